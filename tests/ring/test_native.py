"""The native core through its binding: rings made and attached to, what they tell, keys, and that its stub is true.

Its transitions, races and crashes are tested in native/tests.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import signal
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from native_rings import PATIENCE_S, ZEROS, Child, refused, shm_file, write

from transport import _ring
from transport._ring import Ring
from transport.errors import ClosedError, LayoutError, RingError, RingNotFoundError, SharedMemoryError, UsageError

STUB = Path(__file__).resolve().parents[2] / "transport" / "_ring.pyi"


@pytest.fixture
def ring(name: str) -> Iterator[Ring]:
    made = Ring.create(name, 4, 1000, ZEROS)
    yield made
    made.close()


# --- create and attach ----------------------------------------------------------------------------
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
    if not _ring.FAULT_POINTS:
        promised -= {"set_fault", "report_faults"}
    if sys.version_info < (3, 12):  # the buffer protocol has no name in Python there
        promised = {each for each in promised if not each.endswith(".__buffer__")}
    for promise in promised:
        value: object = _ring
        for part in promise.split("."):
            assert hasattr(value, part), promise
            value = getattr(value, part)
    assert {each for each in dir(_ring) if not each.startswith("_")} <= promised


def test_the_lock_of_the_interpreter_is_given_away_by_one_class() -> None:
    bindings = (STUB.parents[1] / "native" / "bindings").iterdir()
    assert [
        path.name for path in bindings if re.search("gil_scoped_release|PyEval_SaveThread", path.read_text("utf-8"))
    ] == ["gil_released.hpp"]


@pytest.mark.parametrize(
    "bad", ["", "/", "transport-x", "/other-x", "/transport-", "/transport-a/b", "/transport-" + "x" * 300]
)
def test_malformed_names_are_refused(bad: str) -> None:
    refused(lambda: Ring.create(bad, 4, 1000, ZEROS), UsageError)
    refused(lambda: Ring.attach(bad, _ring.ROLE_READER), UsageError)


def test_arguments_out_of_range_are_refused(name: str, ring: Ring) -> None:
    slot, generation = write(ring)
    loan = ring.try_take()
    assert loan is not None
    for call in (
        lambda: Ring.create(name + "x", 0, 1000, ZEROS),
        lambda: Ring.create(name + "x", 1 << 30, 1000, ZEROS),
        lambda: Ring.create(name + "x", 4, 0, ZEROS),
        lambda: Ring.create(name + "x", 4, 1000, b"short"),
        lambda: Ring.attach(name, 9),
        lambda: ring.info(4),
        lambda: ring.payload(4),
        lambda: ring.pin(slot, generation, 16),
        lambda: loan.publish(1001, 0, 1, 0, b""),
        lambda: loan.publish(0, 0, 0, 0, b""),
        lambda: loan.publish(0, 0, 17, 0, b""),
        lambda: loan.publish(0, 0, 1, 0, bytes(_ring.NOTE_CAPACITY + 1)),
        lambda: ring.set_ports(tuple(range(17))),
        lambda: ring.count("no such counter", 1),
    ):
        refused(call, UsageError)


def test_an_absurd_size_is_out_of_memory_and_leaves_nothing(name: str) -> None:
    for capacity in (1 << 50, 1 << 61, (1 << 64) - 1):
        refused(lambda capacity=capacity: Ring.create(name, 4, capacity, ZEROS), SharedMemoryError)
        assert not shm_file(name).exists()


def test_the_segment_is_private_and_listed(name: str, ring: Ring) -> None:
    assert shm_file(name).stat().st_mode & 0o777 == 0o600
    assert name in _ring.segments()


def test_its_makers_memory_map_has_its_name(name: str, ring: Ring) -> None:
    lines = Path("/proc/self/maps").read_text().splitlines()
    assert [line for line in lines if line.endswith(f"/dev/shm{name}")]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_users_segment_is_refused(name: str) -> None:
    with contextlib.closing(Ring.create(name, 4, 1000, ZEROS)) as ring:
        os.chown(shm_file(name), 12345, -1)
        refused(lambda: Ring.attach(name, _ring.ROLE_READER), SharedMemoryError, "belongs to user 12345")
        refused(lambda: Ring.create(name, 4, 1000, ZEROS), SharedMemoryError)
        ring.close()
        refused(lambda: Ring.unlink_if_dead(name), SharedMemoryError)


@pytest.mark.parametrize(
    ("offset", "scribble", "error", "match"),
    [
        (0, b"NOTARING", LayoutError, "magic"),
        (8, struct.pack("=I", 99), LayoutError, "layout version 99"),
        (12, struct.pack("=I", 0), RingNotFoundError, "not initialised"),
        (16, struct.pack("=Q", 0), LayoutError, "sizes"),
        (16, struct.pack("=Q", 1 << 60), LayoutError, "sizes"),
        (24, struct.pack("=Q", (1 << 64) - 1), LayoutError, "sizes"),
        (24, struct.pack("=Q", 100_000), LayoutError, "sizes"),
        (32, struct.pack("=Q", 12), LayoutError, "page size"),
    ],
)
def test_a_corrupted_header_is_refused(
    name: str, ring: Ring, offset: int, scribble: bytes, error: type[RingError], match: str
) -> None:
    with shm_file(name).open("r+b", buffering=0) as file:
        file.seek(offset)
        file.write(scribble)
    refused(lambda: Ring.attach(name, _ring.ROLE_READER), error, match)
    write(ring)  # whoever is attached already is not misled


def test_a_file_of_another_size_is_refused(name: str, ring: Ring) -> None:
    other = name + "-cut"
    try:
        data = shm_file(name).read_bytes()
        shm_file(other).write_bytes(data[:-4096])
        refused(lambda: Ring.attach(other, _ring.ROLE_READER), LayoutError, "bytes, header says")
        shm_file(other).write_bytes(data[:100])
        refused(lambda: Ring.attach(other, _ring.ROLE_READER), RingNotFoundError)
        refused(lambda: Ring.create(other, 1, 1, ZEROS), LayoutError)
    finally:
        shm_file(other).unlink(missing_ok=True)


# --- what a process may do, and waits for ---------------------------------------------------------
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


def test_signals_interrupt_a_wait(name: str) -> None:
    with Child(
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        f"ring = Ring.create({name!r}, 1, 1, bytes(16))\nloan = ring.try_take()\n"
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
    refused(event.value, ClosedError)


# --- slot keys ------------------------------------------------------------------------------------
def test_slot_keys_are_siphash_of_slot_and_generation() -> None:
    # the vector of its authors for the message 00..07 under the key 00..0f
    assert _ring.slot_key(bytes(range(16)), 0x03020100, 0x07060504) == 0x93F5F5799A932462
    # openssl mac -macopt hexkey:a5… -macopt size:8 -in message SIPHASH prints the same, first byte first
    secret = b"\xa5" * 16
    assert _ring.slot_key(secret, 0, 0) == 0x6F0C5BAF8D87A0F8
    assert _ring.slot_key(secret, 5, 1) == 0x5BA3C4B486186029
    assert _ring.slot_key(secret, (1 << 30) - 1, (1 << 30) - 1) == 0xBE29CA2419DF0589


def test_slot_keys_need_a_whole_secret_and_numbers_of_32_bits() -> None:
    for secret in (b"", bytes(15), bytes(17)):
        refused(lambda secret=secret: _ring.slot_key(secret, 0, 0), UsageError, "16 bytes")
    for slot, generation in ((-1, 0), (0, -1), (1 << 32, 0), (0, 1 << 32)):
        with pytest.raises(TypeError):
            _ring.slot_key(bytes(16), slot, generation)


# --- fault points ---------------------------------------------------------------------------------
def test_fault_points_are_only_in_the_test_build(name: str) -> None:
    if not _ring.FAULT_POINTS:
        assert not hasattr(_ring, "set_fault")
        for module in ("_ring", "_ucp"):
            (file,) = Path(_ring.__file__).parent.glob(f"{module}.*.so")
            built = file.read_bytes()
            for trace in (b"take.taken", b"serve.answered", b"read.arrived", b"set_fault", b"report_faults"):
                assert trace not in built, f"{file.name} was built with fault points: it knows {trace!r}"
        return
    refused(lambda: _ring.set_fault("no.such", signal.SIGKILL), UsageError)
    run = f"_ring.set_fault('take.taken', signal.SIGKILL, 1)\nring = Ring.create({name!r}, 4, 1000, bytes(16))\n"
    with Child(run + "ring.try_take()\nprint('once')\nring.try_take()\n") as child:
        assert child.line() == "once"
        assert child.end() == -signal.SIGKILL
    ring = Ring.create(name, 4, 1000, ZEROS)
    assert ring.taken_over
    assert ring.state_counts() == (4, 0, 0, 0)
    ring.close()


# --- copies and checksums at memory speed

SIZES = [0, 1, 3, 16, 17, 128, 129, 240, 241, 1023, 65_535, 65_536, 65_537, 1_000_003, 9_000_001]


@pytest.mark.parametrize("size", SIZES)
def test_checksums_are_xxh3_and_copies_are_exact(size: int) -> None:
    source = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    expected = xxhash.xxh3_64_intdigest(source.tobytes())
    assert _ring.checksum(source) == expected
    copied = np.zeros(size + 2, dtype=np.uint8)
    _ring.copy(copied[1:-1], source)
    assert np.array_equal(copied[1:-1], source)
    assert copied[0] == copied[-1] == 0
    hasher = _ring.Checksum()
    target = np.zeros(size, dtype=np.uint8)
    cut = size // 3
    hasher.update(source[:cut])
    target[:cut] = source[:cut]
    hasher.copy(target[cut:], source[cut:])
    assert np.array_equal(target, source)
    assert hasher.digest() == expected == hasher.digest()


def test_buffers_that_do_not_fit_are_refused() -> None:
    refused(lambda: _ring.copy(bytearray(3), b"four"), UsageError)
    refused(lambda: _ring.Checksum().copy(bytearray(3), b"four"), UsageError)
    with pytest.raises(BufferError):
        _ring.copy(b"read-only", b"123456789")
    with pytest.raises((BufferError, ValueError)):
        _ring.checksum(np.zeros((4, 4), dtype=np.uint8)[:, ::2])
    with pytest.raises(TypeError):
        _ring.checksum("text")
    with pytest.raises(TypeError):
        _ring.checksum(5)


def test_one_checksum_survives_many_threads() -> None:
    hasher = _ring.Checksum()
    block = bytes(1 << 20)
    threads = [threading.Thread(target=lambda: [hasher.update(block) for _ in range(8)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hasher.digest() == xxhash.xxh3_64_intdigest(bytes(32 << 20))
