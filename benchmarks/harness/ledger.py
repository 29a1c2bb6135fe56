"""What rollouts and trainers say they have done, in journals that outlive them, and the account made of it.

A journal has one line per event, appended by one write:

    I writer first last          will write these numbers, last excluded; nothing is promised of them yet
    P writer number …            are in the ring (also: found in a predecessor's)
    E writer                     has written everything
    S writer used                so many slots of its ring are not free
    A rank writer=number …       asks the queue to accept these claims
    Q rank writer=number …       does not know of these claims, and of no others, whether the queue has accepted them
    C rank writer=number …       the queue has accepted them: consumed
    D rank writer=number … because WHY    is about to end these claims without consuming them
    K rank writer=number …       it has ended these claims so
    R rank writer=number …       it has not: they were another's by then
    X rank writer=number why     other bytes than those of the payload

A line that a kill tore ends without its full stop and counts as never said; a process begins with a line of its own.

A payload is *due* to every rank once its writer said P, or one rank has ended it, or died with it. Each rank must
consume it once. A delivery that a process was about to end when it died (A, Q, D) counts as ended so, unless another
process says that it has ended it. When all rings are empty, every other delivery that nobody has ended was lost.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

Delivery = tuple[int, int, int]  # rank, writer, number
VANISHED, TWICE = "vanished", "twice"
_MOST_NAMED = 20


class Journal:
    """Appends; belongs to one process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.write(self._descriptor, b"\n")  # ends what a killed predecessor left

    def say(self, *words: object) -> None:
        """One line, in one write. It is true for whoever reads it as soon as this returns."""
        line = (" ".join(map(str, words)) + " .\n").encode()
        if os.write(self._descriptor, line) != len(line):
            raise OSError(f"no room for the journal {self.path}")

    def close(self) -> None:
        """A process that ends needs no such call."""
        os.close(self._descriptor)


class Lines:
    """The lines of a file, each as its words, as it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0

    def new(self) -> Iterator[list[str]]:
        """Complete lines since the last look."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return
        end = data.rfind(b"\n") + 1
        self._at += end
        for line in data[:end].decode().splitlines():
            words = line.split()
            if words and words[-1] == ".":
                yield words[:-1]


@dataclass
class _Book:
    """One writer's payloads, by number; a byte each."""

    consumed: list[bytearray]  # by rank: how often
    known: bytearray = field(default_factory=bytearray)
    intended: int = 0
    finished: bool = False
    used: int = -1  # slots


@dataclass
class Tally:
    """Counts of payloads; from ``deliveries`` on of deliveries, one for each rank that reads a payload."""

    payloads: int = 0
    never_published: int = 0  # numbers that a writer only intended to write
    deliveries: int = 0
    consumed: int = 0
    silent: int = 0  # asked for by a trainer that died before it could say what became of it
    excused: dict[str, int] = field(default_factory=dict)  # not consumed, or consumed twice, for an allowed reason
    lost: int = 0
    duplicated: int = 0
    wrong: int = 0
    named: list[str] = field(default_factory=list)  # the first that went wrong


def _never(delivery: Delivery, how: str) -> str:
    return ""


