"""How a simulated trainer ends claims of rings: as queue/found_elsewhere.py, with coroutines in the place of threads.

`Answers`, `End` and `Arrivals` are the real ones. A call is interrupted at times, and repeated; the trainer gives some
claims up while their ring is being asked.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from accounts import Violation
from transport.queue.arrivals import Arrivals
from transport.queue.ends import UNTRAINED, Answers, End, Held, Said
from transport.queue.questions import Question, Questions

from transport.claims.demands import Brought
from transport.queue.base import Claim
from transport.wire import frames

_INTERRUPTED: Final = 0.25  # of calls


class Ends:
    """Of one process."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.world = trainer, trainer.world
        self.questions = Questions(contextlib.nullcontext(), self._accepted_late)
        self.answers = Answers(contextlib.nullcontext(), self._note, self.questions)
        self.arrivals = Arrivals(lambda ring: [link for link in self._links() if link.ring == ring], self._used)
        self.unconfirmed: Counter[str] = Counter()  # by ring: used, and not counted there yet
        self.over = False
        self._told = set[str]()  # tokens of the batch
        self._late = set[str]()  # tokens of what was accepted when its ring was asked again
        self._noted: Counter[tuple[int, int]] = Counter()
        self._asked: dict[tuple[int, int], Brought] = {}  # keeps what was brought alive, since keys are of that

    def _links(self) -> list[Any]:
        demands = self.trainer.demands
        return [] if demands is None else demands.links

    @staticmethod
    def claims(brought: Brought, positions: Sequence[int]) -> dict[int, Claim]:
        """Of some payloads, by position."""
        found = {}
        for at in positions:
            row = brought.batch.rows[at]
            name = _name(brought, row)
            found[at] = Claim(name, b"", 0, int(row["attempts"]), f"{name} {row['attempts']}")
        return found

    def token(self, brought: Brought, at: int) -> str:
        """Of one claim."""
        return self.claims(brought, [at])[at].token

    async def end(self, brought: Brought, positions: Sequence[int], end: End) -> list[int] | None:
        """Positions for which it was accepted; None: the caller was interrupted, and may call again."""
        world = self.world
        claims = self.claims(brought, positions)
        fresh = {at: claim for at, claim in claims.items() if Held(brought, at) not in self.answers}
        for at in fresh:
            self._asked[Held(brought, at).key] = brought
        if fresh:
            asking = asyncio.get_running_loop().create_task(
                self.answers.ask([(brought, fresh)], end, self.trainer.name), context=self.trainer.context
            )
            if world.rng.random() < _INTERRUPTED:
                await asyncio.wait((asking,), timeout=world.rng.expovariate(1 / 0.003))
                asking.cancel()
                await asyncio.wait((asking,))
                world.accounts.note(f"interrupted {self.trainer.name}")
                return None
            await asking
        answered: dict[Held, Said] = {}
        accepted = []
        for at in positions:
            held = Held(brought, at)
            said = self.answers.look(held)
            if said is None:
                raise Violation(f"{self.trainer.name} has no answer for a claim of {brought.link.ring[:12]}")
            answered[held] = said
            if said.accepted and said.end.what == end.what:
                accepted.append(at)
        self.answers.drop(answered)
        if world.rng.random() < _INTERRUPTED / 2:
            self.answers.put_back(answered)
            return None
        return accepted

    def forget(self, brought: Brought, positions: Sequence[int]) -> None:
        """Claims too old for who asked, and interrupted; their ring may be asked about them at this moment."""
        for at in positions:
            if not self.answers.give_up(Held(brought, at)):
                brought.demands.let_go(brought, brought.batch.rows[at : at + 1])

    async def used(self, brought: Brought, positions: Sequence[int]) -> None:
        """The trainer has trained on what had arrived: `FoundElsewhere.finish`, which is repeated at times."""
        claims = list(self.claims(brought, positions).values())
        self.world.told[brought.link.ring] += len(claims)
        self.unconfirmed[brought.link.ring] += len(claims)
        while found := self.arrivals.of(claims):
            telling = asyncio.get_running_loop().create_task(self.arrivals.tell(found), context=self.trainer.context)
            if self.world.rng.random() < _INTERRUPTED:
                await asyncio.wait((telling,), timeout=self.world.rng.expovariate(1 / 0.003))
                telling.cancel()
                await asyncio.wait((telling,))
                continue
            await telling
            self.arrivals.end(found, {})

    def _used(self, claim: Claim) -> None:
        if claim.token in self._told:
            self.world.failures.append(Violation(f"{self.trainer.name} tells of {claim.ticket_id} twice"))
        self._told.add(claim.token)

    def _note(self, claim: Claim, brought: Brought, said: Said | None) -> None:
        at = next(at for at, each in enumerate(brought.batch.rows) if _name(brought, each) == claim.ticket_id)
        key = Held(brought, at).key
        self._noted[key] += 1
        if self._noted[key] > 1:
            self.world.failures.append(Violation(f"{self.trainer.name} counts the end of {claim.ticket_id} twice"))
        if said is not None and said.accepted and said.end.what == "arrived" and not self.over:
            self.arrivals.add(claim, brought.link)

    def _accepted_late(self, question: Question) -> None:
        """As `HeldElsewhere` counts it."""
        claim = question.claim
        if self.over:
            return
        if claim.token in self._late:
            self.world.failures.append(Violation(f"{self.trainer.name} counts {claim.ticket_id} twice, late"))
        self._late.add(claim.token)
        if question.what == "arrived":
            self.arrivals.add(claim, question.link)
            self.world.unsaid[ring_of(claim)] -= 1

    def check(self) -> None:
        """Between two batches: what is kept of claims is what is being asked about."""
        answers = self.answers
        if answers._said or not answers._given_up <= answers._asking.keys():
            over = f"{len(answers._said)} answers and {len(answers._given_up)} claims"
            raise Violation(f"{self.trainer.name} keeps {over} that are over")
        self._told.clear()
        if not answers._asking:
            if unsaid := self._asked.keys() - self._noted.keys():
                raise Violation(f"{self.trainer.name} was not told how {len(unsaid)} claims ended")
            self._asked.clear()
            self._noted.clear()

    def close(self) -> None:
        """The process is no more: what it had asked goes on at the rings only."""
        self.over = True
        for arrived in self.arrivals._arrived.values():
            self.world.unsaid[ring_of(arrived.claim)] += 1
        self.world.unsaid += self.unconfirmed
        for key in self.answers._asking:
            self.world.unsaid[self._asked[key].link.ring] += 1
        for task in {*self.answers._asking.values(), *(each.telling for each in self.arrivals._arrived.values())}:
            if task is not None:
                task.cancel()


def ring_of(claim: Claim) -> str:
    """The ring that it is of."""
    return claim.ticket_id.partition("/")[0]


def _name(brought: Brought, row: Any) -> str:
    return f"{brought.link.ring}/{row['slot']}/{row['generation']}"


def asked_about(row: Any, what: str) -> tuple[int, int, int]:
    """What the ring has noted of an accepted end."""
    asking = frames.END_ASKED if what in UNTRAINED else 0
    return int(row["slot"]), int(row["generation"]), int(row["attempts"]) | asking
