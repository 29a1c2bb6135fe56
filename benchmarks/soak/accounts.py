"""The accountant: what must have become of every payload, and what did. Takes lines of journals, does no I/O.

A payload is *published* when its writer said so after the queue had its ticket, or when a successor found it in the
ring. From then on each rank must consume it exactly once. A payload that a killed writer only intended to write may be
there or not; if one rank has consumed it, or the queue has reported it, it is due to all. A delivery that the queue
reported for a reason that is allowed (a deadline that passed) is accounted for, and must not have been consumed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

_MOST_NAMED = 20
EXPIRED = "expired"
PERISHED = f"{EXPIRED}: its slot is free"


@dataclass
class _Book:
    """One writer's payloads, by number."""

    readers: int
    published: bytearray = field(default_factory=bytearray)
    consumed: list[bytearray] = field(init=False)
    intended: int = 0
    finished: bool = False
    known: bytearray = field(default_factory=bytearray)  # published, or consumed or reported without being said to be
    due: int = 0  # payloads known

    def __post_init__(self) -> None:
        self.consumed = [bytearray() for _ in range(self.readers)]

    def mark(self, marks: bytearray, number: int) -> int:
        if marks is not self.known and self.mark(self.known, number) == 1:
            self.due += 1
        if number >= len(marks):
            marks.extend(bytes(max(4096, number + 1 - len(marks))))
        marks[number] = min(255, marks[number] + 1)
        return marks[number]


@dataclass(frozen=True)
class Verdict:
    """Counts of payloads (lost, duplicated and wrong: of deliveries, one per rank)."""

    payloads: int
    deliveries: int
    never_published: int
    lost: int
    duplicated: int
    wrong: int
    reported: dict[str, int]
    silent: int  # accepted by the queue from a trainer that was killed before it could say so
    named: list[str]  # the first few that went wrong


def _nothing_perishes(writer: int, number: int) -> bool:
    return False


