"""Payloads by IPv6: over loopback of a host with both families, and between two hosts that have IPv6 alone."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers import Child, eventually, noise
from redis_server import needs_redis
from two_hosts import Host, two_hosts, why_not

from transport import BlockingClient, SharedRingBuffer, UCXXServer
from transport.errors import RetriesExhaustedError, UsageError, WireNotAllowedError
from transport.wire.interfaces import addresses

pytestmark = [pytest.mark.ucx, pytest.mark.slow]


def own(family: str) -> str:
    """Return an address of this host that other hosts would use."""
    wanted = [address for name, address in addresses() if name != "lo" and (":" in address) == (family == "IPv6")]
    if not wanted:
        pytest.skip(f"this host has no address of {family} beside loopback")
    return wanted[0]


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("mode", ["thread", "process"])
@pytest.mark.parametrize("wire", [{"tcp"}, {"shm"}])
def test_a_payload_comes_over_loopback(mode: Any, wire: Any) -> None:
    with (
        SharedRingBuffer.create(slots=2, slot_bytes=1 << 20) as ring,
        UCXXServer(ring, addresses=("::1",), mode=mode),
        BlockingClient(wire=wire) as client,
    ):
        ticket = ring.write_raw(noise(1 << 20))
        assert ticket.addresses == ("::1",)
        payload = client.read(ticket)
        assert (bytes(payload.data), payload.wire) == (noise(1 << 20).tobytes(), *wire)
        payload.release()
        by_ipv4 = msgspec.structs.replace(ring.write_raw(b"x"), addresses=("127.0.0.1",))
        with pytest.raises((RetriesExhaustedError, WireNotAllowedError)):  # that is not this host, if it has IPv6 alone
            client.read(by_ipv4)
        assert bytes(client.read(msgspec.structs.replace(by_ipv4, addresses=("::1",))).data) == b"x"


@pytest.mark.nightly
def test_one_client_reads_by_both_families() -> None:
    with BlockingClient(wire={"tcp"}) as client:
        for address in ("127.0.0.1", "::1", own("IPv4"), own("IPv6"), "127.0.0.1"):
            with (
                SharedRingBuffer.create(slots=2, slot_bytes=1000) as ring,
                UCXXServer(ring, addresses=(address,), mode="thread"),
            ):
                assert bytes(client.read(ring.write_raw(b"by " + address.encode())).data) == b"by " + address.encode()


def test_addresses_of_both_families_are_refused() -> None:
    with (
        SharedRingBuffer.create(slots=2, slot_bytes=1000) as ring,
        pytest.raises(UsageError, match="IPv4 and of IPv6"),
    ):
        UCXXServer(ring, addresses=("127.0.0.1", "::1"))


# --- two hosts without IPv4 ---------------------------------------------------------------------------
ROLLOUT = """
import sys
from transport import Rollout, Schema
with Rollout(Schema.of(x="int64"), sys.argv[1] or None, mode="process") as rollout:
    for number in range(8):
        ticket = rollout.write({"x": number})
    print(*ticket.addresses, *rollout.ports, flush=True)
    sys.stdin.readline()
"""

TRAINER = """
import sys
from transport import Schema, Trainer
with Trainer(Schema.of(x="int64"), sys.argv[1], wire={"tcp"}) as trainer:
    seen = []
    while len(seen) < 8:
        batch = trainer.take(8, timeout_s=20)
        seen += batch["x"].tolist()
        batch.consume()
print(*sorted(seen), flush=True)
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    if reason := why_not():
        pytest.skip(f"two hosts are not tested: {reason}")
    with two_hosts(tmp_path_factory.mktemp("hosts"), ipv6=True) as both:
        yield both


@pytest.mark.nightly
def test_a_host_with_ipv6_alone_is_found_by_its_address(hosts: tuple[Host, Host]) -> None:
    here, there = hosts
    with here.python(ROLLOUT, "") as rollout:
        address, port = rollout.line().split()
        assert address == here.address
        with there.python(TRAINER, f"rings://[{address}]:{port}") as trainer:
            assert trainer.line() == "0 1 2 3 4 5 6 7"
            assert trainer.wait() == 0
        rollout.tell()
        assert rollout.wait() == 0


@pytest.mark.nightly
@needs_redis
def test_a_directory_and_its_rings_are_reached_by_ipv6_alone(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    here, there = hosts
    options = ("--bind", here.address, "--port", "16380", "--protected-mode", "no", "--save", "", "--dir", tmp_path)
    with subprocess.Popen(here.command("redis-server", *map(str, options)), stdout=subprocess.DEVNULL) as server:
        try:
            ask = here.command("redis-cli", "-h", here.address, "-p", "16380", "ping")
            eventually(lambda: subprocess.run(ask, capture_output=True).stdout == b"PONG\n", "redis-server answers")
            rings = f"rings+redis://[{here.address}]:16380/0?run=ipv6&may_forget=yes"
            with there.python(ROLLOUT, rings) as rollout, here.python(TRAINER, rings) as trainer:
                assert rollout.line().split()[0] == there.address
                assert trainer.line() == "0 1 2 3 4 5 6 7"
                assert trainer.wait() == 0
                rollout.tell()
                assert rollout.wait() == 0
        finally:
            server.kill()


def test_the_doctor_names_the_address_of_a_host_with_ipv6_alone(hosts: tuple[Host, Host]) -> None:
    here, _ = hosts
    with here.python(
        "from transport.config import load; from transport.doctor.network import checks\n"
        "for check in checks(load().configuration, (7450,)):\n"
        "    print(check.status, check.detail, flush=True)"
    ) as doctor:
        assert doctor.line() == f"ok {here.address}: cable0 has the default route"
        assert doctor.line() == "ok free"


SETTING = """
from transport import BlockingClient
from transport.errors import TransportError
from transport.testing import a_ticket
with BlockingClient(wire={"tcp"}) as client:
    try:
        client.read(a_ticket(addresses=("::1",), ports=(PORT,)))
    except TransportError as error:
        print(error, flush=True)
"""


def test_a_setting_of_ucx_that_excludes_ipv6_is_named() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as there:
        port = there.getsockname()[1]
        with Child(SETTING.replace("PORT", str(port)), env={"UCX_TCP_AF_PRIO": "inet"}) as child:
            assert "UCX_TCP_AF_PRIO=inet" in child.line()
