"""The native core through its binding; its transitions, races and crashes are tested in native/tests."""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from transport import _native
from transport._native import Ring

SHM = Path("/dev/shm")
STUB = Path(__file__).resolve().parent.parent / "transport" / "_native.pyi"
ZEROS = bytes(16)
PATIENCE_S = 60  # how long a wait may last before something is broken


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """A name nobody uses, removed afterwards whatever became of its ring."""
    unique = f"/transport-test-native-{os.getpid()}-{abs(hash(request.node.nodeid)):x}"
    yield unique
    shm_file(unique).unlink(missing_ok=True)


@pytest.fixture
def ring(name: str) -> Iterator[Ring]:
    made = Ring.create(name, 4, 1000, ZEROS)
    yield made
    made.close()


def shm_file(name: str) -> Path:
    return SHM / name.removeprefix("/")


def refused(call: Callable[[], object], code: int, match: str | None = None) -> None:
    with pytest.raises(_native.RingFault, match=match) as caught:
        call()
    assert caught.value.args[0] == code
    assert caught.value.code == code


def write(ring: Ring, data: bytes = b"payload", readers: int = 1, note: bytes = b"") -> tuple[int, int]:
    lease = ring.try_take()
    assert lease is not None
    slot, generation = lease
    with ring.payload(slot) as area:
        area[: len(data)] = data
    assert ring.publish(slot, generation, len(data), _native.checksum(data), readers, 0, note)
    return lease


def read(ring: Ring, slot: int, length: int) -> bytes:
    with ring.payload(slot) as area:
        return bytes(area[:length])


