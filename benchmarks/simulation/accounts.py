"""What was produced, trained on, freed and lost: each event is checked against all before it.

A slot is written again only once its payload was trained on or reported as lost, so the last generation of each event
is enough, and the memory of the accounts is that of the slots, however long a simulation goes on.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import NamedTuple

from transport.ticket import Ticket

Identity = tuple[str, int, int]  # ring, slot, generation


class Violation(BaseException):
    """A promise does not hold."""


class Waiting(NamedTuple):
    """A payload that no trainer has trained on: its host, and when it was written."""

    host: int
    at: float


class _Ring:
    """The last generation of each slot that was written, and that was trained on or reported as lost."""

    __slots__ = ("ended", "written")

    def __init__(self) -> None:
        self.written: dict[int, int] = {}
        self.ended: dict[int, int] = {}


def shown(payload: Identity) -> str:
    """For messages and the digest: enough of the ring's id that ten thousand rings differ."""
    ring, slot, generation = payload
    return f"{ring[:12]}/{slot}@{generation}"


class Accounts:
    """The payloads of one simulation."""

    def __init__(self) -> None:
        self.waiting: dict[Identity, Waiting] = {}
        self.counts: Counter[str] = Counter()
        self.now = 0.0
        self._rings: dict[str, _Ring] = {}
        self._digest = hashlib.blake2b(digest_size=8)

    def note(self, what: str) -> None:
        """An event: part of the digest that two runs of a seed are compared by."""
        self._digest.update(f"{self.now:.9f} {what}\n".encode())
        self.counts[what.partition(" ")[0]] += 1

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    @property
    def oldest(self) -> float:
        """When the oldest payload was written that waits, since they are in this order; `now` if none does."""
        return next(iter(self.waiting.values())).at if self.waiting else self.now

    def produced(self, ticket: Ticket, host: int) -> None:
        self.note(f"written {shown(ticket.identity)}")
        ring = self._rings.setdefault(ticket.ring, _Ring())
        before = ring.written.get(ticket.slot, 0)
        if ring.ended.get(ticket.slot, 0) != before or ticket.generation <= before:
            raise Violation(f"lost: {shown(ticket.identity)} is written over generation {before}, which waits")
        ring.written[ticket.slot] = ticket.generation
        self.waiting[ticket.identity] = Waiting(host, self.now)

    def train(self, payload: Identity) -> None:
        self.note(f"trained {shown(payload)}")
        ring_id, slot, generation = payload
        ring = self._rings.get(ring_id, _Ring())
        if generation <= ring.ended.get(slot, 0):
            raise Violation(f"twice: payload {shown(payload)} is trained on a second time")
        if generation != ring.written.get(slot, 0):
            raise Violation(f"payload {shown(payload)} was never written")
        self._end(payload)

    def freed(self, ticket: Ticket) -> None:
        self.note(f"freed {shown(ticket.identity)}")
        if self._rings[ticket.ring].ended.get(ticket.slot) != ticket.generation:
            raise Violation(
                f"lost: the slot of payload {shown(ticket.identity)} is freed, and no trainer trained on it"
            )

    def host_died(self, number: int, held: list[Ticket]) -> None:
        self.note(f"died {number}")
        for ticket in held:
            self.waiting.pop(ticket.identity, None)

    def abandoned(self, payload: Identity) -> None:
        """Rightly reported as lost: the directory could not know that its host lives. Its slot may be freed."""
        self.note(f"abandoned {shown(payload)}")
        self._end(payload)

    def given_up(self, payload: Identity, why: str) -> None:
        """A trainer reports a payload as unreadable."""
        self.note(f"given_up {shown(payload)}")
        if payload in self.waiting:
            raise Violation(f"lost: payload {shown(payload)} is given up ({why}), and its host lives and has it")

    def _end(self, payload: Identity) -> None:
        ring, slot, generation = payload
        self._rings.setdefault(ring, _Ring()).ended[slot] = generation
        self.waiting.pop(payload, None)
