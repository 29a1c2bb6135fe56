"""The life of a ring: made, attached to, closed, taken over, and what processes leave behind when they are killed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers import Child, leaving_at_once, noise, read_bytes, segment_file, states

from transport import Schema, SharedRingBuffer, Ticket, UpTo, _ring
from transport.errors import (
    ClosedError,
    LayoutError,
    NoOwnerError,
    PayloadTooLargeError,
    RingBusyError,
    RingNotFoundError,
    SchemaError,
    SharedMemoryError,
    TransportError,
    UsageError,
)
from transport.ring.attachment import remove_dead

STEPS = Schema.of(obs=("float32", UpTo(10), 3), done=("bool", UpTo(10)), version=("int64",))


# --- making and attaching --------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, UsageError),
        ({"slots": 0, "slot_bytes": 10}, UsageError),
        ({"slots": 4, "slot_bytes": 0}, UsageError),
        ({"slot_bytes": 10, "overflow": "pray"}, UsageError),
        ({"schema": STEPS, "slot_bytes": STEPS.max_bytes - 1}, PayloadTooLargeError),
        ({"slots": 4, "slot_bytes": 1 << 50}, SharedMemoryError),
        ({"slots": 1 << 40, "slot_bytes": 1 << 40}, TransportError),
    ],
    ids=str,
)
def test_a_size_that_makes_no_sense_is_refused_and_leaves_no_segment(
    arguments: Any, error: type[TransportError], name: str
) -> None:
    with pytest.raises(error):
        SharedRingBuffer.create(**arguments, name=name)
    with pytest.raises(RingNotFoundError):
        SharedRingBuffer.attach(name, role="reader")


def test_attaching_to_nothing_or_to_something_else_is_refused_by_name(ring: SharedRingBuffer, name: str) -> None:
    with pytest.raises(RingNotFoundError):
        SharedRingBuffer.attach(name, role="reader")
    other = segment_file(ring).with_name(name.removeprefix("/"))
    for content, kind in (
        (b"", RingNotFoundError),
        (bytes(1 << 16), RingNotFoundError),
        (b"\1" * (1 << 16), LayoutError),
    ):
        other.write_bytes(content)
        with pytest.raises(kind):
            SharedRingBuffer.attach(name, role="reader")


def test_another_schema_is_refused_by_attach(name: str) -> None:
    with SharedRingBuffer.create(STEPS, slots=1, name=name) as ring:
        with pytest.raises(SchemaError, match="same tensors"):
            SharedRingBuffer.attach(name, Schema.of(x=("int8", 3)), role="reader")
        with SharedRingBuffer.attach(name, STEPS, role="reader") as same:
            assert same.ring_id == ring.ring_id


def test_a_living_keepers_ring_is_neither_taken_over_nor_replaced(ring: SharedRingBuffer) -> None:
    with pytest.raises(RingBusyError):
        SharedRingBuffer.create(slots=4, slot_bytes=1000, name=ring.name)
    assert read_bytes(ring, ring.write_raw(b"x")) == b"x"


def test_sixteen_owners_fit_and_observers_do_not_count(ring: SharedRingBuffer) -> None:
    readers = [SharedRingBuffer.attach(ring.name, role="reader") for _ in range(15)]
    with pytest.raises(NoOwnerError):
        SharedRingBuffer.attach(ring.name, role="reader")
    with SharedRingBuffer.attach(ring.name, role="observer") as observer:
        assert observer.get_ready_count() == 0
    readers.pop().close()
    readers.append(SharedRingBuffer.attach(ring.name, role="listener"))
    for reader in readers:
        reader.close()


def test_the_segment_goes_with_the_last_of_its_users(ring: SharedRingBuffer) -> None:
    with SharedRingBuffer.create(slots=1, slot_bytes=10) as writer:
        file = segment_file(writer)
        other = SharedRingBuffer.attach(writer.name, role="writer")
    assert file.exists()
    other.close()
    assert not file.exists()
    other.close()
    assert segment_file(ring).exists()


def test_of_several_that_leave_at_once_the_last_one_removes_the_segment() -> None:
    rings = [SharedRingBuffer.create(slots=1, slot_bytes=10)]
    rings += [SharedRingBuffer.attach(rings[0].name, role="writer") for _ in range(3)]
    with leaving_at_once(rings) as threads:
        list(threads.map(SharedRingBuffer.close, rings))
    assert rings[0].name not in _ring.segments()


def test_remove_dead_takes_segments_of_its_prefix_that_nobody_uses(ring: SharedRingBuffer) -> None:
    made = [SharedRingBuffer.create(slots=1, slot_bytes=10, prefix="mine-") for _ in range(2)]
    assert all(each.name.startswith("/transport-mine-") for each in made)
    made[0].native.close()  # as if it had been killed
    assert not remove_dead("mine-")
    assert [segment_file(each).exists() for each in (*made, ring)] == [False, True, True]
    made[1].native.close()
    assert remove_dead("mine-")
    assert [segment_file(each).exists() for each in (*made, ring)] == [False, False, True]


USES: dict[str, Callable[[SharedRingBuffer, Ticket], object]] = {
    "write": lambda ring, _: ring.write_raw(b"x"),
    "reserve": lambda ring, _: ring.reserve(Schema.of(x=("int8", 3))),
    "read": lambda ring, ticket: ring.read_raw(ticket),
    "acknowledge": lambda ring, ticket: ring.acknowledge(ticket),
    "discard": lambda ring, ticket: ring.discard(ticket),
    "count": lambda ring, _: ring.get_ready_count(),
    "statistics": lambda ring, _: ring.statistics(),
    "tickets": lambda ring, _: ring.tickets(),
    "discard_expired": lambda ring, _: ring.discard_expired(),
    "reclaim": lambda ring, _: ring.reclaim(),
}


@pytest.mark.parametrize("use", USES)
def test_use_after_close_is_a_closed_error(ring: SharedRingBuffer, use: str) -> None:
    ticket = ring.write_raw(b"x")
    ring.close()
    assert "closed" in repr(ring)
    with pytest.raises(ClosedError):
        USES[use](ring, ticket)


def test_leases_that_outlive_their_ring_say_that_it_is_closed() -> None:
    ring = SharedRingBuffer.create(slots=2, slot_bytes=1000)
    reading = ring.read_raw(ring.write_raw(noise(100)))
    writing = ring.reserve(Schema.of(x=("int8", 3)))
    ring.close()
    with pytest.raises(ClosedError):
        reading.consume()
    with pytest.raises(ClosedError):
        writing.publish()
    assert bytes(reading.view) == noise(100).tobytes()  # memory that is lent stays mapped


def test_a_lease_is_released_while_another_thread_closes_its_ring() -> None:
    with SharedRingBuffer.create(slots=2, slot_bytes=1000) as writer, ThreadPoolExecutor(2) as threads:
        ticket = writer.write_raw(noise(100))
        together = threading.Barrier(2)
        for _ in range(200):
            reader = SharedRingBuffer.attach(writer.name, role="reader")
            lease = reader.read_raw(ticket)

            def at_once(call: Callable[[], object]) -> None:
                together.wait(60)
                call()

            list(threads.map(at_once, (reader.close, lease.release)))
            assert not lease.release()
            del lease, reader
        assert states(writer) == (1, 0)


def test_a_forked_child_cannot_use_the_ring_and_its_end_changes_nothing() -> None:
    code = """
import os
from transport import SharedRingBuffer
from transport.errors import ClosedError
with SharedRingBuffer.create(slots=2, slot_bytes=10) as ring:
    if os.fork() == 0:
        try:
            ring.write_raw(b"x")
        except ClosedError:
            os._exit(7)
        os._exit(1)
    print(os.waitstatus_to_exitcode(os.wait()[1]), ring.write_raw(b"x").generation)
"""
    with Child(code) as child:
        assert child.line() == "7 1"
        assert child.wait() == 0