class Child:
    """Python code in a process of its own, which talks in lines and may kill itself."""

    PRELUDE = "import os, signal, sys\nfrom transport import _native\nfrom transport._native import Ring\n"
    DIE = "os.kill(os.getpid(), signal.SIGKILL)\n"

    def __init__(self, code: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", self.PRELUDE + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE_S)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> int:
        return self.process.wait(timeout=PATIENCE_S)


def run_to_death(code: str) -> None:
    with Child(code + Child.DIE) as child:
        assert child.end() == -signal.SIGKILL


# --- create and attach -----------------------------------------------------------------------------


def test_the_module_has_what_its_stub_promises() -> None:
    stub = ast.parse(STUB.read_text(encoding="utf-8"))
    promised = set()
    for node in stub.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            promised.add(node.target.id)
        elif isinstance(node, ast.FunctionDef):
            promised.add(node.name)
        elif isinstance(node, ast.ClassDef):
            promised.add(node.name)
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    promised.add(f"{node.name}.{member.name}")
                elif isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                    promised.add(f"{node.name}.{member.target.id}")
    if not _native.HAS_FAULT_POINTS:
        promised -= {"set_fault", "report_faults"}
    for promise in promised:
        value: object = _native
        for part in promise.split("."):
            assert hasattr(value, part), promise
            value = getattr(value, part)
    assert {each for each in dir(_native) if not each.startswith("_")} <= promised


def test_a_payload_goes_from_writer_to_reader(name: str, ring: Ring) -> None:
    slot, generation = write(ring, b"hello", readers=2, note=b"ticket")
    reader = Ring.attach(name, _native.ROLE_READER)
    assert (reader.ring_id, reader.secret, reader.owner) == (ring.ring_id, ring.secret, 1)
    info = reader.info(slot)
    assert (info.state, info.generation, info.length, info.readers) == (_native.READY, generation, 5, 2)
    assert (info.done, info.pins, info.sequence) == (0xFFFC, 0, 1)
    assert info.checksum == _native.checksum(b"hello")
    assert reader.note(slot, generation) == b"ticket"
    assert reader.pin(slot, generation, 0) == _native.PIN_OK
    assert read(reader, slot, 5) == b"hello"
    assert reader.info(slot).pins == 1 << reader.owner
    assert reader.mark_consumed(slot, generation, 0)
    assert reader.pin(slot, generation, 0) == _native.PIN_DONE
    assert reader.pin(slot, generation + 1, 1) == _native.PIN_STALE
    assert ring.consume(slot, generation, 1)
    assert ring.state_counts() == (4, 0, 0, 0)
    assert not ring.consume(slot, generation, 1)
    assert ring.counters()["late_finalises"] == 1
    reader.close()


def test_a_name_in_use_is_refused_and_a_missing_one_is_not_found(name: str, ring: Ring) -> None:
    refused(lambda: Ring.create(name, 4, 1000, ZEROS), _native.FAULT_EXISTS)
    refused(lambda: Ring.attach(name + "-none", _native.ROLE_READER), _native.FAULT_NOT_FOUND)
    refused(lambda: Ring.unlink_if_dead(name + "-none"), _native.FAULT_NOT_FOUND)


@pytest.mark.parametrize(
    "bad", ["", "/", "transport-x", "/other-x", "/transport-", "/transport-a/b", "/transport-" + "x" * 300]
)
def test_malformed_names_are_refused(bad: str) -> None:
    refused(lambda: Ring.create(bad, 4, 1000, ZEROS), _native.FAULT_ARGUMENT)
    refused(lambda: Ring.attach(bad, _native.ROLE_READER), _native.FAULT_ARGUMENT)


def test_arguments_out_of_range_are_refused(name: str, ring: Ring) -> None:
    slot, generation = write(ring)
    for call in (
        lambda: Ring.create(name + "x", 0, 1000, ZEROS),
        lambda: Ring.create(name + "x", 1 << 30, 1000, ZEROS),
        lambda: Ring.create(name + "x", 4, 0, ZEROS),
        lambda: Ring.create(name + "x", 4, 1000, b"short"),
        lambda: Ring.attach(name, 9),
        lambda: ring.info(4),
        lambda: ring.payload(4),
        lambda: ring.pin(slot, generation, 16),
        lambda: ring.publish(slot, generation, 1001, 0, 1, 0, b""),
        lambda: ring.publish(slot, generation, 0, 0, 0, 0, b""),
        lambda: ring.publish(slot, generation, 0, 0, 17, 0, b""),
        lambda: ring.publish(slot, generation, 0, 0, 1, 0, bytes(_native.NOTE_CAPACITY + 1)),
        lambda: ring.set_ports(tuple(range(17))),
        lambda: ring.count("no such counter", 1),
    ):
        refused(call, _native.FAULT_ARGUMENT)


def test_an_absurd_size_is_out_of_memory_and_leaves_nothing(name: str) -> None:
    for capacity in (1 << 50, 1 << 61, (1 << 64) - 1):
        refused(lambda capacity=capacity: Ring.create(name, 4, capacity, ZEROS), _native.FAULT_NO_MEMORY)
        assert not shm_file(name).exists()


def test_the_segment_is_private_and_listed(name: str, ring: Ring) -> None:
    assert shm_file(name).stat().st_mode & 0o777 == 0o600
    assert name in _native.segments()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_users_segment_is_refused(name: str) -> None:
    with contextlib.closing(Ring.create(name, 4, 1000, ZEROS)) as ring:
        os.chown(shm_file(name), 12345, -1)
        refused(lambda: Ring.attach(name, _native.ROLE_READER), _native.FAULT_DENIED, "belongs to user 12345")
        refused(lambda: Ring.create(name, 4, 1000, ZEROS), _native.FAULT_DENIED)
        ring.close()
        refused(lambda: Ring.unlink_if_dead(name), _native.FAULT_DENIED)


@pytest.mark.parametrize(
    ("offset", "scribble", "code", "match"),
    [
        (0, b"NOTARING", _native.FAULT_LAYOUT, "magic"),
        (8, struct.pack("=I", 99), _native.FAULT_LAYOUT, "layout version 99"),
        (12, struct.pack("=I", 0), _native.FAULT_NOT_READY, "not initialised"),
        (16, struct.pack("=Q", 0), _native.FAULT_LAYOUT, "sizes"),
        (16, struct.pack("=Q", 1 << 60), _native.FAULT_LAYOUT, "sizes"),
        (24, struct.pack("=Q", (1 << 64) - 1), _native.FAULT_LAYOUT, "sizes"),
        (24, struct.pack("=Q", 100_000), _native.FAULT_LAYOUT, "sizes"),
        (32, struct.pack("=Q", 12), _native.FAULT_LAYOUT, "page size"),
    ],
)
def test_a_corrupted_header_is_refused(
    name: str, ring: Ring, offset: int, scribble: bytes, code: int, match: str
) -> None:
    with shm_file(name).open("r+b", buffering=0) as file:
        file.seek(offset)
        file.write(scribble)
    refused(lambda: Ring.attach(name, _native.ROLE_READER), code, match)
    write(ring)  # whoever is attached already is not misled


def test_a_file_of_another_size_is_refused(name: str, ring: Ring) -> None:
    other = name + "-cut"
    try:
        data = shm_file(name).read_bytes()
        shm_file(other).write_bytes(data[:-4096])
        refused(lambda: Ring.attach(other, _native.ROLE_READER), _native.FAULT_LAYOUT, "bytes, header says")
        shm_file(other).write_bytes(data[:100])
        refused(lambda: Ring.attach(other, _native.ROLE_READER), _native.FAULT_NOT_READY)
        Ring.create(other, 1, 1, ZEROS).close()  # rubbish of a creator that died
    finally:
        shm_file(other).unlink(missing_ok=True)


def test_a_seventeenth_owner_is_refused_and_an_observer_is_not(name: str, ring: Ring) -> None:
    owners = [Ring.attach(name, _native.ROLE_READER) for _ in range(_native.MAX_OWNERS - 1)]
    refused(lambda: Ring.attach(name, _native.ROLE_READER), _native.FAULT_NO_OWNER)
    observer = Ring.attach(name, _native.ROLE_OBSERVER)
    assert observer.owner == -1
    assert [owner.index for owner in observer.owners()] == list(range(16))
    assert all(owner.alive for owner in observer.owners())
    refused(observer.try_take, _native.FAULT_ARGUMENT, "observer")
    slot, generation = write(ring)
    refused(lambda: observer.pin(slot, generation, 0), _native.FAULT_ARGUMENT, "observer")
    assert observer.consume(slot, generation, 0)
    for each in [*owners, observer]:
        each.close()


# --- the life of an attachment -----------------------------------------------------------------------


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
        refused(call, _native.FAULT_DETACHED, "closed")
    assert bytes(area[:10]) == b"still here" == array[:10].tobytes()
    area[:5] = b"STILL"
    assert array[:10].tobytes() == b"STILL here"


def test_readers_cannot_write_the_payload(name: str, ring: Ring) -> None:
    reader = Ring.attach(name, _native.ROLE_READER)
    writer = Ring.attach(name, _native.ROLE_WRITER, writable_payload=True)
    assert ring.payload(0).nbytes == 1000
    assert not ring.payload(0).readonly
    assert not writer.payload(0).readonly
    area = reader.payload(0)
    assert area.readonly
    with pytest.raises(TypeError):
        area[0] = 1
    assert not np.frombuffer(area, dtype=np.uint8).flags.writeable
    with pytest.raises(BufferError):
        _native.copy(area, bytes(1000))
    with Child(
        f"import ctypes, numpy as np\nreader = Ring.attach({name!r}, _native.ROLE_READER)\n"
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
        "    except _native.RingFault as fault: print(ring.closed, fault.code, bytes(area[:3]))\n"
        "    ring.close()\n"
        "    sys.stdin.readline()\n"
        "    os._exit(0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    ) as child:
        assert child.line() == f"True {_native.FAULT_DETACHED} b'abc'"
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
        "    ring.publish(slot, generation, len(text), _native.checksum(text), readers, 5, b'note ' + text)\n"
        "    return slot, generation\n"
        "write(b'ready', 2)\n"
        "slot, generation = write(b'reading', 2)\n"
        "ring.pin(slot, generation, 0); ring.consume(slot, generation, 1)\n"
        "ring.set_ports((7001, 7002)); ring.addresses = '10.0.0.1'\n"
        "ring.try_take()\n"
    )
    observer = Ring.attach(name, _native.ROLE_OBSERVER)
    assert observer.state_counts() == (1, 1, 1, 1)
    assert not observer.keeper_alive
    assert [owner.alive for owner in observer.owners()] == [False]
    refused(lambda: Ring.create(name, 5, 1000, ZEROS), _native.FAULT_LAYOUT)
    refused(lambda: Ring.create(name, 4, 999, ZEROS), _native.FAULT_LAYOUT)
    refused(lambda: Ring.create(name, 4, 1000, b"x" * 16), _native.FAULT_LAYOUT)

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
        if info.state == _native.READY:
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
        f"ring = Ring.attach({name!r}, _native.ROLE_LISTENER, writable_payload=True)\n"
        f"assert ring.pin({slot}, {generation}, 0) == _native.PIN_OK\n"
        "ring.try_take()\n"
    )
    assert ring.state_counts() == (2, 1, 0, 1)
    assert ring.reclaim() == 2
    assert ring.state_counts() == (3, 0, 1, 0)
    assert ring.reclaim() == 0
    assert [owner.index for owner in ring.owners()] == [0]


