"""All connections of a client: opened, lent, taken back, parted from; and what is done without being asked.

Pool, routes, quarantine and ledger say what is due; this file does it. It belongs to the client's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

from transport.client.connections.acknowledgements import Ack, AckLedger
from transport.client.connections.connection import Link, Want
from transport.client.connections.pool import EndpointPool, PoolCounts, PortKey
from transport.client.connections.routes import PortQuarantine, Routes, WithoutRdma
from transport.errors import (
    ClosedError,
    DeadlineExceededError,
    LinkError,
    RefusedError,
    RingNotFoundError,
    TransportError,
    UnreachableError,
    WireNotAllowedError,
    WrongRingError,
)
from transport.ring.attachment import found_here, shares_memory
from transport.runtime.descriptors import OF_A_CONNECTION, promised
from transport.runtime.logs import LoggedErrors
from transport.runtime.turns import Turns
from transport.settings import Settings
from transport.wire import frames
from transport.wire.addresses import host_port, is_ipv6
from transport.wire.authentication import checked_secret
from transport.wire.frames import Kind, Record
from transport.wire.interfaces import Network, interface_towards
from transport.wire.joining import address_of, of_this_host
from transport.wire.library import NoCommonTransportError, settings_here
from transport.wire.probing import probe
from transport.wire.ucx import Worker
from transport.wires import Wire, user_settings

log = logging.getLogger(__name__)

_BYE_TIMEOUT_S = 1.0
_CLOSE_TIMEOUT_S = 5.0  # for the last acknowledgements; a ring that cannot be reached does not hold the client up
_LONGEST_SLEEP_S = 30.0
_LOOK_S = 1.0  # while acknowledgements are unconfirmed: is the connection that carried them still there?


class Links:
    """The links of one client, with the acknowledgements that they carry.

    Args:
        wires: the wires a link may use; None: any.
        secret: shared secret to prove to listeners.
        device_memory: UCX shall know it, whatever the wires.
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
        self._settings = settings
        self._wires = wires
        self._secret = checked_secret(secret)
        self._for_device_memory = device_memory
        # By whether shared memory, IPv6, RDMA may be used, and the interface of TCP; None: any.
        self._workers: dict[tuple[bool, bool, bool, str | None], Worker] = {}
        self._refused = ""  # why rdma is used no more
        self._without_rdma = WithoutRdma()
        self._retired: set[Worker] = set()  # each until its last connection has ended
        self._pool: EndpointPool[Link] = EndpointPool(settings)
        self._turns: dict[PortKey, Turns] = {}  # of those that wait for a link of a port
        self._tag_bases: dict[Link, int] = {}
        self._bases: set[int] = set()  # those, and of links that are being opened
        self._partings: set[asyncio.Task[bool]] = set()
        self._wake = asyncio.Event()  # something has changed that upkeep should look at
        self._closed = False
        self._ending = False  # the last acknowledgements are sent
        self._silent: set[str] = set()  # rings of which somebody was there then, and did not answer
        self.opened = 0
        self.quarantine = PortQuarantine(settings)
        self.ledger = AckLedger(settings)
        self.routes = Routes(self.quarantine, self.ledger)
        self.ports = self.routes.ports  # asked at every read: no call in between
        self.next_port = self.routes.next_port
        self._tick = tick
        self._flushes: dict[str, asyncio.Task[None]] = {}
        self._looked = 0.0  # at all idle links, and at the network
        self._tender = asyncio.get_running_loop().create_task(self._tend(), name="transport client")

    def __repr__(self) -> str:
        return f"<Links {self._pool!r} {self.ledger!r} {self.quarantine!r}>"

    @property
    def only_near(self) -> bool:
        """True if payloads may come by shared memory alone."""
        return self._wires is not None and "shm" in self._wires and not self._wires & {"tcp", "rdma"}

    def request(self, link: Link, wants: list[Want]) -> tuple[int, asyncio.Future[Any]]:
        """Send wants with the acknowledgements that are waiting for this ring: the message number, and its outcome."""
        acks = self.ledger.take(link.ring, self._settings.records_per_message - len(wants), link.port)
        number, answer = link.read(wants, acks)
        if acks:  # with no await since `take`, so that no acknowledgement rides twice
            self.ledger.sent(link, number, acks)
        return number, answer

    @property
    def rings(self) -> set[str]:
        """Ids of the rings with a connection."""
        return {link.ring for link in self._tag_bases}

    def counts(self, port: PortKey | None = None) -> PoolCounts:
        """Idle, lent and opening links of one port, or of all."""
        return self._pool.counts(port)

    def failed(self, ring: str, port: PortKey, error: TransportError) -> bool:
        """Note a failure of the port, and quarantine it where the path broke; True when it serves another ring now.

        It is healed by an answer, and a refusal is one. What this side ended itself says nothing about the port.
        """
        assert asyncio._get_running_loop() is self._tender.get_loop(), "ports belong to their client's loop"
        if isinstance(error, WrongRingError):
            self.routes.serves_another(ring, port)
            return True
        if isinstance(error, LinkError) and not isinstance(error, DeadlineExceededError):
            if self.quarantine.failed(port, time.monotonic()):  # else it was used as a last resort, and said so before
                log.info("port %s is quarantined: %s", host_port(*port), error, extra={"port": host_port(*port)})
            self._break_off_all(self._pool.drain_port(port))
        elif isinstance(error, RefusedError):
            self.quarantine.succeeded(port)
        return False

    # --- links --------------------------------------------------------------------------------------
    def try_checkout(self, port: PortKey, ring: str) -> Link | None:
        """Return an idle link to the port, if there is one that still serves ``ring``, and nobody waits for it."""
        return None if self._turns and port in self._turns else self._idle(port, ring)

    def _idle(self, port: PortKey, ring: str) -> Link | None:
        if self._closed:
            raise ClosedError("this client is closed")
        now = time.monotonic()
        while (link := self._pool.checkout(port, now)) is not None:
            if link.usable and link.ring == ring:
                return link
            self.break_off(link)
        return None

    async def checkout(self, port: PortKey, ring: str) -> Link:
        """Return an idle link, a new one, or, where the port has as many as it may, the next one that comes back."""
        given = None if port in self._turns else self._link_or_place(port, ring)
        if given is None:
            turns = self._turns.setdefault(port, Turns())
            try:
                given = await turns.wait(partial(self._link_or_place, port, ring))
            finally:
                if not turns.waiting:
                    del self._turns[port]
        [link] = given
        return await self._open(port, ring) if link is None else link

    def _link_or_place(self, port: PortKey, ring: str) -> list[Link | None] | None:
        """Return an idle link; or None in its place, which is taken in the pool for a new one; or no list."""
        if (link := self._idle(port, ring)) is not None:
            return [link]
        self._part_from_old()
        if not self._pool.may_open(port):
            return None
        self._pool.begin_open(port)
        return [None]

    def _came_back(self, port: PortKey) -> None:
        """Note that the port has a link or a place again."""
        if self._turns and (turns := self._turns.get(port)) is not None:
            turns.look()

    def _allowed(self) -> frozenset[Wire] | None:
        if self._for_device_memory and self._wires is not None:
            return self._wires | {"cuda"}
        return self._wires

    def _worker_for(self, ring: str, address: str) -> Worker:
        """Return the worker of the address's family that may use shared memory, or the one that may not.

        Which has to be known before connecting. UCX crashes where the memory cannot be attached. And where only the
        network namespace is another one it maps the memory, but who waits is not woken: that goes through a socket.
        """
        if self._wires is not None and "shm" not in self._wires:
            return self.worker(address=address)
        route = self.routes.find(ring)
        known = route is not None and (route.segment is None or shares_memory(route.segment))
        if known and of_this_host(address):
            return self.worker(address=address)
        try:
            return self.worker(shared_memory=False, address=address)
        except WireNotAllowedError:
            if route is not None and route.segment is not None:
                found_here(route.segment)  # a ring that has gone says nothing about the wires
            raise

    def worker(self, *, shared_memory: bool = True, address: str = "") -> Worker:
        """Return the worker for such connections. The first time UCX is loaded, which takes a tenth of a second."""
        ipv6, without_rdma = is_ipv6(address), self._without_rdma.holds(address, time.monotonic())
        interface = interface_towards(address) if address else None
        kind = shared_memory, ipv6, not without_rdma, interface
        if (worker := self._workers.get(kind)) is None:
            refused = f"{address} and this host do not both reach each other by it, see UCX_NET_DEVICES"
            refused = self._refused or (refused if without_rdma else "")
            worker = self._workers[kind] = Worker(
                settings_here(
                    self._allowed(), shared_memory=shared_memory, refused=refused, ipv6=ipv6, interface=interface
                )
            )
            # every receive stands before it is asked for: what else comes is no answer, and would stay in UCX
            worker.engine.drop_unexpected()
        return worker

    async def warm(self, port: PortKey, ring: str, most: int) -> int:
        """Open connections to a port before they are needed, up to ``most``; how many it has then.

        The first one alone: a port that does not answer takes one place from readers, not all. Raises what connecting
        raises; the port is not blamed for it, since its listener may not have been started yet.
        """
        if self._pool.counts(port).total == 0:
            await self._open_idle(port, ring)
        more = most - self._pool.counts(port).total
        for error in await asyncio.gather(*(self._open_idle(port, ring) for _ in range(more)), return_exceptions=True):
            if error is not None:
                raise error
        return self._pool.counts(port).total

    async def _open_idle(self, port: PortKey, ring: str) -> None:
        if not self._closed and self._pool.may_open(port):
            self._pool.begin_open(port)
            self.checkin(await self._open(port, ring))

    def device_memory(self) -> bool:
        """Return whether UCX knows device memory here, so that it may be received into."""
        worker = next(iter(self._workers.values()), None) or self.worker()
        return worker.device_memory

    async def _open(self, port: PortKey, ring: str) -> Link:
        """Return a new link in the place that the caller has taken in the pool."""
        try:
            link = await self._connect(port, ring)
        except BaseException:
            self._pool.open_failed(port)
            self._came_back(port)
            raise
        self._pool.opened(port, link)
        self._check_wire(port, link)
        return link

    async def open_apart(self, port: PortKey, ring: str = "", segment: str | None = "", *, takes: bool = False) -> Link:
        """Return a link outside the pool: its caller ends it with `break_off`. "": whatever ring is served.

        segment: of the ring that is served, which was seen on this host; None: it is on another one; "": unknown, so no
        shared memory is used. RingNotFoundError if the segment has gone. takes: payloads, and is to hear the end.
        """
        near = segment is None or (segment != "" and shares_memory(segment, seen=True))
        try:
            link = await self._connect(port, ring, near, takes)
        except TransportError as error:
            self.failed(ring, port, error)
            raise
        self.routes.succeeded(link.ring, port)  # a handshake is an answer
        self._check_wire(port, link)
        return link

    async def _connect(self, port: PortKey, ring: str, near: bool = False, takes: bool = False) -> Link:
        base = frames.new_tag_base(self._bases)
        self._bases.add(base)
        try:
            if self._closed:  # a turn that came just before
                raise ClosedError("this client is closed")
            self.quarantine.begin(port, time.monotonic())
            link = await self._connected(port, ring, base, near, takes)
        except BaseException:
            self._bases.discard(base)
            raise
        self._tag_bases[link] = base
        self.opened += 1
        self.routes.listener_said(port, link.ring, link.ports)
        return link

    def _check_wire(self, port: PortKey, link: Link) -> None:
        if self._wires is not None and link.wire not in self._wires:
            try:
                chosen = ", ".join("/".join(each) for each in link.transports())
            finally:
                self.break_off(link)
            asked = (
                f"; UCX_TLS={os.environ.get('UCX_TLS')} takes precedence: unset it" if "TLS" in user_settings() else ""
            )
            raise WireNotAllowedError(
                f"UCX chose {link.wire} ({chosen}) to {host_port(*port)}, allowed are {sorted(self._wires)}{asked}"
            )

    async def _connected(self, port: PortKey, ring: str, base: int, near: bool, takes: bool) -> Link:
        """Connect and shake hands; again, where the worker was replaced meanwhile, or is not for this address: these
        are not the port's fault."""
        settings = self._settings
        while True:
            self._look_at_network()
            address = await address_of(port[0])
            try:
                worker = self.worker(address=address) if near else self._worker_for(ring, address)
            except WireNotAllowedError:
                if self.only_near:  # whose memory is not found: nobody may be there
                    await probe(address, port[1], settings.connect_timeout_s)
                raise
            with promised(OF_A_CONNECTION, f"a connection to {host_port(*port)}"):
                began = time.monotonic()
                await probe(address, port[1], settings.connect_timeout_s)
                left_s = settings.handshake_timeout_s + max(0, settings.connect_timeout_s - time.monotonic() + began)
                try:
                    return await Link.open(
                        worker,
                        *port,
                        ring=ring,
                        tag_base=base,
                        secret=self._secret,
                        settings=settings,
                        limit_s=left_s,
                        takes=takes,
                    )
                except NoCommonTransportError:
                    if not worker.admits_rdma or self._closed:
                        raise
                    await probe(address, port[1], settings.connect_timeout_s)  # else the whole network is away
                    self._without_rdma.add(address, time.monotonic())
                except (LinkError, ClosedError):
                    if worker in self._workers.values() or self._closed:
                        raise

    def checkin(self, link: Link) -> None:
        """Take back a link whose user is done with it, with nothing under way."""
        if not link.usable:
            self.break_off(link)
            return
        surplus = self._pool.checkin(link, time.monotonic(), awaited=self._turns)
        self._came_back(link.port)
        self._break_off_all(surplus)

    def break_off(self, link: Link, *, silent: bool = False) -> None:
        """Abort a link; what it carried unconfirmed is acknowledged again through another one.

        ``silent``: nothing came through it in the time that one attempt has.
        """
        refused = "received memory could not be registered" if link.memory_refused else ""
        no_rdma = refused or link.port_is_down
        blocked = link.wire == "shm" and (silent or link.peer_died) and not link.worker.retired
        link.abort()
        current = list(self._workers.values())
        if link.worker in current and link.worker.engine.abandoned:
            blocked = True  # a peer may still be sending fragments into memory that goes back to its owner now
        self._pool.drop(link)
        self._bases.discard(self._tag_bases.pop(link, -1))
        self.ledger.lost(link, time.monotonic())
        self._wake.set()
        self._came_back(link.port)
        self._refused = self._refused or refused
        if no_rdma and link.worker in current:
            for worker in current:
                self._replace_worker(worker, no_rdma)
        elif blocked and link.worker in current:
            self._replace_worker(link.worker, "a shared-memory peer died or stopped answering")

    def _replace_worker(self, worker: Worker, why: str) -> None:
        """Replace a worker after a peer over shared memory has died, nothing came in time, or rdma has failed.

        All peers over shared memory write into one queue of this worker. One that is killed in the middle leaves a gap
        there that UCX waits at for ever: nothing would arrive over shared memory any more, from any peer.
        """
        self._forget(worker)
        log.info("%s; replacing all connections of its worker", why)
        for link in [link for link in self._tag_bases if link.worker is worker]:
            link.given_up = True
        self._break_off_all([link for link in self._pool.idle() if link.worker is worker])
        worker.close()  # reads that are under way fail, and are tried again

    def _look_at_network(self) -> None:
        """Retire workers which do not fit the host's network any more; their connections stay until they are idle."""
        if self._workers:
            network = Network.now()
            for worker in list(self._workers.values()):
                if changed := network.changed_since(worker.network):
                    log.info("%s; new connections are made by another worker", changed)
                    self._forget(worker)
                    self._without_rdma.clear()
                    worker.retired = True
                    self._retired.add(worker)
        for worker in [each for each in self._retired if not each.endpoints]:
            self._retired.discard(worker)
            worker.close()

    def _forget(self, worker: Worker) -> None:
        self._workers = {key: each for key, each in self._workers.items() if each is not worker}

    def _break_off_all(self, links: Iterable[Link]) -> None:
        for link in links:
            self.break_off(link)

    def _part_from_old(self) -> None:
        """Take leave of links that were idle for too long, beside everything else; their places are free at once."""
        for link in self._pool.expired(time.monotonic()):
            parting = asyncio.get_running_loop().create_task(self._farewell(link), name="transport farewell")
            self._partings.add(parting)
            parting.add_done_callback(self._partings.discard)

    async def _farewell(self, link: Link) -> bool:
        """Part in good order: the last acknowledgements, BYE, its answer, close. False: it was not answered."""
        try:
            acks = self.ledger.take(link.ring, self._settings.records_per_message - 1, link.port)
            async with asyncio.timeout(_BYE_TIMEOUT_S):
                number, asking = link.ask(Record(Kind.BYE), acks)
                self.ledger.sent(link, number, acks)
                link.answer(await asking)
            self.ledger.answered(link, number)
            return True
        except (TransportError, TimeoutError) as error:
            log.debug("%r did not answer BYE: %s", link, error)
            if isinstance(error, TimeoutError):
                self._silent.add(link.ring)
            return False
        finally:
            self.break_off(link)

    # --- acknowledgements and ageing ----------------------------------------------------------------------
    async def _tend(self) -> None:
        """Send acknowledgements that found no request to ride with; close links before the listener does."""
        failures = LoggedErrors(log, "maintenance of connections")
        while True:
            with failures:
                await self._sleep()
                self._look_around(time.monotonic())
                for ring in self.ledger.due(time.monotonic()):
                    self._begin_flush(ring)
                self._part_from_old()
                self._tick()
                continue
            await asyncio.sleep(_LOOK_S)

    def _look_around(self, now: float) -> None:
        """Part from idle links that broke, and look at the network; links may be thousands, so not at every turn."""
        if now >= self._looked + _LOOK_S:
            self._looked = now
            self._break_off_all([link for link in self._pool.idle() if not link.usable])
            self._look_at_network()

    async def _sleep(self) -> None:
        """Sleep until something is due. Nothing due soon: until woken, too."""
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
            async with asyncio.timeout(_BYE_TIMEOUT_S if self._ending else self._settings.read_timeout(0)):
                link = await self.checkout(port, ring)
        except (TransportError, TimeoutError) as error:
            log.debug("acknowledgements for ring %s are delayed: %s", ring[:8], error)
            if isinstance(error, TransportError):
                self.failed(ring, port, error)
            elif self._ending:
                self.quarantine.failed(port, time.monotonic())
            if self._ending and not isinstance(error, UnreachableError):
                self._silent.add(ring)
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
        """Have acknowledgements confirmed, part from every listener, stop UCX. Users of lent links get ClosedError.

        A port that is silent or gone is replaced by another one of its ring; what no port confirms is logged.
        Cancelled, it does not wait any more: everything is closed at once. Idempotent.
        """
        try:
            self._tender.cancel()
            await asyncio.gather(self._tender, return_exceptions=True)
            if not self._closed:
                self._ending = True
                give_up = time.monotonic() + _CLOSE_TIMEOUT_S
                routes = [self.routes.find(ring) for ring in self.ledger.rings()]
                ways = max((len(route.pairs) for route in routes if route is not None), default=1)
                for _ in range(1 + ways):  # over each port once, beside the connections that are there
                    await self._flush_all(give_up)
                    await self._part_from_idle()
                    if not self.ledger.rings() or time.monotonic() >= give_up:
                        break
                self._admit_no_more()
                await asyncio.gather(*self._partings, return_exceptions=True)
        finally:
            self.end()

    async def _flush_all(self, give_up: float) -> None:
        for ring in self.ledger.pending_rings():
            self._begin_flush(ring)
        if self._flushes:
            _, late = await asyncio.wait(self._flushes.values(), timeout=max(0.0, give_up - time.monotonic()))
            for flush in late:
                flush.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _part_from_idle(self) -> None:
        links = self._pool.take_idle()
        for link, answered in zip(links, await asyncio.gather(*map(self._farewell, links)), strict=True):
            if not answered:
                self.quarantine.failed(link.port, time.monotonic())

    def _is_here(self, ring: str) -> bool:
        """Return whether the ring is one of this host that is still there."""
        route = self.routes.find(ring)
        if route is None or not route.segment:
            return False
        with contextlib.suppress(RingNotFoundError):
            found_here(route.segment)
            return True
        return False

    def _admit_no_more(self) -> None:
        self._closed = True
        for turns in self._turns.values():
            turns.look()

    def end(self) -> None:
        """Stop UCX and everything here, without waiting for a listener. Idempotent."""
        self._tender.cancel()
        self._admit_no_more()
        for ring in self.ledger.rings():
            log.log(
                logging.WARNING if not self._ending or ring in self._silent or self._is_here(ring) else logging.INFO,
                "closed before ring %s confirmed %d acknowledgements: payloads whose acknowledgement did not arrive "
                "can be read once more",
                ring[:8],
                self.ledger.forget_ring(ring),
            )
        for task in [*self._flushes.values(), *self._partings]:
            task.cancel()
        self._break_off_all(self._pool.drain())
        for worker in [*self._workers.values(), *self._retired]:
            worker.close()
