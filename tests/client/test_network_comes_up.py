"""Whoever starts while the network is away takes part when it is back: a listener, a trainer, and a client that knows
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
with Rollout(Schema.of(x="int64"), mode=mode, server=ServerOptions(addresses=(address,))) as rollout:
    rollout.write({"x": 7})
    print(*rollout.ports, flush=True)
    sys.stdin.readline()
"""

# Takes a payload from each address; says when it has tried one in vain.
CLIENT = """
import asyncio, sys
from transport import UCXXClient
from transport.errors import TransportError

async def take(client, address):
    said = False
    while True:
        try:
            if batch := await client.take(address, 1, wait_s=1.0):
                return batch
        except TransportError:
            if not said:
                print("in vain", flush=True)
            said = True

async def main():
    async with UCXXClient(wire={"tcp"}) as client:
        for address in sys.argv[1:]:
            batch = await take(client, address)
            print(int.from_bytes(batch.data(0), "little"), flush=True)
            batch = None
            await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    if reason := why_not():
        pytest.skip(f"two hosts are not tested: {reason}")
    with two_hosts(tmp_path_factory.mktemp("hosts")) as both:
        yield both


def cable(host: Host, state: str) -> None:
    subprocess.run(["ip", "-n", host.name, "link", "set", INTERFACE, state], check=True)


def test_a_listener_that_started_without_its_interface_serves_it_later(hosts: tuple[Host, Host]) -> None:
    here, there = hosts
    cable(here, "down")
    with here.python(ROLLOUT, here.address, "process") as rollout:
        port = rollout.line()
        cable(here, "up")
        with there.python(CLIENT, f"{here.address}:{port}") as client:
            assert "7" in (client.line(), client.line())
        rollout.tell()
        assert rollout.wait() == 0


def test_a_client_that_started_without_its_interface_takes_payloads_later(hosts: tuple[Host, Host]) -> None:
    here, there = hosts
    with here.python(ROLLOUT, here.address, "thread") as rollout:
        cable(there, "down")
        with there.python(CLIENT, f"{here.address}:{rollout.line()}") as client:
            assert client.line() == "in vain"
            cable(there, "up")
            assert client.line() == "7"


def test_a_client_that_knows_loopback_alone_keeps_its_connection_and_reaches_what_comes_up(
    hosts: tuple[Host, Host],
) -> None:
    here, there = hosts
    cable(there, "down")
    with (
        there.python(ROLLOUT, "127.0.0.1", "thread") as near,
        here.python(ROLLOUT, here.address, "thread") as far,
        there.python(CLIENT, *(f"127.0.0.1:{near.line()}", f"{here.address}:{far.line()}")) as client,
    ):
        assert client.line() == "7"
        cable(there, "up")
        client.tell()
        while (said := client.line()) == "in vain":
            pass
        assert said == "7"
        client.tell()
        assert client.wait() == 0
