"""What must have become of every payload, and what did. Takes lines of journals and clock readings, does no I/O.

A payload is due when its rollout said that it is published, or when a trainer has it. It must then be consumed once, or
be accounted for: its host was removed with its ring, or the queue reports it with a reason. What a trainer asked for
when its host was removed is *in question*, until the queue says, or the ring is empty, or another trainer has it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

Payload = tuple[int, int]  # writer, number


@dataclass
class _Writer:
    published: dict[int, float] = field(default_factory=dict)  # number → when
    intended: int = 0
    finished: bool = False
    used: int = -1  # slots
    used_at: float = 0.0
    removed_in: int | None = None  # the fault with which its host was removed
    cut_off_in: int | None = None  # the fault in which its host was out of reach for longer than its record lasts


class Tally(NamedTuple):
    """Counts of one fault, or of all."""

    delivered: int = 0
    again: int = 0  # claims of payloads that another claim had had before
    silent: int = 0  # consumed by a trainer that was removed before it could say so
    with_host: int = 0  # lost with the ring of a removed host
    reported: int = 0  # ended by a report with its reason, the host removed or out of reach for long
    forgotten: int = 0  # consumed twice, or ended, after a Redis that forgot: allowed then
    lost: int = 0
    twice: int = 0
    wrong: int = 0

    @property
    def good(self) -> bool:
        """Nothing that may not be."""
        return not (self.lost or self.twice or self.wrong)


class Books:
    """One run's. ``fault`` is the number of the present one, 0 before the first."""

    def __init__(self) -> None:
        self.fault = 0
        self.forgot_at: float | None = None  # a Redis was promoted that may lack acknowledgements until then
        self.delivered = 0
        self.named: list[str] = []
        self.outstanding: dict[Payload, float] = {}  # due, and without any end
        self.last: dict[str, float] = {}  # trainer or "writer N" → when it last got on
        self.fetched: dict[int, int] = {}  # writer → highest number consumed
        self._writers: dict[int, _Writer] = {}
        self._ids: dict[str, Payload] = {}
        self._consumed: Counter[Payload] = Counter()
        self._reported: dict[Payload, tuple[int, str]] = {}
        self._asked: dict[str, dict[str, Payload]] = {}
        self._ending: dict[str, dict[Payload, str]] = {}
        self._questions: dict[str, Payload] = {}  # token → payload
        self._counts: dict[int, Counter[str]] = {}

    def _count(self, what: str, number: int = 1, fault: int | None = None) -> None:
        self._counts.setdefault(self.fault if fault is None else fault, Counter())[what] += number

    def _writer(self, writer: int) -> _Writer:
        return self._writers.setdefault(writer, _Writer())

    # --- what processes say ---------------------------------------------------------------------------
    def hear(self, source: str, words: list[str], now: float) -> None:
        """One line of the journal ``source``."""
        kind, first, *rest = words
        if kind == "I":
            book = self._writer(int(first))
            book.intended = max(book.intended, int(rest[1]))
        elif kind == "P":
            for each in rest:
                number, _, ticket_id = each.partition("=")
                self._ids[ticket_id] = int(first), int(number)
                self._due((int(first), int(number)), now)
            self.last[f"writer {first}"] = now
        elif kind == "S":
            book = self._writer(int(first))
            book.used, book.used_at = int(rest[0]), now
        elif kind == "E":
            self._writer(int(first)).finished = True
        elif kind == "G":
            self._count("again", int(rest[0]))
        elif kind == "A":
            asked = self._asked[source] = {}
            for each in rest:
                number, writer, token = each.split("=")
                asked[token] = int(writer), int(number)
        elif kind == "C":
            self._asked.pop(source, None)
            for payload in map(_payload, rest):
                self._consume(payload, source, now)
                self._ending.get(source, {}).pop(payload, None)
            if rest:
                self.last[source] = now
        elif kind == "D":
            at = rest.index("because")
            for each in rest[:at]:
                number, writer, _ = each.split("=")
                self._ending.setdefault(source, {})[int(writer), int(number)] = " ".join(rest[at + 1 :])
        elif kind in "RK":
            for payload in map(_payload, rest):
                reason = self._ending[source].pop(payload)
                if kind == "K":
                    self.report(payload, reason, now)
        elif kind == "X":
            self._count("wrong")
            self.named.append(f"{source}: wrong bytes: {' '.join(rest)}")
        elif kind == "Q":
            pass  # what is in question ends by a later C, or as its ring does
        else:
            raise ValueError(f"{source}: unexpected line that begins with {kind!r}")

    def _due(self, payload: Payload, now: float) -> None:
        book = self._writer(payload[0])
        if payload[1] not in book.published:
            book.published[payload[1]] = now
            if not self._consumed[payload] and payload not in self._reported:
                self.outstanding[payload] = now

    def _consume(self, payload: Payload, source: str, now: float) -> None:
        self._due(payload, now)
        self.outstanding.pop(payload, None)
        self._consumed[payload] += 1
        self.delivered += 1
        self._count("delivered")
        self.fetched[payload[0]] = max(self.fetched.get(payload[0], -1), payload[1])
        if self._consumed[payload] > 1 or payload in self._reported:
            self._twice(payload, f"consumed again by {source}")

    def _twice(self, payload: Payload, what: str) -> None:
        if self._may_be_forgotten(payload):
            self._count("forgotten")
            return
        self._count("twice")
        self.named.append(f"writer {payload[0]} number {payload[1]}: {what}")

    def _may_be_forgotten(self, payload: Payload) -> bool:
        at = self._writer(payload[0]).published[payload[1]]
        return self.forgot_at is not None and at <= self.forgot_at

    def report(self, payload: Payload, reason: str, now: float) -> None:
        """A delivery ended without consumption, for this reason. Idempotent."""
        if payload in self._reported:
            return
        self._due(payload, now)
        self.outstanding.pop(payload, None)
        self._reported[payload] = self.fault, reason
        book = self._writer(payload[0])
        removed_in = book.removed_in
        if removed_in is None and "PayloadLostError" in reason:
            removed_in = book.cut_off_in
        if self._consumed[payload]:
            self._twice(payload, f"consumed, and reported: {reason}")
        elif removed_in is not None:
            self._count("reported", fault=removed_in)
        elif self._may_be_forgotten(payload):
            self._count("forgotten")
        else:
            self._count("lost")
            self.named.append(f"writer {payload[0]} number {payload[1]}: reported, and its host lives: {reason}")

    def ticket(self, ticket_id: str) -> Payload | None:
        """Whose ticket that is."""
        return self._ids.get(ticket_id)

    # --- what the run knows -----------------------------------------------------------------------------
    def removed(self, source: str, writer: int | None = None) -> None:
        """A process went with its host; all of its journal has been heard."""
        self._questions.update(self._asked.pop(source, {}))
        self._ending.pop(source, None)
        self.last.pop(source, None)
        if writer is not None:
            self._writer(writer).removed_in = self.fault

    def cut_off(self, writer: int) -> None:
        """Its host was out of reach in this fault for so long that its payloads may count as lost."""
        self._writer(writer).cut_off_in = self.fault

    def used(self, writer: int) -> int:
        """Slots of its ring that are not free, as it last said."""
        return max(0, self._writer(writer).used)

    def questions(self) -> list[str]:
        """Tokens of claims in question whose payload has not been consumed by another trainer."""
        self._questions = {token: each for token, each in self._questions.items() if each in self.outstanding}
        return list(self._questions)

    def answerable(self, queue_says: bool) -> bool:
        """Whether an answer to a question can still come: from the queue, or from a ring whose host was not removed."""
        self.questions()
        return any(queue_says or self._writer(each[0]).removed_in is None for each in self._questions.values())

    def answer(self, token: str, accepted: bool, now: float) -> None:
        """Of a question: the queue had accepted the claim, or the payload is anybody's again."""
        payload = self._questions.pop(token)
        if accepted:
            self._due(payload, now)
            self.outstanding.pop(payload, None)
            self._consumed[payload] += 1
            self._count("silent")

    def answer_emptied(self, now: float) -> None:
        """Questions of payloads whose ring has no slot that is not free."""
        for token in self.questions():
            book = self._writer(self._questions[token][0])
            emptied = book.used == 0 and book.used_at > max(book.published.values(), default=0.0)
            if emptied and book.removed_in is None:
                self.answer(token, True, now)

    def written_since(self, writer: int, since: float) -> bool:
        """Whether a payload that it published since then has been consumed."""
        book, highest = self._writer(writer), self.fetched.get(writer, -1)
        return book.published.get(highest, -1.0) >= since

    def finished(self, writer: int) -> bool:
        """Whether everything it wrote is published."""
        return self._writer(writer).finished

    def published(self, writer: int) -> int:
        """How many it has published."""
        return len(self._writer(writer).published)

    def waited_for(self, before: float, gone_counts: bool) -> list[Payload]:
        """Due before this time, without an end, and not in question. ``gone_counts``: also with removed hosts."""
        asked = set(self._questions.values())
        return [
            payload
            for payload, at in self.outstanding.items()
            if at <= before and payload not in asked and (gone_counts or self._writers[payload[0]].removed_in is None)
        ]

    # --- the end ----------------------------------------------------------------------------------------
    def close(self, reports: bool) -> None:
        """Judge what has no end. ``reports``: the queue has to report what went with a host."""
        questioned = set(self._questions.values())
        for payload in list(self.outstanding):
            removed_in = self._writer(payload[0]).removed_in
            if removed_in is not None and (not reports or payload in questioned):
                self._count("with_host", fault=removed_in)
            else:
                self._count("lost", fault=removed_in)
                self.named.append(f"writer {payload[0]} number {payload[1]}: no trace")
        self.outstanding.clear()

    def tally(self, fault: int) -> Tally:
        """Of one fault."""
        return Tally(**self._counts.get(fault, Counter()))

    def total(self) -> Tally:
        """Of the whole run."""
        counts: Counter[str] = Counter()
        for each in self._counts.values():
            counts.update(each)
        return Tally(**counts)

    def due(self) -> int:
        """Payloads that were published."""
        return sum(len(book.published) for book in self._writers.values())

    def reasons(self) -> dict[str, int]:
        """Reports by reason, numbers left out."""
        kinds = (
            " ".join("#" if any(map(str.isdigit, word)) else word for word in why.split())
            for _, why in self._reported.values()
        )
        return dict(Counter(kinds))


def _payload(word: str) -> Payload:
    writer, number = word.split("=")
    return int(writer), int(number)
