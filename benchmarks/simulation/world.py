"""One simulated run: hosts, trainers, a store, a queue, faults by seed; and what must hold at every step of it."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final
from unittest import mock

import hosts
from accounts import Accounts, Violation, shown
from clock import virtual_time
from faults import Faults
from hosts import Host, SimLink, SimWorker
from plans import LOST_AFTER_S, Plan, Result
from ring_trainers import RingTrainer
from tickets import Tickets
from trainers import Trainer

from transport.claims import demands, places
from transport.claims.connection import ClaimConnection
from transport.client import client as client_module
from transport.client.connections import links
from transport.errors import PayloadLostError, StoreUnavailableError, TransportError
from transport.settings import DEFAULTS, Settings
from transport.store.directory import LEASE_S, Directory, Published, Serving
from transport.store.memory import MemoryStore
from transport.ticket import Ticket

_SETTLE_S: Final = 1800.0  # after the last fault everything that can be trained on is, within this time
_STARVED_S: Final = 900.0
_MANY: Final = 50  # hosts
_GENERATIONS: Final = 64  # of a slot whose verdicts may be on their way


class _Store(MemoryStore):
    """The run's store, which may be away."""

    away_until = 0.0
    world: Any = None

    def _get_many(self, keys: Any) -> Any:
        self._look()
        return super()._get_many(keys)

    def _put_many(self, changes: Any) -> Any:
        self._look()
        return super()._put_many(changes)

    def _renew(self, leases: Any, lease_s: float) -> Any:
        self._look()
        return super()._renew(leases, lease_s)

    def _look(self) -> None:
        if self.world.now < self.away_until:
            raise StoreUnavailableError("the store is away")


class _AtOnce:
    """In the place of a thread that reads the directory."""

    def __init__(self, target: Callable[[], None], **_: Any) -> None:
        self.start = target

    def is_alive(self) -> bool:
        return False

    def join(self) -> None: ...


