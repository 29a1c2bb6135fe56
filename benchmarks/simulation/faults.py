"""What happens to hosts, trainers, store and queue of a simulated run: faults by seed, at times by seed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from hosts import Host


class Faults:
    """Those of one run, until its time is over."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.rng = world.rng

    async def run(self) -> None:
        """Begin faults at the rate of the plan; each goes on beside the others."""
        if not self.world.plan.faults_per_minute:
            return
        kinds: list[tuple[Callable[[], Awaitable[None]], float]] = [
            (self._die, 0.5), (self._reborn, 1.0), (self._restart, 3.0), (self._cut, 3.0), (self._slow, 2.0),
            (self._kill, 2.0), (self._stop, 1.0), (self._away, 1.0), (self._away_queue, 0.7),
        ]  # fmt: skip
        end = self.world.now + self.world.plan.minutes * 60.0
        while True:
            await asyncio.sleep(self.rng.expovariate(self.world.plan.faults_per_minute / 60.0))
            if self.world.now > end:
                return
            [(fault, _)] = self.rng.choices(kinds, [weight for _, weight in kinds])
            self.world.task(self._noted(fault))

    async def _noted(self, fault: Callable[[], Awaitable[None]]) -> None:
        self.world.accounts.note(f"fault{fault.__name__}")
        await fault()

    def _host(self) -> Host:
        chosen: Host = self.rng.choice(self.world.hosts)
        return chosen

    async def _die(self) -> None:
        host = self._host()
        if host.alive and sum(each.alive for each in self.world.hosts) > 1:
            host.die()

    async def _reborn(self) -> None:
        host = self._host()
        if host.alive:
            host.die()
            await asyncio.sleep(self.rng.uniform(0.1, 90.0))
            host.come_back()

    async def _restart(self) -> None:
        """Of one listener, or of all of them."""
        host = self._host()
        ports = self.rng.sample(host.ports, self.rng.randint(1, 2))
        for port in ports:
            host.down.add(port)
            host.break_links(port)
        if host.down.issuperset(host.ports):  # otherwise the other port answers
            host.troubled_until = self.world.now + 21.0
        await asyncio.sleep(self.rng.uniform(0.1, 20.0))
        host.down.difference_update(ports)

    async def _cut(self) -> None:
        host = self._host()
        seconds = self.rng.uniform(0.05, 30.0) if self.rng.random() < 0.9 else self.rng.uniform(30.0, 300.0)
        host.cut_until = max(host.cut_until, self.world.now + seconds)

    async def _slow(self) -> None:
        host = self._host()
        for factor in (self.rng.choice([20.0, 500.0, 5000.0]), 1.0):
            if host.slow > 1000.0:  # answers may still be on their way
                host.troubled_until = self.world.now + 20.0
            host.slow = factor
            if factor > 1.0:
                await asyncio.sleep(self.rng.uniform(1.0, 60.0))

    async def _kill(self) -> None:
        trainer = self.rng.choice(self.world.trainers)
        if trainer.client is not None:
            trainer.kill()
            await asyncio.sleep(self.rng.uniform(0.1, 30.0))
            if not self.world.over:
                trainer.start()

    async def _stop(self) -> None:
        """For longer than its claims last, sometimes; its connections stand."""
        trainer = self.rng.choice(self.world.trainers)
        trainer.stopped_until = self.world.now + self.rng.uniform(1.0, 150.0)

    async def _away(self) -> None:
        store = self.world.store
        store.away_until = max(store.away_until, self.world.now + self.rng.uniform(0.1, 15.0))

    async def _away_queue(self) -> None:
        until = self.world.now + self.rng.uniform(0.1, 15.0)
        self.world.queue_away_until = max(self.world.queue_away_until, until)
