"""The claims that a trainer holds, and what it reports to the queue about them.

    claimed ──settle──► acknowledged: may be trained on   ──lost──► held by another trainer: may not
       └──report──► failed: discarded if unreadable for good, else retried; duplicate: acknowledged, not trained on
       └──give_back──► open for the next consumer

A claim has one end, and a call that asks for it again has the same answer (transport/queue/base.py): every method may
be repeated after an interrupt. Methods block on the queue; the packer calls them from the trainer's thread or a worker
thread. The counters are part of `UCXXDataPackerMixin.ucxx_statistics`.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Iterable, Sequence

from transport.errors import StaleSlotError, TransportError, UsageError
from transport.packer.prefetch import FetchedBatch, FetchedItem
from transport.queue.base import Claim, TicketQueue
from transport.runtime.logs import SAY_AGAIN_S, LogLimit
from transport.settings import Settings

log = logging.getLogger(__name__)


class ClaimBook:
    """Claims in hand are renewed until they are settled, reported, given back, or dropped by the caller.

    Args:
        queue: the queue that claims come from.
        rank: the trainer's rank among the readers of each payload, or the name that the rings have for it.
        consumer: the trainer's name in the queue's reports.
        max_policy_age: how many policy versions a claimed payload may be older than the trainer's; None: any number.
    """

    def __init__(
        self, queue: TicketQueue, rank: int | str, consumer: str, settings: Settings, max_policy_age: int | None = None
    ) -> None:
        if max_policy_age is not None and max_policy_age < 0:
            raise UsageError(f"max_policy_age={max_policy_age}: give a number of policy versions, 0 or more")
        self._max_policy_age = max_policy_age
        self._ageless = LogLimit(SAY_AGAIN_S)
        self._queue = queue
        self._rank = rank
        self._consumer = consumer
        self._retry_delay_s = settings.backoff_most_s
        self._renew_s = min(settings.claim_renew_s, queue.lease_s / 3)
        # By token. Weak: a claim that nobody holds any more ends, as the queue has it.
        self._in_hand: weakref.WeakValueDictionary[str, Claim] = weakref.WeakValueDictionary()
        self.counts = dict.fromkeys(("failed", "stale", "duplicates", "returned", "lost_claims"), 0)

    def __repr__(self) -> str:
        return f"<ClaimBook {self._consumer} rank {self._rank}, {len(self._in_hand)} in hand>"

    @property
    def in_hand(self) -> list[Claim]:
        """Claims that are neither settled nor given back."""
        return list(self._in_hand.values())

    def claim(self, n: int, timeout_s: float, policy_version: int | None = None) -> list[Claim]:
        """Up to ``n`` claims; waits for the first up to ``timeout_s``.

        With ``max_policy_age``, ``policy_version`` is the version in training; the queue discards older payloads.
        """
        oldest = None
        if self._max_policy_age is not None:
            if policy_version is None:
                raise UsageError(
                    "claim_tickets() needs policy_version=, because setup_ucxx_packer() was given max_policy_age"
                )
            oldest = policy_version - self._max_policy_age
        claims = self._queue.claim(n, timeout_s, rank=self._rank, consumer=self._consumer, oldest_version=oldest)
        self._in_hand.update((claim.token, claim) for claim in claims)
        ageless = 0 if oldest is None else sum(claim.policy_version is None for claim in claims)
        if ageless and self._ageless.due() is not None:
            log.warning(
                "%d of %d payloads have no policy_version, and so no age for max_policy_age: have their rollouts write "
                "them with policy_version=",
                ageless,
                len(claims),
            )
        return claims

    def settle(self, items: Sequence[FetchedItem]) -> tuple[list[FetchedItem], list[FetchedItem]]:
        """Consume the items' claims; returns the items to train on, and those whose ring has not answered.

        Items without a claim are to be trained on.
        """
        claims = [item.claim for item in items if item.claim is not None]
        if not claims:
            return list(items), []
        mine = {claim.token for claim in self._queue.ack_many(claims)}
        others = [claim for claim in claims if claim.token not in mine]
        unsure = {claim.token for claim in self._queue.in_question(others)} if others else set()
        self.counts["lost_claims"] += len(others) - len(unsure)
        self._let_go(claims)
        return (
            [item for item in items if item.claim is None or item.claim.token in mine],
            [item for item in items if item.claim is not None and item.claim.token in unsure],
        )

    def report(self, batch: FetchedBatch) -> None:
        """Report the failures and duplicates of a fetched batch to the queue."""
        for item in batch.items:
            if item.claim is None or item.payload is not None:
                continue
            if item.error is None:
                self._queue.ack(item.claim)  # already trained on; no other trainer may get it
            elif item.error.unreadable:
                self._queue.discard(item.claim, f"{type(item.error).__name__}: {item.error}")
            else:
                self._queue.retry(item.claim, self._retry_delay_s, str(item.error))
            self._let_go([item.claim])
        for claim, error in batch.undecodable:
            self._queue.discard(claim, f"{type(error).__name__}: {error}")
            self._let_go([claim])
        batch.reported = True

    def count(self, batch: FetchedBatch) -> None:
        """Count and log the failures of a fetched batch. Called on the loop, once for each batch."""
        for claim, error in batch.undecodable:
            self.counts["failed"] += 1
            log.warning("payload %s was not read, its ticket cannot be decoded: %s", claim.ticket_id, error)
        for item in batch.items:
            self.counts["duplicates"] += item.duplicate
            if item.error is not None:
                self.counts["failed"] += 1
                self.counts["stale"] += isinstance(item.error, StaleSlotError)
                kind, said = type(item.error).__name__, str(item.error)  # a record that is kept would keep its frames
                log.warning("payload %s was not read: %s: %s", item.ticket.name, kind, said)

    def give_back(self, claims: Iterable[Claim], reason: str) -> None:
        """Return unused claims to the queue. Where that fails, their leases end."""
        claims = list(claims)
        try:
            self.counts["returned"] += len(self._queue.retry_many(claims, 0.0, reason))
        except Exception:
            self._let_go(claims)
            raise
        self._let_go(claims)

    def _let_go(self, claims: Iterable[Claim]) -> None:
        for claim in claims:
            self._in_hand.pop(claim.token, None)

    async def keep_leases(self) -> None:
        """Renew the held claims every third of the lease, until cancelled."""
        while True:
            await asyncio.sleep(self._renew_s)
            await self._renew()

    async def _renew(self) -> None:
        # A function of its own: the loop's frame would keep what it renewed, and so its claims, while it sleeps.
        claims = self.in_hand
        try:
            if claims:
                await asyncio.to_thread(self._queue.renew, claims)
        except TransportError as error:
            log.warning("the leases of %d claims were not renewed, retrying: %s", len(claims), error)
