"""Device memory into a ring: bytes, order, what is waited for, and what is left alone."""

from __future__ import annotations

import logging
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import noise, read_bytes

from transport import Schema, SharedRingBuffer, UpTo, _ring
from transport.devices import copies
from transport.devices.copies import _SMALL_BYTES, _STEP_BYTES
from transport.errors import ClosedError, MissingDependencyError, SchemaError

EPISODE = Schema.of(obs=("float32", UpTo(50), 3), flag=("bool",), action=("int64", UpTo(50)), logp=("bfloat16", 7))


def episode(length: int) -> dict[str, np.ndarray]:
    return {
        "obs": np.arange(length * 3, dtype=np.float32).reshape(length, 3),
        "flag": np.array(True),
        "action": np.arange(length, dtype=np.int64) * 7,
        "logp": np.arange(7).astype(ml_dtypes.bfloat16),
    }


def written(values: dict[str, Any], schema: Schema | None = EPISODE) -> tuple[bytes, Any]:
    with SharedRingBuffer.create(schema, slots=2, slot_bytes=None if schema else 64 << 20) as ring:
        ticket = ring.write(values)
        assert ticket.checksum == _ring.checksum(read_bytes(ring, ticket))
        return read_bytes(ring, ticket), ticket.lengths


@pytest.mark.parametrize("on_device", [{"obs"}, {"action", "logp"}, {"obs", "flag", "action", "logp"}])
def test_a_payload_from_a_device_is_the_one_from_the_host(cupy: Any, on_device: set[str]) -> None:
    values = episode(20)
    moved = {name: cupy.on_device(value) if name in on_device else value for name, value in values.items()}
    assert written(moved) == written(values)


def test_what_a_kernel_was_to_write_is_in_the_payload(cupy: Any) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        made = cupy.on_device(noise(5000))
        assert not made.host.any(), "the kernel has not run yet"
        packed, _ = written({"x": made}, None)
    assert packed == noise(5000).tobytes()
    assert {on for _, _, on in cupy.fake.copies} == {stream.ptr}


def test_strided_and_converted_tensors_are_made_plain_on_their_device(cupy: Any) -> None:
    values = episode(20)
    wide = np.arange(240, dtype=np.float32).reshape(40, 6)
    strided = {**values, "obs": cupy.on_device(wide)[::2, ::2], "action": cupy.on_device(values["action"].astype("i2"))}
    assert written(strided) == written({**values, "obs": wide[::2, ::2]})
    assert cupy.fake.copies == [("d2h", 240, 0), ("d2h", 160, 0)]


def test_a_dtype_that_the_library_lacks_is_converted_on_the_host(cupy: Any) -> None:
    schema = Schema.of(x=("float8_e5m2", 16))
    values = np.arange(16, dtype=np.float16)
    with SharedRingBuffer.create(schema, slots=1) as ring:
        ticket = ring.write({"x": cupy.on_device(values)}, casting="unsafe")
        assert read_bytes(ring, ticket) == values.astype(ml_dtypes.float8_e5m2).tobytes()


def test_many_small_tensors_are_waited_for_together(cupy: Any) -> None:
    values = {f"t{number}": noise(number * 37 % 500, number) for number in range(100)}
    packed, _ = written({name: cupy.on_device(value) for name, value in values.items()}, None)
    assert packed == written(values, None)[0]
    assert cupy.fake.waits == 1


def test_a_large_tensor_is_copied_in_steps_that_are_hashed_as_they_arrive(cupy: Any) -> None:
    values = {"head": np.arange(3), "x": noise(2 * _STEP_BYTES + 1000), "tail": noise(_SMALL_BYTES + 1)}
    packed, _ = written({name: cupy.on_device(value) for name, value in values.items()}, None)
    assert packed == written(values, None)[0]
    assert [size for _, size, _ in cupy.fake.copies] == [24, _STEP_BYTES, _STEP_BYTES, 1000, _SMALL_BYTES + 1]