class World:
    """Everything of one simulation. ``run`` is the whole of it."""

    def __init__(self, seed: int, plan: Plan, settings: Settings = DEFAULTS) -> None:
        self.plan = plan
        self.rng = random.Random(f"world {seed}")
        self.seed = seed
        self.settings = settings
        self.step_s = plan.step_s
        self.accounts = Accounts()
        self.queue_away_until = 0.0
        self.over = False
        self.most_ledger = self.most_remembered = 0
        self.failures: list[BaseException] = []
        self._tasks = set[asyncio.Task[None]]()
        self.waiters = deque[asyncio.Future[None]]()
        self.renewed: dict[int, float] = {}  # by host: when the store last had word of it
        self.silent_until: dict[int, float] = {}  # by host: the end of its last silence that counts as its death
        self.host_of: dict[str, Host] = {}  # by ring
        self.kept: dict[tuple[str, int], deque[int]] = {}  # by slot: the last generations that trainers have kept
        self.trained_by: dict[tuple[str, int], tuple[int, Trainer, int]] = {}  # by slot: the last that was

    @property
    def now(self) -> float:
        now = self.loop.jump.now
        self.accounts.now = now
        return now

    def delay(self, host: Host | None) -> float:
        """One way, to or from a host."""
        return self.rng.uniform(0.0002, 0.002) * (host.slow if host is not None else 1.0)

    def run(self) -> Result:
        """Raises Violation."""
        with (
            virtual_time(self.seed) as self.loop,
            mock.patch.object(links, "Link", SimLink),
            mock.patch.object(links, "Worker", SimWorker),
            mock.patch.object(links, "probe", mock.AsyncMock()),  # no port is a real one
            mock.patch.object(client_module, "StatusSocket", lambda *_: mock.Mock()),
            mock.patch.object(ClaimConnection, "__hash__", lambda each: each.link.number),  # the order of sets
            mock.patch.object(demands, "MOST_BYTES", 1024),
            mock.patch.object(demands, "_FIND_S", 1.0),
            mock.patch.object(places, "threading", mock.Mock(Thread=_AtOnce)),
        ):
            SimLink.world, SimLink.count = self, 0
            return self.loop.run_until_complete(self._run())

    async def _run(self) -> Result:
        plan = self.plan
        self.store = _Store(clock=lambda: self.loop.jump.now)
        self.store.world = self
        self.queue = Tickets(
            clock=lambda: self.loop.jump.now,
            max_deliveries=plan.max_deliveries,
            keep_finished=2000 + 10 * plan.hosts * plan.slots,
        )
        self.hosts = [Host(self, number, plan.slots) for number in range(plan.hosts)]
        self.hosts_at = {host.address: host for host in self.hosts}
        kind = RingTrainer if plan.rings else Trainer
        self.trainers: list[Any] = [kind(self, number) for number in range(plan.trainers)]
        self.writing = True
        for host in self.hosts:
            self.task(self._write(host))
            self.task(self._serve(host))
        for trainer in self.trainers:
            trainer.start()
        self.task(Faults(self).run())
        self.task(self._sweep())
        try:
            await self._until_settled()
        finally:
            self.over = True
            for trainer in self.trainers:
                trainer.kill()
            left = asyncio.all_tasks() - {asyncio.current_task()}  # of clients, too
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        most = max(host.most_links for host in self.hosts)
        return Result(
            self.accounts.digest, self.accounts.counts, self.now, most, self.most_ledger, self.most_remembered
        )

    def task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(work)
        self._tasks.add(task)  # the loop itself does not keep it
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.append(error)

    # --- hosts ----------------------------------------------------------------------------------------------
    async def _write(self, host: Host) -> None:
        """A rollout: writes, gives tickets to the queue, and frees what the queue has finished."""
        reconciled = self.now
        while self.writing:
            await asyncio.sleep(self.rng.expovariate(self.plan.writes_per_s))
            if not host.alive:
                continue
            ticket = host.write() if self.writing else None
            if ticket is not None and not self.plan.rings:
                host.unpublished.append(ticket)
            self._publish(host)
            if self.now - reconciled > 60.0 and not host.cut and not self.plan.rings:
                reconciled = self.now
                self._reconcile(host)

    def _publish(self, host: Host) -> None:
        if host.unpublished and not host.cut and self.now >= self.queue_away_until:
            self._wake(self.queue.publish(host.unpublished))
            host.unpublished.clear()

    def _wake(self, count: int) -> None:
        """As many trainers that wait for payloads, who waited longest first."""
        while count > 0 and self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1

    async def until_published(self, limit_s: float) -> None:
        """What a claim with a timeout does; also at its end, since a payload may be ready again by then."""
        waiter = self.loop.create_future()
        self.waiters.append(waiter)
        timer = self.loop.call_later(limit_s, lambda: None if waiter.done() else waiter.set_result(None))
        try:
            await waiter
        finally:
            timer.cancel()

    def _reconcile(self, host: Host) -> None:
        if self.now < self.queue_away_until or not host.alive:
            return
        held = [slot.ticket for slot in host.slots if slot.ticket is not None]
        known = self.queue.known(held)
        for ticket in held:
            state = known.get(ticket.id)
            if state is not None and state.final:
                self._check_acknowledged(ticket)
                host.consume(ticket.slot, ticket.generation)
        missing = [ticket for ticket in held if ticket.id not in known and ticket not in host.unpublished]
        if missing:
            self._wake(self.queue.publish(missing))

    def _check_acknowledged(self, ticket: Ticket) -> None:
        """A slot that only the reconciliation frees: who trained on it is dead, or still has to say so."""
        generation, trainer, born = self.trained_by.get((ticket.ring, ticket.slot), (0, None, 0))
        if generation != ticket.generation or trainer is None or trainer.client is None or trainer.born != born:
            return
        if not trainer.client._links.ledger.contains(ticket.identity, 0):
            raise Violation(f"{trainer.name} lives, and its acknowledgement of payload {ticket} is lost")

    async def _serve(self, host: Host) -> None:
        """What `Announcement` does, on this host's way to the store."""
        directory = Directory(self.store)
        version: Published | None = None
        published = ""
        wait_s = self.rng.uniform(0.001, 0.01)
        while True:
            await asyncio.sleep(wait_s)
            wait_s = LEASE_S / 3 + self.rng.uniform(0.001, 0.01)
            if host.alive and not host.cut:
                try:
                    serving = Serving(
                        ring=host.ring, host=f"host-{host.number}", addresses=(host.address,), ports=host.ports
                    )
                    if published != host.ring:
                        published = host.ring
                        version = None
                    if version is None:
                        version = directory.publish(serving)
                    elif not directory.renew(host.ring, 0.0, version):
                        version = directory.publish_again(serving, 0.0, version) or version
                    if self.now - self.renewed.get(host.number, self.now) >= LOST_AFTER_S:
                        self.silent_until[host.number] = self.now
                    self.renewed[host.number] = self.now
                except StoreUnavailableError:
                    published = published if version is not None else ""

    async def _sweep(self) -> None:
        while self.plan.rings:
            await asyncio.sleep(1.0)
            for host in self.hosts:
                if host.alive and host.links:
                    host.sweep()

    # --- what must hold --------------------------------------------------------------------------------------
    def given_up(self, ticket: Ticket, error: TransportError, begun: float) -> None:
        """A trainer, reading since ``begun``, reports a payload as unreadable: only what went with its host is."""
        waits = self.accounts.waiting.get(ticket.identity)
        if isinstance(error, PayloadLostError) and waits is not None:
            silent = self.now - self.renewed.get(waits.host, self.now) >= LOST_AFTER_S
            if silent or self.silent_until.get(waits.host, -1.0) >= begun:  # by the directory it was dead meanwhile
                self.accounts.abandoned(ticket.identity)
                return
        self.accounts.given_up(ticket.identity, repr(error))

    def keep(self, payload: tuple[str, int, int], trainer: str) -> None:
        """A trainer was told that a payload is its own."""
        self.accounts.note(f"kept {shown(payload)}")
        ring, slot, generation = payload
        kept = self.kept.setdefault((ring, slot), deque(maxlen=_GENERATIONS))  # a verdict may come after the next one
        if generation in kept:
            raise Violation(f"twice: {trainer} keeps {shown(payload)}, which another trainer has kept")
        kept.append(generation)

    def check_ring_trainer(self, trainer: RingTrainer) -> None:
        """What a trainer holds ready is bounded, and its sums are right."""
        if trainer.source is None:
            return
        of = trainer.source._ranks[0]
        assert of.demands is not None
        takers = of.demands._takers
        try:
            if not self._seldom():
                takers.validate()
        except AssertionError as error:
            raise Violation(f"{trainer.name}: {error}") from error
        most = takers.ahead + len(takers._places) * takers.most
        asked = takers.demanded
        if takers.unused + asked > most:  # the answers to demands that were taken back may be on their way
            demands = [place.demand for place in takers._places.values() if place.demand is not None]
            asked = sum(demand.n for demand in demands if not demand.taken_back)
        if takers.unused + asked > most:
            raise Violation(f"{trainer.name} hoards: {takers.unused} unused, {asked} asked for, of {most}")
        lying = sum(len(part) for part in of.came if not part.claims.connection.lost)
        if lying > most:
            raise Violation(f"{trainer.name} hoards: {lying} lie unused, of {most}")
        claimed = trainer.source.depth(0, set())["claimed"]
        if claimed < 0:
            raise Violation(f"{trainer.name} counts {claimed} payloads as claimed")

    def _seldom(self) -> bool:
        """Not now: a look at everything costs as much as there is."""
        return self.plan.hosts > _MANY and self.rng.random() > 0.05

    def check_client(self, trainer: Trainer) -> None:
        """Bounds of memory and connections, and the invariants that the parts state themselves."""
        client = trainer.client
        if client is None:
            return
        links = client._links
        self.most_ledger = max(self.most_ledger, links.ledger.pending_count + links.ledger.sent_count)
        if self._seldom():
            return
        try:
            links._pool.validate()
            links.ledger.validate()
        except AssertionError as error:
            raise Violation(f"{trainer.name}: {error}") from error
        if len(links.quarantine._entries) > 4 * len(self.hosts) + 64:
            raise Violation(f"{trainer.name}: the quarantine remembers {len(links.quarantine._entries)} ports")

    def check_links(self, host: Host) -> None:
        """With each new connection: those of dead clients stay until the host has word of it."""
        if len(host.links) > 2 * self.settings.connections_per_listener:
            raise Violation(f"host {host.number} has {len(host.links)} connections")

    def _check_memory(self) -> None:
        """What the queue remembers is what lies in slots, the last that finished, and what was lost with its host."""
        remembered = self.queue.remembered
        self.most_remembered = max(self.most_remembered, remembered)
        slots = len(self.hosts) * self.plan.slots
        if remembered > 2000 + 14 * slots:
            raise Violation(f"the queue remembers {remembered} deliveries of {slots} slots")

    async def _until_settled(self) -> None:
        end = self.now + self.plan.minutes * 60.0
        while self.now < end:
            await self._step(5.0)
        self.writing = False
        settle = self.now + _SETTLE_S
        while self._left_over() or any(slot.ticket for host in self.hosts if host.alive for slot in host.slots):
            if self.now > settle:
                raise Violation(self._left())
            await self._step(5.0)
            for host in self.hosts:
                if not host.cut and host.alive:
                    self._publish(host)
                    if self.now > end + 120.0 and int(self.now) % 60 < 5 and not self.plan.rings:
                        self._reconcile(host)

    def _left_over(self) -> bool:
        """What nobody has trained on, or what queue or trainer have not been told about."""
        return bool(self.accounts.waiting) or self.queue.unfinished > 0 or self._in_question() is not None

    def _in_question(self) -> Any:
        """What a living trainer has not been told of, and a ring that is there could have answered."""
        asking = (each for each in self.trainers if each.client) if self.plan.rings else ()
        return next((left for each in asking if (left := each.left()) is not None), None)

    def _left(self) -> str:
        left = list(self.accounts.waiting.items())[:3]
        held = sum(slot.ticket is not None for host in self.hosts if host.alive for slot in host.slots)
        return (
            f"starved: {len(self.accounts.waiting)} payloads were not trained on within {_SETTLE_S:.0f} s after the "
            f"last fault, such as {left}; {held} slots are in use; the queue has {dict(self.queue.counts())}; "
            f"in question is {self._in_question()}"
        )

    async def _step(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._check_memory()
        for trainer in self.trainers:
            for task in trainer.tasks:
                if task.done() and not task.cancelled():
                    task.result()
        if self.failures:
            raise self.failures[0]
        last = max(self.accounts.oldest, *(trainer.last_trained for trainer in self.trainers))
        if self.now - last > _STARVED_S and any(host.alive and not host.cut for host in self.hosts):
            raise Violation(f"starved: nobody trains since {_STARVED_S:.0f} s. {self._left()}")


__all__ = ["Plan", "Result", "World", "hosts"]
