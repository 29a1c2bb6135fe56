"""What is measured. Each method of `Bench` adds one row, or a few."""

from __future__ import annotations

import asyncio
import json
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sizes import SLOTS, WEIGHTS
from writer import writer

MANY = 64  # small tensors of one payload
SMALL = 16 << 10


def repeats(size: int) -> int:
    """How often a row is timed."""
    return max(5, min(50, (1 << 30) // size))


def rate(size: int, times: list[float]) -> float:
    """GB/s of the median."""
    return round(size / statistics.median(times) / 1e9, 2)


def timed(size: int, work: Callable[[], object]) -> float:
    """GB/s of ``work``, which has moved ``size`` bytes when it returns."""
    work()
    times = []
    for _ in range(repeats(size)):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return rate(size, times)


def registering(registered: bool) -> Any:
    """For a `with`: slots are registered with CUDA, or all stay as they are."""
    from transport import SharedRingBuffer

    return nullcontext() if registered else patch.object(SharedRingBuffer, "register", lambda *_: False)


class Bench:
    """The device, data on it, and the functions that fill the table."""

    def __init__(self) -> None:
        import cupy
        import numpy as np

        self.cupy, self.np = cupy, np
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.stream.use()
        self.rows: list[dict[str, Any]] = []
        self.left_out: dict[str, str] = {}  # ways that could not be measured, with the reason
        self.expected = np.random.default_rng(0).integers(0, 256, WEIGHTS, np.uint8)
        self.source = cupy.asarray(self.expected)
        self.out = cupy.zeros(WEIGHTS, np.uint8)
        self.stream.synchronize()

    def add(self, way: str, size: int, gb_per_s: float, **more: Any) -> None:
        """One row."""
        self.rows.append({"way": way, "size_bytes": size, "gb_per_s": gb_per_s, **more})
        print(f"  {way:58} {size >> 10:>8} KiB {gb_per_s:>7.2f} GB/s", flush=True)

    def compare(self, size: int) -> None:
        """Fail unless `out` holds the payload; then make it hold something else."""
        same = bool((self.out[:size] == self.source[:size]).all())
        if not same:
            raise SystemExit(f"content mismatch: {size} bytes read differ from those written")
        self.out[:size] = 0
        self.stream.synchronize()

    def plain(self, size: int) -> None:
        """The floor."""
        from transport.devices.streams import address_of, copy_to_device, copy_to_host, pinned_memory

        pinned = address_of(memory := pinned_memory(size, 0))
        device = int(self.source.data.ptr), int(self.out.data.ptr)

        def down() -> None:
            copy_to_host([(pinned, device[0], size)], 0, self.stream.ptr)
            self.stream.synchronize()

        def up() -> None:
            copy_to_device(device[1], pinned, size, 0, self.stream.ptr)
            self.stream.synchronize()

        self.add("cudaMemcpyAsync device → pinned", size, timed(size, down))
        self.add("cudaMemcpyAsync pinned → device", size, timed(size, up))
        self.compare(size)
        del memory

    def write(self, size: int, *, registered: bool) -> None:
        """Device → ring."""
        from transport import SharedRingBuffer

        with registering(registered), SharedRingBuffer.create(slots=SLOTS, slot_bytes=size) as ring:
            tickets: list[Any] = []

            def one() -> None:
                tickets.append(ring.write({"x": self.source[:size]}))

            times = []
            for number in range(repeats(size) + 2 * SLOTS):
                begun = time.perf_counter()
                one()
                if number >= SLOTS:  # pages exist and are registered
                    times.append(time.perf_counter() - begun)
                with ring.read_raw(tickets[-1]) as lease:
                    if number == 0 and bytes(lease.view) != self.expected[:size].tobytes():
                        raise SystemExit("content mismatch: the ring's bytes differ from those written")
                ring.discard(tickets.pop())
            self.add(f"device → ring, {'registered' if registered else 'not registered'}", size, rate(size, times))

    def write_many(self) -> None:
        """A payload of many small tensors."""
        from transport import SharedRingBuffer

        values = {f"t{number}": self.source[number * SMALL : (number + 1) * SMALL] for number in range(MANY)}
        size = MANY * SMALL
        with SharedRingBuffer.create(slots=1, slot_bytes=size) as ring:
            gb_per_s = timed(size, lambda: ring.discard(ring.write(values)))
        self.add(f"device → ring, {MANY} tensors of {SMALL >> 10} KiB", size, gb_per_s)

    def read(self, size: int, wire: str, receive: str, *, registered: bool = True) -> None:
        """Ring → device, the ring in this process, the listener in its own."""
        from transport import SharedRingBuffer, UCXXClient, UCXXServer
        from transport.testing import run

        async def read() -> list[float]:
            times = []
            async with UCXXClient(wire={wire}, device_receive=receive) as client:  # type: ignore[arg-type]
                for number in range(repeats(size) + 2 * SLOTS):
                    ticket = ring.write_raw(self.expected[:size], timeout_s=30)
                    begun = time.perf_counter()
                    await client.read(ticket, out=self.out)
                    self.stream.synchronize()
                    times.append(time.perf_counter() - begun)
                    if number == 0:
                        self.compare(size)
                    await asyncio.sleep(0.01 if wire != "mapped" else 0)  # its acknowledgement
                carried = client.statistics().bytes_by_wire
            if set(carried) != {wire}:
                raise SystemExit(f"wire mismatch: requested {wire}, used {carried}")
            return times[2 * SLOTS :]

        with (
            registering(registered),
            SharedRingBuffer.create(slots=SLOTS, slot_bytes=size) as ring,
            UCXXServer(ring, log_level="ERROR"),
        ):
            times = run(read())
        way = f"ring → device, {wire}{'' if wire == 'mapped' else f', {receive}'}"
        self.add(f"{way}{'' if registered else ', not registered'}", size, rate(size, times))

    def stream_of_payloads(self, size: int, wire: str) -> None:
        """Device → ring → device between two processes, both going on at the same time."""
        from transport import Ticket, UCXXClient
        from transport.testing import run

        count = 3 * SLOTS + repeats(size)

        async def read(lines: Any) -> float:
            begun = 0.0
            async with UCXXClient(wire={wire}) as client:  # type: ignore[arg-type]
                for number in range(count):
                    if number == 2 * SLOTS:
                        begun = time.perf_counter()
                    line = await asyncio.to_thread(lines.readline)
                    await client.read(Ticket.parse(line.strip()), out=self.out)
                    if number == 0:
                        self.stream.synchronize()
                        self.compare(size)
                self.stream.synchronize()
                return time.perf_counter() - begun

        with writer(size, count) as lines:
            took = run(read(lines))
        volume = (count - 2 * SLOTS) * size
        self.add(f"device → device, two processes, {wire}", size, round(volume / took / 1e9, 2))

    def torch_copies(self, size: int) -> None:
        """What torch does: copies between the device and its pinned memory, and out of memory that is not pinned."""
        import torch

        device = torch.zeros(size, dtype=torch.uint8, device="cuda")
        pinned = torch.from_numpy(self.expected[:size]).pin_memory()
        pageable = torch.from_numpy(self.expected[:size])

        def moved(to: Any, source: Any) -> Callable[[], object]:
            def work() -> None:
                to.copy_(source, non_blocking=True)
                torch.cuda.current_stream().synchronize()

            return work

        self.add("torch copy_, pinned → device", size, timed(size, moved(device, pinned)))
        self.add("torch copy_, pageable → device", size, timed(size, moved(device, pageable)))
        self.add("torch copy_, device → pinned", size, timed(size, moved(pinned, device)))
        if not bool((device.cpu() == pageable).all()):
            raise SystemExit(f"content mismatch: torch's copies of {size} bytes differ")

    def nixl(self, sizes: list[int]) -> None:
        """NIXL's READs, which verify nothing; left out, by name, where nixl is not installed."""
        script = [sys.executable, "-P", str(Path(__file__).with_name("nixl_reads.py")), ",".join(map(str, sizes))]
        for source, where in (("VRAM", "device"), ("DRAM", "host")):
            done = subprocess.run([*script, source], capture_output=True, text=True)
            way = f"NIXL READ, {where} → device, two processes"
            if done.returncode:
                why = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
                print(f"  {way}: left out: {why}", flush=True)
                self.left_out[way] = why
                continue
            for line in done.stdout.splitlines():
                if line.startswith("{"):
                    row = json.loads(line)
                    self.add(way, row["size_bytes"], row["gb_per_s"])

    def two_streams(self, size: int, wire: str, receive: str) -> None:
        """Two threads read at once, each into its own memory on its own stream; the rate of both together."""
        from transport import BlockingClient, SharedRingBuffer, UCXXServer

        count = max(5, min(50, (1 << 28) // size))
        together = threading.Barrier(2, timeout=60)
        outs = [self.cupy.zeros(size, self.np.uint8) for _ in range(2)]
        streams = [self.cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        self.stream.synchronize()

        def read(number: int) -> None:
            with streams[number]:
                for at in range(count):
                    if at == SLOTS:
                        together.wait()
                    ticket = ring.write_raw(self.expected[:size], timeout_s=30)
                    begun = time.perf_counter()
                    client.read(ticket, out=outs[number])
                    streams[number].synchronize()
                    took[number] += (time.perf_counter() - begun) if at >= SLOTS else 0.0

        took = [0.0, 0.0]
        with (
            SharedRingBuffer.create(slots=2 * SLOTS, slot_bytes=size) as ring,
            UCXXServer(ring, log_level="ERROR"),
            BlockingClient(wire={wire}, device_receive=receive) as client,  # type: ignore[arg-type]
            ThreadPoolExecutor(2) as threads,
        ):
            for each in [threads.submit(read, number) for number in range(2)]:
                each.result()
        if not all(bool((out == self.source[:size]).all()) for out in outs):
            raise SystemExit(f"content mismatch: {size} bytes read on two streams differ from those written")
        self.add(
            f"ring → device, {wire}{'' if wire == 'mapped' else f', {receive}'}, two streams at once",
            size,
            round(sum(size * (count - SLOTS) / each for each in took) / 1e9, 2),
        )

    def values(self) -> None:
        """A trajectory with nested values, half of its arrays on the device, written and read back."""
        from transport import BlockingClient, SharedRingBuffer

        size = 4 << 20
        value = {
            "messages": [{"role": "user", "content": "x" * 2000}],
            "images": [self.source[:size], self.source[size : 2 * size]],
        }
        with SharedRingBuffer.create(slots=2, slot_bytes=32 << 20) as ring, BlockingClient(wire={"mapped"}) as client:

            def once() -> None:
                with client.read(ring.write({"value": value}, timeout_s=30)) as payload:
                    if len(payload["value"]["images"][1]) != size:
                        raise SystemExit("a nested value came back short")

            self.add("nested value with two device arrays, written and read", 2 * size, timed(2 * size, once))

    def trajectories(self) -> None:
        """The job: payloads a second and GB/s, padded and packed, mapped and over tcp, beside torch alone."""
        import trajectories

        size = trajectories.nbytes()
        for wire in ("mapped", "tcp"):
            for layout in ("padded", "packed"):
                for way in ("ours", "torch"):
                    took = trajectories.job(way, wire, layout, (60 if wire == "mapped" else 30) * trajectories.BATCH)
                    name = f"trajectory job, {wire}, {layout}, {'' if way == 'ours' else 'list and '}{way}"
                    self.add(name, size, round(size / took / 1e9, 2), payloads_per_s=round(1 / took))

    def batches(self, size: int, memory: str) -> None:
        """Claimed payloads of a mapped ring as one batch, 32 of them together of this size."""
        from transport import Schema, SharedRingBuffer, Trainer, UpTo

        count = 32
        rows = size // count // 4
        schema = Schema.of(tokens=("int32", UpTo(rows)))
        payloads = [{"tokens": self.np.arange(rows - number % 7, dtype=self.np.int32)} for number in range(count)]
        times = []
        run = f"bench-{secrets.token_hex(8)}-"
        with (
            SharedRingBuffer.create(schema, slots=count, prefix=run) as ring,
            Trainer(schema, f"rings:{run}", layout="packed", memory=memory) as trainer,
        ):
            for number in range(repeats(size) + 3):
                ring.write_many(payloads)
                begun = time.perf_counter()
                taken = trainer.take(count, 60.0, fill_s=60.0)
                if taken is None:
                    raise SystemExit("a batch did not come within 60 s")
                with taken as batch:
                    tokens = batch["tokens"]
                    self.cupy.cuda.get_current_stream().synchronize()
                    times.append(time.perf_counter() - begun)
                    batch.consume()
                if number == 0:
                    on_host = tokens if memory in ("host", "pinned") else self.cupy.asnumpy(tokens)
                    if int(on_host[-1]) != rows - 1 - (count - 1) % 7:
                        raise SystemExit(f"a batch in {memory} memory has other values than were written")
        self.add(f"ring → batch of {count}, packed, {memory}", size, rate(size, times[3:]))

    def weights(self, size: int) -> None:
        """A version between two processes, out of device memory and into it, without a limit of the link.

        The floor of the pause is one cudaMemcpyAsync of the model out of pinned memory, see `plain`.
        """
        sys.path.append(str(Path(__file__).resolve().parents[1] / "weights"))
        from measure import Case, measured

        for worker in ("mapped", "delta"):
            row = measured(Case(worker, size, 1, updates=5, bucket=64 << 20, device=True))
            how = f"delta, {row.changed:.0%} changed" if worker == "delta" else "full"
            way = f"weights, device → device, two processes, tcp, {how}"
            self.add(
                way,
                row.model_bytes,
                round(row.model_bytes / row.transfer_s / 1e9, 2),
                transfer_s=row.transfer_s,
                update_s=row.update_s,
                pause_ms=row.pause_ms,
            )

    def context_memory(self) -> dict[str, Any]:
        """What UCX says of device memory: the transports of a connection, and device memory that listeners take."""
        from transport import SharedRingBuffer, UCXXServer
        from transport.testing import run
        from transport.wire import ucx
        from transport.wires import settings_for

        async def look(port: int) -> list[str]:
            worker = ucx.Worker(settings_for(None))
            try:
                endpoint = await worker.connect("127.0.0.1", port)
                await asyncio.sleep(0.2)  # the connection's transports are chosen with the peer
                return ["/".join(each) for each in endpoint.transports()] + [f"CUDA memory: {worker.device_memory}"]
            finally:
                worker.close()

        free = self.cupy.cuda.runtime.memGetInfo
        before = free()[0]
        with SharedRingBuffer.create(slots=1, slot_bytes=4096) as ring, UCXXServer(ring, log_level="ERROR") as server:
            lanes = run(look(server.ports[0]))
            return {"ucx": lanes, "listener_device_bytes": before - free()[0]}
