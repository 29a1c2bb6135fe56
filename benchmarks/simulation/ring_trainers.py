"""Simulated trainers that have the rings themselves as their queue: real demands, takers, take links and outcomes."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from typing import Any, Final

import numpy as np
from accounts import Violation
from ring_ends import Ends, asked_about
from ring_questions import AskedAgain
from trainer_process import TrainerProcess
from transport.queue.ends import UNTRAINED, End

from transport import UCXXClient
from transport.claims.demands import Brought, Demands
from transport.claims.places import InDirectory
from transport.store.directory import Directory

BATCH: Final = 8
_BATCHES: Final = 3  # unused or asked for, as queue/found_elsewhere.py has it
_LOOK_S: Final = 1.0
_GIVEN_BACK: Final = 0.02  # of batches
_WHOLE = 0.4  # or given back
_CANCELLED: Final = 0.2  # of calls
_SOME: Final = 0.7  # of the payloads of the others end in one call
_FORGOTTEN: Final = 0.3  # of claims that were too old, and whose end was interrupted
_ENDS: Final = ("done", "arrived", "discarded", "dead", "aged", "retried")
_OFTEN = (60, 25, 3, 1, 4, 3)


class RingTrainer(TrainerProcess):
    """One process that takes batches from whatever ring has some, trains on them, and consumes them, until killed."""

    def __init__(self, world: Any, number: int) -> None:
        super().__init__(world, number)
        self.demands: Demands | None = None
        self.came = deque[Brought]()

    def start(self) -> None:
        """A new process."""
        with self.new_process():
            self.context = contextvars.copy_context()
            self.client = UCXXClient(wire={"tcp"}, ack="manual", settings=self.world.settings)
            self.came = deque()
            self._arrived = asyncio.Event()
            self.ends = Ends(self)
            self.again = AskedAgain(self)
            self.demands = Demands(
                self.client.taking,
                self._find(InDirectory(Directory(self.world.store))),
                self._comes,
                rank=0,
                most_bytes=1024,
                most_attempts=0,
                look_s=_LOOK_S,
                opened=self.ends.arrivals.tell_late,
            )
            self.demands.want(_BATCHES, BATCH, None)
            self.tasks = [asyncio.get_running_loop().create_task(self._work())]

    @staticmethod
    def _find(places: InDirectory) -> Any:
        return lambda: places.served(())

    def _comes(self, brought: Brought) -> None:
        self.came.append(brought)
        self._arrived.set()

    @property
    def unknown(self) -> int:
        """Questions about its claims that no port of their ring has answered in time."""
        if self.client is None:
            return 0
        outcomes = self.client.taking.outcomes
        return outcomes.unknown + outcomes.questions

    def end(self) -> None:
        """End the demands."""
        if self.demands is not None:
            self.ends.close()
            self.again.close()
            self.demands.close()
        self.world.unknown += self.unknown
        self.demands = None

    async def _work(self) -> None:
        world = self.world
        while True:
            while not self.came:
                self._arrived.clear()
                await self._arrived.wait()
            brought = self.came.popleft()
            if brought.link.lost:
                continue
            brought.demands.used(brought, len(brought.batch))
            await asyncio.sleep(world.rng.expovariate(1.0 / world.step_s))
            await asyncio.sleep(max(0.0, self.stopped_until - world.now))
            await self._settle(brought)
            self.ends.check()
            world.check_ring_trainer(self)

    async def _settle(self, brought: Brought) -> None:
        """End a batch in one of the ways that a trainer has."""
        begun, rows, chance = self.world.now, brought.batch.rows, self.world.rng.random()
        every = list(range(len(rows)))
        if chance < _GIVEN_BACK:
            await brought.demands.give_back(brought, rows, self.world.rng.uniform(0.0, 5.0))
        elif chance < _WHOLE:
            self._keep(brought, every, await self._finished(brought), begun, whole=True)
        else:  # claim by claim, as `FoundElsewhere` does it
            some = [at for at in every if self.world.rng.random() < _SOME]
            await self._end(brought, some, begun)
            await self._end(brought, [at for at in every if at not in some], begun)

    async def _finished(self, brought: Brought) -> Any:
        """A whole batch; where the call is cancelled it is asked again, and has the same answer."""
        loop = asyncio.get_running_loop()
        while True:
            asking = loop.create_task(brought.demands.finish(brought, brought.batch.rows), context=self.context)
            if self.world.rng.random() >= _CANCELLED:
                return await asking
            await asyncio.wait((asking,), timeout=self.world.rng.expovariate(1 / 0.003))
            asking.cancel()
            await asyncio.wait((asking,))
            if not asking.cancelled():
                return asking.result()

    async def _end(self, brought: Brought, positions: list[int], begun: float) -> None:
        """Together, until the answer is there, however often the call is interrupted."""
        rng = self.world.rng
        [what] = rng.choices(_ENDS, _OFTEN)
        end = End(what, "not wanted", rng.uniform(0.0, 5.0))
        while positions and (accepted := await self.ends.end(brought, positions, end)) is None:
            if what == "aged" and rng.random() < _FORGOTTEN:
                self.ends.forget(brought, positions)
                return
        if not positions or what == "retried":
            return
        verdicts = np.isin(positions, accepted)
        self._keep(brought, positions, verdicts, begun, what)
        if what == "arrived":
            await asyncio.sleep(rng.expovariate(1.0 / self.world.step_s))
            await self.ends.used(brought, accepted)

    def _keep(
        self,
        brought: Brought,
        positions: list[int],
        verdicts: Any,
        begun: float,
        what: str = "done",
        whole: bool = False,
    ) -> None:
        """What was accepted is this trainer's, and no other's."""
        world = self.world
        token, ring = brought.link.link.native.token, brought.link.ring
        host = world.host_of[ring]
        for at, accepted in zip(positions, verdicts.tolist(), strict=True):
            noted = asked_about(brought.batch.rows[at], what)
            slot, generation, _ = noted
            ended = noted in host.finished_by(ring, token)
            if accepted and not ended:
                raise Violation(f"{self.name} keeps {ring[:12]}/{slot}@{generation}, which the ring has not {what}")
            if accepted and what not in UNTRAINED:
                world.keep((ring, slot, generation), self.name)
                self.last_trained = world.now
            elif not accepted and what not in UNTRAINED and self.again.note(brought, at, what, whole=whole):
                pass  # its FINISH may still be on its way
            elif ended and not accepted and not (what in UNTRAINED and self._excused(host, begun)):
                raise Violation(f"lost: {self.name} drops {ring[:12]}/{slot}@{generation}, which its ring has {what}")
            else:
                world.accounts.note(f"{'discarded' if accepted else 'dropped'} {ring[:12]}/{slot}@{generation}")

    def _excused(self, host: Any, begun: float) -> bool:
        """No port of the ring could be asked in time."""
        return (
            not host.alive
            or max(host.troubled_until, host.cut_until, self.stopped_until) >= begun
            or host.slow > 1000.0
        )
