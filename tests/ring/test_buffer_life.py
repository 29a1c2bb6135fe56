"""The life of a ring: made, attached to, closed, taken over, and what processes leave behind when they are killed."""

from __future__ import annotations

import contextlib
import gc
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers import SHM, Child, leaving_at_once, noise, read_bytes, segment_file, slot_state

from transport import Schema, SharedRingBuffer, SlotState, Ticket, UpTo, _ring
from transport.client import mapped
from transport.errors import (
    ClosedError,
    LayoutError,
    NoOwnerError,
    PayloadTooLargeError,
    RingBusyError,
    RingNotFoundError,
    SchemaError,
    SharedMemoryError,
    StaleSlotError,
    TransportError,
    UsageError,
)
from transport.ring import attachment
from transport.ring.attachment import remove_dead

STEPS = Schema.of(obs=("float32", UpTo(10), 3), done=("bool", UpTo(10)), version=("int64",))
WRITER = """
import sys
from helpers import noise
from transport import SharedRingBuffer
ring = SharedRingBuffer.create(slots=4, slot_bytes=1000, name=sys.argv[1])
for seed in range(2):
    print(ring.write_raw(noise(100, seed)).to_text(), flush=True)
lease = ring.native.try_take()
print("writing", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    unique = f"/transport-ring-{abs(hash(request.node.nodeid)):x}"
    yield unique
    (SHM / unique.removeprefix("/")).unlink(missing_ok=True)


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
    for content in (b"", b"not a ring", bytes(1 << 16)):
        other.write_bytes(content)
        with pytest.raises(LayoutError):
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
    "mark_consumed": lambda ring, ticket: ring.mark_consumed(ticket),
    "release_reading": lambda ring, ticket: ring.release_reading(ticket),
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


# --- death -----------------------------------------------------------------------------------------------
def test_a_killed_writers_payloads_survive_a_take_over_and_its_half_written_slot_is_free(name: str) -> None:
    with Child(WRITER, name) as child:
        tickets = [Ticket.parse(child.line()) for _ in range(2)]
        assert child.line() == "writing"
        with pytest.raises(RingBusyError):
            SharedRingBuffer.create(slots=4, slot_bytes=1000, name=name)
        child.kill()
    with pytest.raises(LayoutError, match=r"expected 5 slots of 1000 bytes .* Give another name, or none"):
        SharedRingBuffer.create(slots=5, slot_bytes=1000, name=name)
    with SharedRingBuffer.create(slots=4, slot_bytes=1000, name=name) as ring:
        assert ring.tickets() == tickets
        assert [read_bytes(ring, ticket) for ticket in tickets] == [noise(100, seed).tobytes() for seed in range(2)]
        ring.reclaim()
        assert (ring.statistics().writing, ring.statistics().free) == (0, 2)
        assert ring.statistics().reclaimed_writing == 1
        assert len({ring.write_raw(b"x").identity for _ in range(2)} | {each.identity for each in tickets}) == 4


def test_a_killed_readers_payload_is_ready_again(ring: SharedRingBuffer) -> None:
    code = """
import sys
from transport import SharedRingBuffer, Ticket
ring = SharedRingBuffer.attach(sys.argv[1], role="reader")
lease = ring.read_raw(Ticket.parse(sys.argv[2]))
print("reading", flush=True)
sys.stdin.readline()
"""
    ticket = ring.write_raw(noise(100))
    with Child(code, ring.name, ticket.to_text()) as child:
        assert child.line() == "reading"
        assert slot_state(ring, ticket) is SlotState.READING
        assert ring.reclaim() == 0
        child.kill()
    assert ring.reclaim() == 1
    assert slot_state(ring, ticket) is SlotState.READY
    assert ring.statistics().reclaimed_reading == 1
    assert read_bytes(ring, ticket) == noise(100).tobytes()


def test_a_writer_that_closes_gives_up_what_is_unread_and_removes_the_segment_beside_readers() -> None:
    writer = SharedRingBuffer.create(slots=3, slot_bytes=1000)
    file = segment_file(writer)
    unread, held, acknowledged = (writer.write_raw(noise(100, seed)) for seed in range(3))
    reader = SharedRingBuffer.attach(writer.name, role="reader")
    leases = [reader.read_raw(held), reader.read_raw(acknowledged)]
    leases[1].acknowledge()
    writer.close()
    assert bytes(leases[0].view) == noise(100, 1).tobytes()  # memory that is looked at stays
    for gone in (unread, held):
        with pytest.raises(StaleSlotError):
            reader.read_raw(gone)
    assert not file.exists()
    for lease in leases:
        lease.release()
    reader.close()


def test_a_reader_killed_after_its_writer_has_closed_leaves_no_segment(ring: SharedRingBuffer) -> None:
    code = """
