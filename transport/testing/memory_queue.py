"""A ticket queue in the memory of one process, for unit tests. See transport/queue/base.py for the contract.

It keeps the whole contract, and a test moves its clock: `MemoryQueue(clock=lambda: now)`. For work use a queue that
survives its process: each call here looks at every delivery that has not finished.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Self, TypeVar

from transport.errors import ClosedError
from transport.queue import arguments
from transport.queue.base import (
    KEEP_FINISHED,
    MAX_DELIVERIES,
    Claim,
    DeliveryState,
    Failure,
    Notice,
    QueueDepth,
    QueuedTicket,
    TicketQueue,
    too_old,
)
from transport.runtime.arguments import several

_RECHECK_S: Final = 0.02  # the clock may be a test's own, which wakes no thread

Found = TypeVar("Found")

_FAILED: Final = (DeliveryState.DISCARDED, DeliveryState.DEAD)


class _Delivery:
    """One ticket for one rank."""

    def __init__(self, sequence: int, ticket: QueuedTicket, rank: int, policy_version: int | None) -> None:
        self.sequence = sequence
        self.ticket = ticket
        self.rank = rank
        self.policy_version = policy_version
        self.state = DeliveryState.READY
        self.attempts = 0
        self.not_before = 0.0
        self.lease_ends = 0.0
        self.consumer = ""
        self.reason = ""
        self.ended: tuple[str, DeliveryState] | None = None  # the token of the last claim that was ended, and how

    @property
    def token(self) -> str:
        return f"{self.sequence}:{self.attempts}"

    @property
    def held(self) -> bool:
        return self.state is DeliveryState.CLAIMED

    def held_by(self, claim: Claim) -> bool:
        return self.held and claim.token == self.token


class _Contents:
    """What all handles of one queue share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.tickets: dict[str, list[_Delivery]] = {}  # by id, in the order of publication; a delivery for each rank
        self.unfinished: dict[_Delivery, None] = {}  # in the order of publication
        self.finished: dict[str, None] = {}  # tickets, in the order in which they finished
        self.counts: dict[int, Counter[str]] = {}  # by state, and of what has happened
        self.notices: dict[str, Notice] = {}
        self.sequence = itertools.count(1)

    def count(self, rank: int, name: str, amount: int = 1) -> None:
        self.counts.setdefault(rank, Counter())[name] += amount

    def publish(self, ticket: QueuedTicket, readers: int, policy_version: int | None) -> None:
        sequence = next(self.sequence)
        self.tickets[ticket.id] = [_Delivery(sequence, ticket, rank, policy_version) for rank in range(readers)]
        for delivery in self.tickets[ticket.id]:
            self.unfinished[delivery] = None
            self.count(delivery.rank, delivery.state.value)

    def move(self, delivery: _Delivery, to: DeliveryState) -> None:
        """The only function that changes a state after publication."""
        ticket = delivery.ticket.id
        self.count(delivery.rank, delivery.state.value, -1)
        self.count(delivery.rank, to.value)
        if to.final:
            del self.unfinished[delivery]
        elif delivery.state.final:  # it was requeued, and has its place again
            self.unfinished[delivery] = None
            self.unfinished = dict.fromkeys(sorted(self.unfinished, key=lambda each: each.sequence))
            self.finished.pop(ticket, None)
        delivery.state = to
        if all(each.state.final for each in self.tickets[ticket]):
            self.finished[ticket] = None

    def forget(self, keep: int) -> None:
        """All but the last tickets that have finished."""
        while len(self.finished) > keep:
            ticket = next(iter(self.finished))
            del self.finished[ticket], self.tickets[ticket]


