"""SharedRingBuffer, written and read: refusals by name, leases, overflow policies, tickets."""

from __future__ import annotations

import gc
import logging
import os
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from claimed import claim_each
from helpers import SHM, Child, eventually, noise, read_bytes, segment_file, slot_state, states

from transport import Schema, SharedRingBuffer, SlotState, Ticket, UpTo, _ring
from transport.errors import (
    ClosedError,
    LayoutError,
    LengthMismatchError,
    NoOwnerError,
    PayloadTooLargeError,
    RankError,
    RingBusyError,
    RingError,
    RingFullError,
    RingNotFoundError,
    SchemaError,
    SharedMemoryError,
    StaleSlotError,
    TransportError,
    UsageError,
    WrongKeyError,
    WrongRingError,
)
from transport.ring import attachment
from transport.ring.attachment import belongs, name_in, random_name, remove_dead
from transport.runtime import logs
from transport.server.listener import Listener

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


def test_an_exception_while_filling_gives_the_slot_back(ring: SharedRingBuffer) -> None:
    with pytest.raises(KeyError), ring.reserve(Schema.of(x=("int8", 3))) as lease:
        assert ring.statistics().writing == 1
        lease["absent"]
    assert ring.statistics().free == 4
    assert ring.statistics().aborts == 1
    with pytest.raises(RingError, match="aborted"):
        lease.publish()
    with pytest.raises(RingError):
        lease.ticket  # noqa: B018


def test_a_lease_publishes_once(ring: SharedRingBuffer) -> None:
    with ring.reserve(Schema.of(x=("int8", 3))) as lease:
        ticket = lease.publish()
        with pytest.raises(RingError):
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
            held = claim_each(reader, 1)
            with pytest.raises(RingFullError, match=f"reader {os.getpid()} holds 1"):
                ring.write_raw(b"c")
            held[0].release()
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


