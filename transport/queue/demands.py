"""Demands that wait at every listener a trainer knows: what comes first is taken. `Takers` decides, this carries out.

    find ──► places ──► connections ──► TAKE, one demand at a place ──► arrived(batch) ──► consume, give back

Places are looked for again and again, so rings that appear and vanish are followed. A connection that breaks gives its
claims up, and its place is tried again, through the next of its ports. Everything belongs to the client's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from transport.errors import BusyError, InternalError, TransportError, WrongRingError
from transport.runtime.logs import Seldom
from transport.taking.batch import Rows, TakenBatch
from transport.taking.outcomes import Served
from transport.taking.takers import Ask, Close, Open, Takers, Untake
from transport.wire.library import engine

if TYPE_CHECKING:
    import numpy as np

    from transport.client.takes.link import TakeLink
    from transport.client.takes.taking import Taking
    from transport.wire.frames import Ended

log = logging.getLogger(__name__)

_WAIT_S: Final = 20.0  # of a demand at a listener; the next one follows at once
_FEW: Final = 64  # connections, which are all looked at in every turn
_LOOK_S: Final = 0.25  # more of them are looked at so often: is each still there?


class Place(NamedTuple):
    """Where one ring is served: any address with any port.

    Attributes:
        ring: its id; "": whatever is served there.
        segment: where it is on this host; None: it is on another one; "": unknown.
    """

    addresses: tuple[str, ...]
    ports: tuple[int, ...]
    ring: str = ""
    segment: str | None = ""


class Brought(NamedTuple):
    """What one demand brought, and the connection that holds the claims."""

    demands: Demands
    place: str
    link: TakeLink
    batch: TakenBatch


class Demands:
    """The demands of one rank.

    Args:
        taking: of the client.
        find: the places of this moment, by a name for each; called in a thread, may block and raise TransportError.
        arrived: is given what came.
        most_attempts: what was claimed so often in vain is dead; 0: no limit.
        look_s: interval of `find`.

    Attributes:
        oldest_version: what is older is discarded at the listener; may be set.
        faults: why a place is not connected, by its name.
    """

    def __init__(
        self,
        taking: Taking,
        find: Callable[[], Mapping[str, Place]],
        arrived: Callable[[Brought], object],
        *,
        rank: int | str,
        most_bytes: int,
        most_attempts: int,
        look_s: float,
    ) -> None:
        self._taking = taking
        self._find = find
        self._arrived = arrived
        self._rank = rank
        self._most_bytes = most_bytes
        self._most_attempts = most_attempts
        self._look_s = look_s
        self.oldest_version: int | None = None
        self.faults: dict[str, TransportError] = {}
        self._takers = Takers(0)
        self._batches = 0
        self._most = 1
        self._largest = 0  # of the payloads that came last, in bytes
        self._places: Mapping[str, Place] = {}
        self._links: dict[str, TakeLink] = {}
        self._numbers: dict[int, int] = {}  # by demand, what its listener knows it as
        self._unwanted: set[int] = set()  # demands that were taken back before they were made
        self._tries: dict[str, int] = {}
        self._spread = random.randrange(1 << 16)  # over the ports of a ring, so that trainers share its listeners
        self._loop = asyncio.get_running_loop()
        self._due: asyncio.TimerHandle | None = None
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._seldom = Seldom()
        self._looked = float("-inf")
        self._task(self._follow())
        self._task(self._keep())

    def __repr__(self) -> str:
        return f"<Demands of rank {self._rank} at {len(self._places)} places, {self._takers.in_hand} in hand>"

    @property
    def places(self) -> Mapping[str, Place]:
        """As last found."""
        return self._places

    @property
    def links(self) -> list[TakeLink]:
        """The connections."""
        return list(self._links.values())

    @property
    def connected(self) -> bool:
        """Whether any place can be asked."""
        return bool(self._links)

    def want(self, batches: int, most: int, oldest_version: int | None) -> None:
        """Have so many batches unused and asked for from now on, of so many payloads; none before the first call."""
        self.oldest_version = oldest_version
        self._batches, self._most = batches, min(most, engine().MOST_TAKEN)
        self._size()
        self._turn()

    def _size(self) -> None:
        """No more payloads in a demand than fit its bytes: as many large ones as small ones are not held ready."""
        fit = max(1, min(engine().MOST_TAKEN, self._most_bytes // max(1, self._largest)))
        most = min(self._most, fit)
        self._takers.ahead, self._takers.most, self._takers.largest = self._batches * most, most, fit

    def used(self, brought: Brought, count: int) -> None:
        """The trainer works on so many of what was brought: others may come in their place."""
        if self._links.get(brought.place) is brought.link:
            self._takers.used(brought.place, count)
            self._turn()

    # --- the ends of claims ---------------------------------------------------------------------------
    async def finish(self, brought: Brought, rows: Rows) -> np.ndarray[Any, Any]:
        """Consume some of what was brought; which were accepted."""
        try:
            return await brought.link.finish(rows)
        finally:
            self._ended(brought, len(rows))

    async def end(self, brought: Brought, rows: Rows, how: Ended, reason: str, consumer: str) -> np.ndarray[Any, Any]:
        """End some of what was brought without using it; which were still held."""
        try:
            return await brought.link.end(rows, how, reason, consumer)
        finally:
            self._ended(brought, len(rows))

    async def give_back(self, brought: Brought, rows: Rows, delay_s: float = 0.0) -> np.ndarray[Any, Any]:
        """Give some of what was brought up; which were still held."""
        try:
            return await brought.link.give_back(rows, delay_s)
        finally:
            self._ended(brought, len(rows))

    def let_go(self, brought: Brought, rows: Rows, delay_s: float = 0.0) -> None:
        """`give_back` without waiting for the answer. Any thread."""
        brought.link.let_go(rows, delay_s)
        with contextlib.suppress(RuntimeError):  # the loop is closed, and every claim has ended
            self._loop.call_soon_threadsafe(self._ended, brought, len(rows))

    def _ended(self, brought: Brought, count: int) -> None:
        if self._links.get(brought.place) is brought.link:
            self._takers.ended(brought.place, count)
        self._turn()

    def close(self) -> None:
        """End every connection and with it every claim: others can claim the payloads. Idempotent."""
        self._closed = True
        if self._due is not None:
            self._due.cancel()
        for task in self._tasks:
            task.cancel()
        for link in self._links.values():
            self._taking.leave(link)
        self._links.clear()

    # --- carrying out ---------------------------------------------------------------------------------
    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _turn(self) -> None:
        if self._closed:
            return
        now = time.monotonic()
        look_at = self._looked + _LOOK_S
        if len(self._links) <= _FEW or now >= look_at:
            look_at, self._looked = float("inf"), now
            for name, link in list(self._links.items()):
                if link.lost:
                    self._lose(name, link)
        for action in self._takers.step(now):
            match action:
                case Open(name):
                    self._task(self._open(name))
                case Close(name):
                    self._taking.leave(self._links.pop(name))
                case Ask(name, _, _, _):
                    self._task(self._ask(action, self._links[name]))
                case Untake(name, demand):
                    number = self._numbers.get(demand)
                    if number is None:
                        self._unwanted.add(demand)
                    else:
                        self._links[name].take_back(number)
        if self._due is not None:
            self._due.cancel()
        due = self._takers.next_due(now)
        due = look_at if due is None else min(due, look_at)
        self._due = None if due == float("inf") else self._loop.call_later(max(0.0, due - now), self._turn)

    def _lose(self, name: str, link: TakeLink) -> None:
        if self._links.get(name) is link:
            del self._links[name]
            self._takers.lost(name, time.monotonic())
        self._taking.leave(link)

    async def _open(self, name: str) -> None:
        place = self._places.get(name)
        tries = self._tries.get(name, 0)
        try:
            if place is None or not place.ports:
                raise WrongRingError(f"ring {name[:8]} is not served any more")
            address = place.addresses[tries // len(place.ports) % len(place.addresses)]
            port = place.ports[(self._spread + tries) % len(place.ports)]
            link = await self._taking.apart((address, port), place.segment)
            if place.ring and link.ring != place.ring:
                self._taking.leave(link)
                raise WrongRingError(f"{address} serves ring {link.ring[:8]}, not {place.ring[:8]}")
        except TransportError as error:
            self._tries[name] = tries + 1
            self.faults[name] = error
            if (before := self._seldom.due()) is not None:
                more = f" ({before} more failures since the last report)" if before else ""
                log.warning("cannot take payloads from %s, and tries again: %s%s", name, error, more)
            self._takers.lost(name, time.monotonic())
        except Exception as error:  # whatever it is, the place is tried again
            self._tries[name] = tries + 1
            self._note(name, error)
            self._takers.lost(name, time.monotonic())
        else:
            self.faults.pop(name, None)
            link.served = partial(self._served, name)
            self._links[name] = link
            self._takers.opened(name)
        self._turn()

    def _note(self, name: str, error: Exception) -> None:
        """An error that is none of this package's."""
        self.faults[name] = InternalError(f"{name}: {type(error).__name__}: {error}")
        if self._seldom.due() is not None:
            log.error("taking payloads from %s failed, and is tried again", name, exc_info=error)

    def _served(self, name: str) -> Served:
        place = self._places.get(name)
        if place is None:
            return Served()
        ports = ((address, port) for address in place.addresses for port in place.ports)
        return Served(tuple(ports), place.segment or "")

    async def _ask(self, ask: Ask, link: TakeLink) -> None:
        name = ask.place

        def asked(number: int) -> None:
            self._numbers[ask.demand] = number
            if ask.demand in self._unwanted:
                link.take_back(number)

        try:
            batch = await link.take(
                ask.n,
                most_bytes=self._most_bytes,
                wait_s=_WAIT_S if ask.waits else 0.0,
                rank=self._rank,
                oldest_version=self.oldest_version,
                most_attempts=self._most_attempts,
                asked=asked,
            )
        except TransportError as error:
            self.faults[name] = error
            if link.lost:
                self._tries[name] = self._tries.get(name, 0) + 1
                self._lose(name, link)
            elif self._links.get(name) is link:
                if not isinstance(error, BusyError):
                    log.warning("a demand failed, and is made again: %s", error)
                self._takers.refused(name, time.monotonic())
        except Exception as error:  # with the connection end claims that may have come
            self._note(name, error)
            self._lose(name, link)
        else:
            if self._links.get(name) is link:
                self._takers.answered(name, len(batch), full=self._full(ask.n, batch))
                if len(batch):
                    for part in batch.split(self._most):
                        self._arrived(Brought(self, name, link, part))
        finally:
            self._numbers.pop(ask.demand, None)
            self._unwanted.discard(ask.demand)
        self._turn()

    def _full(self, n: int, batch: TakenBatch) -> bool:
        """Whether the demand's own limits have ended the answer: another payload may be ready."""
        if len(batch) == 0:
            return batch.dropped >= n
        self._largest = int(batch.rows["length"].max())
        self._size()
        return len(batch) + batch.dropped >= n or batch.nbytes + self._largest > self._most_bytes

    # --- what goes on meanwhile -------------------------------------------------------------------------
    async def _follow(self) -> None:
        while True:
            try:
                found = await asyncio.to_thread(self._find)
            except TransportError as error:
                if (before := self._seldom.due()) is not None:
                    log.warning("rings were not looked for, and are again soon: %s (%d more)", error, before)
            else:
                if found is not self._places:
                    self._follow_to(found)
                self._turn()
            await asyncio.sleep(self._look_s)

    def _follow_to(self, found: Mapping[str, Place]) -> None:
        for name in self._places.keys() - found.keys():
            self._tries.pop(name, None)
            self.faults.pop(name, None)
        self._places = found
        self._takers.found(found)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._taking.renew_s)
            self._turn()
            for link in list(self._links.values()):
                with contextlib.suppress(TransportError):
                    link.renew()
