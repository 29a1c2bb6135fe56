"""A listener that says what a test wants, frame by frame, to a client in this process; over UCX on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import frame_codec
from frame_codec import Answer
from helpers import settings_with
from loopback import EVERYWHERE, IPV6, LOOPBACK

from transport.client.connections.connection import Link, Want
from transport.ticket import Ticket
from transport.wire import frames
from transport.wire.frames import Hello, Kind, Record, Welcome
from transport.wire.ucx import Endpoint, Worker
from transport.wires import settings_for

RING = "1f" * 16
INLINE = 100  # the largest payload that is joined to its answer
UNTOUCHED = 0xEE  # what destinations are full of


@contextlib.asynccontextmanager
async def connected(
    wire_name: Any = "tcp", kind: type[Worker] = Worker, **changes: str
) -> AsyncIterator[tuple[Endpoint, Endpoint]]:
    """An endpoint and the one that a listener made of it, each of a worker of its own."""
    settings = {**settings_for(frozenset({wire_name}), ipv6=IPV6), **changes}
    ours, theirs = kind(settings), kind(settings)
    accepted: asyncio.Queue[Endpoint] = asyncio.Queue()
    listening = theirs.listen(0, accepted.put_nowait, EVERYWHERE)
    try:
        client = await ours.connect(LOOPBACK, listening.port)
        server = await accepted.get()
        # The first message makes the connection.
        here, there = bytearray(1), bytearray(1)
        await asyncio.gather(client.send_stream(b"c"), server.receive_stream(there), server.send_stream(b"s"))
        await client.receive_stream(here)
        assert here + there == b"sc"
        yield client, server
    finally:
        listening.close()
        ours.close()
        theirs.close()


async def exchange(client: Endpoint, server: Endpoint, tag: int = 99) -> None:
    """A message to and fro: each side has done what it had to do before."""
    for sender, receiver in ((client, server), (server, client)):
        buffer = bytearray(4)
        await asyncio.gather(receiver.receive(buffer, tag), sender.send(b"ping", tag))
        assert buffer == b"ping"


# --- what is asked for and said ------------------------------------------------------------------------
def ticket(size: int, slot: int = 3, checksum: int | None = None) -> Ticket:
    return Ticket(
        ring=RING,
        host="host",
        addresses=(),
        ports=(),
        slot=slot,
        generation=7,
        key=99,
        size=size,
        checksum=checksum,
        created=0.0,
    )


def want(size: int, slot: int = 3, rank: int = 0, checksum: int | None = None) -> Want:
    """One that is verified if there is a checksum."""
    return Want(ticket(size, slot, checksum), rank, bytearray([UNTOUCHED]) * size, checksum)


def untouched(*wants: Want) -> bool:
    return all(bytes(each.destination) == bytes([UNTOUCHED]) * each.ticket.size for each in wants)


def ack(slot: int = 1) -> Record:
    return Record(Kind.ACK, slot=slot, generation=2, rank=0, key=3)


def joined(position: int, data: bytes, **changes: Any) -> Answer:
    return Answer(0, position, len(data), 5, 0, memoryview(data))._replace(**changes)


# --- the listener ----------------------------------------------------------------------------------------
class ScriptedListener:
    """A port that accepts, and a worker for its clients. A context manager.

    Args:
        changes: UCX settings of both workers.
    """

    def __init__(self, wire_name: Any = "tcp", **changes: str) -> None:
        self._settings = {**settings_for(frozenset({wire_name}), ipv6=IPV6), **changes}
        self._accepted: asyncio.Queue[Endpoint] = asyncio.Queue()
        self._bases = itertools.count(0x11111111)

    async def __aenter__(self) -> Self:
        self.worker = Worker(self._settings)  # of the clients
        self._own = Worker(self._settings)
        self._listening = self._own.listen(0, self._accepted.put_nowait, EVERYWHERE)
        self.port = self._listening.port
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listening.close()
        self.worker.close()
        self._own.close()

    def break_off(self, link: Link) -> None:
        """Abort a client's link, and have a new worker where UCX may go on with what it has begun to receive."""
        link.abort()
        if self.worker.engine.abandoned:
            self.worker.close()
            self.worker = Worker(self._settings)

    def opening(self, **options: Any) -> asyncio.Task[Link]:
        """A link being opened."""
        arguments: dict[str, Any] = {
            "ring": RING,
            "tag_base": next(self._bases),
            "secret": None,
            "settings": settings_with(),
            **options,
        }
        return asyncio.ensure_future(Link.open(self.worker, LOOPBACK, self.port, **arguments))

    async def accepted(self) -> Side:
        """The next client; it has not been heard."""
        return Side(await self._accepted.get())

    async def linked(self, **welcome: Any) -> tuple[Link, Side]:
        """A link after its handshake, and this side of it."""
        opening = self.opening()
        side = await self.accepted()
        await side.welcome(**welcome)
        return await opening, side


