"""All connections of a client, and what is done without being asked: acknowledging, ageing, the end.

Ledger and pool say what is due; this file does it. It belongs to the client's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from transport.client.connections.acknowledgements import Ack
from transport.client.connections.connection import Link, Want
from transport.client.connections.lending import Lending
from transport.client.connections.pool import PortKey
from transport.errors import ClosedError, TransportError
from transport.settings import Settings
from transport.wires import Wire

log = logging.getLogger(__name__)


_CLOSE_TIMEOUT_S = 5.0  # for the last acknowledgements; a ring that cannot be reached does not hold the client up
_LONGEST_SLEEP_S = 30.0
_FEW = 256  # idle connections
_LOOK_S = 1.0  # while acknowledgements are unconfirmed: is the connection that carried them still there?


class Links(Lending):
    """The links of one client, with the acknowledgements that they carry.

    Args:
        wires, secret, device_memory: as `Lending` takes them.
        tick: called now and then, at least every half minute, for what else grows old.
    """

    def __init__(
        self,
        settings: Settings,
        wires: frozenset[Wire] | None,
        secret: bytes | None,
        tick: Callable[[], object],
        *,
        device_memory: bool = False,
    ) -> None:
        super().__init__(settings, wires, secret, device_memory=device_memory)
        self._tick = tick
        self._flushes: dict[str, asyncio.Task[None]] = {}
        self._looked = 0.0  # at all idle links
        self._tender = asyncio.get_running_loop().create_task(self._tend(), name="transport client")

    def __repr__(self) -> str:
        return f"<Links {self._pool!r} {self.ledger!r} {self.quarantine!r}>"

    def request(self, link: Link, wants: list[Want]) -> tuple[int, asyncio.Future[Any]]:
        """Send wants with the acknowledgements that are waiting for this ring: the message number, and its outcome."""
        acks = self.ledger.take(link.ring, self._settings.records_per_message - len(wants), link.port)
        number, answer = link.read(wants, acks)
        if acks:  # with no await since `take`, so that no acknowledgement rides twice
            self.ledger.sent(link, number, acks)
        return number, answer

    # --- acknowledgements and ageing ----------------------------------------------------------------------
    async def _tend(self) -> None:
        """Send acknowledgements that found no request to ride with; close links before the listener does."""
        while True:
            try:
                await self._sleep()
                self._look_at_idle(time.monotonic())
                for ring in self.ledger.due(time.monotonic()):
                    self._begin_flush(ring)
                self._part_from_old()
                self._tick()
            except Exception:  # whatever it was, acknowledgements must go on
                log.exception("maintenance of connections failed; trying again")
                await asyncio.sleep(_LOOK_S)

    def _look_at_idle(self, now: float) -> None:
        """Part from idle links that broke: a few are looked at each time, many as often as `_LOOK_S` says."""
        if self._pool.idle_count <= _FEW or now >= self._looked + _LOOK_S:
            self._looked = now
            self._break_off_all([link for link in self._pool.idle() if not link.usable])

    async def _sleep(self) -> None:
        """Until something is due. Nothing due soon: until woken, too."""
        now = time.monotonic()
        due = self.ledger.next_due(without=self._flushes)
        if due is not None and due - now <= self._settings.ack_delay_s:
            # not woken by further acknowledgements: under load they ride, and this task costs nothing
            await asyncio.sleep(max(due - now, 0.0))
            return
        # not beyond the age of a link that becomes idle in a moment
        longest_s = min(_LONGEST_SLEEP_S, self._settings.pool_endpoint_max_age_s)
        moments = [now + (_LOOK_S if self.ledger.sent_count else longest_s), due, self._pool.next_expiry()]
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(moment for moment in moments if moment is not None) - now):
                await self._wake.wait()
                # mostly an acknowledgement that rides with the next request: look once for a whole burst of them
                await asyncio.sleep(self._settings.ack_delay_s)

    def _begin_flush(self, ring: str) -> None:
        """Flush a ring beside everything else: one that cannot be reached takes seconds, which others must not wait."""
        if ring not in self._flushes:
            flush = asyncio.get_running_loop().create_task(self._flush(ring), name="transport acknowledgements")
            self._flushes[ring] = flush
            flush.add_done_callback(partial(self._flushed, ring))

    def _flushed(self, ring: str, flush: asyncio.Task[None]) -> None:
        self._flushes.pop(ring, None)
        if not flush.cancelled() and flush.exception() is not None:
            log.error("acknowledging to ring %s failed; trying again", ring[:8], exc_info=flush.exception())
            self.ledger.unreachable(ring, time.monotonic())
        self._wake.set()

    async def _flush(self, ring: str) -> None:
        """Send what is pending for a ring, now; failures leave it pending, with a longer pause."""
        for via in self.ledger.vias(ring):
            route = self.routes.find(ring)
            if route is None:  # no ticket has named a port of it
                log.warning(
                    "dropped %d acknowledgements for ring %s: no port of it is known",
                    self.ledger.forget_ring(ring),
                    ring[:8],
                )
                return
            await self._flush_to(ring, route.pairs, via)

    async def _flush_to(self, ring: str, ports: list[PortKey], via: Hashable | None) -> None:
        port = via if via in ports else self.next_port(ring, ports)
        if via is not None and port != via:
            self.ledger.reroute(ring, via)
        try:
            async with asyncio.timeout(self._settings.read_timeout(0)):
                link = await self.checkout(port, ring)
        except (TransportError, TimeoutError) as error:
            log.debug("acknowledgements for ring %s are delayed: %s", ring[:8], error)
            if isinstance(error, TransportError):
                self.failed(ring, port, error)
            self.ledger.reroute(ring, port)
            self.ledger.unreachable(ring, time.monotonic())
            if self.routes.gone(ring, self._settings.linger_s):  # it does not outlive its writer for longer
                self.ledger.forget_ring(ring)
            return
        try:
            while acks := self.ledger.take(ring, self._settings.records_per_message, port):
                self.ledger.sent(link, link.tell(acks), acks)
        except BaseException as error:
            self.break_off(link)
            if isinstance(error, TransportError):
                return
            raise
        self.checkin(link)

    def acknowledge(self, ack: Ack, via: PortKey | None) -> None:
        """Have ``ack`` sent: with the next request through port ``via``, or alone after ``ack_delay_s``."""
        self.ledger.add(ack, time.monotonic(), via)
        if not self._wake.is_set():
            self._wake.set()

    async def close(self) -> None:
        """Send the last acknowledgements, part from every listener, stop UCX. Users of lent links get ClosedError.

        Cancelled, it does not wait any more: everything is closed at once. Idempotent.
        """
        try:
            self._tender.cancel()
            await asyncio.gather(self._tender, return_exceptions=True)
            if not self._closed:
                await self._flush_all()
                self._admit_no_more()
                partings = [self._farewell(link) for link in self._pool.drain()]
                await asyncio.gather(*self._partings, *partings, return_exceptions=True)
        finally:
            self.end()

    async def _flush_all(self) -> None:
        for ring in self.ledger.pending_rings():
            self._begin_flush(ring)
        if self._flushes:
            _, late = await asyncio.wait(self._flushes.values(), timeout=_CLOSE_TIMEOUT_S)
            for flush in late:
                flush.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _admit_no_more(self) -> None:
        self._closed = True
        for port in list(self._waiting):
            while (turn := self._next_turn(port)) is not None:
                turn.set_exception(ClosedError("this client is closed"))
                turn.exception()  # who was cancelled meanwhile does not look at it

    def end(self) -> None:
        """Stop UCX and everything here, without waiting for a listener. Idempotent."""
        self._tender.cancel()
        self._admit_no_more()
        for task in [*self._flushes.values(), *self._partings]:
            task.cancel()
        self._break_off_all(self._pool.drain())
        for worker in (self._worker, self._worker_apart):
            if worker is not None:
                worker.close()
