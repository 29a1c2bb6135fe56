"""Simulated rollout hosts, the network between them and the trainers, and the connections over it.

The ring and its listeners are a model (they are native code, with models of their own in native/model): slots with
generations, consumption that is idempotent, a listener that answers in the order of the messages of a connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final

import accounts
from accounts import Violation
from claims import Claims, Demand, SimNative

from transport.client.connections.acknowledgements import Ack
from transport.client.connections.connection import Want
from transport.errors import (
    BusyError,
    ChecksumError,
    ConnectionLostError,
    ReadTimeoutError,
    StaleSlotError,
    TransportError,
    UnreachableError,
    WrongRingError,
)
from transport.settings import Settings
from transport.ticket import Ticket
from transport.wire.frames import Kind, Record, SlotFate
from transport.wire.interfaces import Network

_RETRANSMITTED_S: Final = 60.0  # a connection that is cut for longer is broken by TCP
_WRONG_BYTES: Final = 1e-4  # of payloads, on the way
_LATER: Final = object()  # a demand is answered when something is ready


class Slot:
    """One slot of a ring."""

    __slots__ = ("generation", "ticket")

    def __init__(self) -> None:
        self.generation = 0
        self.ticket: Ticket | None = None  # None: free


class Host:
    """A rollout host: a ring, and listeners at one address."""

    def __init__(self, world: Any, number: int, slots: int) -> None:
        self.world = world
        self.number = number
        self.address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        self.ports = (7001, 7002)
        self.links: set[SimLink] = set()
        self.down = set[int]()  # ports whose listener is being restarted
        self.alive = True
        self.cut_until = 0.0  # nothing comes through before
        self.slow = 1.0
        self.troubled_until = 0.0  # it may not have answered before, in time
        self.unpublished: list[Ticket] = []
        self.most_links = 0
        self.writes = 0
        self.new_ring(slots)

    def new_ring(self, slots: int) -> None:
        """What a process that starts on this host has."""
        self.ring = f"{self.world.rng.getrandbits(128):032x}"
        self.slots = [Slot() for _ in range(slots)]
        self.free = list(range(slots))
        self.claims = Claims(self)
        self.world.host_of[self.ring] = self

    @property
    def cut(self) -> bool:
        return bool(self.world.now < self.cut_until)

    # --- the ring -----------------------------------------------------------------------------------------
    def write(self) -> Ticket | None:
        """A new payload; None: the ring is full."""
        if not self.free:
            return None
        at = self.free.pop()
        slot = self.slots[at]
        slot.generation += 1
        slot.ticket = Ticket(
            ring=self.ring, host=f"host-{self.number}", addresses=(self.address,), ports=self.ports, slot=at,
            generation=slot.generation, key=1, size=8, created=0.0,
        )  # fmt: skip
        self.world.accounts.produced(slot.ticket, self.number)
        if self.world.plan.rings:
            self.claims.written(slot.ticket)
        return slot.ticket

    def claim_ended(self, where: tuple[int, int], *, trained: bool) -> None:
        """A claim was finished, or its payload discarded: the slot is free."""
        slot, generation = where
        ticket = self.slots[slot].ticket
        assert ticket is not None
        if trained:
            self.world.accounts.train(ticket.identity)
        else:
            self.world.accounts.abandoned(ticket.identity)
        self.consume(slot, generation)

    def consume(self, slot: int, generation: int) -> bool:
        """As the ring does it: once, and only this generation."""
        here = self.slots[slot]
        if here.ticket is None or here.generation != generation:
            return False
        self.world.accounts.freed(here.ticket)
        here.ticket = None
        self.free.append(slot)
        return True

    def finished_by(self, ring: str, token: int) -> set[tuple[int, int, int]]:
        """What a connection has consumed of a ring that is here; nothing is known of earlier rings."""
        return self.claims.finished.get(token, set()) if ring == self.ring else set()

    def readable(self, slot: int, generation: int) -> bool:
        """Whether this payload is in its slot."""
        here = self.slots[slot]
        return here.ticket is not None and here.generation == generation

    # --- what happens to it ---------------------------------------------------------------------------------
    def break_links(self, port: int | None = None) -> None:
        """The listener's process is no more: the other ends are told by the kernel."""
        for link in sorted(self.links, key=lambda link: link.number):
            if port is None or link.port[1] == port:
                link.broken(ConnectionLostError("the peer has closed the connection"))

    def drop(self, link: SimLink) -> None:
        """The connection is no more, and its claims are anybody's."""
        self.links.discard(link)
        if link.ring == self.ring:
            self.claims.connection_ended(link.number)

    def sweep(self) -> None:
        """A holder of claims that has been silent for its lease loses them."""
        lease_s, now = self.world.settings.claim_lease_s, self.world.now
        holders = [link for link in self.links if self.claims.held_by(link.number)] if self.claims.holds else []
        for link in sorted(holders, key=lambda link: link.number):
            if now - link.heard_at > lease_s:
                trouble = max(self.cut_until, self.troubled_until, link.worker.stopped_until)
                if link.usable and not link.silent and self.slow == 1.0 and now - trouble > lease_s:
                    raise Violation(f"the claims of {link.worker.trainer.name} end, which lives")
                self.world.accounts.note(f"silent {self.number}")
                self.claims.silent(link)

    def die(self) -> None:
        """Without a word: the power went. What its ring held is lost with it."""
        self.alive = False
        self.world.accounts.host_died(self.number, [slot.ticket for slot in self.slots if slot.ticket is not None])
        self.unpublished.clear()
        for link in sorted(self.links, key=lambda link: link.number):
            link.silent = True

    def come_back(self) -> None:
        """The same address and ports, another ring."""
        for link in list(self.links):
            link.server_gone()
        self.alive = True
        self.new_ring(len(self.slots))