class Side:
    """The listener's side of one connection. It does nothing that the test does not say."""

    _bases = itertools.count(0x22222222)

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.base = next(self._bases)
        self.client_base = 0
        self.number = 0  # of the message that is due

    # --- handshake ----------------------------------------------------------------------------------
    async def heard(self, expected: Any) -> Any:
        """The next handshake message."""
        prefix = bytearray(frames.PREFIX_BYTES)
        await self.endpoint.receive_stream(prefix)
        kind, length = frames.decode_prefix(prefix)
        assert kind.name == expected.__name__.upper(), kind
        body = bytearray(length)
        await self.endpoint.receive_stream(body)
        return frames.decode_handshake(expected, bytes(body))

    async def feed(self, data: bytes) -> None:
        await self.endpoint.send_stream(data)

    async def say(self, message: Any) -> None:
        await self.feed(frames.encode_handshake(message))

    async def welcome(self, **changes: Any) -> Hello:
        """Hear HELLO, say WELCOME."""
        hello: Hello = await self.heard(Hello)
        self.client_base = hello.tag_base
        fields = {
            "ring": RING,
            "tag_base": self.base,
            "ports": (5, 6),
            "inline_limit": INLINE,
        }
        await self.say(Welcome(**{**fields, **changes}))
        return hello

    # --- requests -----------------------------------------------------------------------------------
    async def control(self) -> bytes:
        """The next CONTROL message, every byte of it."""
        buffer = bytearray(b"\xcc" * (frame_codec.CONTROL_BYTES + 8))
        await self.endpoint.receive(buffer, frames.tag(self.base, self.number))
        self.number += 1
        count = int.from_bytes(buffer[10:12], "little")
        end = frame_codec.HEADER_BYTES + count * frame_codec.RECORD_BYTES
        assert buffer[end:] == b"\xcc" * (len(buffer) - end)
        return bytes(buffer[:end])

    async def asked(self) -> tuple[int, list[Record]]:
        """Number and records of the next CONTROL message."""
        return frame_codec.decode_control(await self.control())

    async def status(self, number: int, *answers: Answer) -> None:
        await self.status_bytes(number, frame_codec.encode_status(number, list(answers)))

    async def status_bytes(self, number: int, message: Any) -> None:
        """Any bytes in the place of a STATUS message."""
        await self.endpoint.send(message, frames.tag(self.client_base, number))

    async def payload(self, number: int, position: int, data: Any) -> None:
        """A payload that is a message of its own."""
        await self.endpoint.send(data, frames.tag(self.client_base, number, 1 + position))


async def read(link: Link, *wants: Want, acks: tuple[Record, ...] = ()) -> list[Any]:
    """What became of each want."""
    _, arriving = link.read(list(wants), list(acks))
    return link.outcomes(list(wants), await arriving)


async def in_order(link: Link, side: Side) -> None:
    """Everything that was sent before on this connection has been dealt with by both."""
    number, asking = link.ask(Record(Kind.BYE), [])
    asked, [record] = await side.asked()
    assert asked == number
    assert record.kind is Kind.BYE
    await side.status(number, Answer(0, 0))
    assert link.answer(await asking) == (0, 0)
