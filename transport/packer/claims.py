"""The claims that a trainer holds, and what it reports to the queue about them.

    claimed ──settle──► acknowledged: may be trained on   ──lost──► held by another trainer: may not
       └──report──► failed: discarded if unreadable for good, else retried; duplicate: acknowledged, not trained on
       └──give_back──► open for the next consumer

Methods block on the queue; the packer calls them from the trainer's thread or a worker thread. The counters are part of
`UCXXDataPackerMixin.ucxx_statistics`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from transport.client.payload import AckMode
from transport.errors import StaleSlotError, TransportError, UsageError
from transport.packer.prefetch import FetchedBatch, FetchedItem
from transport.queue.base import Came, Claim, TicketQueue
from transport.settings import Settings

log = logging.getLogger(__name__)


class ClaimBook:
    """Claims by token, from `claim` until they are settled, reported or given back.

    Args:
        queue: the queue that claims come from; None: tickets come another way, and nothing is reported.
        rank: the trainer's rank among the readers of each payload, or the name that the rings have for it.
        consumer: the trainer's name in the queue's reports.
        ack: "on_arrival" reports payloads as arrived when they are collected, as trained on when they are settled.
        max_policy_age: how many policy versions a claimed payload may be older than the trainer's; None: any number.
    """

    def __init__(
        self,
        queue: TicketQueue | None,
        rank: int | str,
        consumer: str,
        ack: AckMode,
        settings: Settings,
        max_policy_age: int | None = None,
    ) -> None:
        if max_policy_age is not None and max_policy_age < 0:
            raise UsageError(f"max_policy_age={max_policy_age}: give a number of policy versions, 0 or more")
        self._max_policy_age = max_policy_age
        self._queue = queue
        self._rank = rank
        self._consumer = consumer
        self._ack = ack
        self._retry_delay_s = settings.backoff_most_s
        self._renew_s = 0.0 if queue is None else min(settings.claim_renew_s, queue.lease_s / 3)
        # Invariant: a claim is here as long as its lease is to be renewed.
        self._in_hand: dict[str, Claim] = {}
        self.counts = dict.fromkeys(("failed", "stale", "duplicates", "returned", "lost_claims"), 0)

    def __repr__(self) -> str:
        return f"<ClaimBook {self._consumer} rank {self._rank}, {len(self._in_hand)} in hand>"

    def brought(self, item: FetchedItem) -> Came | None:
        """The payload of an item, where it came with the claim."""
        return None if self._queue is None or item.claim is None else self._queue.brought(item.claim)

    @property
    def in_hand(self) -> list[Claim]:
        """Claims that are neither settled nor given back."""
        return list(self._in_hand.values())

    def claim(self, n: int, timeout_s: float, policy_version: int | None = None) -> list[Claim]:
        """Up to ``n`` claims; waits for the first up to ``timeout_s``. UsageError without a queue.

        With ``max_policy_age``, ``policy_version`` is the version in training; the queue discards older payloads.
        """
        if self._queue is None:
            raise UsageError("claim_tickets() needs a queue: give setup_ucxx_packer(queue=...)")
        oldest = None
        if self._max_policy_age is not None:
            if policy_version is None:
                raise UsageError(
                    "claim_tickets() needs policy_version=, because setup_ucxx_packer() was given max_policy_age"
                )
            oldest = policy_version - self._max_policy_age
        claims: list[Claim] = []
        try:
            claims += self._queue.claim(n, timeout_s, rank=self._rank, consumer=self._consumer, oldest_version=oldest)
            self._in_hand.update((claim.token, claim) for claim in claims)
            return claims
        except BaseException:  # an interrupt: no caller has these claims
            with contextlib.suppress(TransportError):
                self.give_back(claims, "the claim was interrupted")
            raise

    def settle(self, items: list[FetchedItem]) -> list[FetchedItem]:
        """Acknowledge (or finish) the items' claims; returns the items that this trainer may train on.

        Of claims that are in question after a first call the ring is asked again.
        """
        claims = [item.claim for item in items if item.claim is not None]
        if self._queue is None or not claims:
            return items
        asked = [item for item in items if item.claim is not None and item.mine is None]
        if asked:
            accepted: list[Claim] = []
            ended = [item.claim for item in asked if item.claim is not None]
            try:
                again = [item.claim for item in asked if item.asked and item.claim is not None]
                if self._ack == "on_arrival" and again:
                    self._queue.ack_many(self._queue.in_question(again), trained=False)
                accepted += self._queue.finish(ended) if self._ack == "on_arrival" else self._queue.ack_many(ended)
                self._note(asked, accepted)
            except BaseException:  # an interrupt: the repeated call does not ask again
                if accepted:
                    self._note(asked, accepted)
                raise
        self._let_go(claims)
        return [item for item in items if item.claim is None or item.mine]

    def _note(self, asked: list[FetchedItem], accepted: list[Claim]) -> None:
        mine = {claim.token for claim in accepted}
        in_question = {id(item) for item in self.in_question(asked)}
        counts = self.counts
        for item in asked:
            item.asked = True
            if item.mine is None and id(item) not in in_question:
                accepts = item.claim is not None and item.claim.token in mine
                # In one statement, which no interrupt divides.
                item.mine, counts["lost_claims"] = accepts, counts["lost_claims"] + (not accepts)

    def in_question(self, items: list[FetchedItem]) -> list[FetchedItem]:
        """Those of settled items whose ring has not said whether this trainer may train on them."""
        claims = [item.claim for item in items if item.claim is not None]
        tokens = {claim.token for claim in self._queue.in_question(claims)} if self._queue is not None else set()
        return [item for item in items if item.claim is not None and item.claim.token in tokens]

    @staticmethod
    def to_report(batch: FetchedBatch) -> bool:
        """Whether `report` has something to do; it blocks, so it is called in a thread."""
        return any(item.duplicate or item.error is not None or item.payload is None for item in batch.items)

    def report(self, batch: FetchedBatch) -> None:
        """Report the failures and duplicates of a fetched batch to the queue. The second call does nothing."""
        if batch.reported:
            return
        for item in batch.items:
            if not item.counted:
                item.counted = True
                self._count(item)
            if self._queue is None or item.claim is None or item.payload is not None:
                continue
            try:
                self._let_go([item.claim])
                if item.error is None:
                    self._queue.ack(item.claim)  # already trained on; no other trainer may get it
                elif item.error.unreadable:
                    self._queue.discard(item.claim, f"{type(item.error).__name__}: {item.error}")
                else:
                    self._queue.retry(item.claim, self._retry_delay_s, str(item.error))
            except Exception:
                raise
            except BaseException:  # an interrupt: the repeated call ends it, or the trainer gives it back
                self._in_hand[item.claim.token] = item.claim
                raise
        batch.reported = True

    def _count(self, item: FetchedItem) -> None:
        self.counts["duplicates"] += item.duplicate
        if item.error is not None:
            self.counts["failed"] += 1
            self.counts["stale"] += isinstance(item.error, StaleSlotError)
            log.warning("payload %s was not read: %s: %s", item.ticket.name, type(item.error).__name__, str(item.error))

    def report_arrivals(self, batch: FetchedBatch) -> None:
        """With ack="on_arrival": report collected payloads as arrived, first to the queue, then to the rings.

        Called when a batch is collected, so that a batch cancelled before that loses nothing. The second call does
        nothing.
        """
        if self._ack != "on_arrival" or batch.arrived:
            return
        arrived = [item for item in batch.items if item.payload is not None]
        claims = [item.claim for item in arrived if item.claim is not None]
        if self._queue is not None and claims:
            recorded = {claim.token for claim in self._queue.ack_many(claims, trained=False)}
        else:
            recorded = set()
        for item in arrived:
            if item.payload is not None and (item.claim is None or item.claim.token in recorded):
                item.payload.ack()
        batch.arrived = True

    def give_back(self, claims: Iterable[Claim], reason: str) -> None:
        """Return unused claims to the queue."""
        claims = list(claims)
        given = 0
        try:
            for claim in claims:
                self._let_go([claim])
                if self._queue is not None and self._queue.retry(claim, 0.0, reason):
                    self.counts["returned"] += 1
                given += 1
        except Exception:
            self._let_go(claims)  # their leases end
            raise
        except BaseException:  # an interrupt leaves the rest to the next call
            self._in_hand.update((claim.token, claim) for claim in claims[given:])
            raise

    def _let_go(self, claims: list[Claim]) -> None:
        for claim in claims:
            self._in_hand.pop(claim.token, None)

    async def keep_leases(self) -> None:
        """Renew the held claims every third of the lease, until cancelled."""
        queue = self._queue
        if queue is None:
            return
        while True:
            await asyncio.sleep(self._renew_s)
            claims = self.in_hand
            if not claims:
                continue
            try:
                kept = await asyncio.to_thread(queue.renew, claims)
            except TransportError as error:
                log.warning("the leases of %d claims were not renewed, retrying: %s", len(claims), error)
                continue
            lost = {claim.token for claim in claims} - {claim.token for claim in kept}
            if lost & self._in_hand.keys():
                log.warning(
                    "%d claims are lost: their leases ended before they were renewed", len(lost & self._in_hand.keys())
                )
