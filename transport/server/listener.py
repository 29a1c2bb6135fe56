"""A listener: serves one ring on one port from one event loop, each client by a `Connection` of its own.

It holds what its connections share (the native service, the limit on connections). Once a second it sends a heartbeat,
closes idle connections and ends attempts that were not acknowledged. `process` runs it as a process of its own.

A connection has its handshake here, and its requests in native code (native/ucp/serving.hpp):

    HANDSHAKE ──WELCOME sent──► OPEN ──BYE, loss, garbage─────────────────────────────► CLOSED
                                  └──eviction, stop, a fault here──► PARTING ──BYE, loss, late──┘

However a connection ends, `Connection.close` runs once. It first makes UCX stop using the slots' memory and then
releases the pins, so a payload that was not acknowledged is READY again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from transport.errors import (
    AuthenticationError,
    BusyError,
    ClosedError,
    InternalError,
    LinkError,
    ProtocolError,
    RefusedError,
    TransportError,
    UnreachableError,
    WrongRingError,
)
from transport.ring.attachment import Attachment
from transport.runtime.amounts import count
from transport.runtime.error_text import reportable
from transport.runtime.logs import LoggedErrors, LogLimit
from transport.runtime.timeouts import Limit
from transport.server.ending import PART_S
from transport.settings import DEFAULTS, Settings
from transport.wire import authentication, frames
from transport.wire.addresses import is_ipv6
from transport.wire.interfaces import Network, active_ports
from transport.wire.library import engine, settings_here
from transport.wire.ucx import Endpoint, Listening, Worker
from transport.wires import Wire, admits_rdma, settings_for

if TYPE_CHECKING:
    from transport import _ucp

log = logging.getLogger(__name__)

_MOST_READS = 4096  # per connection: bounds the listener's memory if a client never acknowledges
_MOST_UNSENT = 1024  # per connection: answers and payloads that its client has not received yet
_MOST_REFUSED = 64  # beyond the limit on connections: this many at once get a BUSY answer, UCX rejects the rest
_MOST_REASON = 1000  # characters of a refusal, which fits a handshake message then
_MOST_AFTER_REFUSAL = 4  # handshake messages of the largest size
_ALERT_S = 10.0  # for this long after a connection without UCX handshake, look for the next one at this interval:
_LOOK_S = 0.1
_MOST_SILENT = 3  # connections in a row: see `StallDetector`
_SILENT_S = 1.0  # a client that leaves sooner may have had nothing to send
_GONE, _PARTS = 0, -1  # why a connection ends: its client is gone, or is to go; see native/ucp/serving.hpp for others
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


class Connection:
    """A client's connection: handshake, then CONTROL messages until either side ends it."""

    def __init__(self, listener: Listener, endpoint: Endpoint, tag_base: int) -> None:
        self._listener = listener
        self._ring = listener.ring
        self._endpoint = endpoint
        self.tag_base = tag_base  # of what this side receives
        self._native: _ucp.Connection | None = None  # once the client is admitted
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._closed = self._takes = False
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
    def attempts(self) -> int:
        """Reads that have not been acknowledged."""
        return self._native.attempts if self._native is not None else 0

    @property
    def last_active(self) -> float:
        """Time at which the admitted client last sent something, in monotonic seconds; 0.0 before."""
        return self._native.last_active if self._native is not None else 0.0

    async def serve(self) -> None:
        """Run until the connection ends. Errors end this connection only."""
        try:
            async with Limit(self._listener.settings.handshake_timeout_s):
                native = await self._handshake()
            outcome = await self._ended
            if outcome not in (_GONE, engine().END_GARBAGE):
                await self._part(native)
            self._raise_unless_gone(outcome, native.reason)
        except TimeoutError:
            log.info("%r: no handshake within %.1f s", self, self._listener.settings.handshake_timeout_s)
        except LinkError as error:
            log.debug("%r ended: %s", self, error)
        except TransportError as error:
            if not self._closed:
                log.warning("%r ended: %s: %s", self, type(error).__name__, error)
        finally:
            self.close()

    async def _part(self, native: _ucp.Connection) -> None:
        """Have the client close, if it is there, within the time that a handshake has.

        Over shared memory a peer that goes away may have left the client's queue unusable: if this side closed first,
        the client would give up the claims that it has of other rings as well.
        """
        with contextlib.suppress(TransportError, TimeoutError):
            ended = not self._ring.native.closed and self._ring.native.drained
            native.part(again=not ended)
            self._endpoint.tell(frames.ENDED if ended else frames.COME_AGAIN, self._parting)
            async with Limit(self._listener.settings.handshake_timeout_s):
                await self._closed_by_client()

    def _raise_unless_gone(self, outcome: int, reason: str) -> None:
        if outcome == engine().END_GARBAGE:
            raise ProtocolError(reason)
        if outcome == engine().END_INTERNAL:
            raise InternalError(reason)
        log.debug("%r ended: %s", self, reason)

    # --- handshake ----------------------------------------------------------------------------------
    async def _receive_handshake(self, expected: type[frames.Handshake]) -> tuple[frames.Handshake, bytes]:
        """Return the message, and its body as it came."""
        prefix = bytearray(frames.PREFIX_BYTES)
        await self._endpoint.receive_stream(prefix)
        self._received = True
        self._listener.received_at = time.monotonic()
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
            await self._welcome(code=refusal.status, reason=reportable(str(refusal), _MOST_REASON))
            await self._closed_by_client()
            raise
        self._lease_s = hello.lease_ms / 1000 or math.inf
        self._parting = frames.tag(hello.tag_base, 0, frames.PARTING)
        # its receives are posted before WELCOME tells the client to send
        native: _ucp.Connection = engine().Connection(
            self._listener._service,
            self._endpoint.native,
            self.tag_base,
            hello.tag_base,
            self._ended,
            hello.lease_ms / 1000,
            hello.takes,
        )
        self._takes = hello.takes
        self._endpoint.worker.kick()
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
        """Wait until the client has closed: if this side closed first, UCX would drop what it still sends.

        Further messages of the client are discarded, up to a limit: UCX would keep in memory what is not received.
        """
        with contextlib.suppress(TransportError):
            for _ in range(_MOST_AFTER_REFUSAL):
                await self._endpoint.receive_stream(bytearray(frames.MAX_HANDSHAKE_BYTES))

    async def _admit(self, hello: frames.Hello, body: bytes) -> None:
        if hello.ring and hello.ring != self._ring.ring_id:
            raise WrongRingError(f"this listener serves ring {self._ring.ring_id[:8]}, not {hello.ring[:8]}")
        if not self._ring.native.begun:
            raise BusyError("the ring is being set up")
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
            tag_base=self.tag_base,
            ports=self._ring.native.ports() if code == 0 else (),
            inline_limit=self._listener.inline_limit,
            code=code,
            reason=reason,
            consumers=self._ring.native.consumers if code == 0 else "",
            schema=self._ring.native.fingerprint.hex() if code == 0 else "",
            fields=self._ring.native.schema if code == 0 else b"",
            slots=self._ring.native.slot_count if code == 0 else 0,
            ended=code == 0 and self._ring.native.drained,
        )
        await self._endpoint.send_stream(frames.encode_handshake(welcome))

    # --- time, and the end --------------------------------------------------------------------------
    def sweep(self, now: float) -> None:
        """End attempts that were acknowledged through another listener or not in time; part from an idle client."""
        native, settings = self._native, self._listener.settings
        if native is None or self._ended.done():  # handshake and parting have their own limits
            return
        if not self._wire_settled:  # UCX adds lanes while the two sides exchange addresses, mostly before WELCOME
            self._wire_settled = True
            self._count_by_wire(native)
        native.end_consumed()
        if native.attempts == 0:
            if native.waiting:  # an answer is due to it, not from it
                return
            if self._takes and not native.unsent and self._ring.native.drained:
                self.part()  # it rests, or its hands are full, and is to hear the end
            elif now - native.last_active > settings.listener_idle_eviction_s:
                self.part()
            return
        ended = native.expire(now - settings.ack_timeout_s)
        if ended < 0:
            log.warning("%r: client stopped receiving; closing the connection", self)
            self.part()
        elif ended > 0 and now - native.last_active > self._lease_s:
            log.warning("%r: silent for %.0f s; %s READY again", self, self._lease_s, count(ended, "payload"))
        elif ended > 0:  # reads by ticket, which need no acknowledgement: weights on offer get none
            log.info("%r: %s not acknowledged in time, and READY", self, count(ended, "payload"))

    def part(self) -> None:
        """End the connection as soon as its client has closed, which is asked to, or has had time to."""
        if not self.opened:
            self.close()
        elif not self._ended.done():
            self._ended.set_result(_PARTS)

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
            self._ended.set_result(_GONE)
        self._listener.forget(self)
        if silent:
            self._listener.silent(self._began)

    def _in_shared_memory(self) -> bool:
        with contextlib.suppress(TransportError):  # the client may have disconnected
            return self._endpoint.wire() == "shm"
        return False


