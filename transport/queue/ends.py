"""How claims of rings elsewhere end, and the answers of the rings: an interrupted call leaves them to the next one."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import numpy as np

from transport.queue.base import Claim
from transport.queue.demands import Brought
from transport.queue.questions import Questions
from transport.taking.batch import Rows, Verdicts
from transport.wire.frames import Ended

_MOST_UNSAID: Final = 4096  # claims whose ends were interrupted; hardly any, and most are asked about again at once
UNTRAINED: Final = {"discarded": Ended.DISCARDED, "dead": Ended.DEAD, "aged": Ended.AGED}


_Key = tuple[int, int]


class End(NamedTuple):
    """What claims are to become: ``what`` is a count of `QueueDepth`."""

    what: str
    reason: str = ""
    delay_s: float = 0.0

    async def asked(self, brought: Brought, rows: Rows, consumer: str) -> Verdicts:
        """Have the ring end them so; for which it was accepted."""
        if self.what == "done":
            return await brought.demands.finish(brought, rows)
        if self.what == "retried":
            return await brought.demands.give_back(brought, rows, self.delay_s)
        return await brought.demands.end(brought, rows, UNTRAINED[self.what], self.reason, consumer)


class Held(NamedTuple):
    """A claim: one payload of what was brought."""

    brought: Brought
    at: int

    @property
    def key(self) -> _Key:
        """Of it while `brought` lives."""
        return id(self.brought), self.at


class Said(NamedTuple):
    """What became of a claim. It keeps what was brought alive, since the key is of that."""

    end: End
    accepted: bool
    brought: Brought


Group = tuple[Brought, dict[int, Claim]]
"""Claims of one `Brought`, by position."""


class Answers:
    """What rings have said of claims and no caller has been told yet.

    `ask` belongs to the client's loop, the others to any thread that has the lock.

    Args:
        lock: may be acquired again by the thread that has it.
        ended: is called once for each claim that was asked about, under the lock, in the thread of the loop, where no
            interrupt is raised; None: its answer did not come, and no caller waits for it any more.
        questions: are told of what was not accepted.
    """

    def __init__(
        self,
        lock: AbstractContextManager[Any],
        ended: Callable[[Claim, Brought, Said | None], object],
        questions: Questions,
    ) -> None:
        self._lock = lock
        self._ended = ended
        self._questions = questions
        self._said: dict[_Key, Said] = {}
        self._asking: dict[_Key, asyncio.Task[None]] = {}
        self._given_up: set[_Key] = set()  # of them

    def __contains__(self, held: Held) -> bool:
        return held.key in self._said

    def look(self, held: Held) -> Said | None:
        """The answer; None: there is none, because every connection is closed."""
        return self._said.get(held.key)

    def drop(self, answered: Iterable[Held]) -> None:
        """The caller has these answers."""
        for held in answered:
            self._said.pop(held.key, None)

    def put_back(self, answered: Mapping[Held, Said]) -> None:
        """The caller was interrupted before it had them."""
        self._said.update((held.key, said) for held, said in answered.items())

    def give_up(self, held: Held) -> bool:
        """No caller will ask for it. False: the ring has not been asked how it ends."""
        if held.key in self._asking:
            self._given_up.add(held.key)
            return True
        return self._said.pop(held.key, None) is not None

    async def ask(self, groups: Sequence[Group], end: End, consumer: str) -> None:
        """Have the answers for these claims, of a first question that is under way or has been answered meanwhile, too.

        Where this is cancelled the question goes on.
        """
        waited: dict[asyncio.Task[None], None] = {}
        with self._lock:
            for brought, claims in groups:
                fresh = {}
                for at, claim in claims.items():
                    key = Held(brought, at).key
                    if (asking := self._asking.get(key)) is not None:
                        waited[asking] = None
                    elif key not in self._said:
                        fresh[at] = claim
                if fresh:
                    task = asyncio.get_running_loop().create_task(self._ask(brought, fresh, end, consumer))
                    self._asking.update((Held(brought, at).key, task) for at in fresh)
                    waited[task] = None
        await asyncio.shield(asyncio.gather(*waited))

    async def _ask(self, brought: Brought, claims: dict[int, Claim], end: End, consumer: str) -> None:
        rows = brought.batch.rows
        if len(claims) < len(rows):
            rows = rows[np.asarray(list(claims), np.intp)]
        answers: list[Said | None] = [None] * len(claims)
        try:
            verdicts = await end.asked(brought, rows, consumer)
            answers = [Said(end, accepted, brought) for accepted in verdicts.tolist()]
        finally:
            with self._lock:
                for (at, claim), said in zip(claims.items(), answers, strict=True):
                    key = Held(brought, at).key
                    del self._asking[key]
                    given_up = key in self._given_up
                    self._given_up.discard(key)
                    if said is not None or given_up:
                        self._ended(claim, brought, said)
                    if said is not None and not said.accepted and end.what == "done" and not given_up:
                        self._questions.note(claim, brought.link, brought.batch.rows[at], end.what)
                    if said is not None and not given_up:
                        self._said[key] = said


class Unsaid:
    """Ends that were accepted, and whose callers were interrupted, or got an error, before they knew. Any thread."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, str], bool] = {}  # token, and what it became; the oldest first

    def __contains__(self, end: tuple[str, str]) -> bool:
        return end in self._ends

    def ended(
        self,
        claims: Sequence[Claim],
        what: str,
        end: Callable[[list[Claim], list[Claim]], object],
        then: Callable[[list[Claim]], object] = lambda _: None,
    ) -> list[Claim]:
        """Those of ``claims`` that became ``what``, each once, in their order. To be called last, without a decorator.

        Args:
            end: gets those that no such call has ended already, and adds what was accepted to its second argument,
                which has the others: in one call of what is not Python, so that no interrupt comes between an end and
                its record.
            then: gets all that were accepted; may be called twice with the same.
        """
        accepted: list[Claim] = []
        try:
            if self._ends:
                known = {claim.token: claim for claim in claims if (claim.token, what) in self._ends}
                # Of several threads one has each. One call, not of Python, takes it out and keeps it.
                taken = map(self._ends.pop, [(token, what) for token in known], itertools.repeat(False))
                accepted.extend(itertools.compress(known.values(), taken))
            ours = {claim.token for claim in accepted}
            end([claim for claim in claims if claim.token not in ours] if ours else list(claims), accepted)
            then(accepted)
            return in_order(claims, accepted)
        except BaseException:  # the call that is repeated gets them
            self._ends.update(dict.fromkeys(((claim.token, what) for claim in accepted), True))
            while len(self._ends) > _MOST_UNSAID:
                self._ends.pop(next(iter(self._ends)), None)
            then(accepted)
            raise


def in_order(claims: Sequence[Claim], kept: Sequence[Claim]) -> list[Claim]:
    """``kept`` in the order of ``claims``; a claim may be given twice, and was accepted once."""
    left = Counter(id(claim) for claim in kept)
    ordered = []
    for claim in claims:
        if left[id(claim)]:
            left[id(claim)] -= 1
            ordered.append(claim)
    return ordered