TRAINER: ContextVar[Any] = ContextVar("trainer")  # whose process this is


class SimWorker:
    """In the place of the UCX worker."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.engine = self
        self.armed = True
        self.abandoned = 0
        self.device_memory = self.retired = False
        self.network, self.endpoints = Network.now(), ()
        self.trainer = TRAINER.get(None)

    @property
    def stopped_until(self) -> float:
        """When the process goes on that was stopped, as by SIGSTOP: it sends and receives nothing before."""
        return 0.0 if self.trainer is None else float(self.trainer.stopped_until)

    def kick(self) -> None: ...

    def sent(self) -> None: ...

    def drop_unexpected(self) -> None: ...

    def close(self) -> None: ...


class SimLink:
    """In the place of `transport.client.connections.connection.Link`: what the client sees of a connection."""

    world: Any = None
    count = 0

    def __init__(self, host: Host, port: tuple[str, int], worker: SimWorker) -> None:
        SimLink.count += 1
        self.number = SimLink.count
        self.host, self.port, self.worker = host, port, worker
        self.ring, self.ports = host.ring, host.ports
        self.wire, self.inline_limit = "tcp", 1 << 16
        self.given_up = self.peer_died = self.ended = False
        self.usable = True
        self.no_more_rdma = ""
        self.memory_refused, self.port_is_down = False, ""
        self.silent = False  # the other end does not exist any more, and nobody has said so
        self.next_number = 0
        self._ready_at = 0.0  # messages are handled in order
        self._due: dict[int, asyncio.Future[Any]] = {}
        self._puts: dict[int, Callable[[Any], Any]] = {}  # by demand, what takes its answer
        self.native = SimNative(self)
        self.consumers = self.schema = ""
        self.heard_at = self.world.now
        host.links.add(self)
        host.most_links = max(host.most_links, len(host.links))
        self.world.check_links(host)

    @property
    def under_way(self) -> int:
        """How many messages have no answer yet."""
        return len(self._due)

    @classmethod
    async def open(
        cls,
        worker: SimWorker,
        host: str,
        port: int,
        *,
        ring: str,
        tag_base: int,
        secret: Any,
        settings: Settings,
        limit_s: float,
        takes: bool = False,
    ) -> SimLink:
        """As the real one: connecting and shaking hands, within the limits."""
        world = cls.world
        there = world.hosts_at.get(host)
        wait_s = world.delay(there) * 3
        if there is None or not there.alive or there.cut or wait_s > limit_s:
            await asyncio.sleep(limit_s)
            raise ReadTimeoutError(f"{host}:{port} did not answer the handshake in time")
        await asyncio.sleep(wait_s)
        if not there.alive or there.cut:
            await asyncio.sleep(limit_s - wait_s)
            raise ReadTimeoutError(f"{host}:{port} did not answer the handshake in time")
        if port in there.down:
            raise UnreachableError(f"{host}:{port} refused the connection")
        if ring and there.ring != ring:
            raise WrongRingError(f"{host}:{port} serves another ring")
        if len(there.links) >= settings.connections_per_listener * len(there.ports):
            raise BusyError(f"{host}:{port} has as many connections as it may")
        return cls(there, (host, port), worker)

    def transports(self) -> list[tuple[str, str]]:
        return []

    # --- requests -----------------------------------------------------------------------------------------
    def read(self, wants: list[Want], acks: Sequence[Record | Ack]) -> tuple[int, asyncio.Future[Any]]:
        return self._request(acks, lambda: self._read(wants))

    def ask(self, record: Record, acks: Sequence[Record | Ack]) -> tuple[int, asyncio.Future[Any]]:
        return self._request(acks, lambda: self._fate(record))

    def tell(self, records: Sequence[Record | Ack]) -> int:
        number, answer = self._request(records, lambda: None)
        answer.cancel()
        self._due.pop(number, None)
        return number

    def forward(self, token: Any, serve: Callable[[], Any]) -> None:
        """The answer goes to a future of the caller's, or to what it gave in place of one, as `Worker` does it."""

        def tell(outcome: Any) -> None:
            if not isinstance(token, asyncio.Future):
                token(outcome)
            elif token.done():
                pass
            elif isinstance(outcome, Exception):
                token.set_exception(outcome)
            else:
                token.set_result(outcome)

        def answered(answer: asyncio.Future[Any]) -> None:
            if not answer.cancelled():
                tell(answer.exception() or answer.result())

        try:
            _, answer = self._request((), serve)
        except ConnectionLostError as error:
            self.worker.loop.call_soon(tell, error)
            return
        answer.add_done_callback(answered)

    def demand(self, token: Any, n: int, wait_s: float, put: Callable[[Any], Any]) -> int:
        """A TAKE: the listener answers when something is ready."""
        number = self.next_number + 1
        self._puts[number] = put

        def ask() -> Any:
            self.host.claims.ask(Demand(self, number, n), wait_s)
            return _LATER

        self.forward(token, ask)
        return number

    def answer_later(self, number: int, found: Any) -> None:
        """The listener's answer to a demand."""
        self.worker.loop.call_at(self.world.now + self.world.delay(self.host), self._answered, number, found)

    def outcomes(self, wants: list[Want], outcome: Any) -> list[TransportError | None]:
        found: list[TransportError | None] = outcome
        return found

    def answer(self, outcome: Any) -> tuple[int, int]:
        found: tuple[int, int] = outcome
        return found

    def _request(self, acks: Sequence[Record | Ack], serve: Callable[[], Any]) -> tuple[int, asyncio.Future[Any]]:
        if not self.usable:
            raise ConnectionLostError("the connection is gone")
        self.next_number += 1
        number = self.next_number
        answer = self._due[number] = self.worker.loop.create_future()
        world = self.world
        self._ready_at = max(self._ready_at, world.now + world.delay(self.host), self.worker.stopped_until)
        self.worker.loop.call_at(self._ready_at, self._arrived, number, list(acks), serve)
        return number, answer

    def _arrived(self, number: int, acks: list[Any], serve: Callable[[], Any]) -> None:
        """At the listener; also after the client has aborted, since what was sent is under way."""
        host, world = self.host, self.world
        if self.silent or not host.alive or self not in host.links:
            return
        if host.cut:
            if host.cut_until - world.now > _RETRANSMITTED_S:
                self.silent = True
                return
            self.worker.loop.call_at(host.cut_until + world.delay(host), self._arrived, number, acks, serve)
            return
        self.heard_at = world.now
        for ack in acks:
            if not isinstance(ack, Record) or ack.kind in (Kind.ACK, Kind.DISCARD):
                host.consume(ack.slot, ack.generation)
            elif ack.kind is Kind.CANCEL_TAKE:
                host.claims.take_back(self, ack.slot)
        found = serve()
        if found is _LATER:
            return
        if self.usable:
            self.worker.loop.call_at(world.now + world.delay(host), self._answered, number, found)
        else:
            host.drop(self)

    def _answered(self, number: int, found: Any) -> None:
        if self.host.cut:
            if self.host.cut_until - self.world.now > _RETRANSMITTED_S:
                self.silent = True
                return
            self.worker.loop.call_at(self.host.cut_until, self._answered, number, found)
            return
        if self.world.now < self.worker.stopped_until:
            self.worker.loop.call_at(self.worker.stopped_until, self._answered, number, found)
            return
        answer = self._due.pop(number, None)
        put = self._puts.pop(number, None)
        if answer is not None and not answer.done() and self.usable and not self.silent:
            answer.set_result(found if put is None else put(found))

    def _read(self, wants: list[Want]) -> Any:
        failures: list[TransportError | None] = []
        for want in wants:
            ticket = want.ticket
            if not self.host.readable(ticket.slot, ticket.generation):
                failures.append(StaleSlotError(f"payload {ticket.name}: it is not there any more"))
            elif self.world.rng.random() < _WRONG_BYTES:
                failures.append(ChecksumError(f"payload {ticket.name}: checksum mismatch"))
            else:
                failures.append(None)
        return failures if any(failures) else 0

    def _fate(self, record: Record) -> tuple[int, int]:
        there = self.host.readable(record.slot, record.generation)
        return 0, SlotFate.READABLE if there else SlotFate.GONE

    # --- the end -------------------------------------------------------------------------------------------
    def broken(self, error: TransportError) -> None:
        """The listener is gone, and the kernel says so."""
        self.server_gone()
        self.usable = False
        for answer in self._due.values():
            if not answer.done():
                answer.set_exception(error)
        self._due.clear()

    def server_gone(self) -> None:
        """The listener has no such connection any more."""
        self.silent = True
        self.host.drop(self)

    def abort(self) -> None:
        """The client's end. What it had sent may still arrive."""
        if self.usable:
            self.usable = False
            cut_s = max(0.0, self.host.cut_until - self.world.now)  # the listener learns of it when it can
            self.worker.loop.call_later(cut_s + self.world.delay(self.host) + 1.0, self.host.drop, self)
        for answer in self._due.values():
            if not answer.done():
                answer.set_exception(ConnectionLostError("the connection was aborted"))
                answer.exception()
        self._due.clear()


__all__ = ["Host", "SimLink", "SimWorker", "accounts"]
