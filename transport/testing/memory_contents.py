"""What a `MemoryQueue` holds: deliveries, in the order in which they can be claimed and in which their times come."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import Counter, deque
from collections.abc import Iterator
from typing import Final

from transport.queue.base import Claim, DeliveryState, Notice, QueuedTicket

_NEVER: Final = float("inf")


class Delivery:
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
        self.offered = False  # Invariant: whether it is in `Contents.ready`
        self.due_at = _NEVER  # of its entry in `Contents.times`; others of it there are void

    @property
    def token(self) -> str:
        return f"{self.sequence}:{self.attempts}"

    @property
    def held(self) -> bool:
        return self.state is DeliveryState.CLAIMED

    def held_by(self, claim: Claim) -> bool:
        return self.held and claim.token == self.token

    def __lt__(self, other: Delivery) -> bool:
        return self.sequence < other.sequence


class Contents:
    """What all handles of one queue share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.deliveries: dict[tuple[str, int], Delivery] = {}  # in the order of publication
        self.readers: dict[str, int] = {}
        self.counts: dict[int, Counter[str]] = {}  # by state, and of what has happened
        self.notices: dict[str, Notice] = {}
        self.sequence = itertools.count(1)
        # Invariant: each delivery that is ready is in `ready` of its rank, or in `times` until it may be claimed.
        self.ready: dict[int, list[Delivery]] = {}
        self.times: list[tuple[float, int, int, Delivery]] = []  # ends of leases and delays, or earlier
        self.finished: deque[str] = deque()  # tickets, in the order in which they did

    def count(self, rank: int, name: str, amount: int = 1) -> None:
        self.counts.setdefault(rank, Counter())[name] += amount

    def offer(self, delivery: Delivery) -> None:
        """It can be claimed."""
        if not delivery.offered:
            delivery.offered = True
            heapq.heappush(self.ready.setdefault(delivery.rank, []), delivery)

    def look_again(self, delivery: Delivery, at: float) -> None:
        """When the time has come, or sooner, `due` returns it."""
        if at < delivery.due_at:
            delivery.due_at = at
            heapq.heappush(self.times, (at, delivery.sequence, delivery.rank, delivery))

    def due(self, now: float) -> Iterator[Delivery]:
        while self.times and self.times[0][0] <= now:
            at, _, _, delivery = heapq.heappop(self.times)
            if at == delivery.due_at:
                delivery.due_at = _NEVER
                yield delivery

    def move(self, delivery: Delivery, to: DeliveryState) -> None:
        """The only function that changes a state after publication."""
        self.count(delivery.rank, delivery.state.value, -1)
        self.count(delivery.rank, to.value)
        delivery.state = to
        if to.final and all(each.state.final for each in self.of(delivery.ticket.id)):
            self.finished.append(delivery.ticket.id)

    def of(self, ticket_id: str) -> list[Delivery]:
        return [self.deliveries[ticket_id, rank] for rank in range(self.readers[ticket_id])]

    def forget(self, keep: int) -> None:
        """All but the last tickets that have finished."""
        while len(self.finished) > keep:
            ticket_id = self.finished.popleft()
            known = self.readers.get(ticket_id)
            if known is None or not all(each.state.final for each in self.of(ticket_id)):
                continue  # it was requeued, and finishes again
            for rank in range(known):
                del self.deliveries[ticket_id, rank]
            del self.readers[ticket_id]
