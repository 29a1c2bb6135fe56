"""A client that says what a test wants, frame by frame, to a listener in this process; over UCX on loopback."""

from __future__ import annotations

import asyncio
import itertools
from types import TracebackType
from typing import Any, Self
from unittest.mock import patch

import frame_codec
from frame_codec import Answer
from helpers import settings_with, until
from loopback import EVERYWHERE, IPV6, LOOPBACK

from transport.ring.buffer import SharedRingBuffer
from transport.server.listener import Connection, Listener
from transport.ticket import Ticket
from transport.wire import frames
from transport.wire.frames import Hello, Kind, Record, Welcome
from transport.wire.ucx import Endpoint, Worker
from transport.wires import settings_for

SLOTS = 4
SMALL = b"small payload" * 10  # is joined to the answer
INLINE = 8192  # the limit of listeners here: payloads beyond it need not be huge
LARGE = bytes(range(256)) * 100  # is not, and UCX keeps it under way until it is received: see RENDEZVOUS
RENDEZVOUS = 16384
NONCE = bytes(range(16))
STALE, WRONG_KEY, WRONG_RING, VERSION, SECRET, RANK, LENGTH, BUSY, PROTOCOL = range(1, 10)
TCP = frozenset({"tcp"})


def states(ring: SharedRingBuffer) -> dict[str, int]:
    """Slots that are not free, by state."""
    free, writing, ready, reading = ring.native.state_counts()
    assert free + writing + ready + reading == ring.slot_count
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


def pins(ring: SharedRingBuffer, ticket: Ticket) -> int:
    return ring.native.own_pins(ticket.slot)


class Stage:
    """A listener that serves ``ring``, and a worker for its clients. A context manager.

    Args:
        rendezvous: messages of the listener of so many bytes are under way until the client receives them.
    """

    def __init__(
        self, ring: SharedRingBuffer, *, secret: bytes | None = None, rendezvous: int = RENDEZVOUS, **settings: Any
    ) -> None:
        self.listener = Listener(
            ring,
            secret=secret,
            settings=settings_with(**{"inline_limit": INLINE, **settings}),
            wires=TCP,
            bind=EVERYWHERE,
        )
        self._rendezvous = str(rendezvous)
        self.port = 0

    async def __aenter__(self) -> Self:
        chosen = {**settings_for(TCP, ipv6=IPV6), "RNDV_THRESH": self._rendezvous}
        with patch("transport.server.listener.settings_here", lambda *_, **__: chosen):
            self.port = self.listener.start()
        self.worker = Worker(settings_for(TCP, ipv6=IPV6))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.worker.close()  # first: a client closes when it is asked to
        await self.listener.stop()

    async def peer(self) -> Peer:
        """A client that has not said anything."""
        known = set(self.listener._connections)
        endpoint = await self.worker.connect(LOOPBACK, self.port)
        await until(lambda: set(self.listener._connections) - known, "the listener has accepted")
        [connection] = set(self.listener._connections) - known
        return Peer(self, endpoint, connection)

    async def connected(self, **hello: Any) -> Peer:
        """A client whose handshake is done."""
        peer = await self.peer()
        assert (await peer.greet(**hello)).code == 0
        await peer.settled()
        return peer


