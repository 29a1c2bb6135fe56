"""A scripted client of a connection, and what tests of connections and listeners say with it."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from scripted_endpoint import ScriptedEndpoint

from transport import wire
from transport.listener import Listener
from transport.ring import SharedRingBuffer
from transport.ticket import Ticket
from transport.wire import Answer, Hello, Kind, Record, Welcome

SLOTS = 4
SMALL = b"small payload" * 10  # rides in the answer
LARGE = bytes(range(256)) * 100  # does not
NONCE = bytes(range(16))
STALE, WRONG_KEY, WRONG_RING, VERSION, SECRET, RANK, LENGTH, BUSY, PROTOCOL = range(1, 10)


def states(ring: SharedRingBuffer) -> dict[str, int]:
    """Slots that are not free, by state."""
    free, writing, ready, reading = ring.native.state_counts()
    assert free + writing + ready + reading == SLOTS
    counts = {"writing": writing, "ready": ready, "reading": reading}
    return {name: count for name, count in counts.items() if count}


READY = {"ready": 1}
READING = {"reading": 1}
FREE: dict[str, int] = {}


def record(kind: Kind, ticket: Ticket, rank: int = 0, **changes: int) -> Record:
    length = ticket.size if kind is Kind.READ else 0
    return Record(kind, ticket.slot, ticket.generation, rank, ticket.key, length)._replace(**changes)


def read(ticket: Ticket, rank: int = 0, **changes: int) -> Record:
    return record(Kind.READ, ticket, rank, **changes)


def ack(ticket: Ticket, rank: int = 0, **changes: int) -> Record:
    return record(Kind.ACK, ticket, rank, **changes)


class Peer:
    """A client, as far as the listener can tell."""

    _bases = itertools.count(0xABCD0000)

    def __init__(self, listener: Listener, name: str = "peer") -> None:
        self.listener = listener
        self.endpoint = ScriptedEndpoint(name)
        self.base = next(self._bases)
        self.number = 0
        listener._accept(self.endpoint)  # type: ignore[arg-type]
        self.connection, self.task = list(listener._connections.items())[-1]
        self.welcome: Any = None

    def hello(self, **changes: Any) -> Hello:
        fields = {"oldest": 1, "newest": 1, "ring": self.listener.ring.ring_id, "tag_base": self.base, "nonce": NONCE}
        return Hello(**{**fields, **changes})

    async def greet(self, **changes: Any) -> Any:
        self.endpoint.say(self.hello(**changes))
        self.welcome = await self.endpoint.heard(Welcome)
        return self.welcome

    def tell(self, *records: Record) -> int:
        """Send a message; its number."""
        number, self.number = self.number, self.number + 1
        self.endpoint.deliver(wire.tag(self.welcome.tag_base, number), wire.encode_control(number, list(records)))
        return number

    async def ask(self, *records: Record) -> list[Answer]:
        """Send a message and return what the answer says."""
        number = self.tell(*records)
        answered, answers = wire.decode_status(await self.endpoint.arrival(wire.tag(self.base, number)))
        assert answered == number
        return answers

    async def settled(self) -> None:
        """Everything that was sent before has been dealt with."""
        await self.ask(Record(Kind.BYE))

    def payload(self, part: int, number: int | None = None) -> Any:
        """What was sent as a message of its own, last or in answer to ``number``."""
        return self.endpoint.sent.get(wire.tag(self.base, self.number - 1 if number is None else number, part))

    def hold_payloads(self) -> None:
        """Payloads stay under way until `complete`."""
        self.endpoint.hold = lambda tag: tag & 0xFF != 0

    async def complete(self) -> None:
        """UCX has sent the payloads."""
        self.endpoint.release()
        await self.settled()

    async def refused(self) -> None:
        """The listener has said no. It must not close first: UCX would drop what is still on its way."""
        for _ in range(5):
            await asyncio.sleep(0)
        assert not self.endpoint.aborted
        assert not self.task.done()
        await self.gone()

    async def gone(self) -> None:
        """The connection breaks."""
        self.endpoint.lose()
        await self.task
        assert self.endpoint.aborted


async def connected(listener: Listener, name: str = "peer") -> Peer:
    peer = Peer(listener, name)
    assert (await peer.greet()).code == 0
    await peer.settled()
    return peer


def pins(ring: SharedRingBuffer, ticket: Ticket) -> int:
    return ring.native.own_pins(ticket.slot)
