"""Writing payloads from a rollout worker: into its ring, and their tickets to the queue.

While the ring is full, it is reconciled with the queue every few seconds. A request to stop (hurry.py) ends the wait.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from transport.errors import ClosedError, RingFullError, StopRequestedError, TransportError
from transport.packer.publisher import Publisher, Waiting
from transport.packer.unpublished import compared, queued, queued_many
from transport.queue import arguments
from transport.queue.base import TicketQueue
from transport.ring.buffer import SharedRingBuffer
from transport.ring.writes import Tickets
from transport.runtime import hurry
from transport.runtime.arguments import seconds
from transport.ticket import Ticket

log = logging.getLogger(__name__)

T = TypeVar("T")

_RECONCILE_EVERY_S = 5.0  # while the ring is full
_LOOK_S = 0.5  # for a request to stop, while a write waits


class Writing:
    """What a rollout worker does with the ring and the queue that it was given. Belongs to the worker's thread."""

    _ucxx_ring: SharedRingBuffer | None = None
    _ucxx_queue: TicketQueue | None = None
    _ucxx_publisher: Publisher | None = None
    _ucxx_unsure = False  # a write was interrupted: its payload may be in the ring and not published
    _ucxx_readers = 1
    _ucxx_grouped = False

    @property
    def ring(self) -> SharedRingBuffer:
        """The worker's ring. Raises ClosedError before setup and after cleanup."""
        if self._ucxx_ring is None:
            raise ClosedError("this rollout is closed, or not set up: make a new Rollout, or call setup_ucxx()")
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
        """Write one trajectory and have its ticket published, see ``publish`` of `setup_ucxx`.

        While the ring is full, it is reconciled with the queue every few seconds. Raises what `SharedRingBuffer.write`
        raises; StopRequestedError, if the ring is full and a signal has asked the program to stop (`until_stopped`);
        and what the queue's `publish` raised: in the background, for tickets of earlier calls, and this call
        wrote nothing; with publish="immediate", for this one. Its payload is then withdrawn, unless the outcome is
        unknown (`QueueUnavailableError`): then it stays in the ring, and its ticket is published by a later call. Where
        as many tickets wait so as the ring has slots, they are published before anything is written.
        """
        version = arguments.number_or_none(policy_version, "policy_version of write_to_buffer()")
        ring = self.ring

        def write(timeout_s: float) -> Ticket:
            return ring.write(
                trajectory,
                readers=self._ucxx_readers,
                metadata=metadata,
                policy_version=version,
                deadline_s=deadline_s,
                timeout_s=timeout_s,
            )

        ticket = self._written(write, timeout_s)
        publisher = self._ucxx_publisher
        if publisher is not None:
            waiting = [Waiting(queued(ticket), self._deliveries, version)]
            try:
                publisher.add(waiting)
            except BaseException as error:
                for _ in publisher.refused(error, waiting):
                    with contextlib.suppress(TransportError):
                        ring.discard(ticket)
                raise
        self._ucxx_unsure = False
        return ticket

    def write_many_to_buffer(
        self,
        trajectories: Iterable[Mapping[str, Any]],
        *,
        metadata: Mapping[str, Any] | Iterable[Mapping[str, Any] | None] | None = None,
        policy_version: int | None = None,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Tickets:
        """Write many trajectories in one call, which costs a fraction of as many `write_to_buffer`; their tickets.

        Raises what `SharedRingBuffer.write_many` raises: with RingFullError, ``written`` has the tickets of those
        payloads that were written, and these are published. StopRequestedError (see `write_to_buffer`) has them, too.
        Errors of publishing are as with `write_to_buffer`, but no payload is withdrawn: what was written stays in the
        ring, and is published by a later call.
        """
        version = arguments.number_or_none(policy_version, "policy_version of write_many_to_buffer()")
        batch = self.ring.plan_many(
            trajectories,
            readers=self._ucxx_readers,
            metadata=metadata,
            policy_version=version,
            deadline_s=deadline_s,
        )
        encoded: list[bytes] = []
        give_up = float("inf") if timeout_s is None else time.monotonic() + timeout_s

        def write(timeout_s: float) -> None:
            done = batch.write(timeout_s)
            self._publish_many(done, version)  # before the next ones wait for room, which its readers make
            encoded.extend(done.encoded)

        try:
            while batch.left:
                self._written(write, None if timeout_s is None else max(give_up - time.monotonic(), 0.0))
                self._ucxx_unsure = False
        except RingFullError as error:  # of the last payloads, or since tickets wait for a slow queue
            error.written = Tickets(encoded)
            raise
        return Tickets(encoded)

    def _publish_many(self, tickets: Tickets, version: int | None) -> None:
        if self._ucxx_publisher is not None:
            self._ucxx_publisher.add([Waiting(each, self._deliveries, version) for each in queued_many(tickets)])

    def _written(self, write: Callable[[float], T], timeout_s: float | None) -> T:
        """What ``write`` gives, which is called again while the ring is full, and until the time is over."""
        ring, publisher = self.ring, self._ucxx_publisher
        now = time.monotonic()
        give_up = now if ring.overflow == "error" else float("inf") if timeout_s is None else now + timeout_s
        reconcile_at = now + _RECONCILE_EVERY_S
        if self._ucxx_unsure:
            self._find_interrupted()
        while True:
            while publisher is not None and not publisher.room(time.monotonic() + _wait_s(give_up)):
                _check_wait(
                    RingFullError(
                        f"the tickets of {ring.slot_count} payloads are not published yet: the queue is slower than "
                        "the writer, or does not answer"
                    ),
                    give_up,
                )
            self._ucxx_unsure = publisher is not None  # until its ticket is with the publisher
            try:
                return write(_wait_s(give_up))
            except RingFullError as full:
                self._ucxx_unsure = False
                if min(reconcile_at, give_up) <= time.monotonic() and not hurry.stop_requested():
                    # A trainer that was killed between the queue's and the ring's acknowledgement leaves slots unfreed.
                    reconcile_at = time.monotonic() + _RECONCILE_EVERY_S
                    if self.reconcile()[1]:
                        continue
                _check_wait(full, give_up)
            except Exception:
                self._ucxx_unsure = False  # nothing was written
                raise

    def _find_interrupted(self) -> None:
        """A write was interrupted (Ctrl-C): what it may have put into the ring is published."""
        self.reconcile()
        self._ucxx_unsure = False

    @property
    def _deliveries(self) -> int:
        return 1 if self._ucxx_grouped else self._ucxx_readers

    def flush_ucxx(self, timeout_s: float | None = None) -> None:
        """Wait until the queue has the tickets of everything that was written.

        Raises:
            TimeoutError: it has not after ``timeout_s``; publishing continues.
            QueueError kinds: an attempt failed; with publish="background" another one follows.
        """
        seconds(timeout_s, "timeout_s of flush_ucxx()")
        if self._ucxx_publisher is not None:
            if self._ucxx_unsure:
                self._find_interrupted()
            self._ucxx_publisher.flush(timeout_s)

    def reconcile(self) -> tuple[int, int]:
        """Make ring and queue agree after either restarted; returns (tickets published again, slots freed).

        Unread payloads that the queue does not have are published as those of a write are: in the background, where
        `flush_ucxx` waits for them, or by this call, which then raises what the queue's `publish` raises. Those it
        records as finished are freed.
        """
        ring, queue, publisher = self.ring, self._ucxx_queue, self._ucxx_publisher
        if queue is None:
            return 0, 0
        # What the publisher has is not unknown; read before the ring, so that none is missed in between.
        waiting = set() if publisher is None else publisher.pending()
        missing, freed = compared(ring, queue, grouped=self._ucxx_grouped, waiting=waiting)
        if publisher is not None:
            publisher.add(missing)
        published = len(missing)
        if published and not ring.native.taken_over:  # a writer that was killed may not have published its last one
            log.warning(
                "%d unread payloads were unknown to the queue and are published again; if the queue lost its records, "
                "they may be trained on twice",
                published,
            )
        log.debug("reconciled ring %s: %d published again, %d freed", ring.ring_id[:8], published, freed)
        return published, freed


def _wait_s(give_up: float) -> float:
    """How long to wait for room before the next look at whether the wait is over."""
    return 0.0 if hurry.stop_requested() else min(max(give_up - time.monotonic(), 0.0), _LOOK_S)


def _check_wait(full: RingFullError, give_up: float) -> None:
    """Raises ``full`` where the time is over, StopRequestedError where a stop was requested."""
    if hurry.stop_requested():
        raise StopRequestedError(f"{full}. The program was asked to stop: write no more, and close") from None
    if time.monotonic() >= give_up:
        raise full
