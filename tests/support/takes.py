"""What the tests of TAKE share: the addresses of a ring, clients that map nothing, and what of a ring is claimed."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from helpers import NETWORK, until
from loopback import at

from transport import SharedRingBuffer, UCXXClient, _ring
from transport.claims.batch import CONSUME, End, Verdict
from transport.claims.connection import ClaimConnection
from transport.claims.taken_part import TakenPart
from transport.client.connections.pool import PortKey, port_of
from transport.ticket import Ticket

Verdicts = npt.NDArray[np.bool_]

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


async def take(client: UCXXClient, address: str, n: int, **demand: Any) -> TakenPart:
    """What a demand brings."""
    _, taken = (await connected(client, address)).demand(n, **demand)
    return await asyncio.shield(taken)


async def consume(batch: TakenPart, which: Sequence[int] | None = None) -> Verdicts:
    """Which of the payloads, or of those at some positions, count as consumed."""
    return await ended_so(batch, CONSUME, which)


async def ended_so(batch: TakenPart, end: End, which: Sequence[int] | None = None) -> Verdicts:
    """Which of the claims have this end."""
    positions = batch.positions if which is None else batch.positions[list(which)]
    batch.claims.end(positions, end)
    await until(lambda: batch.claims.answered(positions), "the ring has answered")
    if which is None:
        batch.owned.settled()
    ended: Verdicts = batch.claims.verdicts[positions] == int(end.verdict)
    return ended


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


def seen(batch: TakenPart) -> list[Seen]:
    """The payloads of a batch."""
    rows = batch.rows[["attempts", "policy_version"]].tolist()
    return [
        Seen(batch.note(at), attempts, None if version == _ring.NO_VERSION else version, data(batch, at))
        for at, (attempts, version) in enumerate(rows)
    ]


def data(batch: TakenPart, at: int) -> memoryview:
    """The bytes of one payload."""
    memory, begin = batch.place(at)
    return memoryview(memory)[begin : begin + int(batch.rows["length"][at])]


def depth(ring: SharedRingBuffer) -> tuple[int, int]:
    """Payloads that are ready, and that are claimed."""
    counts = ring.native.depth(0)
    return counts["ready"], counts["claimed"]


def contents(batch: TakenPart) -> list[bytes]:
    return [bytes(data(batch, at)) for at in range(len(batch))]


def link_of(batch: TakenPart) -> ClaimConnection:
    link = batch.claims.connection
    assert isinstance(link, ClaimConnection)
    return link


async def ended(batch: TakenPart, verdict: Verdict, reason: str = "", consumer: str = "") -> list[bool]:
    """Which deliveries of the batch ended so."""
    return (await ended_so(batch, End(verdict, reason, consumer))).tolist()


def broken_between(batch: TakenPart | ClaimConnection, *then: Callable[[], object]) -> None:
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
