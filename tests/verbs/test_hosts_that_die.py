"""A host that dies in the middle of a transfer over RDMA: the other end learns it from the wire, before its timeouts.

To the other end a dead host is one from which nothing comes any more. The bound is in docs/GUARANTEES.md.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from helpers import Child, noise
from second_guest import HERE, THERE, Dying, SecondGuest

from transport import BlockingClient, SharedRingBuffer, UCXXServer
from transport.errors import DeadlineExceededError, TransportError
from transport.settings import Settings

pytestmark = [pytest.mark.verbs, pytest.mark.ucx, pytest.mark.slow]

SIZE = 64 << 20
BEGUN = 400  # packets of a transfer of 16 384
NEVER_S = 100_000.0
# Only the wire ends what is under way.
TIMES = {
    "read_timeout_s": NEVER_S,
    "batch_deadline_s": 2 * NEVER_S,
    "connect_timeout_s": 60.0,
    "handshake_timeout_s": 60.0,
    "attempts_per_read": 1,
    "ack_timeout_s": NEVER_S,
    "listener_idle_eviction_s": NEVER_S,
}
PATIENT = Settings(**TIMES)  # type: ignore[arg-type]
SERVER = f"""
import sys
import numpy as np
from transport import SharedRingBuffer, UCXXServer

with SharedRingBuffer.create(slots=1, slot_bytes={SIZE}) as ring:
    with UCXXServer(ring, addresses=("{THERE}",), mode="thread"):
        print(ring.write_raw(np.zeros({SIZE}, np.uint8)).to_text(), flush=True)
        sys.stdin.readline()
"""
READER = f"""
import sys
from transport import BlockingClient, Ticket
from transport.settings import Settings

with BlockingClient(wire={{"rdma"}}, ack="manual", settings=Settings(**{TIMES})) as client:
    print("up", flush=True)
    sys.stdin.readline()
    payload = client.read(Ticket.parse(sys.argv[1]), timeout={NEVER_S})
    print("read", flush=True)
    sys.stdin.readline()
"""


def test_a_read_ends_when_the_host_of_its_server_dies(there: SecondGuest) -> None:
    with Child(SERVER, host=there) as server, BlockingClient(wire={"rdma"}, settings=PATIENT) as client:
        ticket = server.line()
        with Dying(there, after=BEGUN) as dying:
            with pytest.raises(TransportError) as ended:
                client.read(ticket, timeout=NEVER_S)
            print(f"the read ended with {ended.value}")
            dying.wait()
        assert not isinstance(ended.value, DeadlineExceededError)


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with (
        SharedRingBuffer.create(slots=2, slot_bytes=SIZE) as ring,
        UCXXServer(ring, addresses=(HERE,), settings=PATIENT),
    ):
        yield ring


@pytest.mark.parametrize("when", ["while it reads", "with what it has read"])
def test_a_slot_is_free_again_when_the_host_of_its_reader_dies_and_others_are_served_meanwhile(
    there: SecondGuest, ring: SharedRingBuffer, when: str
) -> None:
    content = noise(1 << 20)
    ticket = ring.write_raw(np.zeros(SIZE, np.uint8))
    with (
        Child(READER, ticket.to_text(), host=there) as reader,
        BlockingClient(wire={"rdma"}, settings=PATIENT) as other,
    ):
        reader.line()
        with Dying(there, after=BEGUN if when == "while it reads" else SIZE // 4096) as dying:
            reader.tell()
            if when == "with what it has read":
                reader.line()
            dying.wait()
            died_at = time.monotonic()
            while ring.statistics().reading:
                payload = other.read(ring.write_raw(content), timeout=60)
                np.testing.assert_array_equal(np.asarray(payload["data"]), content)
                payload.release()
            print(f"noticed after {time.monotonic() - died_at:.1f} s")
