"""UCXXRolloutMixin: a rollout worker gets a ring, its server, and tickets for its payloads.

class Worker(UCXXRolloutMixin): ...
worker.setup_ucxx(schema, queue=queue)
ticket = worker.write_to_buffer(trajectory, metadata={"reward": 1.0})    # published to the queue as well
worker.cleanup_ucxx()
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any, Literal

from transport.config import configuration
from transport.errors import ClosedError, RingFullError, TransportError, UsageError
from transport.observe.metrics import Exporter, configured_exporter
from transport.packer.options import RingOptions, ServerOptions, check_options
from transport.packer.session import check_shared
from transport.queue.base import QueuedTicket, TicketQueue, finished
from transport.queue.found import FoundRings
from transport.queue.places import DEFAULT_PREFIX
from transport.queue.rings import RingQueue
from transport.ring.buffer import SharedRingBuffer
from transport.ring.states import RingStatistics
from transport.runtime.arguments import whole
from transport.schema import Schema
from transport.server.server import UCXXServer
from transport.settings import Settings
from transport.store.directory import Announcement
from transport.ticket import Ticket

log = logging.getLogger(__name__)

_RECONCILE_EVERY_S = 5.0  # while the ring is full
_RING, _SERVER = RingOptions(), ServerOptions()  # what setup_ucxx() takes where nothing is said


def ticket_id(ticket: Ticket) -> str:
    """The name under which a queue knows a ticket: ring/slot/generation."""
    return "/".join(map(str, ticket.identity))


def queued(ticket: Ticket) -> QueuedTicket:
    """A ticket as a queue takes it."""
    return QueuedTicket(ticket_id(ticket), ticket.encode())


class UCXXRolloutMixin:
    """Mix into a rollout worker. Belongs to the worker's thread."""

    _ucxx_ring: SharedRingBuffer | None = None
    _ucxx_server: UCXXServer | None = None
    _ucxx_queue: TicketQueue | None = None
    _ucxx_announcement: Announcement | None = None
    _ucxx_readers = 1
    _ucxx_grouped = False
    _ucxx_exporter: Exporter | None = None

    def setup_ucxx(
        self,
        schema: Schema | None = None,
        *,
        slots: int = 64,
        name: str | None = None,
        queue: TicketQueue | None = None,
        readers: int = 1,
        grouped: bool = False,
        mode: Literal["process", "thread"] = "process",
        ring: RingOptions = _RING,
        server: ServerOptions = _SERVER,
        settings: Settings | None = None,
    ) -> SharedRingBuffer:
        """Create the ring and serve it. Called again, it cleans up first.

        Args:
            schema, slots, name: of the ring, see `SharedRingBuffer.create`. With a ``name``, a restarted worker takes
                over its old ring, and `reconcile` publishes payloads missing in the queue.
            queue: where `write_to_buffer` publishes tickets; None: the ring hands its payloads out itself, to trainers
                of this host that were given no queue either, unless the caller passes the tickets on.
            readers: how many ranks read each payload.
            grouped: these ranks are a model-parallel group, which claims each payload together: it is one delivery of
                the queue (`GroupQueue`), not one for each rank.
            mode: of the server, see `UCXXServer`.
            ring, server: further choices, for example ``server=ServerOptions(ports=(7001, 7002))``.
            settings: the default of this and of the server's addresses, wires and secret is the operator's
                configuration (config.py), which may also turn on metrics.

        Raises:
            ConfigurationError: the operator's configuration is wrong.
        """
        check_options(ring=(ring, RingOptions), server=(server, ServerOptions))
        check_shared(queue, server.directory, settings, server.secret)
        readers = whole(readers, "readers")
        self.cleanup_ucxx()
        operator = configuration()
        directory = server.directory
        prefix = DEFAULT_PREFIX if queue is None else ""
        if isinstance(queue, FoundRings):
            prefix = queue.places.prefix
            directory = directory or queue.places.directory
            if name is not None and not name.removeprefix("/transport-").startswith(prefix):
                raise UsageError(f"name={name!r}: trainers look for names that begin with {prefix!r}; begin it so")
        made = SharedRingBuffer.create(
            schema, slots=slots, slot_bytes=ring.slot_bytes, name=name, prefix=prefix, overflow=ring.overflow
        )
        try:
            self._ucxx_server = UCXXServer(
                made,
                server.ports,
                addresses=server.addresses or operator.addresses or None,
                bind=operator.bind,
                settings=operator.settings if settings is None else settings,
                secret=operator.secret() if server.secret is None else server.secret,
                wires=operator.server_wires if server.wires is None else server.wires,
                mode=mode,
                linger_s=server.linger_s,
                log_level=operator.log_level,
                log_format=operator.log_format,
            ).start()
            if directory is not None:
                self._ucxx_announcement = Announcement(directory, made, self._ucxx_server)
            self._ucxx_exporter = configured_exporter(operator)
        except BaseException:
            self.cleanup_ucxx()
            made.close()
            raise
        if self._ucxx_exporter is not None:
            self._ucxx_exporter.add_ring(made)
        self._ucxx_ring, self._ucxx_queue, self._ucxx_readers = made, queue, readers
        self._ucxx_grouped = grouped
        if isinstance(queue, FoundRings):
            queue.hand_out(made)
        elif queue is None and grouped:  # what a group has ended is freed by `reconcile`
            self._ucxx_queue = RingQueue([made])
        if made.native.taken_over and queue is not None:
            self.reconcile()
        return made

    @property
    def ring(self) -> SharedRingBuffer:
        """The worker's ring. Raises ClosedError before setup and after cleanup."""
        if self._ucxx_ring is None:
            raise ClosedError("call setup_ucxx() first")
        return self._ucxx_ring

    def write_to_buffer(
        self,
        trajectory: Mapping[str, Any],
        *,
        metadata: Mapping[str, Any] | None = None,
        policy_version: int | None = None,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Ticket:
        """Write one trajectory and publish its ticket.

        If publishing fails, the payload is discarded, so the ring contains no payload without a ticket. While the ring
        is full, it is reconciled with the queue every few seconds.

        Raises what `SharedRingBuffer.write` and the queue's `publish` raise.
        """
        ring = self.ring
        give_up = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                ticket = ring.write(
                    trajectory,
                    readers=self._ucxx_readers,
                    metadata=metadata,
                    policy_version=policy_version,
                    deadline_s=deadline_s,
                    timeout_s=min(_RECONCILE_EVERY_S, max(give_up - time.monotonic(), 0.0)),
                )
                break
            except RingFullError:
                # A trainer that was killed between the queue's and the ring's acknowledgement leaves slots unfreed.
                _, freed = self.reconcile()
                if not freed and (ring.overflow == "error" or time.monotonic() >= give_up):
                    raise
        if self._ucxx_queue is not None and not isinstance(self._ucxx_queue, FoundRings | RingQueue):
            try:
                self._ucxx_queue.publish(
                    queued(ticket), readers=self._deliveries(ticket), policy_version=policy_version
                )
            except BaseException:
                with contextlib.suppress(TransportError):
                    ring.discard(ticket)
                raise
        return ticket

    def _deliveries(self, ticket: Ticket) -> int:
        return 1 if self._ucxx_grouped else ticket.readers

    def reconcile(self) -> tuple[int, int]:
        """Make ring and queue agree after either restarted; returns (tickets published again, slots freed).

        Unread payloads that the queue does not have are published again; those it records as finished are freed.
        """
        ring, queue = self.ring, self._ucxx_queue
        if queue is None:
            return 0, 0
        tickets = ring.tickets()
        known = queue.known(ticket_id(ticket) for ticket in tickets)
        published = freed = 0
        for ticket in tickets:
            states = known.get(ticket_id(ticket))
            if states is None:
                published += queue.publish(queued(ticket), readers=self._deliveries(ticket))
            elif finished(states[: self._deliveries(ticket)]):
                freed += ring.discard(ticket)
        if published and not ring.native.taken_over:  # a writer that was killed may not have published its last one
            log.warning(
                "%d unread payloads were unknown to the queue and are published again; if the queue lost its records, "
                "they may be trained on twice",
                published,
            )
        log.debug("reconciled ring %s: %d published again, %d freed", ring.ring_id[:8], published, freed)
        return published, freed

    def ring_statistics(self) -> RingStatistics:
        """States and counters of the ring."""
        return self.ring.statistics()

    @property
    def metrics_port(self) -> int | None:
        """Port of this worker's metrics; None: ``metrics_port`` is not configured."""
        return None if self._ucxx_exporter is None else self._ucxx_exporter.port

    def cleanup_ucxx(self, drain_s: float = 0.0) -> None:
        """Stop serving and close the ring. Any state; idempotent.

        Args:
            drain_s: wait this long for unread payloads to be consumed first.
        """
        server, self._ucxx_server = self._ucxx_server, None
        ring, self._ucxx_ring = self._ucxx_ring, None
        announcement, self._ucxx_announcement = self._ucxx_announcement, None
        exporter, self._ucxx_exporter = self._ucxx_exporter, None
        self._ucxx_queue = None
        with contextlib.ExitStack() as stack:  # the ring is closed even if the server fails to stop
            if ring is not None:
                stack.callback(ring.close)
            if announcement is not None:
                stack.callback(announcement.close)  # readers look it up until the last payload is read
            if server is not None:
                stack.callback(server.close, drain_s)
            if exporter is not None:
                stack.callback(exporter.close)
