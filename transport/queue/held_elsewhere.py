"""Claims of rings elsewhere that are held: their payloads, how they end, and what this process counts of them."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import Final

from transport import _ring
from transport.queue.base import Came, Claim, DeliveryState, Failure
from transport.queue.demands import Brought
from transport.queue.ends import UNTRAINED, Answers, End, Group, Held, Said
from transport.queue.looks import consumer_of, ring_of
from transport.queue.questions import Question, Questions
from transport.runtime.loop_thread import LoopThread

_MOST_FAILURES: Final = 256


class HeldElsewhere:
    """The claims that this process holds of rings elsewhere, and their ends. Any thread but the client's.

    Args:
        max_deliveries: claims in vain after which a delivery is dead.
    """

    def __init__(self, max_deliveries: int) -> None:
        self._most_attempts = min(max_deliveries, _ring.MAX_ATTEMPTS)
        self._thread: LoopThread | None = None  # the client's
        # Guards what follows. A lock of C: an interrupt within a Condition's own `with` would leave it locked for ever.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._held: dict[str, Held] = {}
        self._questions = Questions(self._lock, self._note_late)
        self._answers = Answers(self._lock, self._note, self._questions)
        self.counts: dict[str, Counter[tuple[int, str]]] = {}  # by ring
        self.failures: deque[Failure] = deque(maxlen=_MOST_FAILURES)

    def holds(self, claim: Claim) -> bool:
        """Whether the claim was made here, and has not ended by this process's own doing."""
        return claim.token in self._held or claim.token in self._questions

    def in_question(self, claims: Sequence[Claim]) -> list[Claim]:
        """Those of which no ring has said whether they were accepted; see questions.py."""
        return [claim for claim in claims if claim.token in self._questions]

    def came(self, claim: Claim) -> Came | None:
        """The payload of a claim."""
        held = self._held.get(claim.token)
        return None if held is None else Came(held.brought.link.link.wire, held.brought.batch.data(held.at))

    # --- the ends of claims ---------------------------------------------------------------------------
    def ack_many(self, claims: Sequence[Claim]) -> list[Claim]:
        """Consume; those that were accepted. Of claims in question the ring is asked again."""
        what = "done"
        if not self._questions.any(claims):
            return self._end(claims, End(what))
        settled: dict[str, Claim] = {}
        accepted: list[Claim] = []
        try:
            self._questions.settle(claims, what, self._thread, settled)
            accepted += self._end(claims, End(what))
            return [*settled.values(), *accepted]
        except BaseException:  # an interrupt: the call that is repeated gets them
            self._questions.put_back([*settled.values(), *accepted], what)
            raise

    def _note_late(self, question: Question) -> None:
        """Count a claim in question that was accepted. On the loop."""
        claim, what = question.claim, question.what
        self._count(ring_of(claim), claim.rank, **{what: 1})

    def retry(self, claim: Claim, delay_s: float, reason: str) -> bool:
        """Give back; what was claimed for the last time is dead."""
        end = End("dead", reason) if claim.attempts >= self._most_attempts else End("retried", delay_s=delay_s)
        return self._end([claim], end) != []  # bool() would be a call, after which an interrupt may come

    def discard(self, claim: Claim, reason: str) -> bool:
        """End the delivery; its ring records the reason."""
        return self._end([claim], End("discarded", reason)) != []

    def renew(self, claim: Claim) -> bool:
        """Whether it is held; the connection says that this process is alive, from the client's loop."""
        held = self._held.get(claim.token)
        return held is not None and not held.brought.link.lost

    def _end(self, claims: Sequence[Claim], end: End) -> list[Claim]:
        """End claims: those for which it was accepted.

        After an interrupt the repeated call has the answers of the first. A call that asks for another end is refused
        then, and what happened is counted.
        """
        taken: dict[str, Held] = {}
        answered: dict[Held, Said] = {}
        groups: dict[int, Group] = {}
        try:
            with self._lock:
                for claim in claims:
                    held = self._held.get(claim.token)
                    if held is None:
                        continue
                    taken[claim.token] = held
                    del self._held[claim.token]
                    if held not in self._answers:
                        groups.setdefault(id(held.brought), (held.brought, {}))[1][held.at] = claim
            if groups:
                self._settle(list(groups.values()), end, consumer_of(claims[0]))
            accepted: dict[str, Claim] = {}
            with self._lock:
                for claim in claims:
                    if (ended := taken.get(claim.token)) is None:
                        continue
                    if (said := self._answers.look(ended)) is None:
                        del taken[claim.token]
                        self._count(ring_of(claim), claim.rank, claimed=-1)
                        continue
                    answered[ended] = said
                    if said.accepted and said.end.what == end.what:
                        accepted[claim.token] = claim
                self._answers.drop(answered)
            return list(accepted.values())
        except BaseException:  # an interrupt: the call that is repeated gets the answers of this one
            with self._lock:
                self._answers.put_back(answered)
                self._held.update(taken)
            raise

    def _note(self, claim: Claim, brought: Brought, said: Said | None) -> None:
        """Count a claim whose ring has answered. On the loop, so that an interrupt cannot count it twice or not."""
        self._count(ring_of(claim), claim.rank, claimed=-1)
        if said is None or not said.accepted:
            return
        end = said.end
        what = end.what
        amounts = {"discarded" if what == "aged" else what: 1}
        if what == "dead":
            amounts["retried"] = 1
        elif what == "aged":
            amounts["aged"] = 1
        self._count(ring_of(claim), claim.rank, **amounts)
        if what in UNTRAINED:
            state = DeliveryState.DEAD if what == "dead" else DeliveryState.DISCARDED
            failure = Failure(claim.ticket_id, claim.rank, state, claim.attempts, consumer_of(claim), end.reason)
            self.failures.append(failure)

    def _settle(self, groups: Sequence[Group], end: End, consumer: str) -> None:
        """Wait for the answers. They are entered in the thread of the loop, where no interrupt is raised."""
        thread = self._thread
        if thread is not None and not thread.closed:  # otherwise every connection is closed as well
            thread.run(self._answers.ask(groups, end, consumer))

    def _count(self, ring: str, rank: int, **amounts: int) -> None:
        counts = self.counts.setdefault(ring, Counter())
        for name, amount in amounts.items():
            counts[rank, name] += amount

    def depth(self, rank: int | None, but: set[str]) -> Counter[str]:
        """What this process knows of rings that are not seen from here."""
        sums: Counter[str] = Counter()
        with self._lock:
            for ring, counts in self.counts.items():
                if ring not in but:
                    for (of, name), amount in counts.items():
                        sums[name] += amount * (rank is None or of == rank)
        return sums
