"""SharedRingBuffer, written and read: refusals by name, leases, overflow policies, tickets."""

from __future__ import annotations

import os
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers import eventually, noise, read_bytes, slot_state

from transport import Schema, SharedRingBuffer, SlotState, Ticket, UpTo
from transport.errors import (
    InvalidTransition,
    LengthMismatchError,
    PayloadTooLargeError,
    RankError,
    RingFullError,
    SchemaError,
    StaleSlotError,
    UsageError,
    WrongKeyError,
    WrongRingError,
)

STEPS = Schema.of(obs=("float32", UpTo(10), 3), done=("bool", UpTo(10)), version=("int64",))


# --- writing -----------------------------------------------------------------------------------------
def test_write_keeps_only_the_used_part_of_ragged_tensors() -> None:
    with SharedRingBuffer.create(STEPS, slots=2) as ring:
        for steps in (0, 4, 10):
            values = {"obs": np.ones((steps, 3), np.float32), "done": np.ones(steps, bool), "version": 3}
            ticket = ring.write(values, metadata={"reward": 1.5})
            assert ticket.lengths == (steps, steps)
            assert ticket.size == ticket.layout(STEPS).total
            assert (ticket.schema, ticket.metadata) == (None, {"reward": 1.5})
            assert ring.read_raw(ticket).consume()


def test_equal_payloads_are_equal_bytes_whatever_the_slot_held_before() -> None:
    schema = Schema.of(a=("uint8", UpTo(100)), b=("float64", 2))
    with SharedRingBuffer.create(schema, slots=1) as ring:
        seen = set()
        for fill in (0xFF, 0x00):
            with ring.reserve({"a": 100}) as lease:
                lease.memory[:] = bytes([fill]) * len(lease.memory)
            ring.discard(lease.ticket)
            ticket = ring.write({"a": np.arange(5, dtype=np.uint8), "b": np.array([1.0, 2.0])})
            seen.add((read_bytes(ring, ticket), ticket.checksum))
            ring.discard(ticket)
            with ring.reserve({"a": 5}) as lease:
                lease["a"][:] = np.arange(5)
                lease["b"][:] = [1.0, 2.0]
            seen.add((read_bytes(ring, lease.ticket), lease.ticket.checksum))
            ring.discard(lease.ticket)
        assert len(seen) == 1


def test_an_exception_while_filling_gives_the_slot_back(ring: SharedRingBuffer) -> None:
    with pytest.raises(KeyError), ring.reserve(Schema.of(x=("int8", 3))) as lease:
        assert ring.statistics().writing == 1
        lease["absent"]
    assert ring.statistics().free == 4
    assert ring.statistics().aborts == 1
    with pytest.raises(InvalidTransition, match="aborted"):
        lease.publish()
    with pytest.raises(InvalidTransition):
        lease.ticket  # noqa: B018


def test_a_lease_publishes_once(ring: SharedRingBuffer) -> None:
    with ring.reserve(Schema.of(x=("int8", 3))) as lease:
        ticket = lease.publish()
        with pytest.raises(InvalidTransition):
            lease.publish()
    lease.abort()
    assert lease.ticket is ticket
    assert ring.get_ready_count() == 1


@pytest.mark.parametrize(
    ("write", "error"),
    [
        (lambda ring: ring.write_raw(bytes(1001)), PayloadTooLargeError),
        (lambda ring: ring.write_raw(b"x", readers=0), UsageError),
        (lambda ring: ring.write_raw(b"x", readers=17), UsageError),
        (lambda ring: ring.write({"x": object()}), SchemaError),
        (lambda ring: ring.write_raw(b"x", metadata={"x": "y" * 5000}), UsageError),
        (lambda ring: ring.reserve(), SchemaError),
    ],
)
def test_what_cannot_be_written_is_refused_and_takes_no_slot(ring: SharedRingBuffer, write: Any, error: Any) -> None:
    with pytest.raises(error):
        write(ring)
    assert ring.statistics().free == 4


def test_a_ring_with_a_schema_takes_nothing_else() -> None:
    with SharedRingBuffer.create(STEPS, slots=1) as ring:
        for write in (
            lambda: ring.write({"obs": np.ones((2, 3))}),
            lambda: ring.write_raw(b"x"),
            lambda: ring.reserve({"obs": 3}),
            lambda: ring.reserve(STEPS),
        ):
            with pytest.raises(SchemaError):
                write()
        assert ring.statistics().free == 1


