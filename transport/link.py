"""The client's side of one connection: handshake, then requests; used by one reader at a time.

Every receive is posted before the request is sent: the STATUS buffer, and each payload straight into its destination.
After any failure or cancellation the link is aborted, which ends UCX's use of the buffers before anyone reuses them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

from transport import _native, authentication, errors, wire
from transport.errors import (
    AuthenticationError,
    InternalError,
    LengthMismatchError,
    ProtocolError,
    RefusedError,
    TransportError,
)
from transport.settings import Settings
from transport.ticket import Ticket
from transport.ucx import Endpoint, Worker
from transport.wire import Answer, Kind, Record
from transport.wires import Wire


class Want(NamedTuple):
    """One payload to read, and flat writable memory of exactly its size (or device memory)."""

    ticket: Ticket
    rank: int
    destination: Any


_BY_STATUS: dict[int, type[TransportError]] = {
    kind.status: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, TransportError) and kind.status
}


def refusal(code: int, what: str) -> TransportError:
    """The error for a status code of the listener."""
    kind = _BY_STATUS.get(code)
    if kind is None:
        return ProtocolError(f"{what}: the listener answered with the unknown code {code}")
    return kind(f"{what}: {_EXPLAINED.get(kind, 'refused by the listener')}")


_EXPLAINED: dict[type[TransportError], str] = {
    errors.StaleSlotError: "it is not there any more for this rank (consumed, overwritten, discarded or expired)",
    errors.WrongKeyError: "the ticket's key is not that of its slot and generation",
    errors.RankError: "the payload was written for fewer ranks",
    errors.LengthMismatchError: "its slot holds another number of bytes than the ticket says",
    errors.BusyError: "the listener has reached a limit; acknowledge what was read",
}


class Link:
    """A connection to one listener. Make it with `open`."""

    def __init__(self, endpoint: Endpoint, port: tuple[str, int], tag_base: int, welcome: wire.Welcome) -> None:
        self._endpoint = endpoint
        self.port = port  # (host, port), as asked for
        self._tag_base = tag_base
        self._their_base = welcome.tag_base
        self._inline_limit = welcome.inline_limit
        self.next_number = 0
        self.ring = welcome.ring
        self.ports = welcome.ports
        self.wire: Wire = endpoint.wire()

    def __repr__(self) -> str:
        return f"<Link {self._endpoint.name} by {self.wire}, {self.next_number} messages>"

    @classmethod
    async def open(
        cls,
        worker: Worker,
        host: str,
        port: int,
        *,
        ring: str,
        tag_base: int,
        secret: bytes | None,
        settings: Settings,
    ) -> Link:
        """Connect and shake hands within the settings' limits.

        Raises:
            LinkError kinds: nobody there, or it broke.
            RefusedError kinds: another ring, no common version, a wrong secret, too many connections.
        """
        endpoint: Endpoint | None = None
        try:
            async with asyncio.timeout(settings.connect_timeout_s + settings.handshake_timeout_s):
                endpoint = await worker.connect(host, port)
                welcome = await _shake_hands(endpoint, ring, tag_base, secret)
            return cls(endpoint, (host, port), tag_base, welcome)
        except BaseException as error:
            if endpoint is not None:
                endpoint.abort()
            if isinstance(error, TimeoutError):
                raise errors.ReadTimeoutError(f"{host}:{port} did not answer the handshake in time") from error
            raise

    @property
    def usable(self) -> bool:
        """Alive, and with message numbers left."""
        return self._endpoint.alive and self.next_number < wire.MESSAGE_NUMBERS - 1

    def is_inline(self, size: int) -> bool:
        """Whether a payload of ``size`` bytes rides in the STATUS message."""
        return size <= self._inline_limit

    def transports(self) -> list[tuple[str, str]]:
        """Transports and devices, as UCX reports them."""
        return self._endpoint.transports()

    # --- requests -----------------------------------------------------------------------------------
    def tell(self, records: list[Record]) -> int:
        """Send records that have no answer (ACK, DISCARD); the message number. Does not wait."""
        number = self._number()
        self._send(number, records)
        return number

    async def read(self, wants: list[Want], acks: list[Record]) -> tuple[int, list[TransportError | Answer]]:
        """Read payloads into their destinations with one message, ``acks`` riding with it.

        Returns the message number and, in the order of ``wants``, an answer or the refusal. The caller bounds the
        time. When this raises or is cancelled, the link has been aborted.
        """
        with self._aborting():
            number = self._number()
            inline = sum(want.ticket.size for want in wants if self.is_inline(want.ticket.size))
            status = bytearray(wire.status_bytes(len(wants), inline))
            status_arrived = self._endpoint.receive(status, wire.tag(self._tag_base, number))
            first = len(acks)
            arriving: dict[int, asyncio.Future[None]] = {}
            for position, want in enumerate(wants):
                if not self.is_inline(want.ticket.size):
                    tag = wire.tag(self._tag_base, number, 1 + first + position)
                    arriving[position] = self._endpoint.receive(want.destination, tag)
            records = [
                Record(
                    Kind.READ, each.ticket.slot, each.ticket.generation, each.rank, each.ticket.key, each.ticket.size
                )
                for each in wants
            ]
            self._send(number, acks + records)
            await status_arrived
            answers = self._answers(status, number, len(wants))
            results: list[TransportError | Answer] = []
            for position, (want, answer) in enumerate(zip(wants, answers, strict=True)):
                if answer.code != 0:
                    if position in arriving:
                        self._endpoint.withdraw(arriving.pop(position))
                    results.append(refusal(answer.code, f"payload {want.ticket.name}"))
                elif answer.length != want.ticket.size or (answer.inline is None) != (position in arriving):
                    raise LengthMismatchError(f"payload {want.ticket.name}: {answer.length} bytes announced")
                else:
                    if answer.inline is not None and answer.length:
                        _native.copy(want.destination, answer.inline)
                    results.append(answer)
            for arrived in arriving.values():
                await arrived
            return number, results

    async def ask(self, record: Record, acks: list[Record] | None = None) -> tuple[int, Answer]:
        """Send one record that is answered without payload (STATE, BYE); the message number and the answer."""
        with self._aborting():
            number = self._number()
            status = bytearray(wire.status_bytes(1, 0))
            arrived = self._endpoint.receive(status, wire.tag(self._tag_base, number))
            self._send(number, [*(acks or []), record])
            await arrived
            return number, self._answers(status, number, 1)[0]

    @contextlib.contextmanager
    def _aborting(self) -> Iterator[None]:
        """Abort on any failure: nothing may arrive in memory that goes back to its owner with the exception."""
        try:
            yield
        except BaseException:
            self.abort()
            raise

    def _number(self) -> int:
        number = self.next_number
        if number >= wire.MESSAGE_NUMBERS:
            raise InternalError(f"{self!r} has no message numbers left and should have been retired")
        self.next_number += 1
        return number

    def _send(self, number: int, records: list[Record]) -> None:
        sent = self._endpoint.send(wire.encode_control(number, records), wire.tag(self._their_base, number))
        sent.add_done_callback(_look_at)

    def _answers(self, status: bytearray, number: int, expected: int) -> list[Answer]:
        answered, answers = wire.decode_status(status)
        if answered != number or len(answers) != expected:
            raise ProtocolError(
                f"answer to message {answered} with {len(answers)} parts, due were {number}, {expected}"
            )
        return answers

    def abort(self) -> None:
        """Close at once; on return UCX is out of every buffer. Idempotent."""
        self._endpoint.abort()


def _look_at(future: asyncio.Future[None]) -> None:
    """A failed send shows at the receive that waits for its answer."""
    if not future.cancelled():
        future.exception()


async def _shake_hands(endpoint: Endpoint, ring: str, tag_base: int, secret: bytes | None) -> wire.Welcome:
    nonce = authentication.nonce()
    hello = wire.Hello(oldest=wire.OLDEST_VERSION, newest=wire.VERSION, ring=ring, tag_base=tag_base, nonce=nonce)
    endpoint.send_stream(wire.encode_handshake(hello)).add_done_callback(_look_at)
    kind, body = await _receive(endpoint)
    if kind is Kind.CHALLENGE:
        challenge = wire.decode_handshake(wire.Challenge, body)
        if secret is None:
            raise AuthenticationError(f"{endpoint.name} asks for a shared secret; this client was given none")
        expected = authentication.proof(secret, "listener", nonce, challenge.nonce)
        if not authentication.same(challenge.proof, expected):
            raise AuthenticationError(f"{endpoint.name} does not have the shared secret of this client")
        proof = wire.Proof(authentication.proof(secret, "client", nonce, challenge.nonce))
        endpoint.send_stream(wire.encode_handshake(proof)).add_done_callback(_look_at)
        kind, body = await _receive(endpoint)
    elif secret is not None and kind is Kind.WELCOME and not wire.decode_handshake(wire.Welcome, body).code:
        raise AuthenticationError(f"{endpoint.name} did not prove that it has the shared secret")
    if kind is not Kind.WELCOME:
        raise ProtocolError(f"{endpoint.name} answered the handshake with {kind.name}")
    welcome = wire.decode_handshake(wire.Welcome, body)
    if welcome.code:
        kind_of_error = _BY_STATUS.get(welcome.code, RefusedError)
        raise kind_of_error(f"{endpoint.name}: {welcome.reason}")
    return welcome


async def _receive(endpoint: Endpoint) -> tuple[Kind, bytes]:
    prefix = bytearray(wire.PREFIX_BYTES)
    await endpoint.receive_stream(prefix)
    kind, length = wire.decode_prefix(prefix)
    body = bytearray(length)
    if length:
        await endpoint.receive_stream(body)
    return kind, bytes(body)


def new_tag_base(taken: set[int]) -> int:
    """A random tag base that none of this client's links has."""
    while (base := secrets.randbits(32)) in taken:
        pass
    return base
