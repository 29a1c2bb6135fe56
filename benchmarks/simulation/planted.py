"""Faults planted into the decisions, each of which the simulation must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import members
from plans import Plan

from transport.client.attempts import RemoteReads
from transport.client.connections.acknowledgements import AckLedger
from transport.client.connections.pool import EndpointPool
from transport.client.connections.routes import PortQuarantine, Routes
from transport.cooldown.epochs.coordinator import TABLE, Superseded
from transport.cooldown.epochs.coordinator import State as EpochState
from transport.cooldown.epochs.election import checkpointers
from transport.errors import RetriesExhaustedError
from transport.store.directory import Directory, Whereabouts
from transport.store.memory import MemoryStore
from transport.taking.outcomes import Outcomes
from transport.taking.takers import Takers
from transport.testing import MemoryQueue, memory_queue
from transport.wire.frames import UNKNOWN


class Plant(NamedTuple):
    """One fault: what it breaks, and how."""

    what: str
    plant: Callable[[], None]
    plan: Plan = Plan(faults_per_minute=12.0)  # a simulation that is to find it
    members: bool = False  # is one of members


def _set(kind: type, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(kind, name, value)


def _unfenced() -> None:
    original = MemoryQueue.ack_many

    def ack_many(self: Any, claims: Any, **named: Any) -> Any:
        original(self, claims, **named)
        return list(claims)

    MemoryQueue.ack_many = ack_many  # type: ignore[method-assign]


def _forgotten() -> None:
    def lost(self: Any, connection: Any, now: float) -> int:
        for _, carried in self._sent.pop(connection, ()):
            for entry in carried:
                self._entries.pop(entry.ack[:4], None)
        return 0

    AckLedger.lost = lost  # type: ignore[method-assign]


def _never_healed() -> None:
    original = PortQuarantine.failed

    def failed(self: Any, port: Any, now: float) -> None:
        original(self, port, now)
        self._entries[port].until = float("inf")

    def order(self: Any, ports: Any, now: float, start: int = 0) -> Any:
        return [port for port in ports if not self.is_quarantined(port, now)] or [("10.255.255.255", 1)]

    PortQuarantine.failed = failed  # type: ignore[method-assign]
    PortQuarantine.order = order  # type: ignore[method-assign]
    PortQuarantine.succeeded = lambda *_: None  # type: ignore[method-assign]


def _never_lost() -> None:
    def found(self: Any, ticket: Any, serving: Any, now: float) -> Any:
        return None if serving is None else serving.moved(ticket)

    Whereabouts.found = found  # type: ignore[method-assign]
    Routes.all_wrong = lambda *_: False  # type: ignore[method-assign]


def _lost_at_once() -> None:
    original = Whereabouts.__init__
    Whereabouts.__init__ = lambda self, grace_s: original(self, 0.0)  # type: ignore[method-assign]
    Directory.renew = lambda *_: True  # type: ignore[method-assign]


def _no_lease() -> None:
    MemoryQueue.renew = lambda self, claims: list(claims)  # type: ignore[method-assign]
    _unfenced()


def _unbounded() -> None:
    def checkin(self: Any, connection: Any, now: float) -> list[Any]:
        port = self._in_use.pop(connection)
        self._idle[connection] = (port, now)
        self._idle_of.setdefault(port, {})[connection] = None
        return []

    EndpointPool.checkin = checkin  # type: ignore[method-assign]
    EndpointPool.checkout = lambda *_: None  # type: ignore[method-assign]
    EndpointPool.may_open = lambda *_: True  # type: ignore[method-assign]


def _confirmed_too_early() -> None:
    original = RemoteReads._send

    def send(self: Any, link: Any, *arguments: Any) -> Any:
        request = original(self, link, *arguments)
        self._links.ledger.answered(link, request.number)
        return request

    RemoteReads._send = send  # type: ignore[method-assign]


def _unreachable_is_lost() -> None:
    RetriesExhaustedError.unreadable = True


def _forgetful() -> None:
    original = memory_queue.Contents.forget
    memory_queue.Contents.forget = lambda self, keep: original(self, 0)  # type: ignore[method-assign]


def _unanswered(code: int) -> Callable[[], None]:
    async def of(self: Any, broken: Any, rows: Any, served: Any = None) -> list[int]:
        return [code] * len(rows)

    return _set(Outcomes, "of", of)


def _never_opened_again() -> None:
    original = Takers.lost

    def lost(self: Any, name: str, now: float) -> None:
        original(self, name, now)
        self._places[name].due = float("inf")
        self._next(self._places[name])

    Takers.lost = lost  # type: ignore[method-assign]


def _unfenced_store() -> None:
    original = MemoryStore.put_many

    def put_many(self: Any, changes: Any) -> Any:
        free = [each._replace(expected=None) if each.key.endswith("/round") else each for each in changes]
        return original(self, free)

    MemoryStore.put_many = put_many  # type: ignore[method-assign]


def _elected_by_arrival() -> None:
    def elect(clients: Any, *, seed: int, epoch: int, algorithm: int = 1) -> tuple[str, ...]:
        names = list(dict.fromkeys(clients))
        return tuple(names[: checkpointers(len(names))])

    members.elect = elect


def _ended_again() -> None:
    def again(self: Any, event: Any) -> Any:
        return self._write()

    TABLE[EpochState.DECIDED, Superseded] = again  # type: ignore[index]


RINGS = Plan(faults_per_minute=12.0, rings=True, writes_per_s=0.5)

PLANTS = {
    "fencing": Plant("an acknowledgement is accepted whoever has the claim by then", _unfenced),
    "forgotten-acks": Plant("acknowledgements of a connection that broke are forgotten", _forgotten),
    "quarantine-for-ever": Plant("a port that failed once is never used again", _never_healed),
    "never-lost": Plant("payloads of a dead host are never reported as lost", _never_lost),
    "lost-at-once": Plant("a ring that the directory does not have is lost without grace", _lost_at_once),
    "renewal": Plant("claims are not renewed, and not fenced", _no_lease),
    "unbounded-pool": Plant("the pool opens a connection for each read and keeps it", _unbounded),
    "unreachable-is-lost": Plant("a host that cannot be reached counts as lost at once", _unreachable_is_lost),
    "forgetful-queue": Plant("a finished ticket is forgotten while it is in its slot", _forgetful),
    "unanswered-is-kept": Plant("a FINISH without an answer counts as accepted", _unanswered(0), RINGS),
    "unanswered-is-dropped": Plant("no port is asked what became of a FINISH", _unanswered(UNKNOWN), RINGS),
    "never-opened-again": Plant("a connection that broke is not opened again", _never_opened_again, RINGS),
    "unfenced-round": Plant("a round is written over one that was not seen", _unfenced_store, members=True),
    "elected-by-arrival": Plant("who is elected depends on the order of arrival", _elected_by_arrival, members=True),
    "ended-again": Plant("a second coordinator writes over an epoch's end", _ended_again, members=True),
    "early-confirmation": Plant("a request confirms acknowledgements, not its answer", _confirmed_too_early),
}