# --- a full ring ---------------------------------------------------------------------------------------
def test_a_full_ring_refuses_after_the_time_limit_and_loses_nothing() -> None:
    with SharedRingBuffer.create(slots=2, slot_bytes=10) as ring:
        tickets = [ring.write_raw(b"a"), ring.write_raw(b"b")]
        with pytest.raises(RingFullError, match="0 being written, 2 unread"):
            ring.write_raw(b"c", timeout_s=0.01)
        ring.overflow = "error"
        with SharedRingBuffer.attach(ring.name, role="reader") as reader:
            held = reader.claim(1)
            with pytest.raises(RingFullError, match=f"reader {os.getpid()} holds 1"):
                ring.write_raw(b"c")
            assert [claim.release() for claim in held]
        assert [read_bytes(ring, ticket) for ticket in tickets] == [b"a", b"b"]
        assert ring.statistics().full_waits >= 1


def test_a_blocked_writer_goes_on_when_a_slot_is_freed(ring: SharedRingBuffer) -> None:
    first, *_ = [ring.write_raw(b"x") for _ in range(4)]
    written: list[Ticket] = []
    writer = threading.Thread(target=lambda: written.append(ring.write_raw(b"new")))
    writer.start()
    eventually(lambda: ring.statistics().full_waits)
    ring.read_raw(first).consume()
    writer.join()
    assert (written[0].slot, written[0].generation) == (first.slot, 2)


def test_overwriting_takes_the_oldest_payload_that_nobody_reads_and_counts_it() -> None:
    with SharedRingBuffer.create(slots=3, slot_bytes=10, overflow="overwrite") as ring:
        oldest, read_once, other = ring.write_raw(b"1"), ring.write_raw(b"2", readers=2), ring.write_raw(b"3")
        with ring.read_raw(oldest):
            ring.acknowledge(read_once, rank=0)
            assert ring.write_raw(b"4").slot == other.slot
        assert ring.write_raw(b"5").slot == oldest.slot
        assert ring.statistics().overwrites == 2
        for gone in (oldest, other):
            with pytest.raises(StaleSlotError):
                ring.read_raw(gone)
        assert read_bytes(ring, read_once, rank=1) == b"2"


def test_a_writer_that_overwrites_waits_for_a_reader_to_let_go_not_to_finish() -> None:
    with SharedRingBuffer.create(slots=1, slot_bytes=10, overflow="overwrite") as ring:
        lease = ring.read_raw(ring.write_raw(b"1"))
        written: list[Ticket] = []
        writer = threading.Thread(target=lambda: written.append(ring.write_raw(b"2", timeout_s=20.0)))
        writer.start()
        eventually(lambda: ring.statistics().full_waits)
        lease.release()
        writer.join()
        assert written[0].generation == 2


def test_a_blocked_writer_takes_the_place_of_a_payload_that_expires_meanwhile() -> None:
    with SharedRingBuffer.create(slots=1, slot_bytes=10) as ring:
        ring.write_raw(b"1", deadline_s=0.3)
        assert ring.write_raw(b"2", timeout_s=20.0).generation == 2
        assert ring.statistics().discards == 1


