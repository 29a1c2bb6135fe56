"""Reads over RDMA on one host: bytes, registrations, and what is refused for want of memory that may be locked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from helpers import Child, eventually

from transport import BlockingClient, SharedRingBuffer, UCXXServer, rdma
from transport.settings import Settings
from transport.wire.library import lack_of_verbs

pytestmark = [pytest.mark.verbs, pytest.mark.ucx, pytest.mark.slow]

MIB = 1 << 20
PATIENT = Settings(read_timeout_s=60, connect_timeout_s=60, handshake_timeout_s=60)  # a guest is emulated, and slow
READER = """
import logging, sys
from transport import BlockingClient, Ticket
from transport.errors import TransportError
from transport.settings import Settings

logging.basicConfig(format="%(message)s")
patient = Settings(read_timeout_s=60, connect_timeout_s=60, handshake_timeout_s=60)
wires, *tickets = sys.argv[1:]
try:
    with BlockingClient(wire=set(wires.split(",")), settings=patient) as client:
        for ticket in tickets:
            payload = client.read(Ticket.parse(ticket), timeout=120)
            print(payload.wire)
            payload.release()
except TransportError as error:
    print(type(error).__name__, error)
"""


@pytest.fixture(autouse=True, scope="module")
def port() -> None:
    """A port of RDMA and a UCX that can use it."""
    lack = lack_of_verbs()
    if why := rdma.no_port() or (lack.why if lack else ""):
        pytest.skip(f"{why}: make verbs has both")


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(slots=4, slot_bytes=16 * MIB) as ring, UCXXServer(ring):
        yield ring


def write(ring: SharedRingBuffer, size: int) -> str:
    return ring.write_raw(np.frombuffer(os.urandom(size), np.uint8)).to_text()


def limited(kib: int, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program that may lock ``kib`` KiB of memory, whoever runs it."""
    without = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"]
    command = [*without, "bash", "-c", f'ulimit -l {kib}; exec "$@"', "limited", sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True)


@pytest.mark.parametrize("wires", [{"rdma"}, {"tcp", "rdma"}], ids=["rdma", "tcp,rdma"])
def test_payloads_of_any_size_arrive_as_they_were_written(ring: SharedRingBuffer, wires: set[str]) -> None:
    with BlockingClient(wire=wires, settings=PATIENT) as client:  # type: ignore[arg-type]
        for size in (256, 4096, 65536, MIB, 16 * MIB):
            content = np.frombuffer(os.urandom(size), np.uint8)
            payload = client.read(ring.write_raw(content), timeout=120)
            assert payload.wire == "rdma"
            np.testing.assert_array_equal(np.asarray(payload["data"]), content)
            payload.release()


def registrations() -> set[int]:
    """The numbers of all memory that is registered on this host; each registration has a new one."""
    said = subprocess.run(["rdma", "-j", "resource", "show", "mr"], capture_output=True, check=True).stdout
    return {each["mrn"] for each in json.loads(said)}


def test_no_read_registers_memory_once_the_first_ones_are_over(ring: SharedRingBuffer) -> None:
    with BlockingClient(wire={"rdma"}, settings=PATIENT) as client:

        def read(count: int) -> None:
            for _ in range(count):
                payload = client.read(ring.write_raw(np.zeros(MIB, np.uint8)), timeout=120)
                payload.release()

        read(100)  # UCX's pools of buffers have grown by then
        before = registrations()
        assert before
        read(200)
        assert registrations() == before


# --- memory that may be locked ------------------------------------------------------------------------------
@pytest.mark.parametrize("kib", [64, 1024, 65536])
def test_a_reader_that_may_lock_too_little_does_without_rdma_or_says_why(ring: SharedRingBuffer, kib: int) -> None:
    alone = limited(kib, READER, "rdma", write(ring, MIB))
    assert alone.stdout.startswith("WireNotAllowedError")
    assert f"may lock {kib} KiB" in alone.stdout
    with_tcp = limited(kib, READER, "tcp,rdma", write(ring, 256), write(ring, MIB))
    assert with_tcp.stdout.split() == ["tcp", "tcp"]
    assert with_tcp.stderr.count(f"may lock {kib} KiB") == 1


def test_a_reader_whose_memory_is_refused_in_the_middle_goes_on_without_rdma() -> None:
    with SharedRingBuffer.create(slots=2, slot_bytes=128 * MIB) as ring, UCXXServer(ring):
        kib = (rdma.UCX_BYTES >> 10) + 1024
        both = limited(kib, READER, "tcp,rdma", write(ring, 256), write(ring, 128 * MIB))
        assert both.stdout.split() == ["rdma", "tcp"]
        ring.native.discard_unread()
        alone = limited(kib, READER, "rdma", write(ring, 256), write(ring, 128 * MIB))
        wire, error = alone.stdout.splitlines()
        assert wire == "rdma"
        assert error.startswith("WireNotAllowedError")


SERVER = """
import logging, sys
from transport import SharedRingBuffer, UCXXServer, rdma
from transport.errors import TransportError

logging.basicConfig(format="%(message)s")
if sys.argv[2] == "refused":  # by the kernel, where it was not foreseen
    rdma.refusal = lambda *_: ""
with SharedRingBuffer.create(slots=4, slot_bytes=64 << 20) as ring:
    try:
        with UCXXServer(ring, wires=frozenset(sys.argv[1].split(",")), mode="thread"):
            print("served")
    except TransportError as error:
        print(type(error).__name__, error)
"""


@pytest.mark.parametrize(("how", "why"), [("foreseen", "may lock"), ("refused", "256 MiB cannot be registered")])
def test_a_ring_that_cannot_be_registered_is_served_without_rdma_or_not_at_all(how: str, why: str) -> None:
    kib = (rdma.UCX_BYTES >> 10) + 1024
    with_tcp = limited(kib, SERVER, "tcp,rdma", how)
    assert with_tcp.stdout.split() == ["served"]
    assert with_tcp.stderr.count("payloads go without rdma") == 1
    assert why in with_tcp.stderr
    alone = limited(kib, SERVER, "rdma", how)
    assert alone.stdout.startswith("WireNotAllowedError")
    assert why in alone.stdout


STUCK = """
import sys
from transport import BlockingClient, Ticket
from transport.settings import Settings
from transport.wire.ucx import Worker

patient = Settings(read_timeout_s=100, connect_timeout_s=60, handshake_timeout_s=60)
with BlockingClient(wire={"rdma"}, settings=patient) as client:
    client.read(Ticket.parse(sys.argv[1]), timeout=120).release()
    print("first", flush=True)
    sys.stdin.readline()
    Worker._drive = lambda worker: None  # UCX makes no progress: requests leave, and nothing is fetched
    client.read(Ticket.parse(sys.argv[2]), timeout=10_000)
"""


def test_bytes_that_did_not_get_through_do_not_count() -> None:
    """A reader that is killed before it has fetched what it asked for."""
    with SharedRingBuffer.create(slots=2, slot_bytes=16 * MIB) as ring, UCXXServer(ring):
        first = ring.write_raw(b"first").to_text()
        with Child(STUCK, first, write(ring, 16 * MIB)) as reader:
            assert reader.line() == "first"
            eventually(lambda: ring.statistics().bytes_rdma == len(b"first"), "what got through counts")
            reader.tell()
            eventually(lambda: ring.statistics().reading == 1, "the payload is on its way")
            reader.kill()
        eventually(lambda: ring.statistics().reading == 0, "the slot is given back")
        assert ring.statistics().bytes_rdma == len(b"first")
