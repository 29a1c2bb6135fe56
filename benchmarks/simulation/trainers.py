"""Simulated trainers: each has a real client, directory and record; only what they are connected to is simulated."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any, Final

from accounts import Violation, shown
from hosts import TRAINER
from tickets import Claim

from transport import UCXXClient
from transport.errors import TransportError
from transport.packer.consumed_record import ConsumedRecord
from transport.store.directory import Directory
from transport.ticket import Ticket

BATCH: Final = 8
_WAIT_S: Final = 5.0
_READ_S: Final = 60.0


class TrainerProcess:
    """One trainer of a world."""

    def __init__(self, world: Any, number: int) -> None:
        self.world = world
        self.number = number
        self.born = 0
        self.name = ""
        self.client: UCXXClient | None = None
        self.tasks: list[asyncio.Task[None]] = []
        self.last_trained = 0.0
        self.stopped_until = 0.0  # as by SIGSTOP

    @contextlib.contextmanager
    def new_process(self) -> Iterator[None]:
        """What is made in it belongs to a new process of this trainer."""
        self.born += 1
        self.name = f"trainer {self.number}.{self.born}"
        before = TRAINER.set(self)
        try:
            yield
        finally:
            TRAINER.reset(before)
        self.last_trained = self.world.now

    def kill(self) -> None:
        """SIGKILL: no peer is told; the kernel closes the connections."""
        for task in self.tasks:
            task.cancel()
        self.tasks = []
        self.end()
        if self.client is not None:
            self.client.end()
        self.client = None

    def end(self) -> None:
        """End what uses the client."""


class Trainer(TrainerProcess):
    """One process that claims, reads, trains and acknowledges, until it is killed."""

    def __init__(self, world: Any, number: int) -> None:
        super().__init__(world, number)
        self.held: dict[str, Claim] = {}

    def start(self) -> None:
        """A new process."""
        with self.new_process():
            self.record = ConsumedRecord(self.world.settings)
            self.client = UCXXClient(
                wire={"tcp"}, ack="manual", directory=Directory(self.world.store), settings=self.world.settings
            )
            assert self.client._finder is not None
            # its default was bound before time was virtual
            self.client._finder._clock = lambda: self.world.loop.jump.now
            self.held = {}
            loop = asyncio.get_running_loop()
            self.tasks = [loop.create_task(work) for work in (self._work(), self._renew())]

    async def _queue(self, name: str, *arguments: Any, **named: Any) -> Any:
        """A call to the queue, which may be away, and whose answer may be lost."""
        while True:
            await asyncio.sleep(self.world.rng.uniform(0.0005, 0.005))
            if self.world.now < self.stopped_until:
                await asyncio.sleep(self.stopped_until - self.world.now)
            if self.world.now >= self.world.queue_away_until:
                return getattr(self.world.queue, name)(*arguments, **named)
            await asyncio.sleep(1.0)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self.world.queue.lease_s / 3)
            if self.held:
                kept = {claim.token for claim in await self._queue("renew", list(self.held.values()))}
                self.held = {key: claim for key, claim in self.held.items() if claim.token in kept}

    async def _work(self) -> None:
        world = self.world
        while True:
            claims = await self._queue("claim", BATCH, consumer=self.name)
            if not claims:
                await world.until_published(_WAIT_S)
                continue
            self.held.update({claim.token: claim for claim in claims})
            tickets = {Ticket.decode(claim.data).identity: claim for claim in claims}
            assert self.client is not None
            outcomes, begun = [], world.now
            async with contextlib.aclosing(
                self.client.read_many([claim.data for claim in claims], timeout=_READ_S)
            ) as coming:
                outcomes.extend([outcome async for outcome in coming])
            await asyncio.sleep(world.rng.expovariate(1.0 / world.step_s))
            for outcome in outcomes:
                await self._settle(tickets[outcome.ticket.identity], outcome, begun)
            world.check_client(self)

    async def _settle(self, claim: Claim, outcome: Any, begun: float) -> None:
        world, ticket = self.world, outcome.ticket
        assert self.client is not None
        try:
            if outcome.payload is None:
                if outcome.error.unreadable:
                    if await self._queue("discard", claim, type(outcome.error).__name__):
                        world.given_up(ticket, outcome.error, begun)
                else:
                    world.accounts.note(f"retried {shown(ticket.identity)}")
                    await self._queue("retry", claim, world.settings.backoff_most_s, "not reached")
                return
            if not await self._queue("ack_many", [claim]):
                world.accounts.note(f"refused {shown(ticket.identity)}")  # the lease had ended: somebody else has it
                return
            world.accounts.train(ticket.identity)
            ring, slot, generation = ticket.identity
            world.trained_by[ring, slot] = generation, self, self.born
            self.record.accept(ring, slot, generation, 0)
            self.last_trained = world.now
            self.client.ack(ticket)
        except TransportError as error:
            raise Violation(f"{self.name}: settling {ticket.name}: {error!r}") from error
        finally:
            self.held.pop(claim.token, None)
