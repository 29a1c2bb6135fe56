"""Simulated trainers that take from the rings themselves: the real `NetworkSource` and all that it decides.

What blocks a thread there is awaited here. Calls are interrupted, repeated, and repeated with another end; claims are
dropped, also while their ring is being asked. A trainer that is killed loses what is in question.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from accounts import Violation, shown
from trainers import TrainerProcess

from transport import UCXXClient, _ring
from transport.claims.batch import CONSUME, ClaimedRows, End, Verdict
from transport.claims.network import NetworkSource
from transport.claims.places import InDirectory
from transport.store.directory import Directory
from transport.wire import frames

BATCH: Final = 8
_ASKS_AGAIN_S: Final = 1.0
_DROPPED: Final = 0.03  # of groups of claims, without an end
_SOME: Final = 0.7  # of claims end in one call, the others in the next one
_INTERRUPTED: Final = 0.25  # of calls
_ELSE: Final = 0.3  # of interrupted calls are followed by one for another end
_LEFT: Final = 0.1  # of interrupted calls are not made again, and their claims are dropped
_AGAIN: Final = 0.1  # of claims that have ended are ended once more
_LOOK_S: Final = 0.001  # between two looks for an answer
_AGAIN_S: Final = 15.0  # between two questions about the same claim
_AT_ONCE: Final = 0.3  # of these are two
_ENDS: Final = (Verdict.CONSUMED, Verdict.GIVEN_BACK, Verdict.DEAD, Verdict.AGED)
_OFTEN: Final = (85, 4, 4, 4)
_UNTRAINED: Final = (Verdict.DEAD, Verdict.AGED)
_RUNNING: Final = (Verdict.OPEN, Verdict.ASKED, Verdict.IN_QUESTION)


class _Thread:
    """In the place of the client's loop in a thread of its own: everything is on this loop."""

    closed = False

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """What waits for nothing but its turn."""
        while True:
            try:
                work.send(None)
            except StopIteration as done:
                return done.value

    def soon(self, what: Any, *arguments: Any) -> None:
        what(*arguments)

    def submit(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(work)


@dataclass(frozen=True, eq=False)
class Held:
    """One claim, which goes back with this object."""

    claims: ClaimedRows
    position: int
    owned: _ring.OwnedClaims

    @property
    def verdict(self) -> int:
        return int(self.claims.verdicts[self.position])

    @property
    def attempts(self) -> int:
        return int(self.claims.rows["attempts"][self.position])

    @property
    def ring(self) -> str:
        return self.claims.connection.ring


class _Source(NetworkSource):
    """Of one process. Each claim has one end."""

    def __init__(self, trainer: Any, client: UCXXClient, served: Any, came: Any) -> None:
        super().__init__(served, 1000, came, _Thread(), client.claims)  # type: ignore[arg-type]
        self._of = trainer
        self._over = weakref.WeakKeyDictionary[ClaimedRows, set[int]]()

    def _settled(self, claims: ClaimedRows, positions: Any, end: End) -> None:
        super()._settled(claims, positions, end)
        over = self._over.setdefault(claims, set())
        for at in positions.tolist():
            if at in over:
                error = Violation(f"{self._of.name} counts the end of a claim twice: {claims.rows[at]}")
                self._of.world.failures.append(error)
            if claims.verdicts[at] not in _RUNNING:
                over.add(at)


class RingTrainer(TrainerProcess):
    """One process that claims what any ring has, trains on it, and consumes it, until killed."""

    def __init__(self, world: Any, number: int) -> None:
        super().__init__(world, number)
        self.source: NetworkSource | None = None
        self.questions: list[Held] = []

    def start(self) -> None:
        """A new process."""
        with self.new_process():
            self.context = contextvars.copy_context()
            self.client = UCXXClient(wire={"tcp"}, ack="manual", settings=self.world.settings)
            places = InDirectory(Directory(self.world.store))
            self._came = asyncio.Event()
            self.questions = []
            self.source = _Source(self, self.client, lambda: places.served(()), self._came.set)
            loop = asyncio.get_running_loop()
            self.tasks = [loop.create_task(self._work()), loop.create_task(self._ask_again())]

    def end(self) -> None:
        """The process is no more."""
        for claim in self.questions:
            if self._ended(claim, CONSUME):
                self.world.accounts.note(f"question_lost {shown(_payload(claim))}")
        self.questions = []
        if self.source is not None:
            self.source.close()
        self.source = None

    def left(self) -> Held | None:
        """What is in question although its ring is there, and could have answered."""
        for claim in self.questions:
            host = self.world.host_of[claim.ring]
            if host.alive and host.ring == claim.ring:
                return claim
        return None

    # --- work -------------------------------------------------------------------------------------------
    async def _work(self) -> None:
        while (source := self.source) is not None:
            self._came.clear()
            if not await self._batch(source):
                with contextlib.suppress(TimeoutError):  # who waits asks again, as `FoundRings.take_parts`
                    async with asyncio.timeout(_ASKS_AGAIN_S):
                        await self._came.wait()
            self.world.check_ring_trainer(self)

    async def _batch(self, source: NetworkSource) -> bool:
        """Claim, train, end; False: nothing had come. What it leaves without an end goes back when it returns."""
        world = self.world
        claims = self._claimed(source)
        if not claims:
            return False
        await asyncio.sleep(world.rng.expovariate(1.0 / world.step_s))
        await asyncio.sleep(max(0.0, self.stopped_until - world.now))
        some = [each for each in claims if world.rng.random() < _SOME]
        for group in (some, [each for each in claims if each not in some]):
            if group and world.rng.random() >= _DROPPED:
                await self._settle(group)
        return True

    def _claimed(self, source: NetworkSource) -> list[Held]:
        return [
            Held(part.claims, position, part.owned.take(1))
            for part in source.take_parts(BATCH, 0.0, 0, self.name, None)
            for position in part.positions.tolist()
        ]

    async def _settle(self, claims: list[Held]) -> None:
        """End claims in one of the ways that a trainer has, until the answer is there."""
        world, rng = self.world, self.world.rng
        begun = world.now
        first = self._drawn()
        end = first
        while not await self._asked(claims, end):
            if rng.random() < _LEFT:
                world.accounts.note(f"left {self.name}")
                return
            end = self._drawn() if rng.random() < _ELSE else end
        if any(claim.verdict == Verdict.OPEN for claim in claims):  # interrupted before anything was asked
            raise Violation(f"{self.name} has no answer about {claims}")
        for claim in claims:
            self._check(claim, first, begun)
        if rng.random() < _AGAIN:
            before = [claim.verdict for claim in claims]
            done = [claim for claim in claims if claim.verdict != Verdict.IN_QUESTION]
            await self._asked(done, self._drawn())
            after = [claim.verdict for claim in claims]
            if any(now != said for now, said in zip(after, before, strict=True) if said != Verdict.IN_QUESTION):
                raise Violation(f"{self.name} was told {before} and then {after}")

    def _drawn(self) -> End:
        [verdict] = self.world.rng.choices(_ENDS, _OFTEN)
        return CONSUME if verdict is Verdict.CONSUMED else End(verdict, "not wanted", self.name)

    async def _asked(self, claims: Sequence[Held], end: End) -> bool:
        """One call; False: it was interrupted."""
        groups: dict[ClaimedRows, list[int]] = {}
        for claim in claims:
            if claim.verdict in _RUNNING:
                groups.setdefault(claim.claims, []).append(claim.position)
        asking = asyncio.get_running_loop().create_task(self._end_all(groups, end), context=self.context)
        if self.world.rng.random() < _INTERRUPTED:
            await asyncio.wait((asking,), timeout=self.world.rng.expovariate(1 / 0.003))
            asking.cancel()
            await asyncio.wait((asking,))
            self.world.accounts.note(f"interrupted {self.name}")
            return False
        await asking
        return True

    async def _end_all(self, groups: Mapping[ClaimedRows, list[int]], end: End) -> None:
        for claims, positions in groups.items():
            if end.verdict is Verdict.GIVEN_BACK:
                claims.return_soon(np.asarray(positions, np.intp), self.world.rng.uniform(0.0, 5.0), in_vain=True)
            else:
                claims.end(np.asarray(positions, np.intp), end)
        for claims, positions in groups.items():
            while not claims.answered(np.asarray(positions, np.intp)):  # noqa: ASYNC110  # in simulated time
                await asyncio.sleep(_LOOK_S)

    # --- what must hold ---------------------------------------------------------------------------------
    def _check(self, claim: Held, end: End, begun: float) -> None:
        """What was accepted is this trainer's, and no other's; ``end``: the first that was asked for."""
        world, ended = self.world, self._ended(claim, end)
        payload = _payload(claim)
        verdict = Verdict(claim.verdict)
        world.accounts.note(f"{verdict.name.lower()} {shown(payload)}")
        if verdict is Verdict.IN_QUESTION and end is CONSUME:
            self.questions.append(claim)
        elif verdict is Verdict.REFUSED:
            if ended and not (end.verdict in _UNTRAINED and self._excused(world.host_of[claim.ring], begun)):
                raise Violation(f"lost: {self.name} drops {shown(payload)}, which its ring has as {end.verdict.name}")
        elif verdict is not end.verdict:
            raise Violation(f"{self.name} asked for {end.verdict.name} of {shown(payload)}, and got {verdict.name}")
        elif verdict is not Verdict.GIVEN_BACK:
            if not ended and world.host_of[claim.ring].ring == claim.ring:
                raise Violation(f"{self.name} has {shown(payload)} as {verdict.name}, and its ring has not")
            if verdict is Verdict.CONSUMED:
                world.keep(payload, self.name)
                self.last_trained = world.now

    def _ended(self, claim: Held, end: End) -> bool:
        """Whether the ring has ended the claim so."""
        asking = frames.END_ASKED if end.verdict in _UNTRAINED else 0
        ring, slot, generation = _payload(claim)
        token = claim.claims.connection.link.native.token
        return (slot, generation, claim.attempts | asking) in self.world.host_of[ring].finished_by(ring, token)

    def _excused(self, host: Any, begun: float) -> bool:
        """No port of the ring could be asked in time."""
        return (
            not host.alive
            or max(host.troubled_until, host.cut_until, self.stopped_until) >= begun
            or host.slow > 1000.0
        )

    # --- what is in question ------------------------------------------------------------------------------
    async def _ask_again(self) -> None:
        rng = self.world.rng
        while True:
            await asyncio.sleep(rng.expovariate(1.0 / _AGAIN_S))
            await asyncio.sleep(max(0.0, self.stopped_until - self.world.now))
            asked = list(self.questions)
            if asked:
                begun = self.world.now
                await asyncio.gather(*(self._asked(asked, CONSUME) for _ in range(1 + (rng.random() < _AT_ONCE))))
                self.questions = [each for each in self.questions if each.verdict in _RUNNING]
                for claim in asked:
                    if claim.verdict not in _RUNNING:
                        self.world.accounts.note(f"late {shown(_payload(claim))}")
                        self._check(claim, CONSUME, begun)


def _payload(claim: Held) -> tuple[str, int, int]:
    row = claim.claims.rows[claim.position]
    return claim.ring, int(row["slot"]), int(row["generation"])
