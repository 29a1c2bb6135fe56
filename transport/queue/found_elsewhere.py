"""Claims of rings elsewhere: each came with its payload, and is held by a connection of the client's loop."""

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

from transport import _ring
from transport.client.client import UCXXClient
from transport.client.taking import MOST_BYTES, TakeLink
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
from transport.queue.arrivals import Arrivals, Arrived
from transport.queue.base import Came, Claim, DeliveryState, Failure, too_old
from transport.queue.demands import Brought, Demands, Place
from transport.queue.ends import UNTRAINED, Answers, End, Group, Held, Said
from transport.queue.questions import Question, Questions
from transport.queue.rings import consumer_of, token_of
from transport.ring.consumers import consumers_of, rank_of
from transport.runtime.loop_thread import LoopThread
from transport.taking.batch import TakenBatch, Verdicts
from transport.taking.batches import TakenPayloads

_BATCHES: Final = 3  # that lie unused or are asked for: one is being looked at, one has come, one is on its way
_CLAIMS: Final = 16  # of which the largest says how large a batch is: some claim until they have a whole one
_LOOK_S: Final = 0.25
_MOST_FAILURES: Final = 256
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


class FoundElsewhere:
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
        self._served = served
        self._ring = ring
        self._most_attempts = min(max_deliveries, _ring.MAX_ATTEMPTS)
        self._starting = threading.Lock()  # guards thread, client and ranks
        self._thread: LoopThread | None = None
        self._client: UCXXClient | None = None
        self._own = False
        self._ranks: dict[int | str, _Rank] = {}
        self._changed = threading.Condition()  # guards what follows, and what came
        self._held: dict[str, Held] = {}
        self._questions = Questions(self._changed, self._note_late)
        self._answers = Answers(self._changed, self._note, self._questions)
        self.arrivals = Arrivals(self._links_to, self._note_use)
        self.counts: dict[str, Counter[tuple[int, str]]] = {}  # by ring
        self.failures: deque[Failure] = deque(maxlen=_MOST_FAILURES)
        self._closed = False
        # Belongs to the loop. A batch that the caller has dropped is asked about by no one.
        self._finishing: WeakKeyDictionary[TakenBatch, asyncio.Task[Verdicts]] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"<FoundElsewhere {len(self._held)} claims>"

    # --- the client -----------------------------------------------------------------------------------
    def use(self, thread: LoopThread, client: UCXXClient) -> None:
        """Take through this client from now on. Nothing where there is one already."""
        with self._starting:
            if self._client is None:
                self._thread, self._client = thread, client

    def disconnect(self, client: UCXXClient | None) -> None:
        """End what was taken through this client; None: through whichever there is."""
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

    async def _start(self, client: UCXXClient, rank: int | str) -> _Rank:
        def came(brought: Brought) -> None:
            with self._changed:
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
                opened=self.arrivals.tell_late,
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
        with self._changed:
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
                    continue  # they are anybody's by now
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
            with self._changed:
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
        with self._changed:
            for claim in claims:
                held = self._held.pop(claim.token, None)
                if held is not None and not self._answers.give_up(held):
                    self._count(_ring_of(claim), claim.rank, claimed=-1)
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

    def holds(self, claim: Claim) -> bool:
        """Whether the claim was made here, and has not ended by this process's own doing."""
        return claim.token in self._held or claim.token in self.arrivals or claim.token in self._questions

    def in_question(self, claims: Sequence[Claim]) -> list[Claim]:
        """Those of which no ring has said whether they were accepted; see questions.py."""
        return [claim for claim in claims if claim.token in self._questions]

    def came(self, claim: Claim) -> Came | None:
        """The payload of a claim."""
        held = self._held.get(claim.token)
        return None if held is None else Came(held.brought.link.link.wire, held.brought.batch.data(held.at))

    # --- the ends of claims ---------------------------------------------------------------------------
    def ack_many(self, claims: Sequence[Claim], *, trained: bool) -> list[Claim]:
        """Consume; those that were accepted. Of claims in question the ring is asked again."""
        what = "done" if trained else "arrived"
        if not self._questions.any(claims):
            return self._end(claims, End(what))
        settled: dict[str, Claim] = {}
        accepted: list[Claim] = []
        try:
            self._questions.settle(claims, what, self._thread, settled)
            accepted = self._end(claims, End(what))
            return [*settled.values(), *accepted]
        except BaseException:  # an interrupt: the call that is repeated gets them
            self._questions.put_back([*settled.values(), *accepted], what)
            raise

    def _note_late(self, question: Question) -> None:
        """Count a claim in question that was accepted. On the loop."""
        claim, what = question.claim, question.what
        if what == "arrived":
            self.arrivals.add(claim, question.link)
        self._count(_ring_of(claim), claim.rank, **{what: 1})

    def finish(self, claims: Sequence[Claim]) -> list[Claim]:
        """Of what arrived; those that were not finished before. If their connection is lost, the next one says so."""
        found = self.arrivals.of(claims)
        thread = self._thread
        if found and thread is not None and not thread.closed:
            thread.run(self.arrivals.tell(found))
        ended: dict[str, Arrived] = {}
        try:
            self.arrivals.end(found, ended)
            ours = {
                claim.token: claim for claim in claims if claim.token in ended
            }  # one that is given twice counts once
            for token, claim in ours.items():
                if ended[token].telling is None:  # every connection is closed
                    self._note_use(claim)
            return list(ours.values())
        except BaseException:  # an interrupt: the call that is repeated gets them
            self.arrivals.put_back(ended)
            raise

    def _note_use(self, claim: Claim) -> None:
        with self._changed:
            self._count(_ring_of(claim), claim.rank, arrived=-1, done=1)

    def _links_to(self, ring: str) -> list[TakeLink]:
        return [link for of in self._ranks.values() for link in of.demands.links if link.ring == ring]

    def retry(self, claim: Claim, delay_s: float, reason: str) -> bool:
        """Give back; what was claimed for the last time is dead."""
        end = End("dead", reason) if claim.attempts >= self._most_attempts else End("retried", delay_s=delay_s)
        return bool(self._end([claim], end))

    def discard(self, claim: Claim, reason: str) -> bool:
        """End the delivery; its ring records the reason."""
        return bool(self._end([claim], End("discarded", reason)))

    def renew(self, claim: Claim) -> bool:
        """Whether it is held; the connection says that this process is alive, from the client's loop."""
        held = self._held.get(claim.token)
        return claim.token in self.arrivals if held is None else not held.brought.link.lost

    def _end(self, claims: Sequence[Claim], end: End) -> list[Claim]:
        """End claims: those for which it was accepted.

        After an interrupt the repeated call has the answers of the first. A call that asks for another end is refused
        then, and what happened is counted.
        """
        taken: dict[str, Held] = {}
        answered: dict[Held, Said] = {}
        groups: dict[int, Group] = {}
        try:
            with self._changed:
                for claim in claims:
                    held = self._held.get(claim.token)
                    if held is None:
                        continue
                    taken[claim.token] = held
                    del self._held[claim.token]
                    if held not in self._answers:
                        groups.setdefault(id(held.brought), (held.brought, {}))[1][held.at] = claim
            if groups:
                self._settle(list(groups.values()), end, consumer_of(claims[0]))
            accepted: dict[str, Claim] = {}
            with self._changed:
                for claim in claims:
                    if (ended := taken.get(claim.token)) is None:
                        continue
                    if (said := self._answers.look(ended)) is None:
                        del taken[claim.token]
                        self._count(_ring_of(claim), claim.rank, claimed=-1)
                        continue
                    answered[ended] = said
                    if said.accepted and said.end.what == end.what:
                        accepted[claim.token] = claim
                self._answers.drop(answered)
            return list(accepted.values())
        except BaseException:  # an interrupt: the call that is repeated gets the answers of this one
            with self._changed:
                self._answers.put_back(answered)
                self._held.update(taken)
            raise

    def _note(self, claim: Claim, brought: Brought, said: Said | None) -> None:
        """Count a claim whose ring has answered. On the loop, so that an interrupt cannot count it twice or not."""
        self._count(_ring_of(claim), claim.rank, claimed=-1)
        if said is None or not said.accepted:
            return
        end = said.end
        what = end.what
        amounts = {"discarded" if what == "aged" else what: 1}
        if what == "arrived":
            self.arrivals.add(claim, brought.link)
        elif what == "dead":
            amounts["retried"] = 1
        elif what == "aged":
            amounts["aged"] = 1
        self._count(_ring_of(claim), claim.rank, **amounts)
        if what in UNTRAINED:
            state = DeliveryState.DEAD if what == "dead" else DeliveryState.DISCARDED
            failure = Failure(claim.ticket_id, claim.rank, state, claim.attempts, consumer_of(claim), end.reason)
            self.failures.append(failure)

    def _settle(self, groups: Sequence[Group], end: End, consumer: str) -> None:
        """Have the answers, which come on the loop, so that no interrupt comes in between."""
        thread = self._thread
        if thread is not None and not thread.closed:  # otherwise every connection is closed as well
            thread.run(self._answers.ask(groups, end, consumer))

    def _count(self, ring: str, rank: int, **amounts: int) -> None:
        counts = self.counts.setdefault(ring, Counter())
        for name, amount in amounts.items():
            counts[rank, name] += amount

    def depth(self, rank: int | None, but: set[str]) -> Counter[str]:
        """What this process knows of rings that are not seen from here."""
        sums: Counter[str] = Counter()
        with self._changed:
            for ring, counts in self.counts.items():
                if ring not in but:
                    for (of, name), amount in counts.items():
                        sums[name] += amount * (rank is None or of == rank)
        return sums

    def close(self) -> None:
        """What is claimed can be claimed by others. Idempotent."""
        with self._starting:
            self._closed = True
        with self._changed:
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


def _ring_of(claim: Claim) -> str:
    return claim.ticket_id.partition("/")[0]
