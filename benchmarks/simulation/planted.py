"""Faults planted into the decisions, each of which the simulation must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import members
import numpy as np
from plans import Plan
from tickets import Tickets

from transport.claims.batch import OUT_OF_REACH, ClaimedRows, Verdict
from transport.claims.connection import ClaimConnection, ClaimConnections
from transport.claims.outcomes import Outcomes
from transport.claims.takers import Takers
from transport.client.connections.acknowledgements import AckLedger
from transport.client.connections.links import Links
from transport.client.connections.pool import EndpointPool
from transport.client.connections.routes import PortQuarantine, Routes
from transport.cooldown.epochs.coordinator import Coordinator
from transport.cooldown.epochs.election import checkpointers
from transport.cooldown.epochs.ledger import Ledger
from transport.cooldown.epochs.records import Phase
from transport.errors import RetriesExhaustedError
from transport.rendezvous import decisions
from transport.rendezvous.hosting import Hosting
from transport.store.directory import Directory, Finder
from transport.store.memory import MemoryStore
from transport.store.stored import encode
from transport.wire.frames import END_ASKED, UNKNOWN


class Plant(NamedTuple):
    """One fault: what it breaks, and how."""

    what: str
    plant: Callable[[], None]
    plan: Plan = Plan(faults_per_minute=12.0)  # a simulation that is to find it
    members: bool = False  # is one of members


def _set(kind: type, name: str, value: Any) -> Callable[[], None]:
    return lambda: setattr(kind, name, value)


def _unfenced() -> None:
    original = Tickets.ack_many

    def ack_many(self: Any, claims: Any, **named: Any) -> Any:
        original(self, claims, **named)
        return list(claims)

    Tickets.ack_many = ack_many  # type: ignore[method-assign]


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

    def best(self: Any, ports: Any, now: float, turn: int = 0) -> Any:
        return next((port for port in ports if not self.is_quarantined(port, now)), ("10.255.255.255", 1))

    PortQuarantine.failed = failed  # type: ignore[method-assign, assignment]
    PortQuarantine.best = best  # type: ignore[method-assign]
    PortQuarantine.succeeded = lambda *_: None  # type: ignore[method-assign]


def _never_lost() -> None:
    def found(self: Any, ticket: Any, found: Any, now: float) -> Any:
        return None if found.serving is None else found.serving.moved(ticket)

    Finder.found = found  # type: ignore[method-assign]
    Routes.all_wrong = lambda *_: False  # type: ignore[method-assign]


def _lost_at_once() -> None:
    original = Finder.__init__

    def made(self: Any, directory: Any) -> None:
        original(self, directory, grace_s=0.0)

    Finder.__init__ = made  # type: ignore[method-assign, assignment]
    Directory.renew = lambda *_: True  # type: ignore[method-assign]


def _no_lease() -> None:
    Tickets.renew = lambda self, claims: list(claims)  # type: ignore[method-assign]
    _unfenced()


def _unbounded() -> None:
    def checkin(self: Any, connection: Any, now: float, awaited: object = ()) -> list[Any]:
        port = self._in_use.pop(connection)
        self._idle[connection] = (port, now)
        self._idle_of.setdefault(port, {})[connection] = None
        return []

    EndpointPool.checkin = checkin  # type: ignore[method-assign]
    EndpointPool.checkout = lambda *_: None  # type: ignore[method-assign]
    EndpointPool.may_open = lambda *_: True  # type: ignore[method-assign]


def _confirmed_too_early() -> None:
    original = Links.request

    def request(self: Any, link: Any, wants: Any) -> Any:
        number, answer = original(self, link, wants)
        self.ledger.answered(link, number)
        return number, answer

    Links.request = request  # type: ignore[method-assign]


def _unreachable_is_lost() -> None:
    RetriesExhaustedError.unreadable = True


def _forgetful() -> None:
    original = Tickets._forget
    Tickets._forget = lambda self, keep: original(self, 0)  # type: ignore[method-assign]


def _unanswered(code: int) -> Callable[[], None]:
    async def of(self: Any, broken: Any, rows: Any, *more: Any) -> list[int]:
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
    def elect(clients: Any, *, seed: int, epoch: int, **_: Any) -> tuple[str, ...]:
        names = list(dict.fromkeys(clients))
        return tuple(names[: checkpointers(len(names))])

    members.elect = elect  # type: ignore[attr-defined]


def _ended_again() -> None:
    original = Coordinator.superseded

    def superseded(self: Any, theirs: Any) -> None:
        if self.record.phase is not Phase.ENDED:
            original(self, theirs)

    Coordinator.superseded = superseded  # type: ignore[method-assign]


def _asked_anew() -> None:
    def end(self: Any, positions: Any, end: Any) -> None:
        self.verdicts[positions] = Verdict.ASKED
        self.soon(self.connection.end, self, positions, end, False)

    ClaimedRows.end = end  # type: ignore[method-assign]


def _end_asked_as_finish() -> None:
    original = ClaimConnection._outcomes_elsewhere

    async def asked(self: Any, rows: Any, again: bool = False) -> Any:
        rows["attempts"] &= ~np.uint16(END_ASKED)
        return await original(self, rows, again)

    ClaimConnection._outcomes_elsewhere = asked  # type: ignore[method-assign]


def _out_of_reach(code: int, *, when: bool) -> Callable[[], None]:
    """Of questions that are asked again, or of the first ones."""

    def plant() -> None:
        original = Outcomes.of

        async def of(self: Any, broken: Any, rows: Any, served: Any, again: bool = False) -> Any:
            if when and again:
                return [code] * len(rows)
            codes = await original(self, broken, rows, served, again)
            return codes if when else [code if each == OUT_OF_REACH else each for each in codes]

        Outcomes.of = of  # type: ignore[method-assign, assignment]

    return plant


def _never_renewed() -> None:
    async def renew(self: Any) -> None: ...

    ClaimConnections._renew = renew  # type: ignore[method-assign]


def _used_at_once() -> None:
    original = Takers.answered

    def answered(self: Any, name: str, count: int, **named: Any) -> None:
        original(self, name, count, **named)
        self.used(name, count)

    Takers.answered = answered  # type: ignore[method-assign]


def _none(*_: Any) -> list[Any]:
    return []


def _lease_for_ever() -> None:
    original = Tickets.claim

    def claim(self: Any, *arguments: Any, **named: Any) -> Any:
        before, self.lease_s = self.lease_s, 1e9
        try:
            return original(self, *arguments, **named)
        finally:
            self.lease_s = before

    Tickets.claim = claim  # type: ignore[method-assign]
    Tickets.renew = lambda self, claims: list(claims)  # type: ignore[method-assign]


def _unreachable_is_forgotten() -> None:
    def unreachable(self: Any, ring: str, now: float) -> None:
        self.forget_ring(ring)

    AckLedger.unreachable = unreachable  # type: ignore[method-assign]


def _rule(name: str, replacement: Any) -> Callable[[], None]:
    def plant() -> None:
        table = tuple((phase, replacement if rule.__name__ == name else rule) for phase, rule in decisions.TABLE)
        assert table != decisions.TABLE
        decisions.TABLE = table

    return plant


def _without_least(snapshot: Any, rules: Any) -> Any:
    seats = decisions._current(snapshot)
    return decisions._complete(snapshot, seats) if seats and snapshot.open_s >= rules.last_call_s else None


def _two_seats() -> None:
    decisions.one_seat_each = lambda seats: sorted(seats, key=lambda seat: seat.slot)


def _unfenced_epochs() -> None:
    def advance(self: Any, epoch: int, step: Any) -> None:
        record = step(self.look(epoch)[0])
        if record is not None:
            self._store.put(self._key("epoch", epoch), encode(record))

    Ledger.advance = advance  # type: ignore[method-assign]


RINGS = Plan(faults_per_minute=12.0, rings=True, writes_per_s=0.5)
ASKED = RINGS._replace(hosts=2, trainers=3, writes_per_s=2.0, slots=16, faults_per_minute=20.0)
MUCH = RINGS._replace(hosts=2, slots=200, writes_per_s=5.0, step_s=5.0, faults_per_minute=1.0)

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
    "asked-anew": Plant("a call that is repeated asks the ring again, and has another answer", _asked_anew, RINGS),
    "end-asked-as-finish": Plant("of an END without an answer is asked as of a FINISH", _end_asked_as_finish, RINGS),
    "out-of-reach-is-refused": Plant(
        "a claim whose ring is out of reach counts as refused", _out_of_reach(UNKNOWN, when=False), ASKED
    ),
    "questions-dropped": Plant(
        "a claim whose ring was out of reach is not asked about again", _out_of_reach(OUT_OF_REACH, when=True), ASKED
    ),
    "dropped-is-held": Plant(
        "claims that nothing refers to do not go back",
        _set(ClaimConnections, "_return_dropped", lambda self: self._dropped.take()),
        RINGS,
    ),
    "never-renewed": Plant("a trainer that lives does not say so", _never_renewed, RINGS._replace(step_s=50.0)),
    "never-taken-back": Plant(
        "demands stand although no room is left for them",
        _set(Takers, "_take_back", _none),
        RINGS._replace(step_s=50.0),
    ),
    "used-at-once": Plant("what comes counts as used before the trainer has looked at it", _used_at_once, MUCH),
    "lease-for-ever": Plant("claims of a trainer that died do not end", _lease_for_ever),
    "unreachable-is-forgotten": Plant("acknowledgements that cannot be sent are dropped", _unreachable_is_forgotten),
    "without-least": Plant(
        "a round begins with too few members", _rule("_last_call_over", _without_least), members=True
    ),
    "gone-and-ranked": Plant("a member that is gone keeps its rank", _rule("_broken", lambda *_: None), members=True),
    "never-grows": Plant(
        "a spare stays one although there is a place", _rule("_growing", lambda *_: None), members=True
    ),
    "two-seats": Plant("a member that joined twice has two ranks", _two_seats, members=True),
    "host-for-ever": Plant(
        "a dead host of a run has no successor", _set(Hosting, "take", lambda *_: False), members=True
    ),
    "unfenced-epochs": Plant("an epoch is written whatever its record says by then", _unfenced_epochs, members=True),
    "early-confirmation": Plant("a request confirms acknowledgements, not its answer", _confirmed_too_early),
}
