"""A ring that is closed while other threads use it, and leases that nobody ends: no slot is freed under its user."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers import eventually, noise, segment_file, slot_state, states

from transport import Schema, SharedRingBuffer, SlotState
from transport.errors import ClosedError, TransportError
from transport.server.listener import Listener

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
            over = threading.Event()
            errors: list[BaseException] = []

            def write(writer: SharedRingBuffer, over: threading.Event, errors: list[BaseException]) -> None:
                try:
                    writer.write_raw(data)
                except ClosedError as error:
                    errors.append(error)
                finally:
                    over.set()

            thread = threading.Thread(target=write, args=(writer, over, errors))
            thread.start()
            eventually(lambda: ring.statistics().free == 0)
            writer.close()
            while not over.is_set():
                writing = ring.statistics().writing
                assert writing or over.is_set()
                seen += writing
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


def test_leases_that_were_ended_are_dropped_in_silence(
    ring: SharedRingBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    with ring.reserve(THREE) as lease:
        pass
    with ring.read_raw(lease.ticket) as reading:
        pass
    ring.reserve(THREE).abort()
    del lease, reading
    gc.collect()
    assert caplog.records == []


# --- refused ---------------------------------------------------------------------------------------------
class _Unreadable:
    """What `dict` refuses."""

    def __repr__(self) -> str:
        return "<unreadable>"  # names of tests must not differ between workers


@pytest.mark.parametrize(
    "wrong",
    [
        {"metadata": _Unreadable()},
        {"metadata": "text"},
        {"metadata": 3},
        {"metadata": {"x": _Unreadable()}},
        {"deadline_s": "30"},
        {"deadline_s": float("nan")},
        {"deadline_s": float("inf")},
        {"deadline_s": 1e300},
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
    assert ring.native.publish(*taken, 3, 4, 1, 0, b"\xc1 no ticket")
    newest = ring.write_raw(b"3")
    assert ring.tickets() == [first, last, newest]
    [record] = caplog.records
    assert (record.levelno, f"slot {taken[0]} " in record.getMessage()) == (logging.WARNING, True)


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