class Accounts:
    """Books of writers 0, 1, …; ``readers`` says for each how many ranks read its payloads.

    ``perishes``: whether the queue may end a delivery of this payload without a word.
    """

    def __init__(self, readers: Iterable[int], perishes: Callable[[int, int], bool] = _nothing_perishes) -> None:
        self._perishes = perishes
        self._perishable: dict[tuple[int, int, int], str] = {}  # deliveries that are open → ticket
        self._books = [_Book(each) for each in readers]
        # Claims that a trainer was about to have accepted, by journal: token → (rank, writer, number).
        self._asked: dict[str, dict[str, tuple[int, int, int]]] = {}
        # Claims of which a trainer does not know whether they were accepted, and will ask again, by journal: likewise.
        self._unsure: dict[str, dict[str, tuple[int, int, int]]] = {}
        # Of both, those of trainers that died since: (rank, token) → (rank, writer, number).
        self._open: dict[tuple[int, str], tuple[int, int, int]] = {}
        # Claims that a trainer was about to end without consuming them, and why: likewise.
        self._ending: dict[str, dict[tuple[int, int, int], tuple[str, str]]] = {}
        self._open_ends: dict[tuple[int, str], str] = {}
        self._names: dict[str, tuple[int, int]] = {}  # ticket id → (writer, number)
        self._wrong: list[str] = []
        self._reported: dict[tuple[int, int, int], str] = {}
        self._reported_kinds: Counter[str] = Counter()
        self._silent = 0
        self.consumed_total = 0

    def published_by(self, writer: int) -> int:
        """Payloads of ``writer`` that are published."""
        return len(self._books[writer].published) - self._books[writer].published.count(0)

    def intended_by(self, writer: int) -> int:
        """The number after the last that ``writer`` was about to write."""
        return self._books[writer].intended

    def finished(self, writer: int) -> bool:
        """Whether it has written its share."""
        return self._books[writer].finished

    def expected(self) -> int:
        """Deliveries of what is published, also by a writer that was killed before it could say so."""
        return sum(book.readers * book.due for book in self._books)

    def settled(self, allowed: Iterable[str] = ()) -> int:
        """Deliveries consumed, or reported for one of these reasons."""
        return self.consumed_total + sum(self._reported_kinds[kind] for kind in allowed)

    def named(self, ticket_id: str) -> tuple[int, int] | None:
        """Writer and number of a ticket, if a trainer has said them."""
        return self._names.get(ticket_id)

    # --- what processes say -------------------------------------------------------------------------
    def hear(self, source: str, words: list[str]) -> None:
        """One line of the journal ``source``."""
        kind, first, *rest = words
        if kind == "I":
            book = self._books[int(first)]
            book.intended = max(book.intended, int(rest[1]))
        elif kind == "P" or kind == "F":
            book = self._books[int(first)]
            for each in rest:
                number, _, ticket_id = each.partition("=")
                book.mark(book.published, int(number))
                self._may_perish(int(first), int(number), ticket_id)
        elif kind == "E":
            self._books[int(first)].finished = True
        elif kind in ("A", "Q"):
            asked = (self._asked if kind == "A" else self._unsure)[source] = {}
            for each in rest:
                number, writer, token = each.split("=")
                asked[token] = (int(first), int(writer), int(number))
        elif kind == "C":
            self._asked.pop(source, None)
            for each in rest:
                writer, number = each.split("=")
                self._consume(int(first), int(writer), int(number))
                self._ending.get(source, {}).pop((int(first), int(writer), int(number)), None)
        elif kind == "D":
            at = rest.index("because")
            reason = " ".join(rest[at + 1 :])
            for each in rest[:at]:
                number, writer, token = each.split("=")
                self._ending.setdefault(source, {})[int(first), int(writer), int(number)] = token, reason
        elif kind == "R" or kind == "K":
            for each in rest:
                writer, number = each.split("=")
                _, reason = self._ending[source].pop((int(first), int(writer), int(number)))
                if kind == "K":
                    self.report(int(first), int(writer), int(number), reason)
        elif kind == "N":
            for each in rest:
                ticket_id, writer, number = each.split("=")
                self._names[ticket_id] = (int(writer), int(number))
                self._may_perish(int(writer), int(number), ticket_id)
        elif kind == "X":
            self._wrong.append(f"{source}: rank {first} {' '.join(rest)}")
        else:
            raise ValueError(f"{source}: unexpected line that begins with {kind!r}")

    def _may_perish(self, writer: int, number: int, ticket_id: str) -> None:
        if self._perishes(writer, number):
            for rank in range(self._books[writer].readers):
                if not self._is_settled((rank, writer, number)):
                    self._perishable[rank, writer, number] = ticket_id

    def _consume(self, rank: int, writer: int, number: int) -> None:
        book = self._books[writer]
        self._perishable.pop((rank, writer, number), None)
        if book.mark(book.consumed[rank], number) == 1:
            self.consumed_total += 1

    # --- what the auditor finds -----------------------------------------------------------------------
    def died(self, source: str) -> None:
        """The process of this journal is gone: what it asked for without saying what became of it is a question."""
        for token, delivery in (self._unsure.pop(source, {}) | self._asked.pop(source, {})).items():
            self._open[delivery[0], token] = delivery
        for delivery, (token, reason) in self._ending.pop(source, {}).items():
            self._open[delivery[0], token] = delivery
            self._open_ends[delivery[0], token] = reason

    def open_questions(self) -> list[tuple[int, str]]:
        """Rank and token of claims whose trainers died before they could say what became of them."""
        return list(self._open)

    def answer(self, rank: int, token: str, accepted: bool) -> None:
        """Of an open question: the queue has accepted the claim, or it is anybody's again."""
        delivery = self._open.pop((rank, token))
        if accepted:
            self._consume(*delivery)
            self._silent += 1

    def over(self, rank: int, token: str) -> None:
        """Of an open question: the delivery has ended, which says nothing of the claim. Say so before the journals
        are read again.

        It was this claim's end unless another trainer has said, or may yet say, that it was its own.
        """
        delivery = self._open[rank, token]
        if self._is_settled(delivery):
            self._open.pop((rank, token))
            self._open_ends.pop((rank, token), None)
        elif not self._is_asked_for(delivery):
            reason = self._open_ends.pop((rank, token), None)
            if reason is None and self._perishes(*delivery[1:]):
                reason = PERISHED  # nobody trained on it, and it may have ended so before
            if reason is None:
                self.answer(rank, token, True)
            else:
                self._open.pop((rank, token))
                self.report(*delivery, reason)

    def perishable(self) -> dict[tuple[int, str], tuple[int, int, int]]:
        """Deliveries that are open and may have ended without a word, by rank and ticket."""
        return {(delivery[0], ticket_id): delivery for delivery, ticket_id in self._perishable.items()}

    def perished(self, delivery: tuple[int, int, int]) -> None:
        """It has ended, as was seen before the journals were read again: by its deadline unless anybody claims it."""
        taken = self._is_settled(delivery) or self._is_asked_for(delivery) or delivery in self._open.values()
        if not taken:
            self.report(*delivery, PERISHED)

    def _is_settled(self, delivery: tuple[int, int, int]) -> bool:
        rank, writer, number = delivery
        return delivery in self._reported or _at(self._books[writer].consumed[rank], number) > 0

    def _is_asked_for(self, delivery: tuple[int, int, int]) -> bool:
        asked = any(delivery in each.values() for each in (*self._asked.values(), *self._unsure.values()))
        return asked or any(delivery in each for each in self._ending.values())

    def report(self, rank: int, writer: int, number: int, reason: str) -> None:
        """The queue ended this delivery without consumption. Its kind is what stands before the reason's colon."""
        self._perishable.pop((rank, writer, number), None)
        if (rank, writer, number) not in self._reported:
            book = self._books[writer]
            if not _at(book.known, number):
                book.mark(book.known, number)
                book.due += 1
            self._reported_kinds[reason.partition(":")[0]] += 1
        self._reported[rank, writer, number] = reason

    # --- the end ----------------------------------------------------------------------------------------
    def verdict(self, allowed: Iterable[str] = ()) -> Verdict:
        """``allowed``: kinds of reports for which a delivery may end without consumption."""
        allowed = tuple(allowed)
        lost: list[str] = []
        duplicated: list[str] = []
        reported: Counter[str] = Counter()
        payloads = deliveries = never = 0
        for writer, book in enumerate(self._books):
            for number in range(max(book.intended, len(book.known))):
                if not _at(book.known, number):
                    never += number < book.intended
                    continue
                payloads += 1
                deliveries += book.readers
                for rank in range(book.readers):
                    count = _at(book.consumed[rank], number)
                    name = f"writer {writer} number {number} rank {rank}"
                    reason = self._reported.get((rank, writer, number), "")
                    if count > 1:
                        duplicated.append(f"{name}: consumed {count} times")
                    elif count and reason:
                        duplicated.append(f"{name}: consumed, and reported: {reason}")
                    elif not count and reason.partition(":")[0] in allowed:
                        reported[reason.partition(":")[0]] += 1
                    elif not count:
                        lost.append(f"{name}: {reason or 'no trace'}")
        return Verdict(
            payloads=payloads,
            deliveries=deliveries,
            never_published=never,
            lost=len(lost),
            duplicated=len(duplicated),
            wrong=len(self._wrong),
            reported=dict(reported),
            silent=self._silent,
            named=[*self._wrong[:_MOST_NAMED], *lost[:_MOST_NAMED], *duplicated[:_MOST_NAMED]],
        )


def _at(marks: bytearray, number: int) -> int:
    return marks[number] if number < len(marks) else 0
