"""What the tests of `FoundRings` share: rings with a server, places of rings here and elsewhere, claims that come."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal

from transport import SharedRingBuffer, UCXXServer
from transport.claims.places import OnThisHost, RingAddress
from transport.queue import Claim, FoundRings, TicketQueue, open_queue

LONG_S = 30.0
# Claims as many as it is told to, says how many, and consumes what it holds when it is told to.
TRAINER = """
import sys
from transport.queue import open_queue
with open_queue(sys.argv[1]) as queue:
    claims = []
    while len(claims) < int(sys.argv[2]):
        claims += queue.claim(int(sys.argv[2]) - len(claims), 30.0, consumer="child")
    print(len(claims), flush=True)
    sys.stdin.readline()
    print(len(queue.ack_many(claims)), flush=True)
"""


@contextlib.contextmanager
def ring_of(
    prefix: str, *, mode: Literal["thread", "process"] = "thread", ports: tuple[int, ...] = (0,), **arguments: Any
) -> Iterator[SharedRingBuffer]:
    """A ring whose name begins with ``prefix``, and its server; ``arguments``: of the ring."""
    arguments = {"slots": 32, "slot_bytes": 4096, **arguments}
    with (
        SharedRingBuffer.create(prefix=prefix, **arguments) as ring,
        UCXXServer(ring, ports, mode=mode, addresses=("127.0.0.1",)),
    ):
        yield ring


def fill(ring: SharedRingBuffer, count: int) -> None:
    """Write so many payloads, whatever they are."""
    for _ in range(count):
        ring.write_raw(b"any", timeout_s=LONG_S)


def opened(prefix: str) -> FoundRings:
    """The rings of this host that belong to the prefix."""
    queue = open_queue(f"rings:{prefix}")
    assert isinstance(queue, FoundRings)
    return queue


class HereAndElsewhere(OnThisHost):
    """Rings of one prefix are mapped, those of another one are asked over the network."""

    def __init__(self, here: str, elsewhere: str) -> None:
        super().__init__(here)
        self._others = OnThisHost(elsewhere)

    def served(self, mapped: Collection[str], names: Collection[str] = ()) -> Mapping[str, RingAddress]:
        """The others."""
        return {name: place._replace(segment="") for name, place in self._others.served(mapped).items()}

    def close(self) -> None:
        self._others.close()
        super().close()


@contextlib.contextmanager
def here_and_elsewhere() -> Iterator[tuple[SharedRingBuffer, SharedRingBuffer, FoundRings]]:
    """A mapped ring, one that is asked over the network, and a queue of both."""
    here, there = (f"{where}-{secrets.token_hex(4)}-" for where in ("here", "there"))
    with (
        SharedRingBuffer.create(prefix=here, slots=16, slot_bytes=4096) as mapped,
        ring_of(there, slots=16) as other,
        FoundRings(HereAndElsewhere(here, there)) as queue,
    ):
        yield mapped, other, queue


def some(queue: TicketQueue, n: int, **arguments: Any) -> list[Claim]:
    """So many claims, however many calls it takes."""
    claims: list[Claim] = []
    while len(claims) < n:
        came = queue.claim(n - len(claims), LONG_S, consumer="test", **arguments)
        assert came, f"{len(claims)} of {n} came"
        claims += came
    return claims
