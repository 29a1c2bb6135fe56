"""Rings whose writer or reader is killed, stopped or interrupted: what is unread survives, and no segment is left."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import SHM, Child, noise, read_bytes, segment_file

from transport import SharedRingBuffer, Ticket, _ring
from transport.errors import (
    ClosedError,
    StaleSlotError,
)
from transport.ring import attachment
from transport.ring.attached import AttachedRings

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

    attach = SharedRingBuffer.attach

    def attached_last(name: str, *, role: attachment.Role) -> SharedRingBuffer:
        ring = attach(name, role=role)
        assert writer.native.unlink_if_last() is False  # a reader is attached, as the last look of a killed writer's
        for ticket in writer.tickets():
            writer.discard(ticket)
        writer.native.close()
        return ring

    monkeypatch.setattr("transport.ring.attached.open_here", lambda _: None)  # as in another process
    monkeypatch.setattr(SharedRingBuffer, "attach", attached_last)
    monkeypatch.setattr("transport._ring.MAX_OWNERS", 2)  # every reader is one too many
    rings = AttachedRings()
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


WAITS = {"write": "ring.write_raw, args=[noise(100, 2)]", "event": "_ring.Event(sys.argv[1]).wait, args=[0, 1e6]"}


@pytest.mark.parametrize("waits", WAITS)
def test_a_thread_that_waits_while_the_interpreter_ends_does_not_abort_the_process(waits: str, tmp_path: Path) -> None:
    code = f"""
import os, sys, threading, time
from helpers import noise
from transport import SharedRingBuffer, _ring
ring = SharedRingBuffer.create(slots=1, slot_bytes=1000)
ring.write_raw(noise(100, 1))
class Last:  # deleted as the interpreter ends, when that thread gets the lock no more
    def __init__(self, thread):
        self.status, self.say, self.now = open(f"/proc/self/task/{{thread.native_id}}/status"), os.write, time.monotonic
    def sleeps(self):
        self.status.seek(0)
        return self.status.read().partition("voluntary_ctxt_switches:")[2].split()[0]
    def __del__(self):
        before, until = self.sleeps(), self.now() + 1  # it may have tried before this looked
        while self.sleeps() == before and self.now() < until:
            pass
        self.say(1, b"woke\\n")
thread = threading.Thread(target={WAITS[waits]}, daemon=True)
thread.start()
last = Last(thread)
"""
    with Child(code, tmp_path / "event") as child:
        assert child.line() == "woke"
        assert child.wait() == 0


@pytest.mark.nightly
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


@pytest.mark.parametrize("ends", ["closed", "forgotten"])
def test_an_observer_leaves_the_empty_ring_of_a_dead_writer(name: str, ends: str) -> None:
    """A trainer of another host may have it in question."""
    SharedRingBuffer.create(slots=2, slot_bytes=100, name=name).native.close()  # as if it was killed
    observer = SharedRingBuffer.attach(name, role="observer")
    if ends == "closed":
        observer.close()
    del observer
    assert name in _ring.segments()
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


@pytest.mark.nightly
def test_an_interrupt_while_the_segment_is_made_removes_it() -> None:
    """A real signal: it arrives in the native call, and is handled when that has returned."""
    prefix = f"/transport-interrupted-{os.getpid()}-"
    handled = signal.signal(signal.SIGALRM, signal.default_int_handler)
    interrupted = 0
    try:
        for at in range(10):
            signal.setitimer(signal.ITIMER_REAL, 0.002)
            try:
                ring = SharedRingBuffer.create(slots=256, slot_bytes=1 << 20, name=f"{prefix}{at}")  # takes longer
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
    assert [name for name in _ring.segments() if name.startswith(prefix)] == []


def test_an_interrupt_in_the_next_call_behind_the_taking_of_a_slot_gives_the_slot_back() -> None:
    with SharedRingBuffer.create(slots=1, slot_bytes=100) as ring:
        take = ring._overflowing.take

        def interrupt(_: object, event: str, __: object) -> None:
            if event == "call":
                sys.setprofile(None)
                raise KeyboardInterrupt

        def taken(timeout_s: float | None) -> _ring.Loan:
            loan = take(timeout_s)
            sys.setprofile(interrupt)
            return loan

        ring._overflowing.take = taken  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt) as interrupted:
            ring.write_raw(b"payload")
        assert interrupted.tb is not None  # its frames are there, with what they hold
        assert ring.native.state_counts() == (1, 0, 0, 0)
