"""UCXXRolloutMixin: a rollout worker gets a ring, its server, and tickets for its payloads.

class Worker(UCXXRolloutMixin): ...
with Worker() as worker:
    worker.setup_ucxx(schema, queue=queue)
    ticket = worker.write_to_buffer(trajectory, metadata={"reward": 1.0})    # published to the queue as well
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from operator import index
from typing import Literal

import msgspec

from transport.claims.places import default_prefix
from transport.claims.rings import FoundRings, RingQueue
from transport.config import configuration
from transport.errors import QueueFullError, TransportError, UsageError
from transport.observe.metrics import Exporter, configured_exporter
from transport.packer.options import RingOptions, ServerOptions
from transport.packer.publisher import Publisher, PublishMode
from transport.packer.republish import MODULE, Republishing
from transport.packer.session import check_queue
from transport.packer.unpublished import Finished, queued, ticket_id
from transport.packer.with_block import WithBlock
from transport.packer.writing import Writing
from transport.queue.base import TicketQueue
from transport.ring.buffer import SharedRingBuffer
from transport.ring.states import RingStatistics
from transport.runtime import hurry
from transport.schema import Schema
from transport.server.after_writer import AfterWriter
from transport.server.server import UCXXServer
from transport.settings import Settings
from transport.store.directory import Announcement

__all__ = ["UCXXRolloutMixin", "queued", "ticket_id"]

log = logging.getLogger(__name__)

_RING, _SERVER = RingOptions(), ServerOptions()  # what setup_ucxx() takes where nothing is said


class UCXXRolloutMixin(Writing, WithBlock):
    """Mix into a rollout worker. Belongs to the worker's thread.

    `Rollout` is one by itself. A ``with`` cleans up at its end.
    """

    _ucxx_server: UCXXServer | None = None
    _ucxx_announcement: Announcement | None = None
    _ucxx_exporter: Exporter | None = None
    _ucxx_ends = True  # whether the end of the ring is that of its data, or an exception's
    _ucxx_told_s: float | None = None  # how long a drain goes on once a signal ends the program; None: all of it

    def setup_ucxx(
        self,
        schema: Schema | None = None,
        *,
        slots: int = 64,
        name: str | None = None,
        file: str | os.PathLike[str] | None = None,
        queue: TicketQueue | None = None,
        readers: int = 1,
        grouped: bool = False,
        publish: PublishMode | None = None,
        mode: Literal["process", "thread"] = "process",
        ring: RingOptions = _RING,
        server: ServerOptions = _SERVER,
        settings: Settings | None = None,
    ) -> SharedRingBuffer:
        """Create the ring and serve it. Called again, it cleans up first.

        Args:
            schema, slots, name: of the ring, see `SharedRingBuffer.create`. With a ``name``, a restarted worker takes
                over its old ring, and `reconcile` publishes payloads missing in the queue.
            file: where the ring lies instead of /dev/shm, see `SharedRingBuffer.create`. What is unread when the worker
                ends, in whatever way, waits there for the next one; ``RingOptions(sync=…)`` says whether also for the
                host's next start after a loss of power.
            queue: where `write_to_buffer` publishes tickets; None: the ring hands its payloads out itself, to trainers
                of this host that were given no queue either, unless the caller passes the tickets on.
            readers: how many ranks read each payload; with ``RingOptions(consumers=…)`` all of theirs.
            grouped: these ranks are a model-parallel group, which claims each payload together: it is one delivery of
                the queue (`GroupQueue`), not one for each rank.
            publish: "background": `write_to_buffer` returns when the payload is in the ring, and a thread publishes
                tickets in batches, in the order of writing; `flush_ucxx` waits for it. If this process is killed, the
                server's supervisor has the rest published. "immediate": `write_to_buffer` publishes. Default:
                "background" if another process can finish the job (mode "process", and a queue that has an address,
                as RedisQueue has), else "immediate".
            mode: of the server, see `UCXXServer`.
            ring, server: further choices, for example ``server=ServerOptions(ports=(7001, 7002))``.
            settings: the default of this and of the server's addresses, wires and secret is the operator's
                configuration (config.py), which may also turn on metrics.

        Raises:
            ConfigurationError: the operator's configuration is wrong.
            QueueError: a ring was taken over, and the queue cannot be asked what it knows of its payloads.

        Where it raises, nothing is set up, and a ring that it had taken over keeps its unread payloads: call it again.
        """
        check_queue(queue)
        readers = index(readers)
        if publish not in (None, "background", "immediate"):
            raise UsageError(f"publish={publish!r}; choose 'background' or 'immediate'")
        self._ucxx_ends = False  # another ring follows
        self.cleanup_ucxx()
        self._ucxx_ends = True
        operator = configuration()
        directory = server.directory
        prefix = default_prefix() if queue is None else ""
        if isinstance(queue, FoundRings):
            prefix = queue.places.prefix
            directory = directory or queue.places.directory
            if name is not None and not name.removeprefix("/transport-").startswith(prefix):
                raise UsageError(f"name={name!r}: trainers look for names that begin with {prefix!r}; begin it so")
        made = SharedRingBuffer.create(
            schema,
            slots=slots,
            slot_bytes=ring.slot_bytes,
            name=name,
            prefix=prefix,
            overflow=ring.overflow,
            consumers=ring.consumers,
            file=file,
            sync=ring.sync,
        )
        try:
            readers = made.readers_of(None if ring.consumers and readers == 1 else readers)
            after_writer = None
            if mode == "process" and queue is not None and (address := queue.address) is not None:
                task = Republishing(
                    segment=made.name,
                    queue=address,
                    grouped=grouped,
                    log_level=operator.log_level,
                    log_format=operator.log_format,
                )
                after_writer = AfterWriter(module=MODULE, message=msgspec.json.encode(task))
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
                after_writer=after_writer,
            ).start()
            if directory is not None:
                self._ucxx_announcement = Announcement(directory, made, self._ucxx_server)
            self._ucxx_exporter = configured_exporter(operator)
            if queue is not None and not isinstance(queue, FoundRings):
                how: PublishMode = publish or ("immediate" if after_writer is None else "background")
                self._ucxx_publisher = Publisher(queue, how, made.slot_count, Finished(made, queue).look)
            if self._ucxx_exporter is not None:
                self._ucxx_exporter.add_ring(made)
            self._ucxx_ring, self._ucxx_queue, self._ucxx_readers = made, queue, readers
            self._ucxx_grouped = grouped
            if isinstance(queue, FoundRings):
                queue.hand_out(made)
            elif queue is None and grouped:  # what a group has ended is freed by `reconcile`
                self._ucxx_queue = RingQueue([made])
            if made.native.taken_over and queue is not None:
                with contextlib.suppress(QueueFullError):  # what the queue does not take waits with the publisher
                    self.reconcile()
        except BaseException:
            self._ucxx_ring = None  # cleanup_ucxx would give up what the killed worker left unread
            try:
                self.cleanup_ucxx()
            finally:
                made.close(keep_unread=made.native.taken_over)
            raise
        return made

    def ring_statistics(self) -> RingStatistics:
        """States and counters of the ring."""
        return self.ring.statistics()

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports that this worker's listeners have, those chosen for a 0, too. Empty before setup, after cleanup."""
        return () if self._ucxx_server is None else tuple(self._ucxx_server.ports)

    @property
    def metrics_port(self) -> int | None:
        """Port of this worker's metrics; None: ``metrics_port`` is not configured."""
        return None if self._ucxx_exporter is None else self._ucxx_exporter.port

    def cleanup_ucxx(self, drain_s: float = 0.0, *, ends: bool = True) -> None:
        """Publish what waits for it, stop serving, and close the ring. Any state; idempotent.

        Trainers learn that this rollout writes nothing more (`FoundRings.finished`), unless an exception ends its
        ``with``.

        Raises what the queue raises if that fails, when everything else is done.

        Args:
            drain_s: wait this long for tickets to be published and unread payloads to be consumed first, and for
                connected trainers to hear the end.
            ends: False: another process continues in its place, so that this is no end of data.
        """
        if self._ucxx_unsure and drain_s > 0:
            with contextlib.suppress(TransportError):
                self._find_interrupted()
        self._ucxx_unsure = False
        server, self._ucxx_server = self._ucxx_server, None
        ring, self._ucxx_ring = self._ucxx_ring, None
        announcement, self._ucxx_announcement = self._ucxx_announcement, None
        exporter, self._ucxx_exporter = self._ucxx_exporter, None
        publisher, self._ucxx_publisher = self._ucxx_publisher, None
        self._ucxx_queue = None
        give_up_at = time.monotonic() + drain_s
        # the ring is closed even if the server fails to stop
        with hurry.while_ending(max(hurry.MOST_S, drain_s)), contextlib.ExitStack() as stack:
            if ring is not None:
                stack.callback(_close, ring, server)
                if ends and self._ucxx_ends and not ring.native.closed:
                    ring.end_data()
            if announcement is not None:
                stack.callback(announcement.close)  # readers look it up until the last payload is read
            if exporter is not None:  # what waits for its trainers can be looked at
                stack.callback(exporter.close)
            if server is not None:
                stack.callback(lambda: server.close(max(0.0, give_up_at - time.monotonic()), told_s=self._ucxx_told_s))
            if publisher is not None:
                stack.callback(publisher.abort)
                stack.callback(publisher.close, drain_s)  # first: what is drained has to be published


def _close(ring: SharedRingBuffer, server: UCXXServer | None) -> None:
    native = ring.native
    if not native.closed and not native.file and ring.overflow != "overwrite":  # there payloads may go unread
        given_up = native.unread + (0 if server is None else server.given_up)
        if given_up:
            log.warning(
                "ring %s is closed with %d payloads that no trainer has consumed, and gives them up; stop inside "
                "until_stopped(), and close with drain_s, to wait for the trainers",
                ring.ring_id[:8],
                given_up,
            )
    ring.close()
