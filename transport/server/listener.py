"""A listener: serves one ring on one port from one event loop.

It holds what its connections share (the native service, the limit on connections). Once a second it sends a heartbeat,
closes idle connections and ends attempts that were not acknowledged. `process` runs it as a process of its own.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from transport.errors import ClosedError
from transport.ring.attachment import Attachment
from transport.runtime.logs import LogLimit
from transport.server.connection import Connection
from transport.server.stall import StallDetector
from transport.settings import DEFAULTS, Settings
from transport.wire import frames
from transport.wire.library import engine
from transport.wire.ucx import Endpoint, Listening, Worker
from transport.wires import Wire, settings_for

if TYPE_CHECKING:
    from transport import _ucp

log = logging.getLogger(__name__)

_MOST_READS = 4096  # per connection: bounds the listener's memory if a client never acknowledges
_MOST_UNSENT = 1024  # per connection: answers and payloads that its client has not received yet
_MOST_REFUSED = 64  # beyond the limit on connections: this many at once get a BUSY answer, UCX rejects the rest
_ALERT_S = 10.0  # for this long after a connection without UCX handshake, look for the next one at this interval:
_LOOK_S = 0.1
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")


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


class Listener:
    """Serves ``ring`` from the running loop.

    Args:
        ring: attached with role "listener", or the writer's own object (in-process mode).
        secret: shared secret that clients must prove to have; None: none is asked.
        wires: the wires UCX may use; None: whatever is best.
        bind: local IPv4 address to listen on; "": all of them.
        restart: called with the reason when the listener can only be repaired by a new process; only for a listener
            that has a process of its own. Reasons: its memory exceeds ``listener_memory_bytes``, because UCX keeps
            what peers send in more ways than can be counted here; or it is stalled (stall.py).
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
        self._received_at = 0.0  # when a client that is not yet admitted last sent something
        self._stranger_at = -math.inf
        self._worker: Worker | None = None
        self._listening: Listening | None = None
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self._tag_bases: set[int] = set()
        self._service: _ucp.Service | None = None  # what its connections share, once it has been started
        self.draining = False  # set by stop(): reads in progress finish, no new ones begin
        self._sweeper: asyncio.Task[None] | None = None
        self._refused = ring.native.own_count("late_finalises")  # when it was last looked at
        self._refusals = LogLimit()

    def __repr__(self) -> str:
        return f"<Listener port {self.port} {len(self._connections)} connections, {self.attempts} reads>"

    @property
    def attempts(self) -> int:
        """Reads that have not been acknowledged, and claims that have not ended."""
        return self._service.attempts if self._service is not None else 0

    @property
    def port(self) -> int:
        """The port it listens on; 0 before `start` and after `stop`."""
        return self._listening.port if self._listening is not None else 0

    @property
    def refuses_connections(self) -> bool:
        """At the limit, or shutting down."""
        return self.draining or len(self._connections) > self.settings.connections_per_listener

    def start(self, port: int = 0) -> int:
        """Listen on ``port`` (0: assigned) and return it.

        Raises:
            BusyPortError: another program has the port.
            MissingDependencyError: ucxx is not installed.
        """
        self._worker = Worker(settings_for(self._wires))
        try:
            self._service = engine().Service(
                self._worker.engine,
                self.ring.native,
                inline_limit=self.settings.inline_limit,
                slowest_rate=self.settings.read_slowest_rate,
                most_reads=_MOST_READS,
                most_unsent=_MOST_UNSENT,
                numbers=frames.MESSAGE_NUMBERS,
            )
            asyncio.get_running_loop().add_reader(self._service.demand_descriptor, self._look)
            most = self.settings.connections_per_listener + _MOST_REFUSED
            self._listening = self._worker.listen(port, self._accept, self._bind, most)
        except BaseException:
            self._look_no_more()
            self._worker.close()
            raise
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep(), name="transport listener sweep")
        return self._listening.port

    async def stop(self, drain_s: float = 0.0, *, exiting: bool = False) -> None:
        """Accept no new connections, wait up to ``drain_s`` for acknowledgements of reads in progress, then close all.

        ``exiting``: the process ends now, and the kernel frees the worker and its port faster than UCX does.
        """
        self.draining = True
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        if self._service is not None:
            self._service.draining = True
            self._service.dismiss()
            if self._worker is not None:
                self._worker.kick()
            await self._drain(self._service, drain_s)
        if self._sweeper is not None:
            self._sweeper.cancel()
        tasks = list(self._connections.values())
        for connection in list(self._connections):
            connection.close()
        await asyncio.gather(*tasks, *([self._sweeper] if self._sweeper else []), return_exceptions=True)
        self._look_no_more()
        if self._memory is not None:
            self._memory.close()
        if self._worker is not None and not exiting:
            self._worker.close()
            self._worker = self._service = None

    def _look(self) -> None:
        """Something was published while a demand waits, or one has waited long enough."""
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
        connection = Connection(self, endpoint)
        begun = sum(not each.opened and each.host == connection.host for each in self._connections)
        if begun >= self.settings.handshakes_per_host:
            log.info("%r: refused: its host has %d unfinished handshakes", connection, begun)
            connection.close()
            return
        task = asyncio.get_running_loop().create_task(connection.serve(), name=f"transport {endpoint.name}")
        self._connections[connection] = task

    def admit(
        self,
        endpoint: Endpoint,
        tag_base: int,
        client_base: int,
        ended: asyncio.Future[int],
        lease_s: float,
    ) -> _ucp.Connection:
        """Serve an admitted client; ``ended`` resolves when the client is gone.

        Its claims end when it is silent for ``lease_s``; 0: with the connection.
        """
        connection: _ucp.Connection = engine().Connection(
            self._service, endpoint.native, tag_base, client_base, ended, lease_s
        )
        endpoint.worker.kick()
        return connection

    def new_tag_base(self) -> int:
        """A tag base that no connection of this listener uses."""
        base = frames.new_tag_base(self._tag_bases)
        self._tag_bases.add(base)
        return base

    def forget(self, connection: Connection) -> None:
        """The connection has closed."""
        self._connections.pop(connection, None)
        self._tag_bases.discard(connection.tag_base)

    def received(self) -> None:
        """A client that is not yet admitted has sent something."""
        self._received_at = time.monotonic()

    def silent(self, began: float) -> None:
        """A connection over shared memory ended before anything was received on it."""
        last_received = max([self._received_at, *(each.last_active for each in self._connections)])
        stalled = self._stall.silent(began, time.monotonic(), last_received)
        if stalled and self._restart is not None and not self.draining:
            self._restart("it receives nothing over shared memory")

    # --- once a second ------------------------------------------------------------------------------
    async def _sweep(self) -> None:
        while True:
            now = time.monotonic()
            try:
                self.sweep(now)
            except Exception:  # whatever it was: without heartbeats the supervisor ends this listener
                log.exception("%r: a sweep failed; the next one is due", self)
            due = now + self.settings.heartbeat_s
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


async def serve_until(
    listener: Listener, stop: asyncio.Event, drain_s: float, ready: Callable[[int], None], *, exiting: bool = False
) -> None:
    """Report the port of a started listener, serve until ``stop``, then drain."""
    if not listener.port:
        raise ClosedError("the listener has not been started")
    ready(listener.port)
    try:
        await stop.wait()
    finally:
        await listener.stop(drain_s, exiting=exiting)
