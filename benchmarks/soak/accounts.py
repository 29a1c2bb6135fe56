"""The accountant: what must have become of every payload, and what did. Takes lines of journals, does no I/O.

A payload is *published* when its writer said so after the queue had its ticket, or when a successor found it in the
ring. From then on each rank must consume it exactly once. A payload that a killed writer only intended to write may be
there or not; if one rank has consumed it, all must.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

_MOST_NAMED = 20


@dataclass
class _Book:
    """One writer's payloads, by number."""

    readers: int
    published: bytearray = field(default_factory=bytearray)
    consumed: list[bytearray] = field(init=False)
    intended: int = 0
    finished: bool = False
    known: bytearray = field(default_factory=bytearray)  # published, or consumed by some rank without being said to be
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


class Accounts:
    """Books of writers 0, 1, …; ``readers`` says for each how many ranks read its payloads."""

    def __init__(self, readers: Iterable[int]) -> None:
        self._books = [_Book(each) for each in readers]
        # Claims that a trainer was about to have accepted, by journal: token → (rank, writer, number).
        self._asked: dict[str, dict[str, tuple[int, int, int]]] = {}
        self._wrong: list[str] = []
        self._reported: dict[tuple[int, int, int], str] = {}
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
                book.mark(book.published, int(each.partition("=")[0]))
        elif kind == "E":
            self._books[int(first)].finished = True
        elif kind == "A":
            asked = self._asked[source] = {}
            for each in rest:
                number, writer, token = each.split("=")
                asked[token] = (int(first), int(writer), int(number))
        elif kind == "C":
            self._asked.pop(source, None)
            for each in rest:
                writer, number = map(int, each.split("="))
                self._consume(int(first), writer, number)
        elif kind == "X":
            self._wrong.append(f"{source}: rank {first} {' '.join(rest)}")
        else:
            raise ValueError(f"{source}: a line begins with {kind!r}")

    def _consume(self, rank: int, writer: int, number: int) -> None:
        book = self._books[writer]
        if book.mark(book.consumed[rank], number) == 1:
            self.consumed_total += 1

    # --- what the auditor finds -----------------------------------------------------------------------
    def open_questions(self, source: str) -> list[str]:
        """Tokens of claims that the (dead) process of this journal asked for without saying what became of them."""
        return list(self._asked.get(source, ()))

    def answer(self, source: str, accepted: Iterable[str]) -> None:
        """Of the open questions the queue has accepted these; the others are anybody's again."""
        asked = self._asked.pop(source, {})
        for token in accepted:
            self._consume(*asked[token])
            self._silent += 1

    def report(self, rank: int, writer: int, number: int, reason: str) -> None:
        """The queue ended this delivery without consumption, for ``reason``."""
        self._reported[rank, writer, number] = reason

    # --- the end ----------------------------------------------------------------------------------------
    def verdict(self, allowed: Iterable[str] = ()) -> Verdict:
        """``allowed``: reasons, by their first words, for which a payload may end without consumption."""
        allowed = tuple(allowed)
        lost: list[str] = []
        duplicated: list[str] = []
        reported: Counter[str] = Counter()
        never = 0
        for writer, book in enumerate(self._books):
            for number in range(max(book.intended, len(book.published))):
                times = [_at(consumed, number) for consumed in book.consumed]
                if not _at(book.published, number) and not any(times):
                    never += number < book.intended
                    continue
                for rank, count in enumerate(times):
                    name = f"writer {writer} number {number} rank {rank}"
                    reason = self._reported.get((rank, writer, number), "")
                    if count > 1:
                        duplicated.append(f"{name}: consumed {count} times")
                    elif count == 0 and reason.startswith(allowed) and reason and allowed:
                        reported[reason.partition(":")[0]] += 1
                    elif count == 0:
                        lost.append(f"{name}: {reason or 'no trace'}")
        payloads = sum(len(list(self._published(book))) for book in self._books)
        deliveries = sum(book.readers * len(list(self._published(book))) for book in self._books)
        named = [*self._wrong[:_MOST_NAMED], *lost[:_MOST_NAMED], *duplicated[:_MOST_NAMED]]
        return Verdict(
            payloads,
            deliveries,
            never,
            len(lost),
            len(duplicated),
            len(self._wrong),
            dict(reported),
            self._silent,
            named,
        )

    def _published(self, book: _Book) -> Iterator[int]:
        for number in range(max(len(book.published), *map(len, book.consumed))):
            if _at(book.published, number) or any(_at(consumed, number) for consumed in book.consumed):
                yield number


def _at(marks: bytearray, number: int) -> int:
    return marks[number] if number < len(marks) else 0
