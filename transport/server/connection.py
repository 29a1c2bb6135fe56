"""One connection on the listener's side: handshake here, requests in native code (native/ucp/serving.hpp).

    HANDSHAKE ──WELCOME sent──► OPEN ──BYE, loss, eviction, garbage──► CLOSED

However a connection ends, `close` runs once. It first makes UCX stop using the slots' memory and then releases the
pins, so a payload that was not acknowledged is READY again. The connection belongs to its listener's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, Protocol

from transport.errors import (
    AuthenticationError,
    BusyError,
    InternalError,
    LinkError,
    ProtocolError,
    RefusedError,
    TransportError,
    WrongRingError,
)
from transport.wire import authentication, frames
from transport.wire.library import engine
from transport.wire.ucx import Endpoint

if TYPE_CHECKING:
    from transport import _ucp
    from transport.ring.attachment import Attachment
    from transport.settings import Settings

log = logging.getLogger(__name__)

_MOST_AFTER_REFUSAL = 4  # handshake messages of the largest size


class Admission(Protocol):
    """The interface of a listener that its connections use."""

    ring: Attachment
    settings: Settings
    secret: bytes | None

    @property
    def refuses_connections(self) -> bool: ...
    def new_tag_base(self) -> int: ...
    def admit(
        self,
        endpoint: Endpoint,
        tag_base: int,
        client_base: int,
        ended: asyncio.Future[int],
        lease_s: float,
    ) -> _ucp.Connection: ...
    def forget(self, connection: Any) -> None: ...
    def received(self) -> None: ...
    def silent(self, began: float) -> None: ...


class Connection:
    """A client's connection: handshake, then CONTROL messages until either side ends it."""

    def __init__(self, listener: Admission, endpoint: Endpoint) -> None:
        self._listener = listener
        self._ring = listener.ring
        self._endpoint = endpoint
        self._tag_base = listener.new_tag_base()  # of what this side receives
        self._native: _ucp.Connection | None = None  # once the client is admitted
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._closed = False
        self._wire_settled = False
        self.opened = False
        self._began = time.monotonic()
        self._received = False

    @property
    def host(self) -> str:
        """The client's host, as reported by UCX."""
        return self._endpoint.name.rpartition(":")[0]

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self.opened else "handshake"
        return f"<Connection {self._endpoint.name} {state}, {self.attempts} attempts>"

    @property
    def tag_base(self) -> int:
        """Tag base of this connection's requests."""
        return self._tag_base

    @property
    def attempts(self) -> int:
        """Reads that have not been acknowledged."""
        return self._native.attempts if self._native is not None else 0

    @property
    def last_active(self) -> float:
        """When the admitted client last sent something, in monotonic seconds; 0.0 before."""
        return self._native.last_active if self._native is not None else 0.0

    async def serve(self) -> None:
        """Run until the connection ends. Errors end this connection only."""
        try:
            async with asyncio.timeout(self._listener.settings.handshake_timeout_s):
                native = await self._handshake()
            self._raise_unless_gone(await self._ended, native.reason)
        except TimeoutError:
            log.info("%r: no handshake within %.1f s", self, self._listener.settings.handshake_timeout_s)
        except LinkError as error:
            log.debug("%r ended: %s", self, error)
        except TransportError as error:
            if not self._closed:
                log.warning("%r ended: %s: %s", self, type(error).__name__, error)
        finally:
            self.close()

    def _raise_unless_gone(self, outcome: int, reason: str) -> None:
        if outcome == engine().END_GARBAGE:
            raise ProtocolError(reason)
        if outcome == engine().END_INTERNAL:
            raise InternalError(reason)
        log.debug("%r ended: %s", self, reason)

    # --- handshake ----------------------------------------------------------------------------------
    async def _receive_handshake(self, expected: type[frames.Handshake]) -> tuple[frames.Handshake, bytes]:
        """The message, and its body as it came."""
        prefix = bytearray(frames.PREFIX_BYTES)
        await self._endpoint.receive_stream(prefix)
        self._received = True
        self._listener.received()
        kind, length = frames.decode_prefix(prefix)
        body = bytearray(length)
        if length:
            await self._endpoint.receive_stream(body)
        if kind.name.title() != expected.__name__:
            raise ProtocolError(f"expected {expected.__name__}, got {kind.name}")
        return frames.decode_handshake(expected, bytes(body)), bytes(body)

    async def _handshake(self) -> _ucp.Connection:
        try:
            hello, body = await self._receive_handshake(frames.Hello)
            await self._admit(hello, body)
        except RefusedError as refusal:
            await self._welcome(code=refusal.status, reason=str(refusal))
            await self._closed_by_client()
            raise
        # its receives are posted before WELCOME tells the client to send
        native = self._listener.admit(
            self._endpoint, self._tag_base, hello.tag_base, self._ended, hello.lease_ms / 1000
        )
        self._native = native
        self._count_by_wire(native)
        await self._welcome()
        self.opened = True
        return native

    def _count_by_wire(self, native: _ucp.Connection) -> None:
        """Count this connection's payload bytes under its wire in the ring's statistics."""
        with contextlib.suppress(TransportError):  # the client may have disconnected
            native.count_as(f"bytes_{self._endpoint.wire()}")

    async def _closed_by_client(self) -> None:
        """Wait until the client has closed: if this side closed first, UCX would drop the refusal that it still sends.

        Further messages of the client are discarded, up to a limit: UCX would keep in memory what is not received.
        """
        with contextlib.suppress(TransportError):
            for _ in range(_MOST_AFTER_REFUSAL):
                await self._endpoint.receive_stream(bytearray(frames.MAX_HANDSHAKE_BYTES))

    async def _admit(self, hello: frames.Hello, body: bytes) -> None:
        if hello.ring and hello.ring != self._ring.ring_id:
            raise WrongRingError(f"this listener serves ring {self._ring.ring_id[:8]}, not {hello.ring[:8]}")
        if self._listener.refuses_connections:
            raise BusyError("the listener has reached its number of connections, or is shutting down")
        secret = self._listener.secret
        if secret is None:
            return
        own = authentication.nonce()
        challenge = frames.Challenge(own, authentication.proof(secret, "listener", hello.nonce, own, body))
        await self._endpoint.send_stream(frames.encode_handshake(challenge))
        answer, _ = await self._receive_handshake(frames.Proof)
        if not authentication.same(answer.proof, authentication.proof(secret, "client", hello.nonce, own, body)):
            raise AuthenticationError("the client's shared secret differs from this listener's")

    async def _welcome(self, code: int = 0, reason: str = "") -> None:
        welcome = frames.Welcome(
            ring=self._ring.ring_id,
            tag_base=self._tag_base,
            ports=self._ring.native.ports() if code == 0 else (),
            inline_limit=self._listener.settings.inline_limit,
            code=code,
            reason=reason,
            consumers=self._ring.native.consumers if code == 0 else "",
            schema=self._ring.native.fingerprint.hex() if code == 0 else "",
            fields=self._ring.native.schema if code == 0 else b"",
        )
        await self._endpoint.send_stream(frames.encode_handshake(welcome))

    # --- time, and the end --------------------------------------------------------------------------
    def sweep(self, now: float) -> None:
        """End attempts that were acknowledged through another listener or not in time; close an idle connection."""
        native, settings = self._native, self._listener.settings
        if native is None:  # the handshake has its own limit
            return
        if not self._wire_settled:  # UCX adds lanes while the two sides exchange addresses, mostly before WELCOME
            self._wire_settled = True
            self._count_by_wire(native)
        native.end_consumed()
        if native.attempts == 0:
            if native.waiting:  # an answer is due to it, not from it
                return
            if now - native.last_active > settings.listener_idle_eviction_s:
                self.close()
            return
        ended = native.expire(now - settings.ack_timeout_s)
        if ended < 0:
            log.warning("%r: client stopped receiving; closing the connection", self)
            self.close()
        elif ended > 0:  # reads, or the claims of a client that is silent for longer than its own lease
            log.warning("%r: %d payloads not acknowledged in time; they are READY again", self, ended)

    def close(self) -> None:
        """End the connection now. UCX stops using the slots' memory before their pins are released."""
        if self._closed:
            return
        self._closed = True
        silent = not self._received and self._in_shared_memory()
        self._endpoint.abort()
        if self._native is not None:
            self._native.close()
        if not self._ended.done():
            self._ended.set_result(0)
        self._listener.forget(self)
        if silent:
            self._listener.silent(self._began)

    def _in_shared_memory(self) -> bool:
        with contextlib.suppress(TransportError):  # the client may have disconnected
            return self._endpoint.wire() == "shm"
        return False
