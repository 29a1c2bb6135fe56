"""How a simulated trainer asks again about claims in question: as `consume` of a batch that is called again.

`Questions` is the real one; in the place of `Questions.settle`, which blocks a thread, its coroutine is awaited. Calls
are interrupted at times, and two are made at once. A trainer that is killed loses what is in question.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from accounts import Violation
from transport.queue.ends import Held

from transport.claims.demands import Brought

_AGAIN_S: Final = 15.0
_AT_ONCE: Final = 0.3  # of calls are made while another one asks
_INTERRUPTED: Final = 0.2


class InQuestion(NamedTuple):
    """One payload: ``what`` it was to become. ``whole``: its batch is consumed as one, without claims one by one."""

    brought: Brought
    at: int
    what: str
    whole: bool

    @property
    def noted(self) -> tuple[int, int, int]:
        """What the ring has noted if it has consumed it."""
        row = self.brought.batch.rows[self.at]
        return int(row["slot"]), int(row["generation"]), int(row["attempts"])

    @property
    def unanswered(self) -> bool:
        """Whether its ring has still to answer."""
        return self.brought.batch.rows[self.at].tobytes() in self.brought.link.in_question


class AskedAgain:
    """What is in question of one process of a trainer."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.world = trainer, trainer.world
        self.open: dict[tuple[int, int], InQuestion] = {}
        self._task: asyncio.Task[None] | None = None

    def note(self, brought: Brought, at: int, what: str, *, whole: bool) -> bool:
        """It was not accepted; False: because its ring has refused it, or is gone."""
        each = InQuestion(brought, at, what, whole)
        if not each.unanswered:
            return False
        self.open[Held(brought, at).key] = each
        self.world.unsaid[brought.link.ring] += what == "arrived"
        self.world.accounts.note(f"in_question {brought.link.ring[:12]}/{each.noted}")
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._ask(), context=self.trainer.context)
            self.trainer.tasks = [task for task in self.trainer.tasks if not task.done()] + [self._task]
        return True

    def left(self) -> InQuestion | None:
        """One whose ring is there, and could have answered."""
        for each in self.open.values():
            host = self.world.host_of[each.brought.link.ring]
            if host.alive and host.ring == each.brought.link.ring:
                return each
        return None

    def close(self) -> None:
        """The process is no more."""
        for each in self.open.values():
            if self._consumed(each):
                self.world.accounts.note(f"question_lost {each.brought.link.ring[:12]}/{each.noted}")
        self.open.clear()

    async def _ask(self) -> None:
        rng = self.world.rng
        while self.open:
            await asyncio.sleep(rng.expovariate(1.0 / _AGAIN_S))
            await asyncio.sleep(max(0.0, self.trainer.stopped_until - self.world.now))
            group = list(self.open.values())
            await asyncio.gather(*(self._call(group) for _ in range(1 + (rng.random() < _AT_ONCE))))

    async def _call(self, group: Sequence[InQuestion]) -> None:
        """One call for all that was in question when it began."""
        rng = self.world.rng
        asking = asyncio.get_running_loop().create_task(self._asked(group))
        if rng.random() < _INTERRUPTED:
            await asyncio.wait((asking,), timeout=rng.expovariate(1 / 0.003))
            asking.cancel()
            await asyncio.wait((asking,))
            if asking.cancelled():
                return
        accepted = await asking
        for each in group:
            if self._is_open(each) and not each.unanswered and not self._said(each):
                self._refused(each)
        if used := [each for each in accepted if each.what == "arrived"]:
            await asyncio.sleep(rng.expovariate(1.0 / self.world.step_s))
            for each in used:
                await self.trainer.ends.used(each.brought, [each.at])

    async def _asked(self, group: Sequence[InQuestion]) -> list[InQuestion]:
        """Those that this call is told to be the trainer's."""
        accepted = []
        batches: dict[int, list[InQuestion]] = {}
        for each in group:
            if each.whole and each.unanswered:
                batches.setdefault(id(each.brought), []).append(each)
        for batch in batches.values():
            brought = batch[0].brought
            verdicts = await brought.demands.finish(brought, brought.batch.rows[[each.at for each in batch]])
            both = zip(batch, verdicts.tolist(), strict=True)
            accepted += [each for each, said in both if said and self._keep(each)]
        ends = self.trainer.ends
        claims = {ends.token(each.brought, each.at): each for each in group if not each.whole}
        await ends.questions._ask([ends.questions._open[token] for token in claims if token in ends.questions._open])
        for what in ("done", "arrived"):
            settled: dict[str, Any] = {}
            known = [ends.claims(each.brought, [each.at])[each.at] for each in claims.values()]
            ends.questions.settle(known, what, None, settled)
            if self.world.rng.random() < _INTERRUPTED / 2:
                ends.questions.put_back(list(settled.values()), what)
            else:
                accepted += [claims[token] for token in settled if self._keep(claims[token])]
        return accepted

    def _is_open(self, each: InQuestion) -> bool:
        return Held(each.brought, each.at).key in self.open

    def _said(self, each: InQuestion) -> bool:
        """Whether it was accepted, and no call has been told yet."""
        return not each.whole and self.trainer.ends.token(each.brought, each.at) in self.trainer.ends.questions

    def _consumed(self, each: InQuestion) -> bool:
        ring = each.brought.link.ring
        return each.noted in self.world.host_of[ring].finished_by(ring, each.brought.link.link.native.token)

    def _keep(self, each: InQuestion) -> bool:
        """It is this trainer's; False: the process is no more, or another call has the answer about the batch."""
        if each.brought.demands._closed or (each.whole and not self._is_open(each)):
            return False
        slot, generation, _ = each.noted
        shown = f"{each.brought.link.ring[:12]}/{slot}@{generation}"
        if not self._consumed(each) and self.world.host_of[each.brought.link.ring].ring == each.brought.link.ring:
            raise Violation(f"{self.trainer.name} keeps {shown}, which was in question and the ring has not consumed")
        self.world.keep((each.brought.link.ring, slot, generation), self.trainer.name)
        self.world.accounts.note(f"late {shown}")
        self.trainer.last_trained = self.world.now
        self.open.pop(Held(each.brought, each.at).key, None)
        return True

    def _refused(self, each: InQuestion) -> None:
        ring = each.brought.link.ring
        del self.open[Held(each.brought, each.at).key]
        self.world.unsaid[ring] -= each.what == "arrived"
        self.world.accounts.note(f"late_refused {ring[:12]}/{each.noted}")
        if self._consumed(each):
            raise Violation(
                f"lost: {self.trainer.name} drops {ring[:12]}/{each.noted} late, which its ring has {each.what}"
            )
