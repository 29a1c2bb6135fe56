"""BatchStream: batches of payloads from a queue's tickets; the next one is fetched while one is in use.

gather claims ──► fetch ──next──► in use ──used──► consumed
     ▲  (the next batch, while one is in use)  └──close──► given back, like all unused payloads
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

from transport.client.payload import ReceivedPayload
from transport.errors import SchemaError, TransportError
from transport.packer.mixin import FetchedBatch, TicketTrainer
from transport.queue.base import Claim, TicketQueue

log = logging.getLogger(__name__)

_SLICE_S: Final = 0.25  # of every wait, after which `stopping` is asked
_MEET_S: Final = 2.0  # after which a stream has met the rollouts that go on, also at addresses


class BatchStream:
    """Batches of payloads. Belongs to one thread of one process.

    Args:
        queue: the queue that tickets are claimed from.
        batch_size: payloads of a batch, at most.
        fill_s: seconds for which an incomplete batch waits for more tickets. Bounded, because other trainers may hold
            the missing ones.
        idle_s: the stream ends after so many seconds without a ticket, or when all rollouts have ended; None: then
            only.
        stopping: called during every wait; the stream ends when it returns True.
        options: of `TicketTrainer`, with its errors.

    Attributes:
        ended: all rollouts have ended, and the stream with them.
        behind_end: another stream of this run was `ended`. This one ends, too, where it meets no rollout that goes on:
            it may have begun too late to learn of those that have ended.
        packer: for its record and statistics. Claims, batches and its end are the stream's.
    """

    def __init__(
        self,
        queue: TicketQueue,
        batch_size: int,
        *,
        fill_s: float,
        idle_s: float | None,
        stopping: Callable[[], bool] = lambda: False,
        **options: Any,
    ) -> None:
        self.policy_version: int | None = None
        self.ended = self.behind_end = False
        self._meets_until = time.monotonic() + _MEET_S
        self._batch_size = batch_size
        self._fill_s = fill_s
        self._idle_s = float("inf") if idle_s is None else idle_s
        self._stopping = stopping
        self._waiting: list[Claim] = []  # of the batch after the one that is fetched
        self._fetching = False
        self.packer = TicketTrainer(queue=queue, **options)

    def next(self) -> FetchedBatch | None:
        """The next batch with a payload in it; None: `TicketTrainer.finished`, no tickets for ``idle_s``, or
        stopping.

        Raises the queue's errors, those of `collect_prefetch`, and SchemaError: a payload has a schema that was not
        given, or does not fit it; its batch is given back.
        """
        while True:
            if not self._fetching:
                self._gather()
                if not self._waiting:
                    return None
                self._fetch()
            batch = self._collect()
            if batch is None:
                return None
            for item in batch.failures:
                if isinstance(item.error, SchemaError):  # later batches have the same, and the caller sees no failures
                    self.packer.abandon(batch)
                    raise item.error
            try:
                self._claim(0.0)
                if len(self._waiting) == self._batch_size:
                    self._fetch()
            except TransportError as error:  # if it lasts, the next call raises it; this batch is here
                log.warning(
                    "prefetch of the next batch did not start, the next call retries: %s", str(error)
                )  # not its frames
            if batch.payloads:
                return batch
            self.packer.consume(batch)  # reports the failures again, if the queue was unavailable

    def used(self, batch: FetchedBatch) -> list[ReceivedPayload]:
        """Acknowledge a batch; returns the payloads that this trainer has consumed, and no other."""
        return self.packer.consume(batch)

    def record_with(self, batch: FetchedBatch) -> bytes:
        """For a checkpoint of a model that has learned from the batch, which is `used` later: the record with it."""
        self.packer.accept(batch)
        return self.packer.consumed_record().to_bytes()

    def close(self) -> None:
        """Give unused payloads back, and end. Idempotent."""
        self.packer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- steps ----------------------------------------------------------------------------------------
    def _gather(self) -> None:
        """Wait for the claims of a batch: for the first ``idle_s``, for the rest ``fill_s``."""
        give_up = time.monotonic() + (self._fill_s if self._waiting else self._idle_s)
        while len(self._waiting) < self._batch_size and not self._stopping():
            left = max(give_up - time.monotonic(), 0.0)
            begun = bool(self._waiting)
            if self._claim(min(left, _SLICE_S)):
                give_up = give_up if begun else time.monotonic() + self._fill_s
            elif not left or self._over():
                return

    def _over(self) -> bool:
        """Whether no payload comes any more, as far as a claim that brought nothing can tell."""
        self.ended = self.packer.finished()
        behind = self.behind_end and time.monotonic() >= self._meets_until
        return self.ended or (behind and self.packer._packer.queue.finished(0))

    def _claim(self, timeout_s: float) -> bool:
        wanted = self._batch_size - len(self._waiting)
        claims = self.packer.claim_tickets(wanted, timeout_s, policy_version=self.policy_version) if wanted else []
        self._waiting += claims
        return bool(claims)

    def _fetch(self) -> None:
        self.packer.start_prefetch(self._waiting)
        self._waiting, self._fetching = [], True

    def _collect(self) -> FetchedBatch | None:
        while not self._stopping():
            try:
                batch = self.packer.collect_prefetch(_SLICE_S)
            except TimeoutError:
                continue
            except BaseException:
                self._fetching = False  # its claims are back in the queue
                raise
            self._fetching = False
            return batch
        return None
