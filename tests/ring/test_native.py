"""The native core through its binding: rings made and attached to, what they tell, keys, and that its stub is true.

Its transitions, races and crashes are tested in native/tests.
"""

from __future__ import annotations

import ast
import contextlib
import os
import signal
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from native_rings import ZEROS, Child, read, refused, shm_file, write

from transport import _ring
from transport._ring import Ring

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
    if not _ring.HAS_FAULT_POINTS:
        promised -= {"set_fault", "report_faults"}
    if sys.version_info < (3, 12):  # the buffer protocol has no name in Python there
        promised = {each for each in promised if not each.endswith(".__buffer__")}
    for promise in promised:
        value: object = _ring
        for part in promise.split("."):
            assert hasattr(value, part), promise
            value = getattr(value, part)
    assert {each for each in dir(_ring) if not each.startswith("_")} <= promised


def test_a_payload_goes_from_writer_to_reader(name: str, ring: Ring) -> None:
    slot, generation = write(ring, b"hello", readers=2, note=b"ticket")
    reader = Ring.attach(name, _ring.ROLE_READER)
    assert (reader.ring_id, reader.secret, reader.owner) == (ring.ring_id, ring.secret, 1)
    info = reader.info(slot)
    assert (info.state, info.generation, info.length, info.readers) == (_ring.READY, generation, 5, 2)
    assert (info.done, info.pins, info.sequence) == (0xFFFC, 0, 1)
    assert info.checksum == _ring.checksum(b"hello")
    assert reader.note(slot, generation) == b"ticket"
    assert reader.pin(slot, generation, 0) == _ring.PIN_OK
    assert read(reader, slot, 5) == b"hello"
    assert reader.info(slot).pins == 1 << reader.owner
    assert reader.mark_consumed(slot, generation, 0)
    assert reader.pin(slot, generation, 0) == _ring.PIN_DONE
    assert reader.pin(slot, generation + 1, 1) == _ring.PIN_STALE
    assert ring.consume(slot, generation, 1)
    assert ring.state_counts() == (4, 0, 0, 0)
    assert not ring.consume(slot, generation, 1)
    assert ring.counters()["late_finalises"] == 1
    reader.close()


def test_a_name_in_use_is_refused_and_a_missing_one_is_not_found(name: str, ring: Ring) -> None:
    refused(lambda: Ring.create(name, 4, 1000, ZEROS), _ring.FAULT_EXISTS)
    refused(lambda: Ring.attach(name + "-none", _ring.ROLE_READER), _ring.FAULT_NOT_FOUND)
    refused(lambda: Ring.unlink_if_dead(name + "-none"), _ring.FAULT_NOT_FOUND)


@pytest.mark.parametrize(
    "bad", ["", "/", "transport-x", "/other-x", "/transport-", "/transport-a/b", "/transport-" + "x" * 300]
)
def test_malformed_names_are_refused(bad: str) -> None:
    refused(lambda: Ring.create(bad, 4, 1000, ZEROS), _ring.FAULT_ARGUMENT)
    refused(lambda: Ring.attach(bad, _ring.ROLE_READER), _ring.FAULT_ARGUMENT)


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
        lambda: ring.publish(slot, generation, 0, 0, 1, 0, bytes(_ring.NOTE_CAPACITY + 1)),
        lambda: ring.set_ports(tuple(range(17))),
        lambda: ring.count("no such counter", 1),
    ):
        refused(call, _ring.FAULT_ARGUMENT)


def test_an_absurd_size_is_out_of_memory_and_leaves_nothing(name: str) -> None:
    for capacity in (1 << 50, 1 << 61, (1 << 64) - 1):
        refused(lambda capacity=capacity: Ring.create(name, 4, capacity, ZEROS), _ring.FAULT_NO_MEMORY)
        assert not shm_file(name).exists()


def test_the_segment_is_private_and_listed(name: str, ring: Ring) -> None:
    assert shm_file(name).stat().st_mode & 0o777 == 0o600
    assert name in _ring.segments()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_users_segment_is_refused(name: str) -> None:
    with contextlib.closing(Ring.create(name, 4, 1000, ZEROS)) as ring:
        os.chown(shm_file(name), 12345, -1)
        refused(lambda: Ring.attach(name, _ring.ROLE_READER), _ring.FAULT_DENIED, "belongs to user 12345")
        refused(lambda: Ring.create(name, 4, 1000, ZEROS), _ring.FAULT_DENIED)
        ring.close()
        refused(lambda: Ring.unlink_if_dead(name), _ring.FAULT_DENIED)


@pytest.mark.parametrize(
    ("offset", "scribble", "code", "match"),
    [
        (0, b"NOTARING", _ring.FAULT_LAYOUT, "magic"),
        (8, struct.pack("=I", 99), _ring.FAULT_LAYOUT, "layout version 99"),
        (12, struct.pack("=I", 0), _ring.FAULT_NOT_READY, "not initialised"),
        (16, struct.pack("=Q", 0), _ring.FAULT_LAYOUT, "sizes"),
        (16, struct.pack("=Q", 1 << 60), _ring.FAULT_LAYOUT, "sizes"),
        (24, struct.pack("=Q", (1 << 64) - 1), _ring.FAULT_LAYOUT, "sizes"),
        (24, struct.pack("=Q", 100_000), _ring.FAULT_LAYOUT, "sizes"),
        (32, struct.pack("=Q", 12), _ring.FAULT_LAYOUT, "page size"),
    ],
)
def test_a_corrupted_header_is_refused(
    name: str, ring: Ring, offset: int, scribble: bytes, code: int, match: str
) -> None:
    with shm_file(name).open("r+b", buffering=0) as file:
        file.seek(offset)
        file.write(scribble)
    refused(lambda: Ring.attach(name, _ring.ROLE_READER), code, match)
    write(ring)  # whoever is attached already is not misled


