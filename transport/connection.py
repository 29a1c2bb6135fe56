"""One connection's protocol on the listener's side.

    HANDSHAKE ──WELCOME sent──► OPEN ──BYE, loss, eviction, garbage──► CLOSED

Whatever ends a connection, `close` runs once: UCX lets go of the slots' memory first, then the pins are given back,
so a payload that was not acknowledged is READY again. The connection belongs to its listener's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from functools import partial
from typing import TYPE_CHECKING

from transport import _native, authentication, wire
from transport.errors import (
    AuthenticationError,
    BusyError,
    LengthMismatchError,
    LinkError,
    ProtocolError,
    RankError,
    RefusedError,
    StaleSlotError,
    TransportError,
    UsageError,
    WrongKeyError,
    WrongRingError,
)
from transport.ucx import Endpoint
from transport.wire import Answer, Kind, Record

if TYPE_CHECKING:
    from transport.listener import Listener

log = logging.getLogger(__name__)

_RECEIVES_POSTED = 2  # the next request can land while one is being answered
_MOST_UNSENT = 1024  # answers and payloads that a client has not taken yet
_MOST_ATTEMPTS = 4096  # per connection: a client that never acknowledges does not grow the listener


class Attempt:
    """One rank's read of one payload through one connection; holds one pin until `end`."""

    __slots__ = ("connection", "ended", "generation", "rank", "sending", "sent_by", "slot")

    def __init__(self, connection: Connection, slot: int, generation: int, rank: int, sent_by: float) -> None:
        self.connection = connection
        self.slot = slot
        self.generation = generation
        self.rank = rank
        self.sent_by = sent_by  # when its bytes are through at the slowest normal rate; ack_timeout_s counts from here
        self.sending = True  # until nothing is read from the slot any more: an acknowledgement may come before
        self.ended = False

    @property
    def key(self) -> tuple[int, int, int]:
        """What an acknowledgement names."""
        return self.slot, self.generation, self.rank


