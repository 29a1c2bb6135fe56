"""Waiting for a slot, a payload or an event, in threads and other processes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from native_rings import PATIENCE_S, ZEROS, Child, refused, run_to_death, write

from transport import _ring
from transport._ring import Ring


@pytest.fixture
def ring(name: str) -> Iterator[Ring]:
    made = Ring.create(name, 4, 1000, ZEROS)
    yield made
    made.close()


def fill(ring: Ring) -> list[tuple[int, int]]:
    return [write(ring) for _ in range(ring.slot_count)]


def test_take_gives_up_after_its_timeout(ring: Ring) -> None:
    fill(ring)
    assert ring.try_take() is None
    assert ring.take(0) is None
    assert ring.take(-1) is None
    assert ring.take(0.01) is None
    assert ring.counters()["full_waits"] == 3


def test_take_finds_what_a_dead_process_held(name: str, ring: Ring) -> None:
    run_to_death(
        f"ring = Ring.attach({name!r}, _ring.ROLE_WRITER, writable_payload=True)\nwhile ring.try_take(): pass\n"
    )
    assert ring.try_take() is None
    assert ring.take(0) is not None


def test_a_thread_waiting_for_a_slot_lets_others_run(ring: Ring) -> None:
    leases = fill(ring)
    taken: list[tuple[int, int] | None] = []
    thread = threading.Thread(target=lambda: taken.append(ring.take(PATIENCE_S)))
    thread.start()
    slot, generation = leases[2]
    assert ring.consume(slot, generation, 0)
    thread.join(PATIENCE_S)
    assert taken == [(slot, generation + 1)]


def test_a_waiter_notices_that_its_ring_was_closed(name: str) -> None:
    ring = Ring.create(name, 1, 1000, ZEROS)
    fill(ring)
    faults: list[int] = []

    def wait() -> None:
        try:
            ring.take(PATIENCE_S)
        except _ring.RingFault as fault:
            faults.append(fault.args[0])

    thread = threading.Thread(target=wait)
    thread.start()
    ring.close()
    thread.join(PATIENCE_S)
    assert faults == [_ring.FAULT_DETACHED]


@pytest.mark.parametrize("what", ["freed", "published"])
def test_waits_wake_in_another_process(name: str, ring: Ring, what: str) -> None:
    lease = write(ring)
    with Child(
        f"ring = Ring.attach({name!r}, _ring.ROLE_READER)\nseen = ring.{what}_event()\nprint('waiting')\n"
        f"print(ring.wait_{what}(seen, {PATIENCE_S}), ring.{what}_event() - seen)\n"
    ) as child:
        assert child.line() == "waiting"
        if what == "freed":
            assert ring.discard(*lease)
        else:
            write(ring)
        assert child.line() == "True 1"
        assert child.end() == 0


def test_a_wait_ends_at_its_timeout_and_at_once_for_an_old_value(ring: Ring) -> None:
    seen = ring.freed_event()
    assert not ring.wait_freed(seen, 0)
    assert not ring.wait_freed(seen, 0.01)
    assert ring.wait_freed(seen - 1 & 0xFFFFFFFF, PATIENCE_S)


def test_signals_interrupt_a_wait(name: str) -> None:
    with Child(
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        f"ring = Ring.create({name!r}, 1, 1, bytes(16))\nring.try_take()\n"
        f"try:\n    print('waiting')\n    ring.take({PATIENCE_S})\nexcept KeyboardInterrupt: print('interrupted')\n"
        "ring.unlink_if_last()\n"
    ) as child:
        assert child.line() == "waiting"
        child.process.send_signal(signal.SIGINT)
        assert child.line() == "interrupted"
        assert child.end() == 0


def test_an_event_wakes_another_process(tmp_path: Path) -> None:
    path = str(tmp_path / "event")
    event = _ring.Event(path)
    assert Path(path).stat().st_mode & 0o777 == 0o600
    seen = event.value()
    with Child(
        f"event = _ring.Event({path!r})\nseen = event.value()\nprint(seen)\n"
        f"print(event.wait(seen, {PATIENCE_S}))\nevent.advance()\n"
    ) as child:
        assert child.line() == str(seen)
        event.advance()
        assert child.line() == "True"
        assert event.wait(seen + 1, PATIENCE_S)
        assert child.end() == 0
    assert event.value() == seen + 2
    assert not event.wait(event.value(), 0)
    event.close()
    event.close()
    refused(event.value, _ring.FAULT_DETACHED)