class MemoryQueue(TicketQueue):
    """A queue in this process's memory.

    Args:
        lease_s: how long a claim is its claimant's without renewal; None: what the operator configured.
        max_deliveries: claims in vain after which a delivery is dead.
        keep_finished: how many finished tickets are remembered.
        clock: seconds; a test may pass its own.
    """

    def __init__(
        self,
        *,
        lease_s: float | None = None,
        max_deliveries: int = MAX_DELIVERIES,
        keep_finished: int = KEEP_FINISHED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lease_s = arguments.lease(lease_s)
        self._max_deliveries, self._keep_finished = arguments.bounds(max_deliveries, keep_finished)
        self._clock = clock
        self._closed = False
        self._contents = _Contents()

    def __repr__(self) -> str:
        deliveries = sum(map(len, self._contents.tickets.values()))
        return f"<MemoryQueue of {deliveries} deliveries{' closed' if self._closed else ''}>"

    def another(self, *, max_deliveries: int | None = None) -> Self:
        """A second handle on the same tickets, as another process would have; `close` ends one handle."""
        handle = type(self)(
            lease_s=self.lease_s,
            max_deliveries=max_deliveries or self._max_deliveries,
            keep_finished=self._keep_finished,
            clock=self._clock,
        )
        handle._contents = self._contents
        return handle

    # --- publish and claim -----------------------------------------------------------------------
    def publish(
        self,
        tickets: QueuedTicket | Iterable[QueuedTicket],
        *,
        readers: int = 1,
        policy_version: int | None = None,
    ) -> int:
        batch, readers, policy_version = arguments.published(tickets, readers, policy_version)
        new = 0
        with self._contents.changed:
            self._check_open()
            for ticket in batch:
                if ticket.id not in self._contents.tickets:
                    self._contents.publish(ticket, readers, policy_version)
                    new += 1
            self._contents.changed.notify_all()
        return new

    def claim(
        self, n: int, timeout_s: float = 0.0, *, rank: int | str = 0, consumer: str, oldest_version: int | None = None
    ) -> list[Claim]:
        n, timeout_s, rank, oldest_version = arguments.claimed(n, timeout_s, rank, oldest_version)
        return self._waited(lambda: self._try_claim(n, rank, consumer, oldest_version) or None, timeout_s) or []

    def _try_claim(self, n: int, rank: int, consumer: str, oldest_version: int | None) -> list[Claim]:
        now = self._end_leases()
        claims: list[Claim] = []
        for delivery in list(self._contents.unfinished):
            if len(claims) == n:
                break
            if delivery.rank != rank or delivery.held or delivery.not_before > now:
                continue
            delivery.consumer = consumer
            version = delivery.policy_version
            if version is not None and oldest_version is not None and version < oldest_version:
                delivery.reason = too_old(version, oldest_version)
                self._contents.move(delivery, DeliveryState.DISCARDED)
                self._contents.count(rank, "aged")
                continue
            self._contents.move(delivery, DeliveryState.CLAIMED)
            delivery.lease_ends = now + self.lease_s
            delivery.attempts += 1
            ticket = delivery.ticket
            claims.append(Claim(ticket.id, ticket.data, rank, delivery.attempts, delivery.token, version))
        self._contents.forget(self._keep_finished)
        return claims

    # --- the end of a claim ----------------------------------------------------------------------
    def ack_many(self, claims: Sequence[Claim]) -> list[Claim]:
        return self._end(arguments.held(claims, "ack"), DeliveryState.DONE)

    def retry_many(self, claims: Sequence[Claim], delay_s: float = 0.0, reason: str = "") -> list[Claim]:
        listed, delay_s = arguments.held(claims, "retry"), arguments.delayed(delay_s, "retry")
        ended: list[Claim] = []
        for claim in listed:
            last = claim.attempts >= self._max_deliveries
            ended += self._end([claim], DeliveryState.DEAD if last else DeliveryState.READY, reason, delay_s)
        return ended

    def discard(self, claim: Claim, reason: str) -> bool:
        return bool(self._end([claim], DeliveryState.DISCARDED, reason))

    def renew(self, claims: Sequence[Claim]) -> list[Claim]:
        claims = arguments.held(claims, "renew")
        with self._contents.changed:
            self._check_open()
            until = self._end_leases() + self.lease_s
            kept = [claim for claim in claims if (delivery := self._of(claim)) and delivery.held_by(claim)]
            for claim in kept:
                self._contents.tickets[claim.ticket_id][claim.rank].lease_ends = until
        return kept

    def _end(self, claims: Sequence[Claim], to: DeliveryState, reason: str = "", delay_s: float = 0.0) -> list[Claim]:
        ended = []
        with self._contents.changed:
            self._check_open()
            now = self._end_leases()
            for claim in claims:
                delivery = self._of(claim)
                if delivery is not None and delivery.held_by(claim):
                    delivery.reason, delivery.not_before = reason, now + delay_s
                    delivery.ended = claim.token, to
                    self._contents.move(delivery, to)
                    if to in (DeliveryState.READY, DeliveryState.DEAD):
                        self._contents.count(claim.rank, "retried")
                if delivery is not None and delivery.ended == (claim.token, to):
                    ended.append(claim)
            self._contents.forget(self._keep_finished)
            self._contents.changed.notify_all()
        return ended

    # --- looking -----------------------------------------------------------------------------------
    def depth(self, rank: int | None = None) -> QueueDepth:
        rank = arguments.number_or_none(rank, "rank of depth()")
        with self._contents.changed:
            self._check_open()
            self._end_leases()
            sums: Counter[str] = Counter()
            for of_rank, counts in self._contents.counts.items():
                if rank in (None, of_rank):
                    sums.update(counts)
        return QueueDepth(**sums)

    def failures(self, limit: int = 100) -> list[Failure]:
        limit = arguments.most(limit, "limit of failures()")
        with self._contents.changed:
            self._check_open()
            self._end_leases()
            ended = [each for each in self._deliveries() if each.state in _FAILED]
        ended.sort(key=lambda each: (-each.sequence, each.rank))
        return [
            Failure(each.ticket.id, each.rank, each.state, each.attempts, each.consumer, each.reason)
            for each in ended[:limit]
        ]

    def requeue(self, limit: int = 100) -> int:
        limit = arguments.most(limit, "limit of requeue()")
        with self._contents.changed:
            self._check_open()
            self._end_leases()
            dead = [each for each in self._deliveries() if each.state is DeliveryState.DEAD]
            for delivery in dead[:limit]:
                delivery.not_before = 0.0
                self._contents.move(delivery, DeliveryState.READY)
            self._contents.changed.notify_all()
        return len(dead[:limit])

    def unfinished(self, n: int) -> list[bytes]:
        n = arguments.most(n, "n of unfinished()")
        with self._contents.changed:
            self._check_open()
            found = {each.ticket.id: each.ticket.data for each in reversed(self._contents.unfinished)}
        return list(found.values())[:n]

    def known(self, ticket_ids: Iterable[str]) -> dict[str, tuple[DeliveryState, ...]]:
        with self._contents.changed:
            self._check_open()
            self._end_leases()
            return {
                ticket_id: tuple(each.state for each in self._contents.tickets[ticket_id])
                for ticket_id in several(ticket_ids, "known()")
                if ticket_id in self._contents.tickets
            }

    # --- notices -----------------------------------------------------------------------------------
    def announce(self, topic: str, version: int, payload: bytes = b"") -> bool:
        version = arguments.number(version, "version of announce()")
        with self._contents.changed:
            self._check_open()
            present = self._contents.notices.get(topic)
            if present is not None and present.version >= version:
                return False
            self._contents.notices[topic] = Notice(topic, version, payload)
            self._contents.changed.notify_all()
        return True

    def latest(self, topic: str, newer_than: int | None = None, timeout_s: float = 0.0) -> Notice | None:
        newer_than, timeout_s = arguments.waited_for(newer_than, timeout_s)

        def look() -> Notice | None:
            notice = self._contents.notices.get(topic)
            return notice if notice is not None and (newer_than is None or notice.version > newer_than) else None

        return self._waited(look, timeout_s)

    def close(self) -> None:
        """End this handle, and waits in other threads with ClosedError. The tickets stay for other handles."""
        with self._contents.changed:
            self._closed = True
            self._contents.changed.notify_all()

    # --- helpers -----------------------------------------------------------------------------------
    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the queue is closed")

    def _of(self, claim: Claim) -> _Delivery | None:
        deliveries = self._contents.tickets.get(claim.ticket_id, [])
        return deliveries[claim.rank] if claim.rank < len(deliveries) else None

    def _deliveries(self) -> list[_Delivery]:
        """All that are remembered, in the order of publication."""
        return [each for deliveries in self._contents.tickets.values() for each in deliveries]

    def _end_leases(self) -> float:
        """End the claims whose lease is over. Returns the time used."""
        now = self._clock()
        for delivery in list(self._contents.unfinished):
            if delivery.held and delivery.lease_ends <= now:
                self._contents.count(delivery.rank, "expired")
                delivery.reason = f"the lease of {delivery.consumer} ended"
                last = delivery.attempts >= self._max_deliveries
                self._contents.move(delivery, DeliveryState.DEAD if last else DeliveryState.READY)
        return now

    def _waited(self, look: Callable[[], Found | None], timeout_s: float) -> Found | None:
        give_up = time.monotonic() + timeout_s
        with self._contents.changed:
            while True:
                self._check_open()
                found = look()
                left_s = give_up - time.monotonic()
                if found is not None or left_s <= 0:
                    return found
                self._contents.changed.wait(min(left_s, _RECHECK_S))