def test_a_stopped_owner_is_alive(name: str, ring: Ring) -> None:
    with Child(
        f"ring = Ring.attach({name!r}, _native.ROLE_READER)\nring.try_take()\nprint('in')\nsys.stdin.readline()\n"
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
    run_to_death(f"Ring.create({name!r}, 4, 1000, bytes(16))\nring = Ring.attach({name!r}, _native.ROLE_READER)\n")
    reader = Ring.attach(name, _native.ROLE_READER)
    assert not Ring.unlink_if_dead(name)
    reader.close()
    assert Ring.unlink_if_dead(name)
    assert name not in _native.segments()


# --- waiting -----------------------------------------------------------------------------------------


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
        f"ring = Ring.attach({name!r}, _native.ROLE_WRITER, writable_payload=True)\nwhile ring.try_take(): pass\n"
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
        except _native.RingFault as fault:
            faults.append(fault.args[0])

    thread = threading.Thread(target=wait)
    thread.start()
    ring.close()
    thread.join(PATIENCE_S)
    assert faults == [_native.FAULT_DETACHED]


@pytest.mark.parametrize("what", ["freed", "published"])
def test_waits_wake_in_another_process(name: str, ring: Ring, what: str) -> None:
    lease = write(ring)
    with Child(
        f"ring = Ring.attach({name!r}, _native.ROLE_READER)\nseen = ring.{what}_event()\nprint('waiting')\n"
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
    event = _native.Event(path)
    assert Path(path).stat().st_mode & 0o777 == 0o600
    seen = event.value()
    with Child(
        f"event = _native.Event({path!r})\nseen = event.value()\nprint(seen)\n"
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
    refused(event.value, _native.FAULT_DETACHED)


# --- notes, tables and counters ------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, _native.NOTE_CAPACITY])
def test_notes_come_back_as_written(name: str, ring: Ring, size: int) -> None:
    note = bytes(i * 7 % 256 for i in range(size))
    slot, generation = write(ring, note=note)
    reader = Ring.attach(name, _native.ROLE_OBSERVER)
    assert reader.note(slot, generation) == note
    assert reader.note(slot, generation + 1) is None
    assert ring.consume(slot, generation, 0)
    assert reader.note(slot, generation) is None
    reader.close()


def test_ports_addresses_and_owners_are_told_to_all(name: str, ring: Ring) -> None:
    listener = Ring.attach(name, _native.ROLE_LISTENER)
    ring.set_ports((13337, 65535))
    ring.addresses = "192.168.0.1,fe80::1"
    listener.set_own_port(13337)
    before = listener.owners()[1].heartbeat_ns
    listener.heartbeat()
    assert listener.ports() == (13337, 65535)
    assert listener.addresses == "192.168.0.1,fe80::1"
    owner = ring.owners()[1]
    assert (owner.index, owner.role, owner.pid, owner.port) == (1, _native.ROLE_LISTENER, os.getpid(), 13337)
    assert owner.heartbeat_ns >= before
    with pytest.raises(_native.RingFault):
        ring.addresses = "x" * 1001
    ring.set_ports(())
    assert listener.ports() == ()
    listener.close()
    assert [owner.index for owner in ring.owners()] == [0]


def test_counters_are_sums_that_outlive_their_owner(name: str, ring: Ring) -> None:
    writer = Ring.attach(name, _native.ROLE_WRITER, writable_payload=True)
    slot, generation = write(writer, b"12345")
    writer.count("bytes_tcp", 11)
    writer.close()
    assert ring.pin(slot, generation, 0) == _native.PIN_OK
    assert ring.own_pins(slot) == 1
    assert ring.unpin(slot, generation)
    counters = ring.counters()
    assert {key: value for key, value in counters.items() if value} == {
        "takes": 1,
        "publishes": 1,
        "bytes_published": 5,
        "bytes_tcp": 11,
        "pins": 1,
        "unpins": 1,
    }


def test_overwrite_spares_what_is_consumed_in_part_or_pinned(ring: Ring) -> None:
    leases = [write(ring, readers=2) for _ in range(4)]
    assert ring.pin(*leases[0], 0) == _native.PIN_OK
    assert ring.consume(*leases[1], 1)
    assert ring.try_overwrite() == (leases[2][0], leases[2][1] + 1)
    assert ring.try_overwrite() == (leases[3][0], leases[3][1] + 1)
    assert ring.try_overwrite() is None
    assert not ring.discard(*leases[2])
    assert ring.counters()["overwrites"] == 2


# --- copies and checksums ------------------------------------------------------------------------------

SIZES = [0, 1, 3, 16, 17, 128, 129, 240, 241, 1023, 65_535, 65_536, 65_537, 1_000_003, 9_000_001]


@pytest.mark.parametrize("size", SIZES)
def test_checksums_are_xxh3_and_copies_are_exact(size: int) -> None:
    source = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    expected = xxhash.xxh3_64_intdigest(source.tobytes())
    assert _native.checksum(source) == expected
    copied = np.zeros(size + 2, dtype=np.uint8)
    _native.copy(copied[1:-1], source)
    assert np.array_equal(copied[1:-1], source)
    assert copied[0] == copied[-1] == 0
    hasher = _native.Checksum()
    target = np.zeros(size, dtype=np.uint8)
    cut = size // 3
    hasher.update(source[:cut])
    target[:cut] = source[:cut]
    hasher.copy(target[cut:], source[cut:])
    assert np.array_equal(target, source)
    assert hasher.digest() == expected == hasher.digest()


def test_buffers_that_do_not_fit_are_refused() -> None:
    refused(lambda: _native.copy(bytearray(3), b"four"), _native.FAULT_ARGUMENT)
    refused(lambda: _native.Checksum().copy(bytearray(3), b"four"), _native.FAULT_ARGUMENT)
    with pytest.raises(BufferError):
        _native.copy(b"read-only", b"123456789")
    with pytest.raises((BufferError, ValueError)):
        _native.checksum(np.zeros((4, 4), dtype=np.uint8)[:, ::2])
    with pytest.raises(TypeError):
        _native.checksum("text")
    with pytest.raises(TypeError):
        _native.checksum(5)


def test_one_checksum_survives_many_threads() -> None:
    hasher = _native.Checksum()
    block = bytes(1 << 20)
    threads = [threading.Thread(target=lambda: [hasher.update(block) for _ in range(8)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hasher.digest() == xxhash.xxh3_64_intdigest(bytes(32 << 20))


# --- views -----------------------------------------------------------------------------------------------


class Owner:
    """What keeps an attachment; the last view closes it."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


def wanted(ring: Ring, slot: int, generation: int, length: int) -> tuple[int, int, int, int, int]:
    return slot, generation, _native.slot_key(ring.secret, slot, generation), length, 0


def test_views_are_counted_and_pin_until_they_go(ring: Ring) -> None:
    views, owner = _native.Views(ring, 2), Owner()
    held = [views.read(owner, *wanted(ring, *write(ring, b"12345"), 5), True) for _ in range(2)]
    assert len(views) == 2
    third = write(ring, b"123")
    assert views.read(owner, *wanted(ring, *third, 3), True) is None
    assert ring.state_counts() == (1, 0, 1, 2)
    assert [bytes(view) for view in held] == [b"12345"] * 2
    assert ring.counters()["bytes_mapped"] == 10
    held[0].hold.abandon()
    del held[0]
    assert len(views) == 1
    assert ring.state_counts() == (1, 0, 2, 1)
    held.clear()
    assert ring.state_counts() == (2, 0, 2, 0)
    assert views.read(owner, *wanted(ring, *third, 4), True) == _native.READ_OTHER_LENGTH
    assert owner.closed == 0


def test_one_view_may_be_out_where_none_were_allowed(ring: Ring) -> None:
    views, owner = _native.Views(ring, 0), Owner()
    view = views.read(owner, *wanted(ring, *write(ring), 7), False)
    assert views.read(owner, *wanted(ring, *write(ring), 7), False) is None
    assert len(view) == 7


def test_the_last_view_after_close_closes_the_owner_once(ring: Ring) -> None:
    views, owner = _native.Views(ring, 2), Owner()
    assert views.close()
    held = [views.read(owner, *wanted(ring, *write(ring), 7), consume) for consume in (True, False)]
    assert not views.close()
    assert ring.counters()["consumes"] == 1  # what was delivered
    held.pop()
    assert owner.closed == 0
    held.pop()
    assert owner.closed == 1
    assert ring.state_counts() == (3, 0, 1, 0)


def test_views_that_are_let_go_hold_nothing_and_keep_their_memory(ring: Ring) -> None:
    views, owner = _native.Views(ring, 2), Owner()
    held = [views.read(owner, *wanted(ring, *write(ring), 7), consume) for consume in (True, False)]
    views.let_go()
    assert len(views) == 0
    assert ring.state_counts() == (3, 0, 1, 0)
    assert bytes(held[0]) == b"payload"
    views.close()
    held.clear()
    assert owner.closed == 0


def test_an_owner_that_cannot_be_closed_disturbs_nobody(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(unraisable.exc_type))
    views = _native.Views(ring, 2)
    view = views.read(object(), *wanted(ring, *write(ring), 7), True)
    views.close()
    del view
    assert told == [AttributeError]
    assert ring.state_counts() == (4, 0, 0, 0)


def test_views_are_of_rings_only(ring: Ring) -> None:
    for wrong in (None, 1, object()):
        with pytest.raises(TypeError):
            _native.Views(wrong, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _native.Views.read(ring, None, 0, 0, 0, 0, 0, True)  # type: ignore[arg-type]


# --- slot keys -------------------------------------------------------------------------------------------


def test_slot_keys_are_siphash_of_slot_and_generation() -> None:
    # the vector of its authors for the message 00..07 under the key 00..0f
    assert _native.slot_key(bytes(range(16)), 0x03020100, 0x07060504) == 0x93F5F5799A932462
    # openssl mac -macopt hexkey:a5… -macopt size:8 -in message SIPHASH prints the same, first byte first
    secret = b"\xa5" * 16
    assert _native.slot_key(secret, 0, 0) == 0x6F0C5BAF8D87A0F8
    assert _native.slot_key(secret, 5, 1) == 0x5BA3C4B486186029
    assert _native.slot_key(secret, (1 << 30) - 1, (1 << 30) - 1) == 0xBE29CA2419DF0589


def test_slot_keys_need_a_whole_secret_and_numbers_of_32_bits() -> None:
    for secret in (b"", bytes(15), bytes(17)):
        refused(lambda secret=secret: _native.slot_key(secret, 0, 0), _native.FAULT_ARGUMENT, "16 bytes")
    for slot, generation in ((-1, 0), (0, -1), (1 << 32, 0), (0, 1 << 32)):
        with pytest.raises(TypeError):
            _native.slot_key(bytes(16), slot, generation)


# --- fault points ----------------------------------------------------------------------------------------


def test_fault_points_are_only_in_the_test_build(name: str) -> None:
    if not _native.HAS_FAULT_POINTS:
        assert _native.FAULT_POINTS == ()
        assert not hasattr(_native, "set_fault")
        for module in ("_native", "_ucp"):
            (file,) = Path(_native.__file__).parent.glob(f"{module}.*.so")
            built = file.read_bytes()
            for trace in (b"take.taken", b"serve.answered", b"read.arrived", b"set_fault", b"report_faults"):
                assert trace not in built, f"{file.name} was built with fault points: it knows {trace!r}"
        return
    refused(lambda: _native.set_fault("no.such", signal.SIGKILL), _native.FAULT_ARGUMENT)
    run = f"_native.set_fault('take.taken', signal.SIGKILL, 1)\nring = Ring.create({name!r}, 4, 1000, bytes(16))\n"
    with Child(run + "ring.try_take()\nprint('once')\nring.try_take()\n") as child:
        assert child.line() == "once"
        assert child.end() == -signal.SIGKILL
    ring = Ring.create(name, 4, 1000, ZEROS)
    assert ring.taken_over
    assert ring.state_counts() == (4, 0, 0, 0)
    ring.close()
