"""A queue of tickets as a framework has one, which hands them to trainers that read by ticket: in memory, no I/O.

ready ──claim──► claimed ──ack──► done      the lease ends, or retry: ready again, dead at the last delivery
                    └──discard──► discarded
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from transport.settings import DEFAULTS
from transport.ticket import Ticket


class DeliveryState(enum.StrEnum):
    """State of one delivery."""

    READY = "ready"
    CLAIMED = "claimed"
    DONE = "done"
    DISCARDED = "discarded"
    DEAD = "dead"

    @property
    def final(self) -> bool:
        """Whether the state of the delivery will not change again."""
        return self not in (DeliveryState.READY, DeliveryState.CLAIMED)


class Claim(NamedTuple):
    """The exclusive right of one trainer to one delivery, until its lease ends."""

    ticket_id: str
    data: bytes
    attempts: int  # how often the delivery was claimed, this time included
    token: str  # proves that the claim is this one


LEASE_S = DEFAULTS.claim_lease_s


class _Delivery:
    """One ticket, for the one reader that there is."""

    def __init__(self, sequence: int, ticket: Ticket) -> None:
        self.sequence, self.ticket = sequence, ticket
        self.state = DeliveryState.READY
        self.attempts = 0
        self.not_before = self.lease_ends = 0.0

    def held_by(self, claim: Claim) -> bool:
        return self.state is DeliveryState.CLAIMED and claim.attempts == self.attempts


class Tickets:
    """The queue. Its state outlives every host and trainer of the simulation."""

    def __init__(self, clock: Callable[[], float], max_deliveries: int, keep_finished: int) -> None:
        self.lease_s = LEASE_S
        self._clock, self._max_deliveries, self._keep_finished = clock, max_deliveries, keep_finished
        self._deliveries: dict[str, _Delivery] = {}  # by ticket, in the order of publication
        self._open: dict[str, _Delivery] = {}  # those that have not finished
        self._finished: dict[str, None] = {}  # the others, in the order in which they finished
        self._published = 0

    @property
    def remembered(self) -> int:
        """How many deliveries it knows of."""
        return len(self._deliveries)

    @property
    def unfinished(self) -> int:
        """How many of them are still to be trained on."""
        return len(self._open)

    def counts(self) -> Counter[str]:
        """Deliveries by state."""
        return Counter(each.state.value for each in self._deliveries.values())

    def publish(self, tickets: Iterable[Ticket]) -> int:
        """Take them in; how many were new."""
        before = self._published
        for ticket in tickets:
            if ticket.id not in self._deliveries:
                self._published += 1
                self._deliveries[ticket.id] = self._open[ticket.id] = _Delivery(self._published, ticket)
        return self._published - before

    def claim(self, n: int, *, consumer: str) -> list[Claim]:
        """The oldest that are ready."""
        now = self._end_leases()
        claims: list[Claim] = []
        for name, each in self._open.items():
            if len(claims) == n:
                break
            if each.state is DeliveryState.READY and each.not_before <= now:
                each.state = DeliveryState.CLAIMED
                each.lease_ends = now + self.lease_s
                each.attempts += 1
                claims.append(Claim(name, each.ticket.encode(), each.attempts, f"{each.sequence}:{each.attempts}"))
        return claims

    def ack_many(self, claims: Sequence[Claim]) -> list[Claim]:
        """Those that their claimant still had."""
        return [claim for claim in claims if self._end(claim, DeliveryState.DONE)]

    def discard(self, claim: Claim, reason: str) -> bool:
        """Whether the claimant still had it."""
        return self._end(claim, DeliveryState.DISCARDED)

    def retry(self, claim: Claim, delay_s: float, reason: str) -> bool:
        """Back into the queue; dead at the last delivery."""
        last = claim.attempts >= self._max_deliveries
        given_back = self._end(claim, DeliveryState.DEAD if last else DeliveryState.READY)
        if given_back:
            self._deliveries[claim.ticket_id].not_before = self._clock() + delay_s
        return given_back

    def renew(self, claims: Sequence[Claim]) -> list[Claim]:
        """Those that their claimant still has; their leases begin anew."""
        until = self._end_leases() + self.lease_s
        held = [claim for claim in claims if (each := self._deliveries.get(claim.ticket_id)) and each.held_by(claim)]
        for claim in held:
            self._deliveries[claim.ticket_id].lease_ends = until
        return held

    def known(self, tickets: Iterable[Ticket]) -> dict[str, DeliveryState]:
        """The states of those that it remembers, by id."""
        self._end_leases()
        return {each.id: self._deliveries[each.id].state for each in tickets if each.id in self._deliveries}

    def _end(self, claim: Claim, to: DeliveryState) -> bool:
        self._end_leases()
        each = self._deliveries.get(claim.ticket_id)
        if each is None or not each.held_by(claim):
            return False
        self._move(claim.ticket_id, each, to)
        return True

    def _move(self, name: str, delivery: _Delivery, to: DeliveryState) -> None:
        delivery.state = to
        if to.final:
            del self._open[name]
            self._finished[name] = None
            self._forget(self._keep_finished)

    def _forget(self, keep: int) -> None:
        """All but the last that have finished."""
        while len(self._finished) > keep:
            name = next(iter(self._finished))
            del self._finished[name], self._deliveries[name]

    def _end_leases(self) -> float:
        now = self._clock()
        for name, each in list(self._open.items()):
            if each.state is DeliveryState.CLAIMED and each.lease_ends <= now:
                last = each.attempts >= self._max_deliveries
                self._move(name, each, DeliveryState.DEAD if last else DeliveryState.READY)
        return now