def test_a_writer_that_waits_for_long_says_once_who_keeps_its_slots(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LOOK_S", 0.05)

    def said(ring: SharedRingBuffer) -> list[str]:
        """What writes have logged that waited for longer than that."""
        caplog.clear()
        for _ in range(3):  # calls with time limits are one wait, as a rollout's are
            with pytest.raises(RingFullError):
                ring.write_raw(b"x", timeout_s=0.06)
        return [each.getMessage() for each in caplog.records if ring.ring_id[:8] in each.getMessage()]

    with SharedRingBuffer.create(slots=1, slot_bytes=10) as ring:
        ring.write_raw(b"x")
        [unclaimed] = said(ring)
        assert "1 unread" in unclaimed
        assert said(ring) == []
    with (
        SharedRingBuffer.create(slots=1, slot_bytes=10) as ring,
        SharedRingBuffer.attach(ring.name, role="reader") as reader,
    ):
        ring.write_raw(b"x")
        [held] = claim_each(reader, 1)
        [claimed] = said(ring)
        assert f"reader {os.getpid()} holds 1" in claimed
        held.release()


def test_a_writer_that_waits_again_and_again_and_goes_on_has_not_waited_for_long(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(logs, "time", SimpleNamespace(monotonic=lambda: now))
    with SharedRingBuffer.create(slots=1, slot_bytes=10) as ring:
        for waits in (1, 1, 1, 3):
            assert not caplog.records
            ticket = ring.write_raw(b"x")
            for _ in range(waits):
                with pytest.raises(RingFullError):
                    ring.write_raw(b"x", timeout_s=0.0)
                now += 0.6 * logs.LOOK_S
            ring.discard(ticket)
        assert len(caplog.records) == 1


def test_overwriting_takes_the_oldest_payload_that_nobody_reads_and_counts_it() -> None:
    with SharedRingBuffer.create(slots=3, slot_bytes=10, overflow="overwrite") as ring:
        oldest, read_once, other = ring.write_raw(b"1"), ring.write_raw(b"2", readers=2), ring.write_raw(b"3")
        with ring.read_raw(oldest):
            ring.acknowledge(read_once, rank=0)
            assert ring.write_raw(b"4").slot == read_once.slot
        assert ring.write_raw(b"5").slot == oldest.slot
        assert ring.statistics().overwrites == 2
        for gone, rank in ((oldest, 0), (read_once, 1)):
            with pytest.raises(StaleSlotError):
                ring.read_raw(gone, rank)
        assert read_bytes(ring, other) == b"3"


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


def test_a_blocked_writer_takes_the_place_of_the_payload_that_expires_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LOOK_S", 1e9)  # a look at why it waits would find it as well
    with SharedRingBuffer.create(slots=2, slot_bytes=10) as ring:
        later = ring.write_raw(b"1", deadline_s=1000.0)
        ring.write_raw(b"2", deadline_s=0.3)
        assert ring.write_raw(b"3", timeout_s=20.0).generation == 2
        assert ring.statistics().discards == 1
        assert read_bytes(ring, later) == b"1"


def test_a_copy_that_waited_for_a_slot_has_the_deadline_of_its_original(ring: SharedRingBuffer) -> None:
    original = ring.write_raw(b"1", deadline_s=1000.0)
    with SharedRingBuffer.create(slots=1, slot_bytes=10) as other, ThreadPoolExecutor() as pool:
        before = other.write_raw(b"2")
        copied = pool.submit(other.write_copy, original, b"1")
        eventually(lambda: other.statistics().full_waits)
        other.discard(before)
        assert copied.result().deadline == original.deadline


# --- reading ---------------------------------------------------------------------------------------------


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


# --- a ring that is closed while other threads use it, and leases that nobody ends: no slot is freed under its user

THREE = Schema.of(x=("uint8", 3))


@pytest.fixture
def other(ring: SharedRingBuffer) -> Iterator[SharedRingBuffer]:
    """A second writer of the same ring, which is closed under its users."""
    with SharedRingBuffer.attach(ring.name, role="writer") as attached:
        yield attached


class Thread:
    """Runs ``body(go_on)`` up to where it waits, then to its end; what it raised is kept."""

    def __init__(self, body: Callable[[Callable[[], None]], object]) -> None:
        self._entered, self._may_end = threading.Event(), threading.Event()
        self.error: BaseException | None = None

        def run() -> None:
            try:
                body(self._wait)
            except BaseException as error:
                self.error = error.with_traceback(None)  # whose frames hold what the body had
            finally:
                self._entered.set()

        self._thread = threading.Thread(target=run)
        self._thread.start()
        self._entered.wait()

    def _wait(self) -> None:
        self._entered.set()
        self._may_end.wait()

    def end(self) -> None:
        self._may_end.set()
        self._thread.join()


def place_alive(ring: SharedRingBuffer, index: int) -> bool:
    return any(owner.index == index and owner.alive for owner in ring.native.owners())


# --- closed in another thread ----------------------------------------------------------------------------
def test_a_ring_closed_during_a_write_in_another_thread_keeps_its_slot_until_the_copy_is_over() -> None:
    data, seen = np.ones(1 << 26, np.uint8), 0
    with SharedRingBuffer.create(slots=1, slot_bytes=len(data)) as ring:
        for _ in range(10):
            writer = SharedRingBuffer.attach(ring.name, role="writer")
            errors: list[BaseException] = []

            def write(writer: SharedRingBuffer, errors: list[BaseException]) -> None:
                try:
                    writer.write_raw(data)
                except ClosedError as error:
                    errors.append(error)

            thread = threading.Thread(target=write, args=(writer, errors))
            thread.start()
            eventually(lambda: ring.statistics().free == 0)
            writer.close()
            seen += ring.statistics().writing
            thread.join()
            if not errors:  # it was published before
                ring.discard(ring.tickets()[0])
            eventually(lambda: ring.statistics().free == 1)
    assert seen  # at least once it was closed in the middle


def test_a_ring_closed_while_a_lease_is_filled_keeps_the_slot_until_its_end(
    ring: SharedRingBuffer, other: SharedRingBuffer
) -> None:
    def fill(go_on: Callable[[], None]) -> None:
        with other.reserve(THREE) as lease:
            lease["x"][0] = 1
            go_on()
            lease["x"][1:] = 2

    index = other.native.owner
    thread = Thread(fill)
    other.close()
    assert ring.statistics().writing == 1
    ring.reclaim()  # its owner lives
    assert (ring.statistics().writing, place_alive(ring, index)) == (1, True)
    thread.end()
    assert isinstance(thread.error, ClosedError)
    assert (ring.statistics().free, place_alive(ring, index)) == (4, False)


@pytest.mark.parametrize("end", ["release", "consume"])
def test_a_ring_closed_while_a_lease_is_read_keeps_the_slot_until_its_end(ring: SharedRingBuffer, end: str) -> None:
    reader = SharedRingBuffer.attach(ring.name, role="reader")
    ticket = ring.write_raw(noise(100))
    held: list[bytes] = []

    def read(go_on: Callable[[], None]) -> None:
        lease = reader.read_raw(ticket)
        go_on()
        held.append(bytes(lease.view))
        assert getattr(lease, end)()

    thread = Thread(read)
    reader.close()
    assert slot_state(ring, ticket) is SlotState.READING
    ring.discard(ticket)
    assert ring.statistics().free == 3
    thread.end()
    assert held == [noise(100).tobytes()]
    assert isinstance(thread.error, ClosedError) == (end == "consume")
    assert ring.statistics().free == 4


def test_a_slot_is_not_freed_under_arrays_that_outlive_lease_and_ring(
    ring: SharedRingBuffer, other: SharedRingBuffer
) -> None:
    array = other.reserve(THREE)["x"]
    other.close()
    gc.collect()
    assert ring.statistics().writing == 1
    array[:] = 1
    del array
    assert ring.statistics().free == 4


def test_the_segment_goes_with_the_last_lease_of_its_last_user() -> None:
    ring = SharedRingBuffer.create(slots=4, slot_bytes=1000)
    other = SharedRingBuffer.attach(ring.name, role="writer")
    lease = ring.reserve(THREE)
    ring.close()
    assert not other.native.keeper_alive
    other.close()
    assert segment_file(ring).exists()  # whose slot is still being written
    lease.abort()
    assert not segment_file(ring).exists()


@pytest.mark.nightly
def test_threads_that_close_and_look_at_once_get_named_errors_only() -> None:
    for _ in range(20):
        ring = SharedRingBuffer.create(slots=64, slot_bytes=10)
        for _ in range(8):
            ring.write_raw(b"x")
        wrong: list[BaseException] = []

        def use(call: Callable[[], object], wrong: list[BaseException] = wrong) -> None:
            try:
                while True:
                    call()
            except ClosedError:
                pass
            except BaseException as error:
                wrong.append(error)

        def look(ring: SharedRingBuffer = ring) -> None:
            if "closed" in repr(ring):
                raise ClosedError("it is")

        calls = (ring.tickets, ring.statistics, look)
        threads = [threading.Thread(target=use, args=(call,)) for call in calls]
        threads += [threading.Thread(target=ring.close) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert not segment_file(ring).exists()


# --- dropped ---------------------------------------------------------------------------------------------
def test_a_write_lease_that_is_dropped_gives_its_slot_back_and_says_so(
    ring: SharedRingBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    lease = ring.reserve(THREE)
    array = lease["x"]
    del lease
    gc.collect()
    assert ring.statistics().writing == 1  # somebody may be filling it
    del array
    assert ring.statistics().free == 4
    assert [(record.levelno, "garbage-collected" in record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, True)
    ]


def test_a_read_lease_that_is_dropped_gives_its_slot_back_and_says_so(
    ring: SharedRingBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    ticket = ring.write_raw(noise(100))
    lease = ring.read_raw(ticket)
    view = np.frombuffer(lease.view, np.uint8)
    del lease
    gc.collect()
    assert slot_state(ring, ticket) is SlotState.READING
    assert np.array_equal(view, noise(100))
    del view
    assert slot_state(ring, ticket) is SlotState.READY
    assert [(record.levelno, "garbage-collected" in record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, True)
    ]


# --- refused ---------------------------------------------------------------------------------------------
class _Unreadable:
    """What `dict` refuses."""

    def __repr__(self) -> str:
        return "<unreadable>"  # names of tests must not differ between workers


@pytest.mark.parametrize(
    "wrong",
    [
        {"metadata": _Unreadable()},
        {"metadata": {"x": _Unreadable()}},
        {"deadline_s": float("nan")},
        {"deadline_s": -1e300},
        {"readers": "2"},
        {"readers": 1.5},
        {"timeout_s": "3"},
    ],
    ids=str,
)
@pytest.mark.parametrize("way", ["write", "write_raw", "write_many", "reserve"])
def test_what_a_write_refuses_is_named_and_takes_no_slot(ring: SharedRingBuffer, wrong: Any, way: str) -> None:
    writes: dict[str, Callable[[], Any]] = {
        "write": lambda: ring.write({"x": np.zeros(3, np.uint8)}, **wrong),
        "write_raw": lambda: ring.write_raw(b"123", **wrong),
        "write_many": lambda: ring.write_many([{"x": np.zeros(3, np.uint8)}], **wrong),
        "reserve": lambda: ring.reserve(THREE, **wrong).publish(),
    }
    for _ in range(5):  # one more than there are slots
        with pytest.raises((TransportError, TypeError)):
            writes[way]()
        assert ring.statistics().free == 4


# --- notes and refusals ----------------------------------------------------------------------------------
def test_one_unreadable_note_hides_no_other_ticket(ring: SharedRingBuffer, caplog: pytest.LogCaptureFixture) -> None:
    first, last = ring.write_raw(b"1"), ring.write_raw(b"2")
    taken = ring.native.try_take()
    assert taken is not None
    assert taken.publish(3, 4, 1, 0, b"\xc1 no ticket")
    newest = ring.write_raw(b"3")
    assert ring.tickets() == [first, last, newest]
    [record] = caplog.records
    assert (record.levelno, f"slot {taken.slot} " in record.getMessage()) == (logging.WARNING, True)


def test_a_listener_tells_of_refused_acknowledgements_seldom(
    ring: SharedRingBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    ring.native.consume(0, 1, 0)  # before its time
    caplog.set_level(logging.INFO)
    listener = Listener(ring)
    listener.sweep(0.0)
    assert caplog.records == []
    for _ in range(3):
        for _ in range(2):
            assert not ring.native.consume(0, 1, 0)  # as the engine does for an acknowledgement that comes again
        listener.sweep(0.0)
    [record] = caplog.records
    assert (record.levelno, ": 2 acknowledgements came second" in record.getMessage()) == (logging.INFO, True)


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


def test_a_ring_is_not_found_before_its_data_begin(name: str) -> None:
    with SharedRingBuffer.create(slots=2, slot_bytes=10, name=name, begins=False) as ring:
        for role in ("writer", "reader", "observer"):
            with pytest.raises(RingNotFoundError):
                SharedRingBuffer.attach(name, role=role)
        ring.begin_data()
        ring.write_raw(b"unread")
        with SharedRingBuffer.attach(name, role="reader") as reader:
            assert reader.native.unread == 1
        ring.close(keep_unread=True)
    with (
        SharedRingBuffer.create(slots=2, slot_bytes=10, name=name, begins=False) as again,
        SharedRingBuffer.attach(name, role="reader") as reader,  # as it was left
    ):
        assert again.native.taken_over and reader.native.unread == 1


def test_another_schema_is_refused_by_attach(name: str) -> None:
    with SharedRingBuffer.create(STEPS, slots=1, name=name) as ring:
        with pytest.raises(SchemaError, match="same tensors"):
            SharedRingBuffer.attach(name, Schema.of(x=("int8", 3)), role="reader")
        with SharedRingBuffer.attach(name, STEPS, role="reader") as same:
            assert same.ring_id == ring.ring_id


def test_a_living_keepers_ring_is_neither_taken_over_nor_replaced(ring: SharedRingBuffer) -> None:
    with pytest.raises(RingBusyError, match=f"{os.getpid()}"):
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


def test_of_two_that_leave_at_once_and_see_each_other_the_last_one_removes_the_segment() -> None:
    ring = SharedRingBuffer.create(slots=1, slot_bytes=10)
    other = SharedRingBuffer.attach(ring.name, role="writer")

    class Meanwhile:
        """The last one's attachment; the other one, which has looked before, is gone when it has left."""

        def __getattr__(self, name: str) -> Any:
            return getattr(ring.native, name)

        def leave(self, **arguments: bool) -> int:
            given_up = ring.native.leave(**arguments)
            other.native.close()
            return given_up

    attachment.leave(cast(_ring.Ring, Meanwhile()), only_empty=False)
    assert ring.name not in _ring.segments()


def test_remove_dead_takes_segments_of_its_prefix_that_nobody_uses(ring: SharedRingBuffer) -> None:
    made = [SharedRingBuffer.create(slots=1, slot_bytes=10, prefix="mine-") for _ in range(2)]
    assert all(each.name.startswith("/transport-mine-") for each in made)
    made[0].native.close()  # as if it had been killed
    assert not remove_dead("mine-")
    assert [segment_file(each).exists() for each in (*made, ring)] == [False, True, True]
    made[1].native.close()
    assert remove_dead("mine-")
    assert [segment_file(each).exists() for each in (*made, ring)] == [False, False, True]


@pytest.mark.parametrize(
    ("name", "belong"),
    [
        ("job", True),
        ("job0123456789abcdef", True),
        ("job-0123456789abcdef", True),
        ("job.a", True),
        ("job00123456789abcdef", False),
        ("job10", False),
        ("other-job", False),
    ],
)
def test_a_name_belongs_to_a_prefix_at_a_separator_or_as_it_is_made(name: str, belong: bool) -> None:
    assert belongs(f"/transport-{name}", "job") == belong
    assert belongs(name.replace("job", "job-"), "job-") == name.startswith("job")
    assert belongs(random_name("job"), "job")
    assert belongs(name_in("/a/file", "job"), "job")


@pytest.mark.parametrize("rest", [b"not a ring's", b"\xff"], ids=["space", "bytes"])
def test_files_of_others_whose_names_cannot_be_a_rings_are_no_segments(tmp_path: Path, rest: bytes) -> None:
    prefix = f"{tmp_path.name}-"
    file = SHM / os.fsdecode(f"transport-{prefix}".encode() + rest)
    with SharedRingBuffer.create(slots=1, slot_bytes=10, prefix=prefix) as ring:
        file.touch()
        try:
            assert [name for name in _ring.segments() if tmp_path.name in name] == [ring.name]
            ring.native.close()  # as if it had been killed
            assert remove_dead(prefix)
            assert file.exists()
        finally:
            file.unlink()


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


def test_an_expired_payload_is_not_read_and_makes_room(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(b"1", deadline_s=0.0)
    with pytest.raises(StaleSlotError, match="deadline"):
        ring.read_raw(ticket)
    ring.write_raw(b"2", deadline_s=0.0)
    kept = ring.write_raw(b"3", deadline_s=1000.0)
    assert ring.discard_expired() == 1
    assert ring.discard_expired(now=kept.created + 1001.0) == 1
    assert ring.statistics().free == 4


def test_a_close_without_a_descriptor_left_is_an_error_and_the_next_one_removes_the_segment() -> None:
    made = SharedRingBuffer.create(slots=4, slot_bytes=1000)
    made.write_raw(b"x")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(RingError):
            made.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    made.close()
    assert made.name not in _ring.segments()


def test_what_is_published_while_the_ring_is_closed_is_given_up_with_the_rest(ring: SharedRingBuffer) -> None:
    made = SharedRingBuffer.create(slots=4, slot_bytes=1000)
    with SharedRingBuffer.attach(made.name, role="reader") as reader:
        errors: list[TransportError] = []

        def write() -> None:
            try:
                while True:
                    made.write_raw(b"x", timeout_s=0.0)
            except TransportError as error:
                errors.append(error)

        made.overflow = "overwrite"
        thread = threading.Thread(target=write)
        thread.start()
        eventually(lambda: reader.get_ready_count() > 0)
        made.close()
        thread.join()
        assert isinstance(errors[0], ClosedError)
        assert states(reader) == (0, 0)