# --- reading ---------------------------------------------------------------------------------------------
def test_a_lease_is_finalised_once_and_late_calls_change_nothing_but_are_counted(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(b"x", readers=2)
    lease = ring.read_raw(ticket)
    assert slot_state(ring, ticket) is SlotState.READING
    assert lease.release()
    assert not lease.release()
    assert not lease.consume()
    assert slot_state(ring, ticket) is SlotState.READY
    late = ring.read_raw(ticket)
    assert ring.read_raw(ticket).consume()
    assert not late.consume()
    assert not ring.acknowledge(ticket)
    assert ring.statistics().late_finalises >= 2
    assert (slot_state(ring, ticket), ring.statistics().consumes) == (SlotState.READY, 1)


def test_memory_stays_pinned_until_the_last_reader_lets_go(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(noise(100))
    with SharedRingBuffer.attach(ring.name, role="reader") as other:
        mine, theirs = ring.read_raw(ticket), other.read_raw(ticket)
        assert mine.consume()
        assert slot_state(ring, ticket) is SlotState.READING
        assert bytes(theirs.view) == noise(100).tobytes()
        assert not theirs.consume()
        assert ring.statistics().free == 4
        with pytest.raises(TypeError):
            theirs.view[0] = 1


def test_a_payload_is_freed_when_each_of_its_ranks_has_consumed_it(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(b"x", readers=16)
    for rank in range(16):
        assert read_bytes(ring, ticket, rank) == b"x"
        assert ring.acknowledge(ticket, rank)
        with pytest.raises(StaleSlotError):
            ring.read_raw(ticket, rank)
    assert ring.statistics().free == 4


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"key": 0}, WrongKeyError),
        ({"generation": 2}, WrongKeyError),
        ({"slot": 3}, WrongKeyError),
        ({"slot": 4}, StaleSlotError),
        ({"ring": "0" * 32}, WrongRingError),
        ({"size": 7, "schema": None}, LengthMismatchError),
    ],
    ids=str,
)
def test_an_altered_ticket_opens_nothing(ring: SharedRingBuffer, change: Any, error: Any) -> None:
    ticket = ring.write_raw(b"secret")
    with pytest.raises(error):
        ring.read_raw(msgspec.structs.replace(ticket, **change))
    with pytest.raises(RankError):
        ring.read_raw(ticket, rank=1)
    assert (slot_state(ring, ticket), ring.get_ready_count()) == (SlotState.READY, 1)


def test_an_old_ticket_never_returns_the_next_payload_of_its_slot() -> None:
    with SharedRingBuffer.create(slots=1, slot_bytes=10) as ring:
        old = ring.write_raw(b"old")
        ring.read_raw(old).consume()
        new = ring.write_raw(b"new")
        for refused in (lambda: ring.read_raw(old), lambda: ring.read_raw(old, 0)):
            with pytest.raises(StaleSlotError):
                refused()
        for changes_nothing in (ring.acknowledge, ring.discard):
            assert not changes_nothing(old)
        assert ring.statistics().stale_pins == 2
        assert read_bytes(ring, new) == b"new"


def test_discard_frees_at_once_or_when_the_last_reader_lets_go(ring: SharedRingBuffer) -> None:
    ready, reading = ring.write_raw(b"1", readers=3), ring.write_raw(b"2")
    lease = ring.read_raw(reading)
    assert ring.discard(ready)
    assert ring.discard(reading)
    assert not ring.discard(ready)
    assert ring.statistics().free == 3
    assert bytes(lease.view) == b"2"
    lease.release()
    assert (ring.statistics().free, ring.statistics().discards) == (4, 2)


def test_an_expired_payload_is_not_read_and_makes_room(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(b"1", deadline_s=0.0)
    with pytest.raises(StaleSlotError, match="deadline"):
        ring.read_raw(ticket)
    ring.write_raw(b"2", deadline_s=0.0)
    kept = ring.write_raw(b"3", deadline_s=1000.0)
    assert ring.discard_expired() == 1
    assert ring.discard_expired(now=kept.created + 1001.0) == 1
    assert ring.statistics().free == 4


def test_a_payload_whose_deadline_passes_while_it_is_read_is_consumed(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(b"1", deadline_s=1000.0)
    lease = ring.read_raw(ticket)
    assert ring.discard_expired(now=ticket.created + 1001.0) == 0
    assert lease.consume()


def test_tickets_are_those_of_all_unread_payloads_oldest_first(ring: SharedRingBuffer) -> None:
    tickets = [ring.write_raw(noise(seed), metadata={"seed": seed}) for seed in range(4)]
    ring.read_raw(tickets.pop(1)).consume()
    tickets.append(ring.write_raw(b"newest"))
    lease = ring.read_raw(tickets[1])
    with SharedRingBuffer.attach(ring.name, role="observer") as observer:
        assert observer.tickets() == ring.tickets() == tickets
    lease.release()


def test_statistics_count_what_was_done(ring: SharedRingBuffer) -> None:
    ring.read_raw(ring.write_raw(bytes(300))).consume()
    ring.read_raw(ring.write_raw(bytes(200))).release()
    look = ring.statistics()
    assert (look.slots, look.slot_capacity_bytes, look.free, look.ready) == (4, 1000, 3, 1)
    assert (look.takes, look.publishes, look.pins, look.consumes, look.unpins) == (2, 2, 2, 1, 2)
    assert look.bytes_published == 500
    assert repr(ring) == f"<SharedRingBuffer {ring.ring_id[:8]} 4×1000 B: 3 free, 0 writing, 1 ready, 0 reading>"
