"""The client's side of one connection: the handshake here, the requests in native code (native/ucp/reading.hpp).

Every receive is posted before the request is sent, each payload straight into its destination, and checked against its
checksum before the future is set. After any failure or cancellation its user aborts the link, which
ends UCX's use of the buffers before they are used again.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from transport import _ring, errors, rdma
from transport.client.connections.acknowledgements import Ack
from transport.errors import (
    AuthenticationError,
    ChecksumError,
    ConnectionLostError,
    InternalError,
    LengthMismatchError,
    ProtocolError,
    RefusedError,
    TransportError,
    VersionMismatchError,
    WrongRingError,
)
from transport.runtime.timeouts import Limit
from transport.settings import Settings
from transport.ticket import Ticket
from transport.wire import authentication, frames
from transport.wire.addresses import host_port
from transport.wire.frames import Kind, Record
from transport.wire.library import engine
from transport.wire.ucx import Endpoint, Worker
from transport.wires import Wire

if TYPE_CHECKING:
    from transport import _ucp

log = logging.getLogger(__name__)


class Want(NamedTuple):
    """One payload to read, and flat writable memory of exactly its size; ``checksum``: what is verified on arrival.

    ``destination`` is a buffer, or a tuple (address, bytes, what keeps and hashes it) of device memory. With ``offset``
    it is for as many bytes of the payload from there on, a multiple of 64; any ``checksum`` but None then means that
    they are verified against the listener's.
    """

    ticket: Ticket
    rank: int
    destination: Any
    checksum: int | None = None
    offset: int | None = None


_BY_STATUS: dict[int, type[TransportError]] = {
    kind.status: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, TransportError) and kind.status
}


def refusal(code: int, what: str) -> TransportError:
    """Return the error for a status code of the listener."""
    kind = _BY_STATUS.get(code)
    if kind is None:
        return ProtocolError(f"{what}: the listener answered with the unknown code {code}")
    return kind(f"{what}: {_EXPLAINED.get(kind, 'refused by the listener')}")


_EXPLAINED: dict[type[TransportError], str] = {
    errors.StaleSlotError: "it is not there any more for this rank (consumed, overwritten, discarded or expired)",
    errors.WrongKeyError: "the ticket's key is not that of its slot and generation",
    errors.RankError: "the payload was written for fewer ranks",
    errors.LengthMismatchError: "size mismatch between its slot and the ticket",
    errors.RingEndedError: "the ring's writer has ended, and nothing is left",
    errors.BusyError: "its listener is stopping, or this connection has too many reads that are not acknowledged",
}


def wrong_checksum(want: Want, actual: int) -> ChecksumError:
    """Return the error for a payload whose bytes are not those that were written."""
    expected = want.ticket.checksum or 0
    return ChecksumError(
        f"payload {want.ticket.name}: checksum mismatch: received {actual:016x}, expected {expected:016x}"
    )


class Link:
    """A connection to one listener. Make it with `open`."""

    def __init__(self, endpoint: Endpoint, port: tuple[str, int], tag_base: int, welcome: frames.Welcome) -> None:
        self._endpoint = endpoint
        self.port = port  # (host, port), as asked for
        self._codes = engine()
        self.native: _ucp.Link = self._codes.Link(endpoint.native, tag_base, welcome.tag_base, welcome.inline_limit)
        self.given_up = False  # for what happened to another link, or because its listener has asked for it
        self.inline_limit = welcome.inline_limit  # of the listener: payloads of up to this many bytes are joined
        self.ring = welcome.ring
        self.consumers = welcome.consumers  # as the ring's segment has them
        self.schema = welcome.schema  # its fingerprint; NO_SCHEMA: each payload has its own
        self.fields = welcome.fields  # its schema, encoded; empty: not said
        self.slots = welcome.slots  # of the ring; 0: not said
        self.ended = welcome.ended  # nothing is left of the ring, as its listener said first or last
        self.ports = welcome.ports
        self.wire: Wire = endpoint.wire()
        word = bytearray(len(frames.COME_AGAIN))
        endpoint.expect(word, frames.tag(tag_base, 0, frames.PARTING), partial(self._asked_to_close, word))
        # As a listener does: UCX keeps what comes after the handshake in its way, however much it is.
        endpoint.receive_stream(bytearray(1)).add_done_callback(self._said_more)

    def __repr__(self) -> str:
        return f"<Link {self._endpoint.name} by {self.wire}, {self.native.next_number} messages>"

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
        limit_s: float | None = None,
        takes: bool = False,
    ) -> Link:
        """Connect and shake hands. Each thing that the listener says comes within ``limit_s``, or the settings' limits.

        Raises:
            LinkError kinds: unreachable, or disconnected.
            RefusedError kinds: another ring, another version, a wrong secret, too many connections.
        """
        endpoint: Endpoint | None = None
        try:
            async with Limit(limit_s or settings.connect_timeout_s + settings.handshake_timeout_s) as limit:
                endpoint = await worker.connect(host, port)
                await endpoint.joined()
                hello = frames.Hello(
                    ring=ring,
                    tag_base=tag_base,
                    nonce=authentication.nonce(),
                    lease_ms=min(math.ceil(settings.claim_lease_s * 1000), (1 << 32) - 1),
                    takes=takes,
                )
                welcome = await _shake_hands(endpoint, hello, secret, limit)
            worker.keep_new_sockets()
            return cls(endpoint, (host, port), tag_base, welcome)
        except BaseException as error:
            if endpoint is not None:
                endpoint.abort()
            if isinstance(error, TimeoutError):
                raise errors.ReadTimeoutError(
                    f"{host_port(host, port)} did not answer the handshake in time"
                ) from error
            raise

    @property
    def usable(self) -> bool:
        """Alive, with message numbers left for a request and a farewell, and of a worker that is not retired."""
        return self.native.usable and not self.worker.retired

    @property
    def worker(self) -> Worker:
        """The UCX worker it belongs to."""
        return self._endpoint.worker

    @property
    def peer_died(self) -> bool:
        """True if the other side went away, as UCX has seen it, before this side closed."""
        return self._endpoint.native.open and not self._endpoint.native.alive

    @property
    def memory_refused(self) -> bool:
        """True if received memory could not be registered with an RDMA device, which ended the link."""
        return self.wire == "rdma" and self._endpoint.native.refused

    @property
    def port_is_down(self) -> str:
        """Reason why no RDMA port can be used, where that ended the link; else empty."""
        return rdma.no_port() if self.wire == "rdma" and self.peer_died else ""

    def transports(self) -> list[tuple[str, str]]:
        """Transports and devices, as UCX reports them."""
        return self._endpoint.transports()

    # --- requests -----------------------------------------------------------------------------------
    def tell(self, records: Sequence[Record | Ack]) -> int:
        """Send records that have no answer (ACK, DISCARD); the message number. Does not wait."""
        self._ready()
        number = self.native.tell(records)
        self._endpoint.worker.kick()
        return number

    def read(self, wants: list[Want], acks: Sequence[Record | Ack]) -> tuple[int, asyncio.Future[Any]]:
        """Ask for payloads by one message, ``acks`` riding with it: its number, and a future. They arrive in place.

        `outcomes` explains what the future gets. Who stops waiting for it aborts the link.
        """
        self._ready()
        worker = self._endpoint.worker
        future = worker.loop.create_future()
        number = self.native.read(future, wants, acks)
        worker.kick()
        return number, future

    def outcomes(self, wants: list[Want], outcome: Any) -> list[TransportError | None]:
        """Return what became of each want, once the future of `read` has its outcome. Raises ProtocolError."""
        if outcome == 0:
            return [None]
        if outcome == self._codes.PROTOCOL:
            raise ProtocolError(f"{self._endpoint.name} sent an answer that does not fit its request")
        codes = outcome if isinstance(outcome, list) else [outcome]
        return [self._error(code, want) if code else None for code, want in zip(codes, wants, strict=True)]

    def _error(self, code: int, want: Want) -> TransportError:
        ticket = want.ticket
        if code == self._codes.WRONG_CHECKSUM:
            actual = _ring.checksum(want.destination)
            if want.offset is not None:
                return ChecksumError(
                    f"payload {ticket.name}: checksum mismatch of its bytes from {want.offset} on: {actual:016x} came"
                )
            return wrong_checksum(want, actual)
        if code == self._codes.WRONG_LENGTH:
            return LengthMismatchError(
                f"payload {ticket.name}: size mismatch: its slot does not hold the ticket's {ticket.size} bytes"
            )
        return refusal(code, f"payload {ticket.name}")

    def ask(self, record: Record, acks: Sequence[Record | Ack]) -> tuple[int, asyncio.Future[Any]]:
        """Send one record that is answered without payload (STATE, BYE), after ``acks``. See `answer`."""
        self._ready()
        worker = self._endpoint.worker
        future = worker.loop.create_future()
        number = self.native.ask(future, record, acks)
        worker.kick()
        return number, future

    def answer(self, outcome: Any) -> tuple[int, int]:
        """Code (0: success, else the ``status`` of an error class) and value of an answer. Raises ProtocolError.

        Args:
            outcome: what the future of `ask` was given.
        """
        if outcome == self._codes.PROTOCOL:
            raise ProtocolError(f"{self._endpoint.name} sent an answer that does not fit its request")
        code, value = outcome
        return code, value

    def _ready(self) -> None:
        if self.native.usable:
            return
        if not self._endpoint.alive:
            raise ConnectionLostError(f"{self._endpoint.name}: the peer disconnected")
        if self.native.next_number >= frames.MESSAGE_NUMBERS:
            raise InternalError(f"{self!r} has no message numbers left and should have been closed")

    def _asked_to_close(self, word: bytearray, came: int | TransportError) -> None:
        """Close, before the end of a listener that has asked for that is taken for a death."""
        if not isinstance(came, TransportError):
            self.given_up, self.ended = True, word == frames.ENDED
            self.abort()

    def _said_more(self, came: asyncio.Future[int]) -> None:
        if came.cancelled() or came.exception() is not None:
            return
        log.warning("%s sent stream data after the handshake; its connection ends", self._endpoint.name)
        self.abort()

    def abort(self) -> None:
        """Close at once; on return UCX is out of every buffer. Idempotent."""
        self._endpoint.abort()


async def _shake_hands(endpoint: Endpoint, hello: frames.Hello, secret: bytes | None, limit: Limit) -> frames.Welcome:
    said = frames.encode_handshake(hello)
    endpoint.say(said)
    kind, body = await _receive(endpoint, limit)
    if kind is Kind.CHALLENGE:
        challenge = frames.decode_handshake(frames.Challenge, body)
        if secret is None:
            raise AuthenticationError(
                f"{endpoint.name} requires a shared secret, this client has none; set the same secret"
            )
        proof = _answered(endpoint.name, challenge, secret, hello.nonce, said[frames.PREFIX_BYTES :])
        endpoint.say(frames.encode_handshake(proof))
        kind, body = await _receive(endpoint, limit)
    elif secret is not None and kind is Kind.WELCOME and not frames.decode_handshake(frames.Welcome, body).code:
        raise AuthenticationError(f"{endpoint.name} has no shared secret, this client has one; set the same secret")
    if kind is not Kind.WELCOME:
        raise ProtocolError(f"{endpoint.name} answered the handshake with {kind.name}")
    welcome = frames.decode_handshake(frames.Welcome, body)
    if welcome.code:
        kind_of_error = _BY_STATUS.get(welcome.code, RefusedError)
        raise kind_of_error(f"{endpoint.name}: {welcome.reason}")
    if hello.ring and welcome.ring != hello.ring:
        raise WrongRingError(f"{endpoint.name} serves ring {welcome.ring[:8]}, not {hello.ring[:8]}")
    return welcome


def _answered(name: str, challenge: frames.Challenge, secret: bytes, nonce: bytes, hello: bytes) -> frames.Proof:
    """Return the proof that answers a challenge, once the listener's own was found good."""
    expected = authentication.proof(secret, "listener", nonce, challenge.nonce, hello)
    if not authentication.same(challenge.proof, expected):
        raise AuthenticationError(
            f"{name} has another shared secret than this client, or received a modified HELLO; set the same secret"
        )
    return frames.Proof(authentication.proof(secret, "client", nonce, challenge.nonce, hello))


async def _receive(endpoint: Endpoint, limit: Limit) -> tuple[Kind, bytes]:
    prefix = bytearray(frames.PREFIX_BYTES)
    await endpoint.receive_stream(prefix)
    limit.restart()
    try:
        kind, length = frames.decode_prefix(prefix)
    except VersionMismatchError as error:
        raise VersionMismatchError(f"{endpoint.name}: {error}") from None
    body = bytearray(length)
    if length:
        await endpoint.receive_stream(body)
        limit.restart()
    return kind, bytes(body)
