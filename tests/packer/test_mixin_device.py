"""The data packer with ``device=``: batches in device memory while the trainer computes, and a device that fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import eventually, every_wire, free, settings_with
from packers import Packer, Worker, collected

from transport.client.device_reads import DevicePayload, DeviceReceive
from transport.errors import MissingDependencyError, UsageError
from transport.packer.options import ClientOptions
from transport.schema import Schema, UpTo
from transport.settings import Settings
from transport.ticket import Ticket

pytestmark = pytest.mark.ucx

SCHEMA = Schema.of(obs=("float32", UpTo(4096), 4), step=("int64",))


@pytest.fixture
def worker(cupy: Any) -> Iterator[Worker]:
    worker = Worker()
    worker.setup_ucxx(SCHEMA, slots=8, mode="thread")
    yield worker
    worker.cleanup_ucxx()


def packing(wire: str, receive: DeviceReceive = "staged", settings: Settings | None = None) -> Packer:
    packer = Packer()
    client = ClientOptions(device="cupy", device_receive=receive, settings=settings)
    packer.setup_ucxx_packer(schemas=[SCHEMA], wire={wire}, client=client)  # type: ignore[arg-type]
    return packer


def obs_of(step: int) -> np.ndarray:
    """Of one shape for each step: small ones share a message, large ones do not."""
    return np.full((4096 if step % 2 else 3, 4), step, np.float32)


def write(worker: Worker, step: int, cupy: Any) -> Ticket:
    return worker.write_to_buffer({"obs": cupy.on_device(obs_of(step)), "step": step})


@every_wire
def test_a_batch_goes_from_device_memory_to_device_memory(wire: str, worker: Worker, cupy: Any) -> None:
    packer = packing(wire)
    try:
        batch = collected(packer, [write(worker, step, cupy) for step in range(6)])
        payloads = packer.consume(batch)
        cupy.fake.run_all()
        for step, payload in enumerate(payloads):
            assert isinstance(payload, DevicePayload) and payload.wire == wire
            arrays = packer.get_policy_input(payload.ticket)
            assert isinstance(arrays["obs"], cupy.ndarray)
            assert (arrays["obs"].host == obs_of(step)).all() and int(arrays["step"].host) == step
        del payload, payloads, batch, arrays
        eventually(lambda: free(worker._ucxx_ring), "the slots are free again")
    finally:
        packer.cleanup_ucxx_packer()


@pytest.mark.parametrize("wire", ["mapped", "tcp"])
def test_what_the_trainers_stream_does_with_a_batch_comes_after_its_arrival(
    wire: str, worker: Worker, cupy: Any
) -> None:
    packer = packing(wire)
    try:
        ticket = write(worker, 1, cupy)
        cupy.fake.stopped = True
        training = cupy.cuda.Stream(non_blocking=True)
        (payload,) = packer.consume(collected(packer, [ticket]))
        with training:
            seen = payload["obs"].astype(np.float64)
        while cupy.fake.queues[training.ptr]:  # the trainer's stream alone is driven
            cupy.fake.step(training.ptr)
        assert (seen.host == obs_of(1)).all()
        cupy.fake.stopped = False
    finally:
        packer.cleanup_ucxx_packer()


@pytest.mark.parametrize("wire", ["mapped", "tcp"])
def test_a_batch_whose_copy_fails_is_read_again_and_the_next_one_arrives(wire: str, worker: Worker, cupy: Any) -> None:
    packer = packing(wire, settings=settings_with(staging_bytes=64 << 10))
    try:
        tickets = [write(worker, step, cupy) for step in (1, 3, 5)]
        cupy.fake.copies_left = 1
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
            collected(packer, tickets)
        cupy.fake.copies_left = 1 << 30
        payloads = packer.consume(collected(packer, tickets))
        cupy.fake.run_all()
        assert sorted(int(payload["step"].host) for payload in payloads) == [1, 3, 5]
        assert packer._packer.client._device_reads._staging.bytes <= 64 << 10
    finally:
        packer.cleanup_ucxx_packer()


@pytest.mark.parametrize("wire", ["mapped", "tcp"])
def test_a_clean_up_with_copies_queued_leaves_no_slot_and_no_pinned_memory(
    wire: str, worker: Worker, cupy: Any
) -> None:
    packer = packing(wire)
    tickets = [write(worker, step, cupy) for step in (1, 3, 2, 4)]
    cupy.fake.stopped = True
    collected(packer, tickets)
    client = packer._packer.client
    packer.cleanup_ucxx_packer()
    assert (client._device_reads._staging.bytes, client._device_reads._staging.lent) == (0, 0)
    assert worker.ring_statistics().consumes == 0
    eventually(lambda: worker._ucxx_ring.statistics().reading == 0, "the listener has seen that the client is gone")


def test_a_device_that_cannot_be_used_is_named_at_set_up(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    packer = Packer()
    with pytest.raises(UsageError, match="this process sees 1 CUDA devices"):
        packer.setup_ucxx_packer(client=ClientOptions(device="cupy:4"))
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", lambda: 0)
    with pytest.raises(MissingDependencyError, match="no CUDA device"):
        packer.setup_ucxx_packer(client=ClientOptions(device="cupy"))
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingDependencyError, match="pip install 'cupy-cuda12x"):
        packer.setup_ucxx_packer(client=ClientOptions(device="cupy"))