def test_a_file_of_another_size_is_refused(name: str, ring: Ring) -> None:
    other = name + "-cut"
    try:
        data = shm_file(name).read_bytes()
        shm_file(other).write_bytes(data[:-4096])
        refused(lambda: Ring.attach(other, _ring.ROLE_READER), _ring.FAULT_LAYOUT, "bytes, header says")
        shm_file(other).write_bytes(data[:100])
        refused(lambda: Ring.attach(other, _ring.ROLE_READER), _ring.FAULT_NOT_READY)
        Ring.create(other, 1, 1, ZEROS).close()  # rubbish of a creator that died
    finally:
        shm_file(other).unlink(missing_ok=True)


def test_a_seventeenth_owner_is_refused_and_an_observer_is_not(name: str, ring: Ring) -> None:
    owners = [Ring.attach(name, _ring.ROLE_READER) for _ in range(_ring.MAX_OWNERS - 1)]
    refused(lambda: Ring.attach(name, _ring.ROLE_READER), _ring.FAULT_NO_OWNER)
    observer = Ring.attach(name, _ring.ROLE_OBSERVER)
    assert observer.owner == -1
    assert [owner.index for owner in observer.owners()] == list(range(16))
    assert all(owner.alive for owner in observer.owners())
    refused(observer.try_take, _ring.FAULT_ARGUMENT, "observer")
    slot, generation = write(ring)
    refused(lambda: observer.pin(slot, generation, 0), _ring.FAULT_ARGUMENT, "observer")
    assert observer.consume(slot, generation, 0)
    for each in [*owners, observer]:
        each.close()


# --- notes, tables and counters -------------------------------------------------------------------
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, _ring.NOTE_CAPACITY])
def test_notes_come_back_as_written(name: str, ring: Ring, size: int) -> None:
    note = bytes(i * 7 % 256 for i in range(size))
    slot, generation = write(ring, note=note)
    reader = Ring.attach(name, _ring.ROLE_OBSERVER)
    assert reader.note(slot, generation) == note
    assert reader.note(slot, generation + 1) is None
    assert ring.consume(slot, generation, 0)
    assert reader.note(slot, generation) is None
    reader.close()


def test_ports_addresses_and_owners_are_told_to_all(name: str, ring: Ring) -> None:
    listener = Ring.attach(name, _ring.ROLE_LISTENER)
    ring.set_ports((13337, 65535))
    ring.addresses = "192.168.0.1,fe80::1"
    listener.set_own_port(13337)
    before = listener.owners()[1].heartbeat_ns
    listener.heartbeat()
    assert listener.ports() == (13337, 65535)
    assert listener.addresses == "192.168.0.1,fe80::1"
    owner = ring.owners()[1]
    assert (owner.index, owner.role, owner.pid, owner.port) == (1, _ring.ROLE_LISTENER, os.getpid(), 13337)
    assert owner.heartbeat_ns >= before
    with pytest.raises(_ring.RingFault):
        ring.addresses = "x" * 1001
    ring.set_ports(())
    assert listener.ports() == ()
    listener.close()
    assert [owner.index for owner in ring.owners()] == [0]


def test_counters_are_sums_that_outlive_their_owner(name: str, ring: Ring) -> None:
    writer = Ring.attach(name, _ring.ROLE_WRITER, writable_payload=True)
    slot, generation = write(writer, b"12345")
    writer.count("bytes_tcp", 11)
    writer.close()
    assert ring.pin(slot, generation, 0) == _ring.PIN_OK
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
    assert ring.pin(*leases[0], 0) == _ring.PIN_OK
    assert ring.consume(*leases[1], 1)
    assert ring.try_overwrite() == (leases[2][0], leases[2][1] + 1)
    assert ring.try_overwrite() == (leases[3][0], leases[3][1] + 1)
    assert ring.try_overwrite() is None
    assert not ring.discard(*leases[2])
    assert ring.counters()["overwrites"] == 2


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
        refused(lambda secret=secret: _ring.slot_key(secret, 0, 0), _ring.FAULT_ARGUMENT, "16 bytes")
    for slot, generation in ((-1, 0), (0, -1), (1 << 32, 0), (0, 1 << 32)):
        with pytest.raises(TypeError):
            _ring.slot_key(bytes(16), slot, generation)


# --- fault points ---------------------------------------------------------------------------------
def test_fault_points_are_only_in_the_test_build(name: str) -> None:
    if not _ring.HAS_FAULT_POINTS:
        assert _ring.FAULT_POINTS == ()
        assert not hasattr(_ring, "set_fault")
        for module in ("_ring", "_ucp"):
            (file,) = Path(_ring.__file__).parent.glob(f"{module}.*.so")
            built = file.read_bytes()
            for trace in (b"take.taken", b"serve.answered", b"read.arrived", b"set_fault", b"report_faults"):
                assert trace not in built, f"{file.name} was built with fault points: it knows {trace!r}"
        return
    refused(lambda: _ring.set_fault("no.such", signal.SIGKILL), _ring.FAULT_ARGUMENT)
    run = f"_ring.set_fault('take.taken', signal.SIGKILL, 1)\nring = Ring.create({name!r}, 4, 1000, bytes(16))\n"
    with Child(run + "ring.try_take()\nprint('once')\nring.try_take()\n") as child:
        assert child.line() == "once"
        assert child.end() == -signal.SIGKILL
    ring = Ring.create(name, 4, 1000, ZEROS)
    assert ring.taken_over
    assert ring.state_counts() == (4, 0, 0, 0)
    ring.close()
