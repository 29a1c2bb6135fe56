"""A device that is removed, or whose link goes down, in the middle of a read, at either end: nothing hangs or ends.

What is read is as it was written; else there is an error with a reason, and later reads are as before.
"""

from __future__ import annotations

import contextlib
import subprocess
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from helpers import Child, eventually, noise
from second_guest import HERE, HERE_TOO, LINK, THERE, THERE_TOO, Removal, SecondGuest, after_packets, link_down

from transport.rdma import ports

pytestmark = [pytest.mark.verbs, pytest.mark.ucx, pytest.mark.slow]

MIB = 1 << 20
LARGE, SMALL = np.tile(noise(MIB), 64), noise(MIB, 1)
BEGUN = 400  # packets of a transfer of 16 384
# UCX 1.23 finds the interface of a device by its place on the PCI bus, and takes devices that have none for one device
# (ib_device.c, uct_ib_device_get_roce_ndev_index). By their networks it tells them apart.
APART = {"UCX_IB_ROCE_REACHABILITY_MODE": "local_subnet"}
TIMES = {"read_timeout_s": 60.0, "connect_timeout_s": 60.0, "handshake_timeout_s": 60.0}
SERVER = f"""
import sys
import numpy as np
from helpers import noise
from transport import SharedRingBuffer, UCXXServer
from transport.settings import Settings

with SharedRingBuffer.create(slots=2, slot_bytes={LARGE.size}) as ring:
    with UCXXServer(ring, addresses=sys.argv[1].split(","), settings=Settings(**{TIMES})):
        print(ring.write_raw(np.tile(noise({MIB}), 64)).to_text(), flush=True)
        for line in sys.stdin:
            print(ring.write_raw(noise({MIB}, 1)).to_text(), flush=True)
"""
READER = f"""
import sys, zlib
from transport import BlockingClient, Ticket
from transport.errors import TransportError
from transport.settings import Settings

with BlockingClient(wire=set(sys.argv[1].split(",")), settings=Settings(**{TIMES})) as client:
    print("up", flush=True)
    for line in sys.stdin:
        ticket, timeout_s = line.split()
        try:
            payload = client.read(Ticket.parse(ticket), timeout=float(timeout_s))
            print(payload.wire, zlib.crc32(payload["data"]), flush=True)
            payload.release()
        except TransportError as error:
            print(type(error).__name__, error, flush=True)
"""


class Two(NamedTuple):
    """A listener's process on one host, and a reader's on the other one."""

    server: Child
    reader: Child

    def begin_large(self, timeout_s: float) -> str:
        """Read a small payload, and return while a large one is on its way: its ticket."""
        large = self.server.line()
        assert self.small() == f"rdma {zlib.crc32(SMALL)}"
        self.reader.tell(f"{large} {timeout_s}")
        after_packets(BEGUN)
        return large

    def small(self) -> str:
        """What comes of reading a small one."""
        self.server.tell()
        return self.read(self.server.line())

    def read(self, ticket: str) -> str:
        """What comes of reading this one."""
        self.reader.tell(f"{ticket} 100")
        return self.reader.line()


@contextlib.contextmanager
def two(
    there: SecondGuest, reader_there: bool, wires: str, addresses: str = "", env: dict[str, str] = APART
) -> Iterator[Two]:
    """Both of them; ``addresses`` of the listener, by default that of the link."""
    addresses = addresses or (HERE if reader_there else THERE)
    with (
        Child(SERVER, addresses, host=None if reader_there else there, env=env) as server,
        Child(READER, wires, host=there if reader_there else None, env=env) as reader,
    ):
        assert reader.line() == "up"
        try:
            yield Two(server, reader)
        finally:
            for child in (reader, server):
                stdin, child.process.stdin = child.process.stdin, None
                assert stdin is not None
                stdin.close()
                child.wait()


