"""Payloads from one host to another: no shared memory, no common loopback, only the network between them.

Written, listened and queued on one host, read on the other, over UCX's TCP. The hosts are those of two_hosts.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis_server import needs_redis
from two_hosts import INTERFACE, NOBODY, Host, redis_at, second_interface, two_hosts, why_not

pytestmark = [
    pytest.mark.ucx,
    pytest.mark.slow,
    needs_redis,
]

PAYLOADS = 6

# Publishes, serves until it is told to stop, and says what its tickets advertise.
WRITER = """
import json, sys
import numpy as np
from transport import Schema, ServerOptions, UCXXRolloutMixin, UpTo

url, payloads, addresses, mode = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]

class Worker(UCXXRolloutMixin):
    pass

worker = Worker()
worker.setup_ucxx(
    Schema.of(data=("int64", UpTo(1 << 18))), slots=8, rings=url, mode=mode,
    server=ServerOptions(addresses=addresses),
)
for number in range(payloads):
    ticket = worker.write_to_buffer({"data": np.arange(number, number + 100_000 + number)})
said = {"addresses": ticket.addresses, "ports": ticket.ports, "host": ticket.host, "ticket": ticket.to_text()}
print(json.dumps(said), flush=True)
sys.stdin.readline()
print(json.dumps({"unread": worker.ring_statistics().ready}), flush=True)
worker.cleanup_ucxx()
"""

# Takes and compares everything.
READER = """
import json, os, sys
import numpy as np
from transport import ClientOptions, Schema, Trainer, UpTo
from transport.settings import Settings
from transport.ticket import host_identity

url, payloads = sys.argv[1], int(sys.argv[2])
schema = Schema.of(data=("int64", UpTo(1 << 18)))
seen, wires, segments = [], {}, os.listdir("/dev/shm")
with Trainer(schema, url, client=ClientOptions(settings=Settings(connect_timeout_s=1.0))) as trainer:
    while len(seen) < payloads:
        batch = trainer.take(payloads, 20.0)
        for payload in batch:
            data = payload["data"]
            number = len(data) - 100_000
            assert np.array_equal(data, np.arange(number, number + len(data))), number
            seen.append(number)
        for wire, nbytes in batch.bytes_by_wire.items():
            wires[wire] = wires.get(wire, 0) + nbytes
        batch.consume()
        assert batch.accepted.all()
    avoided = list(trainer.statistics().client.quarantined_ports)
    depth = trainer.rings.depth()
print(json.dumps({
    "seen": sorted(seen), "wires": sorted(wires), "avoided": avoided, "segments": segments,
    "host": host_identity(), "done": depth.done, "bytes": wires,
}), flush=True)
"""

# Reads one ticket, and says what went wrong.
ASKER = """
import sys
from transport import BlockingClient, Ticket
from transport.errors import TransportError
from transport.settings import Settings

with BlockingClient(settings=Settings(connect_timeout_s=0.5)) as client:
    try:
        client.read(Ticket.parse(sys.argv[1]), timeout=5.0)
    except TransportError as error:
        while error is not None:
            print(f"{type(error).__name__}: {error}", end=" | ")
            error = error.__cause__
    else:
        print("read", end="")
print(flush=True)
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    if reason := why_not():
        pytest.skip(f"two hosts are not tested: {reason}")
    with two_hosts(tmp_path_factory.mktemp("hosts")) as both:
        yield both


@pytest.fixture
def queue(hosts: tuple[Host, Host], tmp_path: Path) -> Iterator[str]:
    """A Redis server on the writer's host, as both reach it."""
    with redis_at(hosts[0], tmp_path) as address:
        yield f"rings+redis://{address}/0?run=two-hosts"


