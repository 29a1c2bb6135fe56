"""The whole job over the network: one process writes in batches, another takes over tcp, verifies and consumes.

    .venv/bin/python benchmarks/take_job.py [--sizes 4096,65536] [--payloads 100000] [--repeats 3] [--batch 32]
                                            [--ahead 2] [--zeromq]

The trainer takes through one listener process, with ``ahead`` demands under way. ``--zeromq`` adds PUSH/PULL over tcp
with the same checksums, if pyzmq is installed. benchmarks/ring_job.py measures readers of the same host.

Every payload is verified by its checksum, which the reader computes. Prints a JSON line per size: payloads a second,
GB/s, and microseconds of processor time of each process per payload.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

import numpy as np

from transport import Schema, SharedRingBuffer, TensorSpec, UCXXClient, UCXXServer, _ring

SLOTS = 256


def take(address: str, batch: int, total: int, ahead: int, told: Connection) -> None:
    """Take, verify and consume ``total`` payloads; tells its end and processor time."""

    async def train() -> None:
        async with UCXXClient(wire={"tcp"}) as client:
            most_bytes = 8 << 20
            await client.take(address, 1)
            told.send("ready")
            left, cpu = total, time.process_time()

            async def one() -> None:
                nonlocal left
                while left > 0:
                    taken = await client.take(address, batch, most_bytes=most_bytes, wait_s=30.0)  # verified on arrival
                    accepted = await taken.consume()
                    left -= int(accepted.sum())

            takers = [asyncio.create_task(one()) for _ in range(ahead)]
            await asyncio.wait(takers, return_when=asyncio.FIRST_COMPLETED)  # the others wait in vain
            told.send((time.perf_counter(), time.process_time() - cpu))
            for taker in takers:
                taker.cancel()
            await asyncio.gather(*takers, return_exceptions=True)

    asyncio.run(train())


def pull(address: str, batch: int, total: int, told: Connection) -> None:
    """As `take`, from ZeroMQ, which promises nothing."""
    import zmq

    socket = zmq.Context.instance().socket(zmq.PULL)
    socket.connect(address)
    told.send("ready")
    cpu = time.process_time()
    for _ in range(total):
        checksum, data = socket.recv_multipart(copy=False)
        assert _ring.checksum(data.buffer) == int.from_bytes(checksum.buffer, "little")
    told.send((time.perf_counter(), time.process_time() - cpu))


def run_zeromq(size: int, batch: int, total: int) -> dict[str, float]:
    import zmq

    payloads = [np.random.default_rng(n).integers(0, 255, size, np.uint8) for n in range(batch)]
    socket = zmq.Context.instance().socket(zmq.PUSH)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    ours, theirs = multiprocessing.Pipe()
    arguments = (f"tcp://127.0.0.1:{port}", batch, total, theirs)
    child = multiprocessing.get_context("spawn").Process(target=pull, args=arguments)
    child.start()
    ours.recv()
    begun, cpu = time.perf_counter(), time.process_time()
    for _ in range(total // batch):
        for payload in payloads:
            socket.send_multipart((_ring.checksum(payload).to_bytes(8, "little"), payload))
    writer_cpu = time.process_time() - cpu
    ended, reader_cpu = ours.recv()
    child.join()
    socket.close()
    return _row(total, ended - begun, writer_cpu, reader_cpu)


def _row(total: int, took_s: float, writer_cpu: float, reader_cpu: float) -> dict[str, float]:
    return {
        "payloads_per_s": total / took_s,
        "writer_us": writer_cpu / total * 1e6,
        "reader_us": reader_cpu / total * 1e6,
    }


def run(size: int, batch: int, total: int, ahead: int) -> dict[str, float]:
    schema = Schema((TensorSpec("data", "uint8", (size,)),))
    payloads = [{"data": np.random.default_rng(n).integers(0, 255, size, np.uint8)} for n in range(batch)]
    with contextlib.ExitStack() as stack:
        ring = stack.enter_context(SharedRingBuffer.create(schema, slots=SLOTS))
        ours, theirs = multiprocessing.Pipe()
        stack.enter_context(UCXXServer(ring))
        arguments = (f"127.0.0.1:{ring.native.ports()[0]}", batch, total, ahead, theirs)
        child = multiprocessing.get_context("spawn").Process(target=take, args=arguments)
        child.start()
        ours.recv()
        begun, cpu = time.perf_counter(), time.process_time()
        for _ in range(total // batch):
            ring.write_many(payloads, timeout_s=60.0)
        writer_cpu = time.process_time() - cpu
        ended, reader_cpu = ours.recv()
        child.join()
        assert ring.native.depth(0)["done"] == total
    return _row(total, ended - begun, writer_cpu, reader_cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="4096,65536")
    parser.add_argument("--payloads", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--ahead", type=int, default=2)
    parser.add_argument("--zeromq", action="store_true")
    options = parser.parse_args()
    peers = ["rings"]
    if options.zeromq and importlib.util.find_spec("zmq"):
        peers.append("zeromq")
    for size in map(int, options.sizes.split(",")):
        total = max(options.batch, options.payloads * 4096 // max(size, 4096)) // options.batch * options.batch
        for peer in peers:
            runs = [
                run(size, options.batch, total, options.ahead)
                if peer == "rings"
                else run_zeromq(size, options.batch, total)
                for _ in range(options.repeats)
            ]
            row = {key: round(statistics.median(each[key] for each in runs), 2) for key in runs[0]}
            row |= {"gb_per_s": round(row["payloads_per_s"] * size / 1e9, 2)}
            print(json.dumps({"peer": peer, "size_bytes": size, "batch": options.batch, **row}), flush=True)


if __name__ == "__main__":
    main()
