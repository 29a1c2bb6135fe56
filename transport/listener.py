"""A listener: serves one ring on one port from one event loop.

It holds what its connections share (attempts by payload, the limit on connections) and sweeps once a second:
heartbeat, idle eviction, attempts that nobody acknowledged. Run as a process of its own by `listen_main`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from transport.connection import Attempt, Connection, random_tag_base
from transport.errors import ClosedError
from transport.ring import SharedRingBuffer
from transport.settings import DEFAULTS, Settings
from transport.ucx import Endpoint, Listening, Worker
from transport.wires import Wire, settings_for

log = logging.getLogger(__name__)

_KEYS_CACHED = 4096


class Listener:
    """Serves ``ring`` from the running loop.

    Args:
        ring: attached with role "listener", or the writer's own object (in-process mode).
        secret: shared secret that clients must prove to have; None: none is asked.
        wires: the wires UCX may use; None: whatever is best.
    """

    def __init__(
        self,
        ring: SharedRingBuffer,
        *,
        settings: Settings = DEFAULTS,
        secret: bytes | None = None,
        wires: frozenset[Wire] | None = None,
    ) -> None:
        self.ring = ring
        self.settings = settings
        self.secret = secret
        self._wires = wires
        self._worker: Worker | None = None
        self._listening: Listening | None = None
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self._tag_bases: set[int] = set()
        self._attempts: dict[tuple[int, int, int], list[Attempt]] = {}
        self._keys: dict[tuple[int, int], int] = {}
        self.draining = False  # set by stop(): what is under way is finished, nothing is begun
        self._quiet = asyncio.Event()
        self._sweeper: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        reading = sum(len(attempts) for attempts in self._attempts.values())
        return f"<Listener port {self.port} {len(self._connections)} connections, {reading} reads>"

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
            self._listening = self._worker.listen(port, self._accept)
        except BaseException:
            self._worker.close()
            raise
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep(), name="transport listener sweep")
        return self._listening.port

    async def stop(self, drain_s: float = 0.0) -> None:
        """Accept no more, let reads under way be acknowledged for up to ``drain_s``, then close everything."""
        self.draining = True
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        if self._attempts and drain_s > 0:
            self._quiet.clear()
            try:
                async with asyncio.timeout(drain_s):
                    await self._quiet.wait()
            except TimeoutError:
                log.warning("%r: reads still under way after %.1f s are cut off", self, drain_s)
        if self._sweeper is not None:
            self._sweeper.cancel()
        tasks = list(self._connections.values())
        for connection in list(self._connections):
            connection.close()
        await asyncio.gather(*tasks, *([self._sweeper] if self._sweeper else []), return_exceptions=True)
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    # --- connections --------------------------------------------------------------------------------
    def _accept(self, endpoint: Endpoint) -> None:
        connection = Connection(self, endpoint)
        task = asyncio.get_running_loop().create_task(connection.serve(), name=f"transport {endpoint.name}")
        self._connections[connection] = task

    def new_tag_base(self) -> int:
        """A tag base that no connection of this listener has."""
        while (base := random_tag_base()) in self._tag_bases:
            pass
        self._tag_bases.add(base)
        return base

    def forget(self, connection: Connection) -> None:
        """The connection has closed."""
        self._connections.pop(connection, None)
        self._tag_bases.discard(connection.tag_base)

    def key(self, slot: int, generation: int) -> int:
        """The key of a payload; computed once per payload."""
        known = self._keys.get((slot, generation))
        if known is None:
            if len(self._keys) >= _KEYS_CACHED:
                self._keys.clear()
            known = self._keys[slot, generation] = self.ring.key(slot, generation)
        return known

    # --- attempts -----------------------------------------------------------------------------------
    def began(self, attempt: Attempt) -> None:
        """An attempt has pinned its payload."""
        self._attempts.setdefault(attempt.key, []).append(attempt)

    def acknowledge(self, slot: int, generation: int, rank: int) -> bool:
        """A reader has the payload, through whichever connection or port. False: it had been acknowledged before."""
        native = self.ring.native
        attempts = self._attempts.get((slot, generation, rank), [])
        idle = [attempt for attempt in attempts if not attempt.sending]
        if not idle:
            accepted = native.consume(slot, generation, rank)
        else:
            # the pin of one attempt goes in the same swap as the consumption
            accepted = native.mark_consumed(slot, generation, rank)
            if accepted:
                self._drop(idle.pop())
        for attempt in idle:
            self.ended(attempt)
        for attempt in attempts:
            attempt.ended = True  # still sending: ends when UCX has let go of the slot
        return accepted

    def sent(self, attempt: Attempt) -> None:
        """UCX has let go of the attempt's slot."""
        attempt.sending = False
        if attempt.ended:
            self.ended(attempt)

    def ended(self, attempt: Attempt) -> None:
        """Give the attempt's pin back, once."""
        if self._drop(attempt):
            self.ring.native.unpin(attempt.slot, attempt.generation)

    def _drop(self, attempt: Attempt) -> bool:
        attempts = self._attempts.get(attempt.key)
        if attempts is None or attempt not in attempts:
            return False
        attempts.remove(attempt)
        if not attempts:
            del self._attempts[attempt.key]
        attempt.connection.finished(attempt)
        if not self._attempts:
            self._quiet.set()
        return True

    # --- once a second ------------------------------------------------------------------------------
    async def _sweep(self) -> None:
        while True:
            self.sweep(time.monotonic())
            await asyncio.sleep(self.settings.heartbeat_s)

    def sweep(self, now: float) -> None:
        """Heartbeat; close idle connections; end attempts acknowledged through other listeners, or not in time."""
        self.ring.native.heartbeat()
        idle_s = self.settings.listener_idle_eviction_s
        for attempts in list(self._attempts.values()):
            for attempt in list(attempts):
                if not attempt.sending and self._consumed_elsewhere(attempt):
                    self.ended(attempt)
        for connection in list(self._connections):
            oldest = connection.oldest_attempt()
            if oldest is not None and now - oldest > self.settings.ack_timeout_s:
                connection.expire_attempts(now - self.settings.ack_timeout_s)
            elif oldest is None and connection.opened and now - connection.last_active > idle_s:
                connection.close()

    def _consumed_elsewhere(self, attempt: Attempt) -> bool:
        info = self.ring.native.info(attempt.slot)
        return info.generation != attempt.generation or bool(info.done >> attempt.rank & 1)


async def serve_until(listener: Listener, stop: asyncio.Event, drain_s: float, ready: Callable[[int], None]) -> None:
    """Report the port of a started listener, serve until ``stop``, then drain."""
    if not listener.port:
        raise ClosedError("the listener has not been started")
    ready(listener.port)
    try:
        await stop.wait()
    finally:
        await listener.stop(drain_s)