def reported(line: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(line)
    return found


def test_every_payload_crosses_over_tcp_by_the_address_that_the_writer_chose(
    hosts: tuple[Host, Host], queue: str
) -> None:
    here, there = hosts
    with (
        here.python(WRITER, queue, PAYLOADS, "null", "process") as writer,
        there.python(READER, queue, PAYLOADS) as reader,
    ):
        written, read = reported(writer.line()), reported(reader.line())
        writer.tell("stop")
        left = reported(writer.line())
        assert (writer.wait(), reader.wait()) == (0, 0)
    assert written["addresses"] == [here.address]  # its way out; not loopback, which the reader has, too
    assert read["seen"] == list(range(PAYLOADS))
    assert read["wires"] == ["tcp"]
    assert read["segments"] == []
    assert read["host"] != written["host"]
    assert read["done"] == PAYLOADS
    assert read["avoided"] == []
    assert left["unread"] == 0  # acknowledged over the network, and free


@pytest.mark.nightly
def test_of_several_addresses_the_reachable_one_is_found(hosts: tuple[Host, Host], queue: str) -> None:
    here, there = hosts
    addresses = json.dumps([NOBODY, here.address])
    with (
        here.python(WRITER, queue, PAYLOADS, addresses, "thread") as writer,
        there.python(READER, queue, PAYLOADS) as reader,
    ):
        written, read = reported(writer.line()), reported(reader.line())
        writer.tell("stop")
        assert (writer.wait(), reader.wait()) == (0, 0)
    assert read["seen"] == list(range(PAYLOADS))
    assert read["wires"] == ["tcp"]
    assert here.address not in " ".join(read["avoided"])
    assert written["addresses"] == [NOBODY, here.address]


@pytest.mark.nightly
def test_an_address_that_both_hosts_have_is_no_way_between_them(hosts: tuple[Host, Host], queue: str) -> None:
    """As of two virtual machines behind the NAT of theirs. UCX takes it for one, and for the fastest."""
    with contextlib.ExitStack() as made:
        for host in hosts:
            made.enter_context(second_interface("10.0.2.15/24", host.ip))
        here, there = hosts
        writer = made.enter_context(here.python(WRITER, queue, PAYLOADS, "null", "process"))
        reader = made.enter_context(there.python(READER, queue, PAYLOADS))
        writer.line()
        read = reported(reader.line())
        writer.tell("stop")
        writer.line()
        assert (writer.wait(), reader.wait()) == (0, 0)
    assert read["seen"] == list(range(PAYLOADS))
    assert read["wires"] == ["tcp"]
    assert read["avoided"] == []


@pytest.mark.nightly
@pytest.mark.parametrize("address", [NOBODY, "127.0.0.1"])
def test_an_unreachable_address_is_an_error_that_names_it(hosts: tuple[Host, Host], address: str) -> None:
    here, there = hosts
    ring = f"rings:unreachable-{os.getpid()}-"  # a directory takes no server that is reached by loopback alone
    with here.python(WRITER, ring, 1, json.dumps([address]), "thread") as writer:
        written = reported(writer.line())
        with there.python(ASKER, written["ticket"]) as asker:
            said = asker.line()
            assert f"{address}:{written['ports'][0]}" in said
            assert "Error" in said
            writer.tell("stop")
            assert (writer.wait(), asker.wait()) == (0, 0)


# Publishes itself in the directory; says why it cannot.
ROLLOUT = """
import sys
from transport import Rollout, Schema
from transport.errors import ConfigurationError
try:
    with Rollout(Schema.of(x="int64"), rings=sys.argv[1], mode="thread"):
        print("published", flush=True)
except ConfigurationError as error:
    print(error, flush=True)
"""


@pytest.mark.nightly
def test_a_directory_on_another_host_takes_no_server_that_names_loopback_alone(
    hosts: tuple[Host, Host], queue: str
) -> None:
    _, there = hosts
    route = ["ip", "-n", there.name, "route"]
    subprocess.run([*route, "delete", "default"], check=True)
    try:
        with there.python(ROLLOUT, queue) as rollout:
            said = rollout.line()
            assert "TRANSPORT_ADDRESSES" in said
            assert there.address in said
            assert rollout.wait() == 0
    finally:
        subprocess.run([*route, "add", "default", "dev", INTERFACE], check=True)
    with there.python(ROLLOUT, queue) as rollout:
        assert rollout.line() == "published"
        assert rollout.wait() == 0
