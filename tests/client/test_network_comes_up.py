"""Whoever starts while the network is away takes part when it is back: a listener, a client, and a client that knows
nothing else of the network than loopback. The hosts are those of two_hosts.py.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from two_hosts import INTERFACE, Host, two_hosts, why_not

pytestmark = [pytest.mark.ucx, pytest.mark.slow]

# Writes a payload into a ring which its listener serves, and waits for the end.
ROLLOUT = """
import sys
from transport import Rollout, Schema, ServerOptions
address, mode = sys.argv[1:]
server = ServerOptions(addresses=(address,))
with Rollout(Schema.of(x="int64"), mode=mode, server=server, drain_s=0) as rollout:
    print(rollout.write({"x": 7}).to_text(), flush=True)
    sys.stdin.readline()
"""

# Reads each ticket; says when it has tried one in vain.
CLIENT = """
import sys
from transport import BlockingClient, Schema, Settings
from transport.errors import TransportError

def read(client, ticket):
    said = False
    while True:
        try:
            return int(client.read(ticket)["x"])
        except TransportError:
            if not said:
                print("in vain", flush=True)
            said = True

settings = Settings(calls_per_ticket=1, attempts_per_read=1)
with BlockingClient(wire={"tcp"}, schemas=[Schema.of(x="int64")], settings=settings) as client:
    for ticket in sys.argv[1:]:
        print(read(client, ticket), flush=True)
        sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    if reason := why_not():
        pytest.skip(f"two hosts are not tested: {reason}")
    with two_hosts(tmp_path_factory.mktemp("hosts")) as both:
        yield both


def cable(host: Host, state: str) -> None:
    subprocess.run(["ip", "-n", host.name, "link", "set", INTERFACE, state], check=True)


@pytest.mark.nightly
def test_a_listener_that_started_without_its_interface_serves_it_later(hosts: tuple[Host, Host]) -> None:
    here, there = hosts
    cable(here, "down")
    with here.python(ROLLOUT, here.address, "process") as rollout:
        ticket = rollout.line()
        cable(here, "up")
        with there.python(CLIENT, ticket) as client:
            assert "7" in (client.line(), client.line())
        rollout.tell()
        assert rollout.wait() == 0


@pytest.mark.nightly
def test_a_client_that_started_without_its_interface_reads_later(hosts: tuple[Host, Host]) -> None:
    here, there = hosts
    with here.python(ROLLOUT, here.address, "thread") as rollout:
        cable(there, "down")
        with there.python(CLIENT, rollout.line()) as client:
            assert client.line() == "in vain"
            cable(there, "up")
            assert client.line() == "7"


@pytest.mark.nightly
def test_a_client_that_knows_loopback_alone_keeps_its_connection_and_reaches_what_comes_up(
    hosts: tuple[Host, Host],
) -> None:
    here, there = hosts
    cable(there, "down")
    with (
        there.python(ROLLOUT, "127.0.0.1", "thread") as near,
        here.python(ROLLOUT, here.address, "thread") as far,
        there.python(CLIENT, near.line(), far.line()) as client,
    ):
        assert client.line() == "7"
        cable(there, "up")
        client.tell()
        while (said := client.line()) == "in vain":
            pass
        assert said == "7"
        client.tell()
        assert client.wait() == 0
