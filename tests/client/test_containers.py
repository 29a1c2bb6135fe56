"""Two containers of one machine that share its memory and have networks of their own (`docker run --ipc=host`).

UCX finds that they may use shared memory; but who waits for a message there is woken through a socket that does not
leave its network namespace.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from two_hosts import Host, two_hosts, why_not

pytestmark = [pytest.mark.ucx, pytest.mark.slow]

PAYLOADS = 6
PORT = 17450

WRITER = """
import sys
import numpy as np
from transport import Rollout, Schema, ServerOptions, UpTo

server = ServerOptions(ports=[int(sys.argv[1])])
with Rollout(Schema.of(data=("int64", UpTo(1 << 16))), slots=8, server=server) as rollout:
    tickets = [rollout.write_to_buffer({"data": np.full(50_000, number)}) for number in range(int(sys.argv[2]))]
    print(tickets[0].to_text(), flush=True)
    sys.stdin.readline()
"""

# The first by its ticket, the others as they are taken.
READER = """
import sys
from transport import BlockingClient, Schema, Ticket, Trainer, UpTo

schema = Schema.of(data=("int64", UpTo(1 << 16)))
address, ticket, payloads = sys.argv[1], Ticket.parse(sys.argv[2]), int(sys.argv[3])
with BlockingClient(schemas=[schema], wire={"shm", "tcp"}) as client:
    payload = client.read(ticket, timeout=10.0)
    seen, wires = [int(payload["data"][0])], {payload.wire}
with Trainer(schema, f"rings://{address}", wire={"shm", "tcp"}) as trainer:
    while len(seen) < payloads:
        batch = trainer.take(payloads, 10.0)
        assert batch is not None, f"nothing came after {seen}"
        seen += [int(payload["data"][0]) for payload in batch]
        wires |= set(batch.bytes_by_wire)
        batch.consume()
print(sorted(seen), sorted(wires), flush=True)
"""


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    if reason := why_not():
        pytest.skip(f"two containers are not tested: {reason}")
    with two_hosts(tmp_path_factory.mktemp("containers"), one_machine=True) as both:
        yield both


@pytest.mark.nightly
def test_payloads_come_over_tcp_where_only_the_network_is_apart(containers: tuple[Host, Host]) -> None:
    here, there = containers
    with here.python(WRITER, PORT, PAYLOADS) as writer:
        ticket = writer.line()
        with there.python(READER, f"{here.address}:{PORT}", ticket, PAYLOADS) as reader:
            assert reader.line() == f"{list(range(PAYLOADS))} ['tcp']"
            assert reader.wait() == 0
        writer.tell("stop")
        assert writer.wait() == 0