class Connection:
    """A client's connection: handshake, then one CONTROL message after the other until either side ends it."""

    def __init__(self, listener: Listener, endpoint: Endpoint) -> None:
        self._listener = listener
        self._ring = listener.ring
        self._endpoint = endpoint
        self._tag_base = listener.new_tag_base()  # of what this side receives
        self._client_base = 0
        self._posted: list[tuple[bytearray, asyncio.Future[None]]] = []
        self._number = 0
        self._posted_number = 0
        self._attempts: set[Attempt] = set()
        self._unsent: set[asyncio.Future[None]] = set()
        self._closed = False
        self.opened = False
        self.last_active = time.monotonic()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self.opened else "handshake"
        return f"<Connection {self._endpoint.name} {state}, {len(self._attempts)} attempts>"

    @property
    def tag_base(self) -> int:
        """Tag base of this connection's requests."""
        return self._tag_base

    async def serve(self) -> None:
        """Run until the connection ends. Errors end this connection only."""
        try:
            async with asyncio.timeout(self._listener.settings.handshake_timeout_s):
                await self._handshake()
            while not self._closed:
                await self._serve_one()
        except TimeoutError:
            log.info("%r: no handshake within %.1f s", self, self._listener.settings.handshake_timeout_s)
        except LinkError as error:
            log.debug("%r ended: %s", self, error)
        except TransportError as error:
            if not self._closed:
                log.warning("%r ended: %s: %s", self, type(error).__name__, error)
        finally:
            self.close()

    # --- handshake ----------------------------------------------------------------------------------
    async def _receive_handshake(self, expected: type[wire.Handshake]) -> wire.Handshake:
        prefix = bytearray(wire.PREFIX_BYTES)
        await self._endpoint.receive_stream(prefix)
        kind, length = wire.decode_prefix(prefix)
        body = bytearray(length)
        if length:
            await self._endpoint.receive_stream(body)
        if kind.name.title() != expected.__name__:
            raise ProtocolError(f"expected {expected.__name__}, got {kind.name}")
        return wire.decode_handshake(expected, bytes(body))

    async def _handshake(self) -> None:
        try:
            hello = await self._receive_handshake(wire.Hello)
            await self._admit(hello)
        except RefusedError as refusal:
            await self._welcome(code=refusal.status, reason=str(refusal))
            await self._left_by_peer()
            raise
        self._client_base = hello.tag_base
        self._post_receives()
        await self._welcome(version=wire.agree_version(hello))
        self.opened = True

    async def _left_by_peer(self) -> None:
        """Until the client has closed: if this side closed first, UCX would drop a refusal that is still on its way."""
        with contextlib.suppress(TransportError):
            while True:  # what it may still have said is of no interest
                await self._endpoint.receive_stream(bytearray(wire.MAX_HANDSHAKE_BYTES))

    async def _admit(self, hello: wire.Hello) -> None:
        wire.agree_version(hello)
        if hello.ring and hello.ring != self._ring.ring_id:
            raise WrongRingError(f"this listener serves ring {self._ring.ring_id[:8]}, not {hello.ring[:8]}")
        if self._listener.refuses_connections:
            raise BusyError("the listener has reached its number of connections, or is shutting down")
        secret = self._listener.secret
        if secret is None:
            return
        own = authentication.nonce()
        challenge = wire.Challenge(own, authentication.proof(secret, "listener", hello.nonce, own))
        await self._endpoint.send_stream(wire.encode_handshake(challenge))
        answer = await self._receive_handshake(wire.Proof)
        if not authentication.same(answer.proof, authentication.proof(secret, "client", hello.nonce, own)):
            raise AuthenticationError("the client's shared secret differs from this listener's")

    async def _welcome(self, version: int = wire.VERSION, code: int = 0, reason: str = "") -> None:
        welcome = wire.Welcome(
            version=version,
            ring=self._ring.ring_id,
            tag_base=self._tag_base,
            ports=self._ring.native.ports() if code == 0 else (),
            inline_limit=self._listener.settings.inline_limit,
            code=code,
            reason=reason,
        )
        await self._endpoint.send_stream(wire.encode_handshake(welcome))

    # --- requests -----------------------------------------------------------------------------------
    def _post_receives(self) -> None:
        while len(self._posted) < _RECEIVES_POSTED and self._posted_number < wire.MESSAGE_NUMBERS:
            buffer = bytearray(wire.CONTROL_BYTES)
            future = self._endpoint.receive(buffer, wire.tag(self._tag_base, self._posted_number))
            self._posted_number += 1
            self._posted.append((buffer, future))

    async def _serve_one(self) -> None:
        if not self._posted:
            raise ProtocolError("its message numbers are used up")
        buffer, arrived = self._posted.pop(0)
        await arrived
        self.last_active = time.monotonic()
        number, records = wire.decode_control(buffer)
        if number != self._number:
            raise ProtocolError(f"control message {number} where {self._number} was due")
        self._number += 1
        self._post_receives()
        self._answer(number, records)
        while len(self._unsent) > _MOST_UNSENT:  # it asks and does not listen: its answers are not piled up here
            await asyncio.wait(self._unsent, return_when=asyncio.FIRST_COMPLETED)

    def _answer(self, number: int, records: list[Record]) -> None:
        answers: list[Answer] = []
        payloads: list[tuple[int, Attempt, memoryview]] = []
        for index, record in enumerate(records):
            if record.kind is Kind.READ:
                answer, attempt, view = self._read(index, record)
                answers.append(answer)
                if attempt is not None and view is not None:
                    payloads.append((index, attempt, view))
            elif record.kind is Kind.ACK:
                if self._known(record) and record.rank < _native.MAX_READERS:
                    self._listener.acknowledge(record.slot, record.generation, record.rank)
            elif record.kind is Kind.DISCARD:
                if self._known(record):
                    self._ring.native.discard(record.slot, record.generation)
            elif record.kind is Kind.STATE:
                answers.append(self._state(index, record))
            else:
                answers.append(Answer(0, index))
        if answers:
            self._send(wire.encode_status(number, answers), wire.tag(self._client_base, number))
        for index, attempt, view in payloads:
            if len(view) <= self._listener.settings.inline_limit:  # copied into the answer
                self._listener.sent(attempt)
                continue
            sent = self._send(view, wire.tag(self._client_base, number, 1 + index))
            sent.add_done_callback(partial(self._sent, attempt))

    def _sent(self, attempt: Attempt, _: asyncio.Future[None]) -> None:
        self._listener.sent(attempt)

    def _send(self, data: object, tag: int) -> asyncio.Future[None]:
        future = self._endpoint.send(data, tag)
        if not future.done():
            self._unsent.add(future)
            future.add_done_callback(self._unsent.discard)
        future.add_done_callback(_look_at)
        return future

    def _known(self, record: Record) -> bool:
        """True when the record carries the key of its slot and generation."""
        if record.slot >= self._ring.slot_count:
            return False
        return record.key == self._listener.key(record.slot, record.generation)

    def _read(self, index: int, record: Record) -> tuple[Answer, Attempt | None, memoryview | None]:
        try:
            attempt, info = self._pin(record)
        except (RefusedError, UsageError) as refusal:
            return Answer(refusal.status, index), None, None
        view = self._ring.native.payload(record.slot)[: info.length]
        self._ring.native.count("bytes_read", info.length)
        inline = view if info.length <= self._listener.settings.inline_limit else None
        return Answer(0, index, info.length, info.checksum, 0, inline), attempt, view

    def _pin(self, record: Record) -> tuple[Attempt, _native.SlotInfo]:
        if not self._known(record):
            raise WrongKeyError("not the key of this slot and generation")
        if len(self._attempts) >= _MOST_ATTEMPTS:
            raise BusyError(f"{_MOST_ATTEMPTS} reads of this connection are not acknowledged")
        if self._listener.draining:
            raise BusyError("the listener is shutting down")
        native = self._ring.native
        answer = native.pin(record.slot, record.generation, record.rank) if record.rank < _native.MAX_READERS else -1
        if answer != _native.PIN_OK:
            if answer != _native.PIN_STALE and record.rank >= native.info(record.slot).readers:
                raise RankError(f"rank {record.rank} of a payload for fewer readers")
            raise StaleSlotError("consumed, overwritten or discarded")
        info = native.info(record.slot)
        if info.length != record.length or 0 < info.deadline_ns <= time.time_ns():
            native.unpin(record.slot, record.generation)
            if info.length != record.length:
                raise LengthMismatchError(f"the slot holds {info.length} bytes")
            native.discard(record.slot, record.generation)
            raise StaleSlotError("its deadline has passed")
        sent_by = self.last_active + info.length / self._listener.settings.read_slowest_rate
        attempt = Attempt(self, record.slot, record.generation, record.rank, sent_by)
        self._attempts.add(attempt)
        self._listener.began(attempt)
        return attempt, info

    def _state(self, index: int, record: Record) -> Answer:
        if not self._known(record):
            return Answer(WrongKeyError.status, index)
        return Answer(0, index, value=wire.fate_of(self._ring.native.info(record.slot), record))

    # --- the end ------------------------------------------------------------------------------------
    def finished(self, attempt: Attempt) -> None:
        """The listener ended the attempt and gave its pin back."""
        self._attempts.discard(attempt)

    def oldest_attempt(self) -> float | None:
        """``sent_by`` of the oldest attempt that has not been acknowledged."""
        return min((attempt.sent_by for attempt in self._attempts), default=None)

    def expire_attempts(self, before: float) -> None:
        """End attempts whose ``sent_by`` is before ``before``. One whose bytes are not through costs the connection."""
        late = [attempt for attempt in self._attempts if attempt.sent_by < before]
        if any(attempt.sending for attempt in late):
            log.warning("%r takes no bytes any more; closing it", self)
            self.close()
            return
        for attempt in late:
            log.warning("%r: payload in slot %d not acknowledged in time; it is READY again", self, attempt.slot)
            self._listener.ended(attempt)

    def close(self) -> None:
        """End the connection now. UCX is out of the slots' memory before their pins go."""
        if self._closed:
            return
        self._closed = True
        self._endpoint.abort()
        for attempt in list(self._attempts):
            attempt.sending = False
            self._listener.ended(attempt)
        self._listener.forget(self)


def _look_at(future: asyncio.Future[None]) -> None:
    """A send that failed is noticed by the receive that is always pending; its own exception needs no second report."""
    if not future.cancelled():
        future.exception()


def random_tag_base() -> int:
    """32 random bits; collisions are the listener's to avoid."""
    return secrets.randbits(32)
