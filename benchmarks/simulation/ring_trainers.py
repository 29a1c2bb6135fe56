"""Simulated trainers that have the rings themselves as their queue: real demands, takers, take links and outcomes."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final

from accounts import Violation
from trainer_process import TrainerProcess

from transport import UCXXClient
from transport.queue.demands import Brought, Demands
from transport.queue.places import InDirectory
from transport.store.directory import Directory
from transport.wire.frames import Ended

BATCH: Final = 8
_BATCHES: Final = 3  # unused or asked for, as queue/found_elsewhere.py has it
_LOOK_S: Final = 1.0
_GIVEN_BACK: Final = 0.02  # of batches
_DISCARDED: Final = 0.01


class RingTrainer(TrainerProcess):
    """One process that takes batches from whatever ring has some, trains on them, and consumes them, until killed."""

    def __init__(self, world: Any, number: int) -> None:
        super().__init__(world, number)
        self.demands: Demands | None = None
        self.came = deque[Brought]()

    def start(self) -> None:
        """A new process."""
        with self.new_process():
            self.client = UCXXClient(wire={"tcp"}, ack="manual", settings=self.world.settings)
            self.came = deque()
            self._arrived = asyncio.Event()
            self.demands = Demands(
                self.client.taking,
                self._find(InDirectory(Directory(self.world.store))),
                self._comes,
                rank=0,
                most_bytes=1024,
                most_attempts=0,
                look_s=_LOOK_S,
            )
            self.demands.want(_BATCHES, BATCH, None)
            self.tasks = [asyncio.get_running_loop().create_task(self._work())]

    @staticmethod
    def _find(places: InDirectory) -> Any:
        return lambda: places.served(())

    def _comes(self, brought: Brought) -> None:
        self.came.append(brought)
        self._arrived.set()

    def end(self) -> None:
        """End the demands."""
        if self.demands is not None:
            self.demands.close()
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
            begun, rows, chance = world.now, brought.batch.rows, world.rng.random()
            if chance < _GIVEN_BACK:
                await brought.demands.give_back(brought, rows, world.rng.uniform(0.0, 5.0))
            elif chance < _GIVEN_BACK + _DISCARDED:
                await brought.demands.end(brought, rows, Ended.DISCARDED, "not wanted", self.name)
            else:
                self._keep(brought, await brought.demands.finish(brought, rows), begun)
            world.check_ring_trainer(self)

    def _keep(self, brought: Brought, verdicts: Any, begun: float) -> None:
        """What was accepted is this trainer's, and no other's."""
        world = self.world
        token, ring = brought.link.link.number, brought.link.ring
        host = world.host_of[ring]
        for row, accepted in zip(brought.batch.rows, verdicts.tolist(), strict=True):
            slot, generation, attempts = int(row["slot"]), int(row["generation"]), int(row["attempts"])
            consumed = (slot, generation, attempts) in host.finished_by(ring, token)
            if accepted and not consumed:
                raise Violation(f"{self.name} keeps {ring[:12]}/{slot}@{generation}, which the ring has not consumed")
            if accepted:
                world.keep((ring, slot, generation), self.name)
                self.last_trained = world.now
            elif consumed and not self._excused(host, begun):
                raise Violation(f"lost: {self.name} drops {ring[:12]}/{slot}@{generation}, which its ring has consumed")
            else:
                world.accounts.note(f"dropped {ring[:12]}/{slot}@{generation}")

    def _excused(self, host: Any, begun: float) -> bool:
        """No port of the ring could be asked in time."""
        return (
            not host.alive
            or max(host.troubled_until, host.cut_until, self.stopped_until) >= begun
            or host.slow > 1000.0
        )
