"""Claiming from rings elsewhere: demands of each rank bring claims with their payloads, over the client's connections.

`held_elsewhere.py` has what is claimed, and how it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from transport.client.client import UCXXClient
from transport.client.takes.link import MOST_BYTES, TakeLink
from transport.config import configuration
from transport.errors import (
    AuthenticationError,
    ClosedError,
    MissingDependencyError,
    RankError,
    TransportError,
    VersionMismatchError,
    WireNotAllowedError,
)
from transport.queue.base import Carrier, Claim, too_old
from transport.queue.demands import Brought, Demands, Place
from transport.queue.ends import End, Held
from transport.queue.held_elsewhere import HeldElsewhere
from transport.queue.looks import ring_of, token_of
from transport.ring.consumers import consumers_of, rank_of
from transport.runtime.loop_thread import LoopThread
from transport.taking.batch import TakenBatch, Verdicts
from transport.taking.batches import TakenPayloads

_BATCHES: Final = 3  # that lie unused or are asked for: one is being looked at, one has come, one is on its way
_CLAIMS: Final = 16  # of which the largest says how large a batch is: some claim until they have a whole one
_LOOK_S: Final = 0.25
# With these a place stays unreachable until this process is configured otherwise.
_OWN_FAULTS: Final = (AuthenticationError, MissingDependencyError, VersionMismatchError, WireNotAllowedError)


class _Rank:
    """What came for one rank and is not claimed yet."""

    def __init__(self, demands: Demands) -> None:
        self.demands = demands
        self.came: deque[tuple[Brought, int]] = deque()  # with the position of the first that is not claimed
        self.unsaid: dict[int, Brought] = {}  # taken, and not said to be used: that costs a turn of the loop
        self.sizes: deque[int] = deque(maxlen=_CLAIMS)
        self.wanted: tuple[int, int | None] | None = None


class FoundElsewhere(HeldElsewhere):
    """Claims over the network. Any thread but the client's.

    Args:
        served: the places of this moment; may block.
        max_deliveries: claims in vain after which a delivery is dead.
        ring: called when something has come, for threads that wait for rings of this host as well.
    """

    def __init__(
        self,
        served: Callable[[], Mapping[str, Place]],
        max_deliveries: int,
        ring: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(max_deliveries)
        self._served = served
        self._ring = ring
        self._starting = threading.Lock()  # guards thread, client and ranks
        self._client: Any = None
        self._own = False
        self._ranks: dict[int | str, _Rank] = {}
        self._closed = False
        # Belongs to the loop. A batch that the caller has dropped is not kept for its answer.
        self._finishing: WeakKeyDictionary[TakenBatch, asyncio.Task[Verdicts]] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"<FoundElsewhere {len(self._held)} claims>"

    # --- the client -----------------------------------------------------------------------------------
    def use(self, thread: LoopThread, client: Carrier) -> None:
        """Take through this client from now on. Nothing where there is one already."""
        with self._starting:
            if self._client is None:
                self._thread, self._client = thread, client

    def disconnect(self, client: Carrier | None) -> None:
        """End what was taken through this client; None: through the present one."""
        with self._starting:
            if self._client is None or client not in (None, self._client):
                return
            thread, ours, own = self._thread, self._client, self._own
            ranks, self._ranks = self._ranks, {}
            self._thread = self._client = None
            self._own = False
        if thread is not None and not thread.closed:
            with contextlib.ExitStack() as stack:
                if own:
                    stack.callback(thread.close)
                    stack.callback(lambda: thread.run(ours.close()))
                for rank in ranks.values():
                    stack.callback(_closed_on, thread, rank.demands)

    def rank(self, rank: int | str) -> _Rank:
        """The demands of a rank, from the first call on."""
        known = self._ranks.get(rank)
        if known is not None and self._thread is not None and not self._thread.closed:
            return known
        with self._starting:
            if self._thread is not None and self._thread.closed:
                raise ClosedError("a forked child does not have its parent's connections; open the queue in the child")
            known = self._ranks.get(rank)
            if known is None:
                if self._closed:
                    raise ClosedError("the queue is closed")
                if self._client is None or self._thread is None:
                    self._thread, self._client = _made()
                    self._own = True
                known = self._ranks[rank] = self._thread.run(self._start(self._client, rank))
            return known

    async def _start(self, client: Carrier, rank: int | str) -> _Rank:
        def came(brought: Brought) -> None:
            with self._lock:
                made.came.append((brought, 0))
                self._changed.notify_all()
            self._ring()

        made = _Rank(
            Demands(
                client.taking,
                self._served,
                came,
                rank=rank,
                most_bytes=MOST_BYTES,
                most_attempts=self._most_attempts,
                look_s=_LOOK_S,
            )
        )
        return made

    # --- claiming -------------------------------------------------------------------------------------
    def want(self, rank: int | str, n: int, oldest_version: int | None) -> None:
        """Have demands for some times ``n`` payloads wait; does not wait itself."""
        of = self.rank(rank)
        of.sizes.append(n)
        most = max(of.sizes)
        if of.wanted != (most, oldest_version) and self._thread is not None:
            of.wanted = (most, oldest_version)
            self._thread.soon(of.demands.want, _BATCHES, most, oldest_version)

    def take(self, n: int, wait_s: float, rank: int | str) -> Brought | None:
        """A whole batch that has come, whatever its size; for those who need no `Claim` of each payload."""
        of = self.rank(rank)
        with self._lock:
            if not of.came:
                if of.unsaid:  # it does not consume what it took before it takes more
                    for each in of.unsaid.values():
                        self._use(each, len(each.batch))
                    of.unsaid.clear()
                self._changed.wait(wait_s)
            while of.came:
                came = of.came[0]
                brought, at = came
                if brought.link.lost:
                    of.came.popleft()
                    continue  # its payloads can be claimed by others now
                if at:  # the others were claimed one by one
                    brought = brought._replace(batch=brought.batch.part(at, len(brought.batch)))
                try:
                    of.unsaid[id(brought)] = brought
                    of.came.popleft()
                    return brought
                except BaseException:  # an interrupt: the next call has it
                    of.unsaid.pop(id(brought), None)
                    if not any(each is came for each in of.came):
                        of.came.appendleft(came)
                    raise
        return None

    def finish_batch(self, brought: Brought, payloads: TakenPayloads | None = None) -> Future[Verdicts]:
        """Consume all of a batch, or what was kept of it; which were accepted, once the listener has said so."""
        for of in list(self._ranks.values()):
            if of.unsaid.pop(id(brought), None) is not None:
                self._use(brought, len(brought.batch))  # before its end: older ones may still be in hand
        thread = self._thread
        if thread is None or thread.closed:
            ended: Future[Verdicts] = Future()
            ended.set_result(np.zeros(len(brought.batch if payloads is None else payloads), np.bool_))
            return ended
        return thread.submit(self._finished(brought, payloads))

    async def _finished(self, brought: Brought, payloads: TakenPayloads | None) -> Verdicts:
        """Repeated after an interrupt this is the same question, with the same answer."""
        asking = self._finishing.get(brought.batch)
        if asking is None or (asking.done() and (asking.cancelled() or asking.exception() is not None)):
            end = brought.demands.finish(brought, brought.batch.rows) if payloads is None else payloads.consume()
            asking = self._finishing[brought.batch] = asyncio.get_running_loop().create_task(end)
        return await asyncio.shield(asking)

    def told(self, brought: Brought) -> None:
        """The caller has the answer of `finish_batch`; a further call asks anew."""
        self._finishing.pop(brought.batch, None)

    def claim(self, n: int, wait_s: float, rank: int | str, consumer: str, oldest_version: int | None) -> list[Claim]:
        """Up to ``n`` of what has come, the first that came first."""
        of = self.rank(rank)
        claims: list[Claim] = []
        aged: list[Claim] = []
        try:
            with self._lock:
                if not of.came:
                    self._changed.wait(wait_s)
                while of.came and len(claims) < n:
                    came = of.came[0]
                    brought, begin = came
                    if brought.link.lost:
                        of.came.popleft()
                        continue  # others may have claimed them by now
                    end = min(len(brought.batch), begin + n - len(claims))
                    of_ring = self.counts.setdefault(brought.batch.ring, Counter())
                    its_rank = int(brought.batch.rows["rank"][begin])
                    try:
                        if end < len(brought.batch):
                            of.came[0] = brought, end
                        else:
                            of.came.popleft()
                        for at in range(begin, end):
                            claim = self._claimed(brought, at, its_rank, consumer)
                            version = claim.policy_version
                            old = None not in (version, oldest_version) and version < oldest_version  # type: ignore[operator]
                            (aged if old else claims).append(claim)
                        self._use(brought, end - begin)
                        of_ring[its_rank, "claimed"] += end - begin  # last: what is given up below is not counted
                    except BaseException:
                        if not any(each is came for each in of.came):
                            self._unclaim(brought, begin, end)
                        raise
            while aged:  # asked for when an older policy would do
                claim = aged[0]
                self._end([claim], End("aged", too_old(claim.policy_version or 0, oldest_version or 0)))
                del aged[0]
            return claims
        except BaseException:  # an interrupt: no caller has these claims
            self.forget([*claims, *aged])
            raise

    def _unclaim(self, brought: Brought, begin: int, end: int) -> None:
        """Give up payloads of which some have become claims."""
        for token, held in list(self._held.items()):
            if held.brought is brought and begin <= held.at < end:
                del self._held[token]
        self._use(brought, end - begin)
        self._let_go(brought, begin, end)

    def forget(self, claims: Sequence[Claim]) -> None:
        """Give up claims without waiting for the answer."""
        with self._lock:
            for claim in claims:
                held = self._held.pop(claim.token, None)
                if held is not None and not self._answers.give_up(held):
                    self._count(ring_of(claim), claim.rank, claimed=-1)
                    self._let_go(held.brought, held.at, held.at + 1)

    def _let_go(self, brought: Brought, begin: int, end: int) -> None:
        if self._thread is not None:
            self._thread.soon(brought.demands.let_go, brought, brought.batch.rows[begin:end])

    def _use(self, brought: Brought, count: int) -> None:
        if self._thread is not None:
            self._thread.soon(brought.demands.used, brought, count)

    def _claimed(self, brought: Brought, at: int, rank: int, consumer: str) -> Claim:
        payload = brought.batch[at]
        token = token_of(payload.name, rank, payload.attempts, consumer)
        self._held[token] = Held(brought, at)
        return Claim(payload.name, payload.encoded, rank, payload.attempts, token, payload.policy_version)

    def explain(self, rank: int | str, *, known: bool = False) -> None:
        """Raise why nothing can come, where this process's own configuration keeps it from every place.

        ``known``: another ring has the consumer of this name; those that have not are left out.
        """
        demands = self.rank(rank).demands
        faults = list(demands.faults.values())
        known = known or any(_knows(link, rank) for link in demands.links)
        for fault in faults:
            unknown_name = isinstance(fault, RankError) and not known
            if unknown_name or (not demands.connected and isinstance(fault, _OWN_FAULTS)):
                raise fault

    def _links_to(self, ring: str) -> list[TakeLink]:
        return [link for of in self._ranks.values() for link in of.demands.links if link.ring == ring]

    def close(self) -> None:
        """What is claimed can be claimed by others. Idempotent."""
        with self._starting:
            self._closed = True
        with self._lock:
            self._changed.notify_all()
        self._ring()
        self.disconnect(None)


def _knows(link: TakeLink, rank: int | str) -> bool:
    """Whether the ring of this connection has the rank, as far as its listener has said."""
    try:
        rank_of(consumers_of(link.link.consumers), rank)
    except TransportError:
        return False
    return True


def _closed_on(thread: LoopThread, demands: Demands) -> None:
    thread.run(_call(demands.close))


async def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _made() -> tuple[LoopThread, UCXXClient]:
    """A client of one's own, as the operator configured it."""
    operator = configuration()

    async def make() -> UCXXClient:
        return UCXXClient(wire=operator.wire_policy, settings=operator.settings, secret=operator.secret(), ack="manual")

    thread = LoopThread("transport rings")
    try:
        return thread, thread.run(make())
    except BaseException:
        thread.close()
        raise
