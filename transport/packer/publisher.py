"""Publishes a rollout worker's tickets in the order of writing, from a thread or from the call that wrote.

    add ──► waiting ──publish succeeded──► forgotten
              ▲ │
              └─┘ publish failed: tried again after a pause; the failure is raised at the next write, and at flush

* A payload is in its ring before its ticket is here, and its slot stays READY until its ticket was claimed. What waits
  here when the process dies is therefore found in the ring, and published by another process (republish.py), or by the
  writer that takes the ring over. Both do it with a Publisher: nothing else publishes what a ring has.
* While one batch is published the next one gathers: the faster tickets come, the more share one transaction.
* Publishing is idempotent for each id, so that a batch whose outcome is unknown is published again. No payload is
  withdrawn whose ticket may have been published: a trainer may have claimed it.
* A queue that is full refuses a batch as a whole. Then fewer are tried, down to one.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import Literal, NamedTuple

from transport.errors import ClosedError, QueueFullError, QueueUnavailableError, TransportError
from transport.queue.base import QueuedTicket, TicketQueue
from transport.runtime import hurry, threads
from transport.runtime.decoders import hiding
from transport.runtime.loop_thread import Flag

log = logging.getLogger(__name__)

PublishMode = Literal["background", "immediate"]

MOST_AT_ONCE = 256
TIDY_EVERY = 1000
_PAUSE_FIRST_S, _PAUSE_MOST_S = 0.05, 2.0


@hiding("queued")
class Waiting(NamedTuple):
    """A ticket whose payload is in the ring, with what `publish` is told of it."""

    queued: QueuedTicket
    readers: int  # deliveries, one for each rank
    policy_version: int | None

    @property
    def terms(self) -> tuple[int, int | None]:
        """What the tickets of one call have in common."""
        return self.readers, self.policy_version


def runs(waiting: Iterable[Waiting], most: int = MOST_AT_ONCE) -> Iterable[list[Waiting]]:
    """The same tickets in the same order, in batches that one call can publish."""
    for _, run in itertools.groupby(waiting, lambda each: each.terms):
        each = list(run)
        for start in range(0, len(each), most):
            yield each[start : start + most]


class Publisher:
    """The tickets of one ring on their way to the queue. Tickets are added by one thread, the worker's.

    An interrupt of that thread (Ctrl-C) at any instant hangs and loses nothing: the two threads share a deque, which
    one of them extends and the other shortens, and no lock.

    Args:
        mode: "background": `add` returns at once, and a thread publishes. "immediate": `add` publishes.
        most_waiting: tickets that may wait; beyond it `room` waits.
        tidy: called behind every so many publications, by the thread that publishes.
    """

    def __init__(
        self, queue: TicketQueue, mode: PublishMode, most_waiting: int, tidy: Callable[[], object] | None = None
    ) -> None:
        self.mode: PublishMode = mode
        self._queue = queue
        self._most_waiting = most_waiting
        self._pid = os.getpid()
        self._waiting: deque[Waiting] = deque()
        self._wake: SimpleQueue[bool] = SimpleQueue()  # an item for each reason to look; True: also in a pause
        self._attempted = Flag()  # set after an attempt, and replaced by a new one before
        self._most_at_once = MOST_AT_ONCE
        self._tidy = tidy
        self._until_tidy = TIDY_EVERY
        self._failure: TransportError | None = None  # of the last attempt, until it is raised or an attempt succeeds
        self._failures = 0
        self._closing = False
        self._thread: threading.Thread | None = None
        if mode == "background":
            self._thread = threading.Thread(target=self._run, name="transport publisher", daemon=True)
            threads.start(self._thread)

    def __repr__(self) -> str:
        return f"<Publisher {self.mode}, {len(self._waiting)} waiting>"

    # --- the worker's side --------------------------------------------------------------------------
    def add(self, tickets: Sequence[Waiting]) -> None:
        """Take tickets whose payloads are in the ring. "immediate": publish them, and what waited before.

        Raises ("immediate" only) what `publish` raises. The tickets keep waiting, unless `refused` takes them back.
        """
        self._check()
        self._waiting.extend(tickets)
        self._publish(urgent=False)

    def refused(self, error: BaseException, tickets: Sequence[Waiting]) -> list[Waiting]:
        """After `add` raised: those of the tickets that were certainly not published, which are forgotten here.

        With an unknown outcome there are none: the tickets wait, and are published with the next ones.
        """
        if not isinstance(error, TransportError) or isinstance(error, QueueUnavailableError):
            return []
        mine = {each.queued.id for each in tickets}
        forgotten = [each for each in self._waiting if each.queued.id in mine]
        self._waiting = deque(each for each in self._waiting if each.queued.id not in mine)
        return forgotten

    def room(self, give_up_at: float) -> bool:
        """Wait until one more ticket may wait. False when the time is over. Raises a failure, once.

        Raises ("immediate" only) what `publish` raises, of tickets that waited before.
        """
        while True:
            self._check()
            attempted = self._attempted
            self._raise_failure()
            if len(self._waiting) < self._most_waiting:
                return True
            if self._thread is None:  # nothing else publishes them
                self._publish(urgent=False)
                continue
            if time.monotonic() >= give_up_at:
                return False
            attempted.wait(give_up_at - time.monotonic())

    def pending(self) -> set[str]:
        """Ids of the tickets that wait."""
        return set() if os.getpid() != self._pid else {each.queued.id for each in self._waiting.copy()}

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every ticket that was added is published.

        Raises:
            TimeoutError: they are not after ``timeout_s``; publishing continues.
            QueueError kinds: an attempt failed; another one follows.
        """
        if os.getpid() != self._pid:
            raise ClosedError("tickets are published by the process that wrote them, not by a child that it forked")
        give_up_at = None if timeout_s is None else time.monotonic() + timeout_s
        self._publish(urgent=True)
        while True:
            attempted = self._attempted
            if not self._waiting:
                return
            self._raise_failure()
            if self._closing:
                raise ClosedError(f"{len(self._waiting)} tickets are not published: cleanup_ucxx() was called")
            left_s = None if give_up_at is None else give_up_at - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise TimeoutError(
                    f"{len(self._waiting)} tickets are not published after {timeout_s:g} s; publishing continues"
                )
            attempted.wait(left_s)

    def close(self, patience_s: float = 0.0) -> None:
        """Publish what waits, and end. Idempotent. Raises the failure of the last attempt, after which none follows.

        What a retry may cure is tried again for ``patience_s``, or until the end of this process is in a hurry; then it
        returns within the time that the queue takes to fail. In a forked child it does nothing.
        """
        if os.getpid() != self._pid or self._closing:
            return
        give_up_at = time.monotonic() + patience_s
        try:
            for failures in itertools.count(1):
                try:
                    self.flush()
                    break
                except TransportError as error:
                    left_s = min(give_up_at, hurry.until()) - time.monotonic()
                    if not error.retryable or left_s <= 0:
                        raise
                self._attempted.wait(min(_pause_s(failures), left_s))
        finally:
            self.abort()
        if self._thread is not None:
            self._thread.join()

    def abort(self) -> None:
        """End without publishing what waits. Does not wait for the thread."""
        if os.getpid() == self._pid:
            self._closing = True
            self._wake.put(True)

    def _publish(self, urgent: bool) -> None:
        if self._thread is not None:
            self._wake.put(urgent)
        else:
            while self._publish_once():
                pass

    def _check(self) -> None:
        if os.getpid() != self._pid or self._closing:
            raise ClosedError("no ticket is published after cleanup_ucxx(), nor in a forked child")

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            kind = type(failure)
            raise kind(
                f"{len(self._waiting)} tickets are not published yet, their payloads are in the ring, and publishing "
                f"is tried again: {failure}"
            ) from failure

    # --- publishing ---------------------------------------------------------------------------------
    def _publish_once(self) -> bool:
        """Publish the first batch; False: nothing waits. Raises what the queue raises."""
        batch = next(iter(runs(itertools.islice(self._waiting.copy(), self._most_at_once))), None)
        if batch is None:
            return False
        try:
            readers, policy_version = batch[0].terms
            self._queue.publish([each.queued for each in batch], readers=readers, policy_version=policy_version)
        except QueueFullError:
            self._most_at_once = max(1, len(batch) // 2)
            if len(batch) > 1:
                return True
            raise
        self._most_at_once = min(MOST_AT_ONCE, 2 * self._most_at_once)
        for _ in batch:
            self._waiting.popleft()
        self._until_tidy -= len(batch)
        if self._until_tidy <= 0 and self._tidy is not None:
            self._until_tidy = TIDY_EVERY
            with contextlib.suppress(TransportError):  # it is tried again later, and what it is for can wait
                self._tidy()
        return True

    def _run(self) -> None:
        while not self._closing:
            try:
                published = self._publish_once()
                self._failures, self._failure = 0, None
            except Exception as error:
                self._failed(error if isinstance(error, TransportError) else _unexpected(error))
                published = False
            attempted, self._attempted = self._attempted, Flag()
            attempted.set()
            if not published and not self._closing:
                self._wait()

    def _wait(self) -> None:
        """Until there is something to publish; after a failure for its pause, unless it is urgent."""
        if not self._failures:
            self._wake.get()
        else:
            until = time.monotonic() + _pause_s(self._failures)
            with contextlib.suppress(Empty):
                while not self._wake.get(timeout=max(0.0, until - time.monotonic())):
                    pass
        with contextlib.suppress(Empty):
            while True:
                self._wake.get_nowait()

    def _failed(self, error: TransportError) -> None:
        self._failures += 1
        self._failure = error
        if self._failures == 1:
            log.warning("%d tickets are not published, trying again: %s", len(self._waiting), error)


def _pause_s(failures: int) -> float:
    """Seconds after so many failures in a row."""
    return min(_PAUSE_FIRST_S * 2.0 ** min(failures - 1, 16), _PAUSE_MOST_S)


def _unexpected(error: Exception) -> TransportError:
    told = QueueUnavailableError(f"publishing failed with {error!r}")
    told.__cause__ = error
    return told
