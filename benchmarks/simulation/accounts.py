"""What was produced, trained on, freed and lost: each event is checked against all before it."""

from __future__ import annotations

import hashlib
from collections import Counter

from transport.ticket import Ticket


class Violation(Exception):
    """A promise does not hold."""


class Accounts:
    """The payloads of one simulation, by name."""

    def __init__(self) -> None:
        self.waiting: dict[str, tuple[int, float]] = {}  # not trained on: host, and when it was written
        self.trained = set[str]()
        self.gone = set[str]()  # with their hosts
        self.counts: Counter[str] = Counter()
        self.now = 0.0
        self._digest = hashlib.blake2b(digest_size=8)

    def note(self, what: str) -> None:
        """An event: part of the digest that two runs of a seed are compared by."""
        self._digest.update(f"{self.now:.9f} {what}\n".encode())
        self.counts[what.partition(" ")[0]] += 1

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def produced(self, ticket: Ticket, host: int) -> None:
        self.note(f"written {ticket.name}")
        self.waiting[ticket.name] = (host, self.now)

    def train(self, name: str) -> None:
        self.note(f"trained {name}")
        if name in self.trained:
            raise Violation(f"twice: payload {name} is trained on a second time")
        if name not in self.waiting and name not in self.gone:
            raise Violation(f"payload {name} was never written")
        self.trained.add(name)
        self.waiting.pop(name, None)

    def freed(self, ticket: Ticket) -> None:
        self.note(f"freed {ticket.name}")
        if ticket.name not in self.trained:
            raise Violation(f"lost: the slot of payload {ticket.name} is freed, and nobody trained on it")

    def host_died(self, number: int, held: list[Ticket]) -> None:
        self.note(f"died {number}")
        for ticket in held:
            if self.waiting.pop(ticket.name, None) is not None:
                self.gone.add(ticket.name)

    def given_up(self, name: str, why: str) -> None:
        """A trainer reports a payload as unreadable."""
        self.note(f"given_up {name}")
        if name in self.waiting:
            raise Violation(f"lost: payload {name} is given up ({why}), and its host lives and has it")