def test_large_tensors_are_copied_only_some_way_ahead_of_the_hashing(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 0

    def watch(self: copies.DeviceCopies) -> None:
        nonlocal most
        most = max(most, self._ahead)
        start(self)

    start = copies.DeviceCopies.start
    monkeypatch.setattr(copies.DeviceCopies, "start", watch)
    monkeypatch.setattr(copies, "_STEP_BYTES", 1 << 16)
    monkeypatch.setattr(copies, "_AHEAD_BYTES", 3 << 16)
    values = {"x": noise((20 << 16) + 5), "small": noise(7), "y": noise(5 << 16)}
    packed, _ = written({name: cupy.on_device(value) for name, value in values.items()}, None)
    assert packed == written(values, None)[0] and 2 << 16 <= most < 4 << 16


def test_host_tensors_between_small_ones_from_the_device_keep_their_bytes(cupy: Any) -> None:
    values = {f"t{number}": noise(100 + number, number) for number in range(65)}
    moved = {
        name: cupy.on_device(value) if number % 3 else value for number, (name, value) in enumerate(values.items())
    }
    assert written(moved, None) == written(values, None)


def test_a_slot_is_given_back_only_when_no_copy_writes_into_it(cupy: Any) -> None:
    with SharedRingBuffer.create(slots=1, slot_bytes=1 << 20) as ring:
        values = {f"t{number}": cupy.on_device(noise(_SMALL_BYTES + 64, number)) for number in range(3)}
        cupy.fake.copies_left = 2
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError):
            ring.write(values)
        assert not any(cupy.fake.queues.values()), "a copy into the slot is still queued"
        assert ring.statistics().free == 1


def test_a_tensor_from_a_device_must_fit_the_schema(cupy: Any) -> None:
    with SharedRingBuffer.create(EPISODE, slots=1) as ring:
        for name, wrong in {"obs": np.zeros((51, 3), "f4"), "action": np.zeros(3), "flag": np.zeros(1, bool)}.items():
            with pytest.raises(SchemaError, match=name):
                ring.write({**episode(3), name: cupy.on_device(wrong)})
        assert not cupy.fake.copies and ring.statistics().free == 1


# --- registered pages ---------------------------------------------------------------------------
def test_a_slot_is_registered_at_its_first_payload_from_a_device_and_until_the_ring_closes(cupy: Any) -> None:
    with SharedRingBuffer.create(slots=2, slot_bytes=1 << 20) as ring:
        ring.discard(ring.write({"x": noise(10)}))
        assert not cupy.fake.registered
        for number in range(4):
            ring.discard(ring.write({"x": cupy.on_device(noise(10, number))}))
        assert sorted(cupy.fake.registered.values()) in ([1 << 20], [1 << 20] * 2)
        assert not cupy.fake.read_only
    assert not cupy.fake.registered


def test_registrations_end_with_a_ring_that_is_closed_while_many_payloads_are_written(cupy: Any) -> None:
    with SharedRingBuffer.create(slots=1, slot_bytes=4096) as ring:
        ring.discard(ring.write({"x": cupy.on_device(noise(10))}))
        batch = ring.plan_many([{"x": noise(10)}])
        full = ring.write_raw(noise(10))
        take = batch._take

        def taken_and_closed(timeout_s: float | None) -> _ring.Loan:
            ring.discard(full)
            loan = take(timeout_s)
            ring.close()  # by another thread
            assert cupy.fake.registered, "the slot is in use"
            return loan

        batch._take = taken_and_closed
        with pytest.raises(ClosedError):
            batch.write(None)
    assert not cupy.fake.registered


def test_where_cuda_registers_nothing_payloads_are_copied_all_the_same(
    cupy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cupy.fake.refuses_registration = True
    with (
        caplog.at_level(logging.WARNING, "transport.devices.streams"),
        SharedRingBuffer.create(slots=2, slot_bytes=4096) as ring,
    ):
        for number in range(2):
            ticket = ring.write({"x": cupy.on_device(noise(10, number))})
            assert read_bytes(ring, ticket) == noise(10, number).tobytes()
    assert len(caplog.records) == 1 and "cannot register" in caplog.text


def test_writing_from_a_device_without_cupy_says_what_to_install(monkeypatch: pytest.MonkeyPatch, cupy: Any) -> None:
    values = cupy.on_device(noise(10))
    monkeypatch.setitem(sys.modules, "cupy", None)
    with (
        SharedRingBuffer.create(slots=1, slot_bytes=4096) as ring,
        pytest.raises(MissingDependencyError, match="pip install 'cupy-cuda12x"),
    ):
        ring.write({"x": values})
