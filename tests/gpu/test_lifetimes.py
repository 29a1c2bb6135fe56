"""With a CUDA device: streams, events and memory that end while something else uses them. `make gpu` runs these."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from gpu_payloads import busy, bytes_of, why_not
from helpers import Child, noise

from transport import BlockingClient, SharedRingBuffer, UCXXServer
from transport.devices.streams import own_stream

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one")]

every_wire = pytest.mark.parametrize("wire", ["mapped", "tcp"])
every_library = pytest.mark.parametrize("library", ["cupy", "torch"])

SIZE = 1 << 20


@every_wire
@every_library
def test_payloads_that_the_collector_ends_end_no_events_of_others(
    torch: Any, device: Any, wire: Any, library: str
) -> None:
    with (
        SharedRingBuffer.create(slots=4, slot_bytes=SIZE) as ring,
        UCXXServer(ring, log_level="ERROR"),
        BlockingClient(wire={wire}, device=library) as client,
    ):
        for number in range(300):
            payload = client.read(ring.write({"x": noise(SIZE, number % 4)}, timeout_s=10))
            array = payload["x"]
            cycle: list[Any] = [payload, array]
            cycle.append(cycle)
            del payload, cycle
            if number % 7 == 0:
                gc.collect()
            if number % 20 == 0:
                assert bytes_of(array) == noise(SIZE, number % 4).tobytes()


@every_wire
def test_a_stream_that_is_dropped_lives_while_a_read_uses_it(device: Any, wire: Any) -> None:
    """CUDA gives the handle of a destroyed stream out again."""
    with (
        SharedRingBuffer.create(slots=4, slot_bytes=SIZE) as ring,
        UCXXServer(ring, log_level="ERROR"),
        BlockingClient(wire={wire}) as client,
        BlockingClient(wire={wire}, device="cupy") as into_new,
    ):
        outs, sums = [], []
        for number in range(40):
            stream = device.cuda.Stream(non_blocking=True)
            busy(device, stream, 5)
            with stream:
                out = device.zeros(SIZE, np.uint8)
                client.read(ring.write({"x": noise(SIZE, number % 4)}, timeout_s=10), out=out)
                payload = into_new.read(ring.write({"x": noise(SIZE, number % 4)}, timeout_s=10))
                sums.append(payload["x"].sum(dtype=np.int64))
            outs.append(out)
            del stream, payload
        device.cuda.Device().synchronize()
        for number, (out, total) in enumerate(zip(outs, sums, strict=True)):
            assert bytes_of(out) == noise(SIZE, number % 4).tobytes()
            assert int(total) == int(noise(SIZE, number % 4).sum(dtype=np.int64))


@every_library
def test_every_stream_that_looks_waits_for_a_copy_that_is_not_done(torch: Any, device: Any, library: str) -> None:
    def streams() -> list[Any]:
        if library == "torch":
            return [torch.cuda.Stream() for _ in range(3)]
        return [device.cuda.Stream(non_blocking=True) for _ in range(3)]

    with (
        SharedRingBuffer.create(slots=4, slot_bytes=SIZE) as ring,
        BlockingClient(wire={"mapped"}, device=library) as client,
    ):
        for number in range(6):
            busy(device, own_stream(0).owner, 100)
            payload = client.read(ring.write({"x": noise(SIZE, number)}, timeout_s=10))
            sums = []
            for stream in streams() * 2:
                with torch.cuda.stream(stream) if library == "torch" else stream:
                    x = payload["x"]
                    sums.append(x.sum() if library == "torch" else x.sum(dtype=np.int64))
                    del x
            payload.release()
            del payload
            device.cuda.Device().synchronize()
            assert {int(each) for each in sums} == {int(noise(SIZE, number).sum(dtype=np.int64))}


PER_THREAD = """
import queue, threading
import cupy, numpy as np
from gpu_payloads import busy
from helpers import noise
from transport import BlockingClient, SharedRingBuffer

SIZE = 1 << 20
assert cupy.cuda.get_current_stream().ptr == cupy.cuda.Stream.ptds.ptr
dropped = queue.Queue()
sums = {}

def drop():
    while (each := dropped.get()) is not None:
        busy(cupy, cupy.cuda.Stream.ptds, 1)
        del each

def work(first):
    for number in range(first, 60, 3):
        payload = client.read(ring.write({"x": noise(SIZE, number)}, timeout_s=30))
        x = payload["x"]
        busy(cupy, cupy.cuda.Stream.ptds, 2)
        sums[number] = x.sum(dtype=np.int64)
        dropped.put((payload, x))
        del payload, x
    cupy.cuda.Stream.ptds.synchronize()

with (
    SharedRingBuffer.create(slots=8, slot_bytes=SIZE) as ring,
    BlockingClient(wire={"mapped"}, device="cupy") as client,
):
    dropping = threading.Thread(target=drop)
    workers = [threading.Thread(target=work, args=(first,)) for first in range(3)]
    for each in (dropping, *workers):
        each.start()
    for each in workers:
        each.join()
    dropped.put(None)
    dropping.join()
    wrong = [number for number, each in sums.items() if int(each) != int(noise(SIZE, number).sum(dtype=np.int64))]
print(len(sums), wrong, flush=True)
"""


def test_with_a_default_stream_for_each_thread_any_of_them_may_drop_an_array(device: Any) -> None:
    with Child(PER_THREAD, env={"CUPY_CUDA_PER_THREAD_DEFAULT_STREAM": "1"}) as child:
        assert child.line() == "60 []"