class Peer:
    """A client. What it was sent it receives, unless it holds back."""

    _bases = itertools.count(0xABCD0000)

    def __init__(self, stage: Stage, endpoint: Endpoint, connection: Connection) -> None:
        self.listener = stage.listener
        self.endpoint = endpoint
        self.connection = connection  # the listener's side
        self.task = stage.listener._connections[connection]
        self.base = next(self._bases)
        self.number = 0
        self.welcome: Any = None
        self.payloads: dict[tuple[int, int], bytes] = {}  # that came as messages of their own, by number and part
        self.holds = False
        self._held: list[tuple[int, int, int]] = []

    @property
    def native(self) -> Any:
        """The native part of the listener's side."""
        return self.connection._native

    @property
    def closed(self) -> bool:
        """Whether the listener has closed the connection."""
        return not self.connection._endpoint.native.open

    # --- handshake ----------------------------------------------------------------------------------
    def hello(self, **changes: Any) -> Hello:
        return Hello(**{"ring": self.listener.ring.ring_id, "tag_base": self.base, "nonce": NONCE, **changes})

    async def say(self, message: Any) -> None:
        data = message if isinstance(message, bytes) else frames.encode_handshake(message)
        await self.endpoint.send_stream(data)

    async def heard(self, expected: Any) -> Any:
        """The next handshake message."""
        prefix = bytearray(frames.PREFIX_BYTES)
        await self.endpoint.receive_stream(prefix)
        kind, length = frames.decode_prefix(prefix)
        assert kind.name == expected.__name__.upper(), kind
        body = bytearray(length)
        await self.endpoint.receive_stream(body)
        return frames.decode_handshake(expected, bytes(body))

    async def greet(self, **changes: Any) -> Any:
        await self.say(self.hello(**changes))
        self.welcome = await self.heard(Welcome)
        return self.welcome

    # --- requests -----------------------------------------------------------------------------------
    def send(self, message: bytes | bytearray, number: int | None = None) -> None:
        """Any bytes in the place of a CONTROL message."""
        tag = frames.tag(self.welcome.tag_base, self.number if number is None else number)
        self.endpoint.send(message, tag).add_done_callback(_look_at)

    def tell(self, *records: Record) -> int:
        """Send a message, and take nothing of what it is answered; its number."""
        number = self.number
        self.send(frame_codec.encode_control(number, list(records)))
        self.number += 1
        return number

    async def status(self, number: int, *records: Record) -> list[Answer]:
        """What the answer to the message ``number``, of these records, says."""
        small = sum(each.length for each in records if each.length <= self.welcome.inline_limit)
        buffer = bytearray(frame_codec.status_bytes(frames.MAX_RECORDS, small))
        await self.endpoint.receive(buffer, frames.tag(self.base, number))
        answered, answers = frame_codec.decode_status(buffer)
        assert answered == number
        return answers

    async def take(self, number: int, part: int, size: int) -> bytes:
        """Receive a payload that is a message of its own."""
        buffer = bytearray(size)
        await self.endpoint.receive(buffer, frames.tag(self.base, number, part))
        self.payloads[number, part] = bytes(buffer)
        return bytes(buffer)

    async def ask(self, *records: Record) -> list[Answer]:
        """Send a message and return what the answer says."""
        number = self.tell(*records)
        answers = await self.status(number, *records)
        for answer in answers:
            if answer.code == 0 and answer.joined is None and records[answer.position].kind is Kind.READ:
                payload = number, 1 + answer.position, answer.length
                if self.holds:
                    self._held.append(payload)
                else:
                    await self.take(*payload)
        return answers

    def payload(self, part: int) -> bytes | None:
        """What came as a message of its own in answer to the last message."""
        return self.payloads.get((self.number - 1, part))

    async def settled(self) -> None:
        """Everything that was sent before has been dealt with."""
        await self.ask(Record(Kind.BYE))

    async def complete(self) -> None:
        """Receive what was held back, and let the listener see it."""
        held, self._held = self._held, []
        for payload in held:
            await self.take(*payload)
        if not self.task.done():
            await self.settled()

    # --- the end ------------------------------------------------------------------------------------
    async def refused(self) -> None:
        """The listener has said no. It must not close first: UCX would drop what is still on its way."""
        for _ in range(5):
            await asyncio.sleep(0.001)
        assert not self.closed
        assert not self.task.done()
        await self.gone()

    async def parts(self) -> None:
        """The listener has asked the client to close, and leaves that to it."""
        said = bytearray(len(frames.COME_AGAIN))
        await self.endpoint.receive(said, frames.tag(self.base, 0, frames.PARTING))
        assert said == frames.COME_AGAIN
        assert not self.closed
        await self.gone()

    async def gone(self) -> None:
        """The connection breaks."""
        self.endpoint.abort()
        await self.task
        assert self.closed


def _look_at(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