import sys
from transport import SharedRingBuffer
ring = SharedRingBuffer.attach(sys.argv[1], role="reader")
print("attached", flush=True)
sys.stdin.readline()
"""
    with Child(code, ring.name) as child:
        assert child.line() == "attached"
        ring.close()
        child.kill()
    assert not segment_file(ring).exists()


@pytest.mark.parametrize("role", ["writer", "listener"])
def test_a_writer_that_closes_leaves_the_segment_to_who_goes_on_with_it(role: Any, ring: SharedRingBuffer) -> None:
    with SharedRingBuffer.attach(ring.name, role=role):
        ring.close()
        assert segment_file(ring).exists()
    assert not segment_file(ring).exists()


def test_a_reader_that_is_refused_leaves_no_segment_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = SharedRingBuffer.create(slots=2, slot_bytes=100)
    ticket = writer.write_raw(b"payload")

    def everybody_else_leaves(_: SharedRingBuffer) -> int:
        assert writer.native.unlink_if_last() is False  # a reader is attached, as the last look of a killed writer's
        for ticket in writer.tickets():
            writer.discard(ticket)
        writer.native.close()
        return 16

    monkeypatch.setattr(mapped, "_readers", everybody_else_leaves)
    rings = mapped.MappedRings()
    assert rings.find(ticket) is None
    assert not segment_file(writer).exists()


def test_a_reader_that_closes_next_to_a_killed_writer_leaves_the_unread_payloads(name: str) -> None:
    with Child(WRITER, name) as child:
        tickets = [Ticket.parse(child.line()) for _ in range(2)]
        assert child.line() == "writing"
        reader = SharedRingBuffer.attach(name, role="reader")
        child.kill()
    assert read_bytes(reader, tickets[0]) == noise(100, 0).tobytes()
    reader.close()
    with SharedRingBuffer.create(slots=4, slot_bytes=1000, name=name) as ring:
        assert ring.tickets() == tickets
    assert not segment_file(ring).exists()


def test_the_last_reader_of_a_killed_writer_removes_an_empty_segment(name: str) -> None:
    with Child(WRITER, name) as child:
        tickets = [Ticket.parse(child.line()) for _ in range(2)]
        assert child.line() == "writing"
        reader = SharedRingBuffer.attach(name, role="reader")
        child.kill()
    for ticket in tickets:
        assert reader.read_raw(ticket).consume()
    reader.close()
    assert not segment_file(reader).exists()


def test_a_writer_that_ends_without_closing_leaves_no_segment() -> None:
    body = """
from transport import SharedRingBuffer
ring = SharedRingBuffer.create(slots=2, slot_bytes=10)
ring.write_raw(b"unread")
print(ring.name, flush=True)
raise SystemExit("a script that failed")
"""
    ended = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stdout.startswith("/transport-")
    assert not (SHM / ended.stdout.strip().removeprefix("/")).exists()


def test_a_ring_that_is_dropped_without_closing_leaves_no_segment() -> None:
    ring = SharedRingBuffer.create(slots=2, slot_bytes=10)
    file = SHM / ring.name.removeprefix("/")
    assert file.exists()
    del ring
    gc.collect()
    assert not file.exists()


def test_a_reader_that_ends_with_views_in_hand_leaves_no_segment() -> None:
    body = """