class Ledger:
    """The account of one run.

    Args:
        ranks: how many read the payloads of a writer.
        excused: asked of a delivery that was `VANISHED`, was ended `TWICE`, or was ended for another reason, given as
            text: under which name that is allowed; empty: it is not.

    Attributes:
        settled: deliveries that were consumed, or ended for a reason.
        consumed: of these, consumed.
        due: deliveries that are due.
        last: by trainer, and as "writer N", when it last got on.
        carried: by writer, when the newest of its payloads was published that a trainer has consumed.
    """

    def __init__(
        self, ranks: Callable[[int], int] = lambda writer: 1, excused: Callable[[Delivery, str], str] = _never
    ) -> None:
        self._ranks, self._excused = ranks, excused
        self.settled = self.consumed = self.due = 0
        self.last: dict[str, float] = {}
        self.carried: dict[int, float] = {}
        self._books: dict[int, _Book] = {}
        self._outstanding: dict[Delivery, float] = {}  # due, and without any end → since when
        self._ended: dict[Delivery, str] = {}  # for a reason, without consumption
        self._twice: list[Delivery] = []
        self._wrong: list[str] = []
        self._asked: dict[str, list[Delivery]] = {}  # by journal
        self._unsure: dict[str, list[Delivery]] = {}
        self._ending: dict[str, dict[Delivery, str]] = {}
        self._maybe: dict[Delivery, str] = {}  # a process died that may have ended it so; "": that may have consumed it

    def _book(self, writer: int) -> _Book:
        if writer not in self._books:
            self._books[writer] = _Book([bytearray() for _ in range(self._ranks(writer))])
        return self._books[writer]

    # --- what processes say ---------------------------------------------------------------------------
    def hear(self, source: str, words: list[str], now: float = 0.0) -> None:
        """One line of the journal ``source``, read at this time."""
        kind, first, *rest = words
        who = int(first)
        if kind == "I":
            self._book(who).intended = max(self._book(who).intended, int(rest[1]))
        elif kind == "P":
            for number in rest:
                self._is_due(who, int(number), now)
            self.last[f"writer {who}"] = now
        elif kind == "E":
            self._book(who).finished = True
        elif kind == "S":
            self._book(who).used = int(rest[0])
        elif kind == "A":
            self._asked[source] = [_delivery(who, word) for word in rest]
        elif kind == "Q":
            self._unsure[source] = [_delivery(who, word) for word in rest]
        elif kind == "C":
            self._asked.pop(source, None)
            for word in rest:
                self._consume(_delivery(who, word), now)
            if rest:
                self.last[source] = now
        elif kind == "D":
            at = rest.index("because")
            reason = " ".join(rest[at + 1 :])
            self._ending.setdefault(source, {}).update({_delivery(who, word): reason for word in rest[:at]})
        elif kind in ("K", "R"):
            for delivery in (_delivery(who, word) for word in rest):
                reason = self._ending[source].pop(delivery)
                if kind == "K":
                    self._end(delivery, reason, now)
        elif kind == "X":
            self._wrong.append(f"{source}: wrong bytes: rank {first} {' '.join(rest)}")
        else:
            raise ValueError(f"{source}: unexpected line that begins with {kind!r}")

    def _is_due(self, writer: int, number: int, now: float) -> None:
        book = self._book(writer)
        if _add(book.known, number) == 1:
            for rank in range(len(book.consumed)):
                self._outstanding[rank, writer, number] = now
            self.due += len(book.consumed)

    def _consume(self, delivery: Delivery, now: float) -> None:
        rank, writer, number = delivery
        self._is_due(writer, number, now)
        self._maybe.pop(delivery, None)
        count = _add(self._book(writer).consumed[rank], number)
        if (since := self._outstanding.pop(delivery, None)) is not None:
            self.settled += 1
            self.carried[writer] = max(since, self.carried.get(writer, since))
        self.consumed += 1
        if count > 1 or delivery in self._ended:
            self._twice.append(delivery)

    def _end(self, delivery: Delivery, reason: str, now: float) -> None:
        rank, writer, number = delivery
        self._is_due(writer, number, now)
        self._maybe.pop(delivery, None)
        if self._outstanding.pop(delivery, None) is not None:
            self.settled += 1
        self._ended[delivery] = reason
        if _at(self._book(writer).consumed[rank], number):
            self._twice.append(delivery)

    # --- what the run knows -----------------------------------------------------------------------------
    def died(self, source: str, writer: int | None = None) -> None:
        """The process of this journal is gone, with all that it said heard; ``writer``: it was this rollout."""
        ending = self._ending.pop(source, {})
        for delivery in (*self._asked.pop(source, ()), *self._unsure.pop(source, ()), *ending):
            self._is_due(delivery[1], delivery[2], 0.0)  # it was claimed, so that it had been published
            if not self._is_over(delivery):
                self._maybe[delivery] = ending.get(delivery, "")
        self.last.pop(source, None)
        if writer is not None:
            self._book(writer).finished, self._book(writer).used = False, -1

    def _is_over(self, delivery: Delivery) -> bool:
        rank, writer, number = delivery
        return delivery in self._ended or _at(self._book(writer).consumed[rank], number) > 0

    def intended(self, writer: int) -> int:
        """The number after the last that it was about to write."""
        return self._book(writer).intended

    def published(self, writer: int) -> int:
        """How many of its payloads are known."""
        return _marked(self._book(writer).known)

    def emptied(self, writer: int) -> bool:
        """Whether it has written everything, and its ring is empty."""
        return self._book(writer).finished and self._book(writer).used == 0

    def waited_for(self, before: float = float("inf")) -> list[Delivery]:
        """Due since before this time, not ended, not in question, and not allowed to vanish."""
        return [
            delivery
            for delivery, since in self._outstanding.items()
            if since <= before and delivery not in self._maybe and not self._excused(delivery, VANISHED)
        ]

    # --- the end ----------------------------------------------------------------------------------------
    def close(self) -> Tally:
        """The account, when every ring is empty or the run was given up."""
        excused: Counter[str] = Counter()
        lost: list[str] = []
        duplicated: list[str] = []
        silent, twice = 0, set(self._twice)
        ends = {delivery: reason for delivery, reason in self._ended.items() if delivery not in twice}
        for delivery in self._outstanding:
            if self._maybe.get(delivery) == "":
                silent += 1
            else:
                ends[delivery] = self._maybe.get(delivery, VANISHED)
        for bad, judged in ((lost, [*ends.items()]), (duplicated, [(each, TWICE) for each in self._twice])):
            for delivery, how in judged:
                if name := self._excused(delivery, how):
                    excused[name] += 1
                else:
                    bad.append(f"writer {delivery[1]} number {delivery[2]} rank {delivery[0]}: {how}")
        books = self._books.values()
        return Tally(
            payloads=sum(_marked(book.known) for book in books),
            never_published=sum(book.intended - _marked(book.known[: book.intended]) for book in books),
            deliveries=self.due,
            consumed=self.consumed,
            silent=silent,
            excused=dict(excused),
            lost=len(lost),
            duplicated=len(duplicated),
            wrong=len(self._wrong),
            named=[*self._wrong[:_MOST_NAMED], *lost[:_MOST_NAMED], *duplicated[:_MOST_NAMED]],
        )


def _delivery(rank: int, word: str) -> Delivery:
    writer, _, number = word.partition("=")
    return rank, int(writer), int(number)


def _marked(marks: bytearray) -> int:
    return len(marks) - marks.count(0)


def _at(marks: bytearray, number: int) -> int:
    return marks[number] if number < len(marks) else 0


def _add(marks: bytearray, number: int) -> int:
    if number >= len(marks):
        marks.extend(bytes(max(4096, number + 1 - len(marks))))
    marks[number] = min(255, marks[number] + 1)
    return marks[number]
