"""The queue of the rings that are found: by name on this host, at addresses, or in a directory. See places.py.

    this host    attached and claimed from, see found_here.py; the payload is a view of its slot
    elsewhere    a demand waits at the listener, see found_elsewhere.py; the payload comes with its claim

Both take turns. What a trainer has of rings elsewhere beyond its claims, or has asked for, is at most three times
what it claims at a time, and one payload for each ring beside; of large payloads three times what one answer brings.
On one host nothing is configured: writers name their rings so that trainers find them.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from transport.config import configuration, lease_or_configured
from transport.errors import ClosedError, TransportError
from transport.queue import arguments
from transport.queue.base import (
    MAX_DELIVERIES,
    Came,
    Carrier,
    Claim,
    DeliveryState,
    Failure,
    Notice,
    QueueDepth,
    QueuedTicket,
    TicketQueue,
)
from transport.queue.demands import Brought, Place
from transport.queue.ends import Unsaid, in_order
from transport.queue.found_elsewhere import FoundElsewhere
from transport.queue.found_here import FoundHere
from transport.queue.looks import depth_of, failures_of, known_of, unfinished_of
from transport.queue.notices import NoNotices, Notices, RingNotices, StoreNotices
from transport.queue.places import OnThisHost, Places
from transport.ring.buffer import SharedRingBuffer
from transport.runtime.arguments import expect, seconds
from transport.runtime.explaining import checked, explained_calls
from transport.store.base import Store
from transport.taking.batch import TakenBatch, Verdicts
from transport.taking.batches import TakenPayloads
from transport.ticket import Ticket

if TYPE_CHECKING:
    from transport.runtime.loop_thread import LoopThread
    from transport.schema import Schema

_LOOK_S: Final = 0.1  # how often rings are looked for while something waits
_SLICE_S: Final = 0.1  # longest wait without a look for what has no wake-up


@explained_calls
class FoundRings(TicketQueue):
    """The rings of a run as its queue. `open_queue` makes one; thread-safe, and blocking as every queue.

    Args:
        places: where the rings are; closed with the queue.
        store: for notices, of the directory; closed with the queue.
        lease_s: how long a claim of a mapped ring is its claimant's without renewal; None: as configured. Claims over
            the network last as long as their connection, and its listener's ``ack_timeout_s``.
        max_deliveries: claims in vain after which a delivery is dead.
    """

    def __init__(
        self,
        places: Places | None = None,
        *,
        store: Store | None = None,
        lease_s: float | None = None,
        max_deliveries: int = MAX_DELIVERIES,
    ) -> None:
        if store is not None:
            expect(store, Store, "store of FoundRings()", "a Store, as open_store() makes it")
        self.places: Places = OnThisHost() if places is None else places
        self.lease_s = arguments.lease(lease_or_configured(lease_s))
        self._store = store
        self._notices: Notices = NoNotices()
        if store is not None:
            self._notices = StoreNotices(store)
        elif self.places.prefix:
            self._notices = RingNotices(self.places.prefix)
        self._here = FoundHere(self.places, lease_s=self.lease_s, max_deliveries=max_deliveries)
        wires = configuration().wires
        self._here.only((), mapped=not wires or "mapped" in wires, carries=not wires or set(wires) != {"mapped"})
        self._elsewhere = FoundElsewhere(self._here.served, max_deliveries, self._here.queue.bell.ring)
        self._unsaid = Unsaid()
        self._verdicts: WeakKeyDictionary[TakenBatch, Verdicts] = WeakKeyDictionary()  # not told: interrupted
        self._look_at = 0.0
        self._closed = threading.Event()
        self._turns = itertools.count()  # of rings here and elsewhere, which are asked first in turn

    def __repr__(self) -> str:
        return f"<FoundRings {self.places!r}, {self._here!r}, {self._elsewhere!r}>"

    # --- who uses it ----------------------------------------------------------------------------------
    def hand_out(self, ring: SharedRingBuffer) -> None:
        """A writer of this process: the payloads of its ring are this queue's, too. The ring stays its own."""
        self._here.add(ring)

    def connect(self, thread: LoopThread, client: Carrier, schemas: Sequence[Schema]) -> TicketQueue:
        """See `TicketQueue.connect`: payloads from elsewhere come through this client."""
        self._elsewhere.use(thread, client)
        self._here.only(schemas, mapped=client.allows("mapped"), carries=client.carries())
        return self

    def disconnect(self, client: Carrier) -> None:
        """See `TicketQueue.disconnect`."""
        self._elsewhere.disconnect(client)

    # --- publish and claim ----------------------------------------------------------------------------
    def publish(
        self,
        tickets: QueuedTicket | Iterable[QueuedTicket],
        *,
        readers: int = 1,
        policy_version: int | None = None,
    ) -> int:
        """Nothing is stored, the ring has it; see `RingQueue.publish`."""
        self._check_open()
        return self._here.queue.publish(tickets, readers=readers, policy_version=policy_version)

    @checked
    def claim(
        self, n: int, timeout_s: float = 0.0, *, rank: int | str = 0, consumer: str, oldest_version: int | None = None
    ) -> list[Claim]:
        """See `TicketQueue.claim`. Of each ring the oldest come first."""
        n, timeout_s, rank, oldest_version = arguments.claimed_by_name(n, timeout_s, rank, consumer, oldest_version)
        give_up = time.monotonic() + timeout_s
        while True:
            here, elsewhere = self._follow(rank, n, oldest_version)
            if here and isinstance(rank, str):
                self._here.queue.check_name(rank)  # before anything is claimed elsewhere
            slice_s = max(0.0, min(give_up - time.monotonic(), _SLICE_S))
            claims: list[Claim] = []
            try:
                try:
                    self._claim(claims, n, slice_s, rank, consumer, oldest_version, here=here, elsewhere=elsewhere)
                except TransportError:
                    if not claims:
                        raise  # else the next call meets it again: what was claimed is the caller's
                if claims:
                    return claims
            except BaseException:  # an interrupt: no caller has these claims
                self._return(claims)
                raise
            if time.monotonic() >= give_up:
                if elsewhere:
                    self._elsewhere.explain(rank, known=here)
                return claims
            if not here and not elsewhere:
                self._closed.wait(slice_s)

    def _claim(
        self,
        claims: list[Claim],
        n: int,
        wait_s: float,
        rank: int | str,
        consumer: str,
        oldest_version: int | None,
        *,
        here: bool,
        elsewhere: bool,
    ) -> None:
        """One round: ``claims`` grows with each half, so that an error in the second one loses nothing of the first."""
        rung = self._here.queue.bell.rung if here and elsewhere else None

        def of_this_host(wait_s: float) -> None:
            self._here.queue.claim_or_wake(
                n, wait_s, rung, rank=rank, consumer=consumer, oldest_version=oldest_version, into=claims
            )

        if here and elsewhere and next(self._turns) % 2:
            of_this_host(0.0)
        if elsewhere and len(claims) < n:
            wait_elsewhere_s = 0.0 if here else wait_s
            claims += self._elsewhere.claim(n - len(claims), wait_elsewhere_s, rank, consumer, oldest_version)
        if here and len(claims) < n:
            of_this_host(0.0 if claims else wait_s)

    def _return(self, claims: Sequence[Claim]) -> None:
        """Give claims up that no caller has."""
        elsewhere = [claim for claim in claims if self._elsewhere.holds(claim)]
        self._elsewhere.forget(elsewhere)
        for claim in claims:
            if claim not in elsewhere:
                with contextlib.suppress(TransportError):
                    self._here.queue.retry(claim)

    @checked
    def take(self, n: int, timeout_s: float = 0.0, *, rank: int | str = 0) -> Brought | None:
        """A batch from one ring elsewhere as it came, without a `Claim` for each payload; see `consume`."""
        n = arguments.number(n, "n of take()")
        seconds(timeout_s, "timeout_s of take()")
        if not isinstance(rank, str):
            rank = arguments.number(rank, "rank of take()")
        arguments.claimable(n, rank)
        give_up = time.monotonic() + timeout_s
        while True:
            _, elsewhere = self._follow(rank, n, None)
            left_s = max(0.0, give_up - time.monotonic())
            if elsewhere:
                brought = self._elsewhere.take(n, min(left_s, _SLICE_S), rank)
                if brought is not None or left_s <= 0:
                    return brought
            elif left_s <= 0:
                return None
            else:
                self._closed.wait(min(left_s, _SLICE_S))

    @checked
    def consume(self, brought: Brought) -> Verdicts:
        """Say that a whole batch of `take` was used: which payloads were accepted. Drop what was made of the others.

        After an interrupt the repeated call has the answer of the first.
        """
        verdicts = self._verdicts.get(brought.batch)
        if verdicts is None:
            verdicts = self._consumed(brought, None).result()
        try:
            self._verdicts.pop(brought.batch, None)
            self._elsewhere.told(brought)
            return verdicts
        except BaseException:
            self._verdicts[brought.batch] = verdicts
            raise

    def consume_soon(self, brought: Brought, payloads: TakenPayloads | None = None) -> Future[Verdicts]:
        """`consume` without waiting: the next batch may be taken while the answer of this one is on its way.

        ``payloads``: the batch that `placed` made of it.
        """
        ended = self._consumed(brought, payloads)
        ended.add_done_callback(lambda _: self._elsewhere.told(brought))  # the future has the answer
        return ended

    def _consumed(self, brought: Brought, payloads: TakenPayloads | None) -> Future[Verdicts]:
        self._check_open()
        return self._elsewhere.finish_batch(brought, payloads)

    def _follow(self, rank: int | str, n: int, oldest_version: int | None) -> tuple[bool, bool]:
        """Whether there are rings here, and elsewhere; the latter have demands from here on."""
        self._check_open()
        now = time.monotonic()
        if now >= self._look_at:
            self._here.look()
            self._look_at = now + _LOOK_S
        elsewhere = self._here.elsewhere
        if elsewhere:
            self._elsewhere.want(rank, n, oldest_version)
        return self._here.some, elsewhere

    def brought(self, claim: Claim) -> Came | None:
        """See `TicketQueue.brought`."""
        came = self._elsewhere.came(claim)
        if came is not None or not claim.data:
            return came
        data = self._here.payload(claim, Ticket.decode(claim.data).size)
        return None if data is None else Came("mapped", data)

    # --- the ends of claims ---------------------------------------------------------------------------
    def _apart(self, claims: Iterable[Claim], call: str) -> tuple[list[Claim], list[Claim]]:
        """Claims of rings here, and elsewhere."""
        self._check_open()
        listed = arguments.held(claims, call)
        elsewhere = [claim for claim in listed if self._elsewhere.holds(claim)]
        if not elsewhere:
            return listed, []
        return [claim for claim in listed if not self._elsewhere.holds(claim)], elsewhere

    @checked
    def ack_many(self, claims: Sequence[Claim]) -> list[Claim]:
        """See `TicketQueue.ack_many`."""
        claims = arguments.held(claims, "ack")

        def end(claims: list[Claim], accepted: list[Claim]) -> None:
            here, elsewhere = self._apart(claims, "ack")
            if elsewhere:
                accepted += self._elsewhere.ack_many(elsewhere)
            if here:
                accepted += self._here.queue.ack_many(here)

        return self._unsaid.ended(claims, "done", end)

    def in_question(self, claims: Sequence[Claim]) -> list[Claim]:
        """See `TicketQueue.in_question`. At most the last 4096 are known."""
        return self._elsewhere.in_question(arguments.held(claims, "in_question"))

    @checked
    def retry(self, claim: Claim, delay_s: float = 0.0, reason: str = "") -> bool:
        """See `TicketQueue.retry`."""
        delay_s = arguments.given_back(claim, delay_s, reason, "retry")
        if self._apart([claim], "retry")[1]:
            return self._elsewhere.retry(claim, delay_s, reason)
        return self._here.queue.retry(claim, delay_s, reason)

    @checked
    def discard(self, claim: Claim, reason: str) -> bool:
        """See `TicketQueue.discard`. A ring elsewhere records the reason, too."""
        arguments.given_back(claim, 0.0, reason, "discard")
        if self._apart([claim], "discard")[1]:
            return self._elsewhere.discard(claim, reason)
        return self._here.queue.discard(claim, reason)

    def renew(self, claims: Sequence[Claim]) -> list[Claim]:
        """See `TicketQueue.renew`."""
        here, elsewhere = self._apart(claims, "renew")
        kept = [*self._here.queue.renew(here), *(claim for claim in elsewhere if self._elsewhere.renew(claim))]
        return in_order(claims, kept)

    # --- looking --------------------------------------------------------------------------------------
    def depth(self, rank: int | None = None) -> QueueDepth:
        """See `TicketQueue.depth`, of the rings on this host; of others what this process has claimed."""
        self._check_open()
        rank = arguments.number_or_none(rank, "rank of depth()")
        seen = self._here.seen()
        return depth_of(seen, rank, self._elsewhere.depth(rank, {ring.ring_id for ring in seen}))

    def failures(self, limit: int = 100) -> list[Failure]:
        """See `TicketQueue.failures`: what rings on this host remember, and what this process discarded elsewhere."""
        self._check_open()
        limit = arguments.number(limit, "limit of failures()")
        found = failures_of(self._here.seen(), limit)
        known = {(failure.ticket_id, failure.rank) for failure in found}
        own = [each for each in reversed(self._elsewhere.failures) if (each.ticket_id, each.rank) not in known]
        return [*own, *found][:limit]

    def known(self, ticket_ids: Iterable[str]) -> Mapping[str, tuple[DeliveryState, ...]]:
        """See `RingQueue.known`, of the rings on this host."""
        self._check_open()
        asked = arguments.asked(ticket_ids)
        seen = self._here.seen({each.partition("/")[0] for each in asked})
        return known_of(seen, asked)

    def unfinished(self, n: int) -> list[bytes]:
        """See `TicketQueue.unfinished`, of the rings on this host."""
        self._check_open()
        return unfinished_of(self._here.seen(), n)

    def not_counted(self) -> dict[str, Place]:
        """The rings, by id, whose hosts alone know their depth and failures: they cannot be seen from here."""
        self._check_open()
        seen = {ring.ring_id for ring in self._here.seen()}
        return {ring: place for ring, place in self.places.served(seen).items() if ring not in seen}

    # --- notices --------------------------------------------------------------------------------------
    def announce(self, topic: str, version: int, payload: bytes = b"") -> bool:
        """See `TicketQueue.announce`. On one host the notice ends with the process that announced it."""
        self._check_open()
        return self._notices.announce(topic, arguments.announced(topic, version, payload), payload)

    def latest(self, topic: str, newer_than: int | None = None, timeout_s: float = 0.0) -> Notice | None:
        """See `TicketQueue.latest`."""
        self._check_open()
        newer_than, timeout_s = arguments.waited_for(topic, newer_than, timeout_s)
        notice = self._notices.latest(topic, newer_than, timeout_s, self._closed)
        self._check_open()
        return notice

    def close(self) -> None:
        """Leave the rings that were found, and give up what is claimed of them. Idempotent."""
        self._closed.set()
        self._elsewhere.close()
        self._here.close()
        self._notices.close()
        if self._store is not None:
            self._store.close()

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise ClosedError("the queue is closed")