class OwnMemory:
    """Private memory of this process. Keeps its file open, so that it can be asked when descriptors have run out."""

    def __init__(self) -> None:
        self._file = Path("/proc/self/statm").open("rb", buffering=0)  # noqa: SIM115 - closed by `close`

    def size(self) -> int:
        """Bytes, without files and shared segments."""
        _, resident, shared, *_ = os.pread(self._file.fileno(), 256, 0).split()
        return (int(resident) - int(shared)) * _PAGE_BYTES

    def close(self) -> None:
        """Idempotent."""
        self._file.close()


class StallDetector:
    """Decision from a listener's silent connections whether it is stalled. No I/O.

    All clients of a host write into one shared-memory queue of the listener. A client that is killed after it reserved
    an entry and before it filled it leaves an entry that UCX waits for. Nothing that any client sends afterwards
    arrives, although new connections are still made, through TCP. UCX's interface does not report this state; the only
    sign is that connections stay silent.
    """

    def __init__(self) -> None:
        self._silent: list[float] = []  # start times of connections without a message, since the last received message

    def silent(self, began: float, ended: float, last_received: float) -> bool:
        """Report a connection on which nothing was received; True if the listener is stalled.

        Args:
            began, ended: of the connection. All three times are in seconds of one clock.
            last_received: when the listener last received anything from any client.
        """
        if ended - began < _SILENT_S:
            return False
        self._silent = [each for each in self._silent if each > last_received]
        if began > last_received:
            self._silent.append(began)
        return len(self._silent) >= _MOST_SILENT