@pytest.mark.parametrize("wires", ["rdma", "tcp,rdma"])
@pytest.mark.parametrize("reader_there", [True, False], ids=["the listener's", "the reader's"])
def test_a_device_that_is_removed_under_a_read_is_let_go_of(there: SecondGuest, reader_there: bool, wires: str) -> None:
    """The kernel removes it when nobody has it open: until then payloads may come by it."""
    with Removal(None) as removal, two(there, reader_there, wires) as both:
        both.begin_large(100)
        removal.begin()
        assert both.reader.line() in [f"{wire} {zlib.crc32(LARGE)}" for wire in ("rdma", "tcp")]
        assert both.small() in [f"{wire} {zlib.crc32(SMALL)}" for wire in ("rdma", "tcp")]


@pytest.mark.parametrize("wires", ["rdma", "tcp,rdma"])
@pytest.mark.parametrize("reader_there", [True, False], ids=["the listener's", "the reader's"])
def test_a_link_that_goes_down_under_a_read_ends_it_with_a_reason(
    there: SecondGuest, reader_there: bool, wires: str
) -> None:
    with two(there, reader_there, wires) as both:
        both.begin_large(20)
        with link_down():
            outcome = both.reader.line()
        kind, _, reason = outcome.partition(" ")
        assert (kind.endswith("Error") and reason) or outcome == f"rdma {zlib.crc32(LARGE)}"  # before the link was down
        assert both.small() == f"rdma {zlib.crc32(SMALL)}"


@pytest.fixture
def second_devices(there: SecondGuest) -> Iterator[None]:
    """Each host has a second device, on the other network; neither network leads to the other one."""

    def on_both(command: str) -> None:
        for words in (command.split(), there.command(*command.split())):
            subprocess.run(words, check=True)

    on_both("rdma link add rxe1 type rxe netdev eth1")
    on_both("ip route del default")
    yield
    on_both(f"ip route replace default dev {LINK}")
    on_both("rdma link delete rxe1")


@pytest.mark.usefixtures("second_devices")
def test_what_is_read_comes_by_the_device_whose_port_is_active(there: SecondGuest) -> None:
    with link_down(), two(there, False, "rdma", THERE_TOO) as both:
        assert sorted(ports().values()) == ["ACTIVE", "DOWN"]
        both.begin_large(100)
        assert both.reader.line() == f"rdma {zlib.crc32(LARGE)}"


@pytest.mark.usefixtures("second_devices")
@pytest.mark.parametrize("reader_there", [True, False], ids=["the listener's", "the reader's"])
def test_reads_go_on_by_the_other_device_when_one_loses_its_link(there: SecondGuest, reader_there: bool) -> None:
    addresses = f"{HERE},{HERE_TOO}" if reader_there else f"{THERE},{THERE_TOO}"
    with two(there, reader_there, "rdma", addresses) as both:
        large = both.begin_large(100)
        with link_down():
            outcome = both.reader.line()
            while outcome.partition(" ")[0].endswith("Error"):  # the listener is being started again, without the port
                outcome = both.read(large)
            assert outcome == f"rdma {zlib.crc32(LARGE)}"
            assert both.small() == f"rdma {zlib.crc32(SMALL)}"


@pytest.mark.usefixtures("second_devices")
def test_where_one_side_alone_sees_a_way_by_rdma_payloads_go_over_tcp(there: SecondGuest) -> None:
    """As two hosts may whose routes differ; here since devices are taken for one, see APART."""
    with two(there, False, "tcp,rdma", THERE_TOO, env={}) as both:
        both.server.line()
        with link_down():
            assert both.small() == f"tcp {zlib.crc32(SMALL)}"
        eventually(lambda: both.small() == f"rdma {zlib.crc32(SMALL)}", "RDMA is tried again")
    with link_down(), two(there, False, "rdma", THERE_TOO, env={}) as both:
        kind, _, reason = both.read(both.server.line()).partition(" ")
        assert kind == "WireNotAllowedError"
        assert THERE_TOO in reason
