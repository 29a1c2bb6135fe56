"""What the tests of TAKE share: the addresses of a ring, clients that map nothing, and what of a ring is claimed."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from helpers import NETWORK
from loopback import at

from transport import SharedRingBuffer, UCXXClient, _ring
from transport.claims.batch import CONSUME, End, TakenBatch, Verdict, Verdicts
from transport.claims.connection import ClaimConnection
from transport.client.connections.pool import PortKey, port_of
from transport.ticket import Ticket

LONG_S = 60.0
SLOTS = 8


def addresses(ring: SharedRingBuffer) -> list[str]:
    """One for each port."""
    return [at(port) for port in ring.native.ports()]


def remote(**arguments: Any) -> UCXXClient:
    return UCXXClient(**{"wire": NETWORK, **arguments})


_opened: weakref.WeakKeyDictionary[UCXXClient, dict[PortKey, ClaimConnection]] = weakref.WeakKeyDictionary()


async def connected(client: UCXXClient, address: str) -> ClaimConnection:
    """The client's connection to a port, a new one where the last one is lost or spent."""
    known, port = _opened.setdefault(client, {}), port_of(address)
    if port not in known or known[port].lost or known[port].spent:
        known.pop(port, None)
        known[port] = await client.claims.open(port)
    return known[port]


async def take(client: UCXXClient, address: str, n: int, **demand: Any) -> TakenBatch:
    """What a demand brings."""
    _, taken = (await connected(client, address)).demand(n, **demand)
    return await asyncio.shield(taken)


async def consume(batch: TakenBatch, which: Sequence[int] | None = None) -> Verdicts:
    """Which of the payloads, or of those at some positions, count as consumed."""
    return await ended_so(batch, CONSUME, which)


async def give_back(batch: TakenBatch, which: Sequence[int] | None = None) -> Verdicts:
    """Which of the claims were given up."""
    return await ended_so(batch, End(Verdict.GIVEN_BACK), which)


async def ended_so(batch: TakenBatch, end: End, which: Sequence[int] | None = None) -> Verdicts:
    """Which of the claims have this end."""
    if which is None:
        verdicts = await batch.claims.end(batch.positions, end)
        batch.owned.settled()
        return verdicts
    return await batch.claims.end(batch.first + np.asarray(which, np.intp), end)


class Seen(NamedTuple):
    """What came of one payload."""

    encoded: bytes
    attempts: int
    policy_version: int | None
    data: memoryview

    @property
    def ticket(self) -> Ticket:
        """Decoded anew."""
        return Ticket.decode(self.encoded)


def seen(batch: TakenBatch) -> list[Seen]:
    """The payloads of a batch."""
    rows = batch.rows[["attempts", "policy_version"]].tolist()
    return [
        Seen(bytes(batch.note(at)), attempts, None if version == _ring.NO_VERSION else version, batch.data(at))
        for at, (attempts, version) in enumerate(rows)
    ]


def depth(ring: SharedRingBuffer) -> tuple[int, int]:
    """Payloads that are ready, and that are claimed."""
    counts = ring.native.depth(0)
    return counts["ready"], counts["claimed"]


def contents(batch: TakenBatch) -> list[bytes]:
    return [bytes(batch.data(at)) for at in range(len(batch))]


def link_of(batch: TakenBatch) -> ClaimConnection:
    link = batch.claims.connection
    assert isinstance(link, ClaimConnection)
    return link


async def ended(batch: TakenBatch, verdict: Verdict, reason: str = "", consumer: str = "") -> list[bool]:
    """Which deliveries of the batch ended so."""
    return (await ended_so(batch, End(verdict, reason, consumer))).tolist()


def broken_between(batch: TakenBatch | ClaimConnection, *then: Callable[[], object]) -> None:
    """The client's loop stands still after the next FINISH of the batch, or connection, and the answer is lost."""
    link = batch if isinstance(batch, ClaimConnection) else link_of(batch)
    message = link._message

    def lost(*arguments: Any) -> None:
        message(*arguments)
        link._message = message  # type: ignore[method-assign]
        for each in then:
            each()
        link.link.abort()

    link._message = lost  # type: ignore[method-assign]
