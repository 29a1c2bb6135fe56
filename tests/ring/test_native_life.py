"""The life of an attachment: closed, forked, killed, stopped; who may take over and remove."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import numpy as np
import pytest
from native_rings import ZEROS, Child, read, refused, run_to_death, write

from transport import _ring
from transport._ring import Ring


@pytest.fixture
def ring(name: str) -> Iterator[Ring]:
    made = Ring.create(name, 4, 1000, ZEROS)
    yield made
    made.close()


def test_close_is_idempotent_and_what_was_exported_lives_on(name: str) -> None:
    ring = Ring.create(name, 4, 1000, ZEROS)
    slot, _ = write(ring, b"still here")
    area = ring.payload(slot)
    array = np.frombuffer(ring.payload(slot), dtype=np.uint8)
    assert ring.unlink_if_last()
    ring.close()
    ring.close()
    assert ring.closed
    assert repr(ring) == f"<Ring {name} closed>"
    for call in (ring.try_take, ring.counters, lambda: ring.payload(0), lambda: ring.take(1), ring.unlink_if_last):
        refused(call, _ring.FAULT_DETACHED, "closed")
    assert bytes(area[:10]) == b"still here" == array[:10].tobytes()
    area[:5] = b"STILL"
    assert array[:10].tobytes() == b"STILL here"


def test_readers_cannot_write_the_payload(name: str, ring: Ring) -> None:
    reader = Ring.attach(name, _ring.ROLE_READER)
    writer = Ring.attach(name, _ring.ROLE_WRITER, writable_payload=True)
    assert ring.payload(0).nbytes == 1000
    assert not ring.payload(0).readonly
    assert not writer.payload(0).readonly
    area = reader.payload(0)
    assert area.readonly
    with pytest.raises(TypeError):
        area[0] = 1
    assert not np.frombuffer(area, dtype=np.uint8).flags.writeable
    with pytest.raises(BufferError):
        _ring.copy(area, bytes(1000))
    with Child(
        f"import ctypes, numpy as np\nreader = Ring.attach({name!r}, _ring.ROLE_READER)\n"
        "address = np.frombuffer(reader.payload(0), dtype=np.uint8).ctypes.data\n"
        "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "ctypes.memset(address, 1, 1)\n"
    ) as child:
        assert child.end() == -signal.SIGSEGV  # the pages themselves are read-only
    reader.close()
    writer.close()


def test_a_forked_child_is_detached(name: str) -> None:
    with Child(
        f"ring = Ring.create({name!r}, 4, 1000, bytes(16))\n"
        "slot, generation = ring.try_take()\n"
        "area = ring.payload(slot); area[:3] = b'abc'\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try: ring.try_take()\n"
        "    except _ring.RingFault as fault: print(ring.closed, fault.code, bytes(area[:3]))\n"
        "    ring.close()\n"
        "    sys.stdin.readline()\n"
        "    os._exit(0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    ) as child:
        assert child.line() == f"True {_ring.FAULT_DETACHED} b'abc'"
        assert child.end() == -signal.SIGKILL
        # The grandchild still runs, and does not keep its parent's locks.
        ring = Ring.create(name, 4, 1000, ZEROS)
        assert ring.taken_over
        assert ring.state_counts() == (4, 0, 0, 0)
        child.go()
        assert child.line() == ""
        ring.close()


def test_a_killed_writer_is_taken_over_in_every_state(name: str) -> None:
    run_to_death(
        f"ring = Ring.create({name!r}, 4, 1000, bytes(16))\n"
        "def write(text, readers):\n"
        "    slot, generation = ring.try_take()\n"
        "    ring.payload(slot)[:len(text)] = text\n"
        "    ring.publish(slot, generation, len(text), _ring.checksum(text), readers, 5, b'note ' + text)\n"
        "    return slot, generation\n"
        "write(b'ready', 2)\n"
        "slot, generation = write(b'reading', 2)\n"
        "ring.pin(slot, generation, 0); ring.consume(slot, generation, 1)\n"
        "ring.set_ports((7001, 7002)); ring.addresses = '10.0.0.1'\n"
        "ring.try_take()\n"
    )
    observer = Ring.attach(name, _ring.ROLE_OBSERVER)
    assert observer.state_counts() == (1, 1, 1, 1)
    assert not observer.keeper_alive
    assert [owner.alive for owner in observer.owners()] == [False]
    refused(lambda: Ring.create(name, 5, 1000, ZEROS), _ring.FAULT_LAYOUT)
    refused(lambda: Ring.create(name, 4, 999, ZEROS), _ring.FAULT_LAYOUT)
    refused(lambda: Ring.create(name, 4, 1000, b"x" * 16), _ring.FAULT_LAYOUT)

    ring = Ring.create(name, 4, 1000, ZEROS)
    assert ring.taken_over
    assert ring.ring_id == observer.ring_id
    assert ring.secret == observer.secret
    assert ring.ports() == (7001, 7002)
    assert ring.addresses == "10.0.0.1"
    assert ring.state_counts() == (2, 0, 2, 0)
    texts = {}
    for slot in range(4):
        info = ring.info(slot)
        if info.state == _ring.READY:
            texts[read(ring, slot, info.length)] = (info.done, ring.note(slot, info.generation), info.deadline_ns)
    assert texts == {b"ready": (0xFFFC, b"note ready", 5), b"reading": (0xFFFE, b"note reading", 5)}
    counters = ring.counters()
    assert (counters["takes"], counters["publishes"]) == (3, 2)
    assert (counters["reclaimed_writing"], counters["reclaimed_reading"]) == (1, 1)
    ring.close()
    observer.close()


def test_a_killed_readers_slot_is_reclaimed(name: str, ring: Ring) -> None:
    slot, generation = write(ring)
    run_to_death(
        f"ring = Ring.attach({name!r}, _ring.ROLE_LISTENER, writable_payload=True)\n"
        f"assert ring.pin({slot}, {generation}, 0) == _ring.PIN_OK\n"
        "ring.try_take()\n"
    )
    assert ring.state_counts() == (2, 1, 0, 1)
    assert ring.reclaim() == 2
    assert ring.state_counts() == (3, 0, 1, 0)
    assert ring.reclaim() == 0
    assert [owner.index for owner in ring.owners()] == [0]


def test_a_stopped_owner_is_alive(name: str, ring: Ring) -> None:
    with Child(
        f"ring = Ring.attach({name!r}, _ring.ROLE_READER)\nring.try_take()\nprint('in')\nsys.stdin.readline()\n"
    ) as child:
        assert child.line() == "in"
        child.process.send_signal(signal.SIGSTOP)
        assert ring.reclaim() == 0
        assert [owner.alive for owner in ring.owners()] == [True, True]
        assert not ring.unlink_if_last()
        child.process.send_signal(signal.SIGCONT)
        child.go()
        assert child.end() == 0


def test_a_dead_ring_can_be_unlinked_and_a_living_one_not(name: str) -> None:
    run_to_death(f"Ring.create({name!r}, 4, 1000, bytes(16))\nring = Ring.attach({name!r}, _ring.ROLE_READER)\n")
    reader = Ring.attach(name, _ring.ROLE_READER)
    assert not Ring.unlink_if_dead(name)
    reader.close()
    assert Ring.unlink_if_dead(name)
    assert name not in _ring.segments()