class Listener:
    """Listener that serves ``ring`` from the running loop.

    Args:
        ring: attached with role "listener", or the writer's own object (in-process mode).
        secret: shared secret that clients must prove to have; None: none is asked.
        wires: the wires UCX may use; None: whatever is best.
        bind: local address to listen on; "": all of IPv4, "::": all of IPv6.
        restart: called with the reason when the listener can only be repaired by a new process; only for a listener
            that has a process of its own. Reasons: its memory exceeds ``listener_memory_bytes``, because UCX keeps
            what peers send in more ways than can be counted here; it is stalled (`StallDetector`); or its UCX lacks a
            part of the host's network which came up later (wire/interfaces.py), and which a client needs.
    """

    def __init__(
        self,
        ring: Attachment,
        *,
        settings: Settings = DEFAULTS,
        secret: bytes | None = None,
        wires: frozenset[Wire] | None = None,
        bind: str = "",
        restart: Callable[[str], object] | None = None,
    ) -> None:
        self.ring = ring
        self.settings = settings
        self.secret = secret
        self._wires = wires
        self._bind = bind
        self._restart = restart
        self._memory = None if restart is None else OwnMemory()
        self._stall = StallDetector()
        self.received_at = 0.0  # when a client that is not yet admitted last sent something
        self._stranger_at = -math.inf
        self._worker: Worker | None = None
        self._listening: Listening | None = None
        self._would_use_rdma = False
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self._tag_bases: set[int] = set()
        self._service: _ucp.Service | None = None  # what its connections share, once it has been started
        self.draining = False  # set by stop(): reads in progress finish, no new ones begin
        self._sweeper: asyncio.Task[None] | None = None
        self._refused = ring.native.own_count("late_finalises")  # when it was last looked at
        self._refusals = LogLimit()
        self._changes = LogLimit()
        self._limits = LogLimit()

    def __repr__(self) -> str:
        return f"<Listener port {self.port} {len(self._connections)} connections, {self.attempts} reads>"

    @property
    def attempts(self) -> int:
        """Reads that have not been acknowledged, and claims that have not ended."""
        return self._service.attempts if self._service is not None else 0

    @property
    def inline_limit(self) -> int:
        """Bytes up to which a payload is joined to its answer."""
        return self._service.inline_limit if self._service is not None else self.settings.inline_limit

    @property
    def port(self) -> int:
        """The port it listens on; 0 before `start` and after `stop`."""
        return self._listening.port if self._listening is not None else 0

    @property
    def refuses_connections(self) -> bool:
        """True at the limit, or when shutting down."""
        return self.draining or len(self._connections) > self.settings.connections_per_listener

    def start(self, port: int = 0) -> int:
        """Listen on ``port`` (0: assigned) and return it.

        Raises:
            BusyPortError: another program has the port.
            MissingDependencyError: ucxx is not installed.
            WireNotAllowedError: this host has none of the wires.
        """
        self._worker, self._service = self._open()
        self._would_use_rdma = admits_rdma(settings_for(self._wires, refused=""))
        try:
            asyncio.get_running_loop().add_reader(self._service.demand_descriptor, self._look)
            most = self.settings.connections_per_listener + _MOST_REFUSED
            self._listening = self._worker.listen(port, self._accept, self._bind, most, self._not_accepted)
        except BaseException:
            self._look_no_more()
            self._worker.close()
            raise
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep(), name="transport listener sweep")
        return self._listening.port

    def _open(self, refused: str = "") -> tuple[Worker, _ucp.Service]:
        """Make worker and service, and register the ring for RDMA devices; without them where that is refused."""
        pages = -(-self.ring.slot_capacity // _PAGE_BYTES)
        ring_bytes = self.ring.slot_count * pages * _PAGE_BYTES
        settings = settings_here(self._wires, locked_bytes=ring_bytes, refused=refused, ipv6=is_ipv6(self._bind))
        worker = Worker(settings)
        try:
            service: _ucp.Service = engine().Service(
                worker.engine,
                self.ring.native,
                inline_limit=self.settings.inline_limit,
                slowest_rate=self.settings.read_slowest_rate,
                most_reads=_MOST_READS,
                most_unsent=_MOST_UNSENT,
                numbers=frames.MESSAGE_NUMBERS,
            )
            if admits_rdma(settings):
                service.register_payloads()
            return worker, service
        except engine().UcxFault as error:
            worker.close()
            refused = f"the ring's {ring_bytes >> 20} MiB cannot be registered ({error.args[1]})"
        except BaseException:
            worker.close()
            raise
        return self._open(refused)

    async def stop(self, drain_s: float = 0.0, *, exiting: bool = False) -> None:
        """Accept no new connections, wait up to ``drain_s`` for acknowledgements of reads in progress, then close all.

        ``exiting``: the process ends now, and the kernel frees the worker and its port faster than UCX does.
        """
        self.draining = True
        async with contextlib.AsyncExitStack() as stack:  # from the last one on, whatever one of them raises
            if not exiting:
                stack.callback(self._close_worker)
            if self._memory is not None:
                stack.callback(self._memory.close)
            stack.callback(self._look_no_more)
            stack.push_async_callback(self._end_connections)
            stack.push_async_callback(self._dismiss, drain_s)
            if self._listening is not None:
                stack.callback(self._listening.close)
                self._listening = None

    async def _dismiss(self, drain_s: float) -> None:
        """Tell demands that wait that nothing comes, and wait for reads in progress."""
        if self._service is None:
            return
        self._service.draining = True
        with contextlib.suppress(ClosedError):  # the ring was closed first: the ends of the connections tell
            self._service.dismiss()
        if self._worker is not None:
            self._worker.kick()
        await self._drain(self._service, drain_s)

    async def _end_connections(self) -> None:
        tasks = [*self._connections.values(), *([self._sweeper] if self._sweeper else [])]
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self._connections):
            connection.part()
        try:
            if self._connections:
                await asyncio.wait(self._connections.values(), timeout=PART_S)
        finally:
            for connection in list(self._connections):
                connection.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _close_worker(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = self._service = None

    def _look(self) -> None:
        """Look at demands: something was published while one waits, or one has waited long enough."""
        if self._service is not None and self._worker is not None:
            self._service.look()
            self._worker.drive()

    def _look_no_more(self) -> None:
        if self._service is not None:
            asyncio.get_running_loop().remove_reader(self._service.demand_descriptor)
            self._service.watch_no_more()

    async def _drain(self, service: _ucp.Service, drain_s: float) -> None:
        if not service.attempts or drain_s <= 0:
            return
        quiet: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        service.when_quiet(quiet)
        try:
            async with asyncio.timeout(drain_s):
                await quiet
        except TimeoutError:
            log.warning("%r: reads did not finish within %.1f s; closing their connections", self, drain_s)

    # --- connections --------------------------------------------------------------------------------
    def _accept(self, endpoint: Endpoint) -> None:
        base = frames.new_tag_base(self._tag_bases)
        self._tag_bases.add(base)
        connection = Connection(self, endpoint, base)
        begun = sum(not each.opened and each.host == connection.host for each in self._connections)
        if begun >= self.settings.handshakes_per_host:
            log.info("%r: refused: its host has %d unfinished handshakes", connection, begun)
            connection.close()
            return
        task = asyncio.get_running_loop().create_task(connection.serve(), name=f"transport {endpoint.name}")
        self._connections[connection] = task

    def _not_accepted(self, error: TransportError) -> None:
        """UCX could not make the endpoint of a client."""
        if isinstance(error, UnreachableError):
            self._look_at_network()

    def _look_at_network(self) -> None:
        if self._worker is None or not (changed := Network.now().changed_since(self._worker.network)):
            return
        if self._restart is not None:
            self._restart(f"{changed} after it had started")
        elif self._changes.due() is not None:
            log.warning("%r: has the network of its start, but %s: start it again", self, changed)

    def forget(self, connection: Connection) -> None:
        """Forget a connection that has closed."""
        self._connections.pop(connection, None)
        self._tag_bases.discard(connection.tag_base)

    def silent(self, began: float) -> None:
        """Note that a connection over shared memory ended before anything was received on it."""
        last_received = max([self.received_at, *(each.last_active for each in self._connections)])
        stalled = self._stall.silent(began, time.monotonic(), last_received)
        if stalled and self._restart is not None:
            self._restart("it receives nothing over shared memory")

    # --- once a second ------------------------------------------------------------------------------
    async def _sweep(self) -> None:
        failures = LoggedErrors(log, f"a sweep of {self!r}")
        while True:
            now = time.monotonic()
            due = now + self.settings.heartbeat_s
            with failures:
                self.sweep(now)
            with failures:
                while self._on_alert(now) and now + _LOOK_S < due:
                    await asyncio.sleep(_LOOK_S)
                    now = time.monotonic()
            await asyncio.sleep(max(due - now, 0.0))

    def _on_alert(self, now: float) -> bool:
        """Close connections without a UCX handshake in time, and keep a reserve of descriptors.

        True while there are such connections or descriptors are few, and for ``_ALERT_S`` after.
        """
        if self._listening is not None and self._listening.end_strangers(self.settings.handshake_timeout_s):
            self._stranger_at = now
            if self._listening.shut and self._limits.due() is not None:
                limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                log.warning(
                    "%r: takes no further connection until some end: of the %d files that this process may have open "
                    "(ulimit -n) only the reserve is left; raise the limit, or give the ring more ports",
                    self,
                    limit,
                )
        return now - self._stranger_at < _ALERT_S

    def sweep(self, now: float) -> None:
        """Heartbeat; close idle connections; end attempts acknowledged through other listeners, or not in time."""
        self.ring.native.heartbeat()
        for connection in list(self._connections):
            connection.sweep(now)
        self._tell_refused()
        if self._worker is not None:
            self._worker.kick()  # delivers ends that native code has to report
        if self._restart is None or self._memory is None:
            return
        # No client tells of it: without a port it is served over tcp, and by one that is down it has no connection.
        if self._worker is not None and self._would_use_rdma and active_ports() != self._worker.network.ports:
            self._look_at_network()
        if (size := self._memory.size()) > self.settings.listener_memory_bytes:
            self._restart(f"its memory of {size >> 20} MiB exceeds listener_memory_bytes")

    def _tell_refused(self) -> None:
        refused, self._refused = self._refused, self.ring.native.own_count("late_finalises")
        if self._refused > refused and (before := self._refusals.due()) is not None:
            # No defect by itself: what a lost connection leaves unconfirmed is acknowledged again, and an update of
            # weights that fails discards buckets whose acknowledgements are on their way.
            log.info(
                "%r: %d acknowledgements came second: sent again after a lost connection, or the payload was already "
                "consumed or discarded (%d more reports suppressed since the last line; "
                "statistics().late_finalises counts all)",
                self,
                self._refused - refused,
                before,
                extra={"ring": self.ring.ring_id},
            )