import sys
from transport import BlockingClient, SharedRingBuffer
client = BlockingClient(wire={"mapped"})
with SharedRingBuffer.create(slots=2, slot_bytes=10) as ring:
    held = client.read(ring.write_raw(b"held"))["data"]
    if sys.argv[1] == "closed":
        client.close()
print(ring.name, flush=True)
"""
    for client in ("closed", "open"):
        ended = subprocess.run([sys.executable, "-c", body, client], capture_output=True, text=True)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert not (SHM / ended.stdout.strip().removeprefix("/")).exists()


def test_a_reader_that_was_stopped_while_it_left_removes_no_ring_that_was_filled_meanwhile() -> None:
    writer = SharedRingBuffer.create(slots=2, slot_bytes=100)
    reader = SharedRingBuffer.attach(writer.name, role="reader")
    name, left = writer.name, reader.native

    class Stopped:
        """The reader: while it leaves, a payload is written, and the writer ends as if it was killed."""

        def __getattr__(self, what: str) -> Any:
            return getattr(left, what)

        def leave(self, **options: bool) -> int:
            given_up = left.leave(**options)
            writer.write_raw(b"payload")
            writer.native.close()
            return given_up

    attachment.leave(Stopped(), only_empty=True)  # type: ignore[arg-type]
    assert name in _ring.segments()
    with SharedRingBuffer.attach(name, role="reader") as again:
        assert len(again.tickets()) == 1
    assert attachment.remove_if_dead(name)


def test_a_writer_that_was_stopped_while_it_closed_removes_no_ring_that_its_successor_filled(name: str) -> None:
    writer = SharedRingBuffer.create(slots=2, slot_bytes=100, name=name)
    writer.write_raw(b"given up")
    listener = SharedRingBuffer.attach(name, role="listener")
    left = writer.native

    class Stopped:
        """The writer: while it closes, its listener ends, and a successor writes a payload and ends as if killed."""

        def __getattr__(self, what: str) -> Any:
            return getattr(left, what)

        def leave(self, **options: bool) -> int:
            given_up = left.leave(**options)
            successor = SharedRingBuffer.create(slots=2, slot_bytes=100, name=name)
            successor.write_raw(b"payload")
            successor.native.close()
            listener.native.close()
            return given_up

    attachment.leave(Stopped(), only_empty=False, give_up_unread=True)  # type: ignore[arg-type]
    with SharedRingBuffer.create(slots=2, slot_bytes=100, name=name) as again:
        assert len(again.tickets()) == 1


def test_the_last_loan_of_a_closed_writer_removes_no_ring_that_its_successor_filled(name: str) -> None:
    writer = SharedRingBuffer.create(slots=2, slot_bytes=100, name=name)
    lease = writer.read_raw(writer.write_raw(b"lent"))
    listener = SharedRingBuffer.attach(name, role="listener")
    writer.close()  # the name stays for the listener, the place for the lease
    successor = SharedRingBuffer.create(slots=2, slot_bytes=100, name=name)
    ticket = successor.write_raw(b"payload")
    successor.native.close()  # as if it had been killed
    listener.native.close()
    with pytest.raises(ClosedError):
        lease.consume()
    del lease
    gc.collect()
    with SharedRingBuffer.create(slots=2, slot_bytes=100, name=name) as again:
        assert again.tickets() == [ticket]


def test_an_interrupt_while_the_segment_is_made_removes_it() -> None:
    """A real signal: it arrives in the native call, and is handled when that has returned."""
    before = set(_ring.segments())
    handled = signal.signal(signal.SIGALRM, signal.default_int_handler)
    interrupted = 0
    try:
        for _ in range(30):
            signal.setitimer(signal.ITIMER_REAL, 0.002)
            try:
                ring = SharedRingBuffer.create(slots=256, slot_bytes=1 << 20)  # takes longer than that
                ring.close()
            except KeyboardInterrupt:
                interrupted += 1
            with contextlib.suppress(KeyboardInterrupt):  # of a signal that came late, and has come by then
                signal.setitimer(signal.ITIMER_REAL, 0.0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handled)
    assert interrupted
    gc.collect()
    assert set(_ring.segments()) == before
