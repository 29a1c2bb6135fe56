"""Many members of one run in one thread, over a store that fails when it is told to. Every step is a real `Session`.

The clocks are the test's: one of the store's, and one for each member, which may jump. A death is an exception out of a
call to the store, before or after the write took place; the session is never called again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from store_proxy import FailingStore, Killed

from transport.decoders import json_decoder
from transport.rendezvous.closing import Archive
from transport.rendezvous.member_states import State
from transport.rendezvous.records import Closing, Place, Reason, Roster, Round, RoundPhase, Status
from transport.rendezvous.rules import Rules
from transport.rendezvous.session import Session
from transport.store.base import Change, Store
from transport.store.memory import MemoryStore

RUN = "run"
RULES = Rules(least=2, most=3, lease_s=10.0, last_call_s=5.0, join_timeout_s=60.0, store_patience_s=30.0)


class Line(FailingStore):
    """One member's way to the store: notes who wrote the round."""

    def __init__(self, inner: Store, name: str, wrote: Callable[[str, Round], None]) -> None:
        super().__init__(inner)
        self._name = name
        self._wrote = wrote

    def wrote(self, change: Change) -> None:
        if change.key == f"rendezvous/{RUN}/round" and change.value is not None:
            assert change.expected is not None, "the round is written over something unseen"
            self._wrote(self._name, json_decoder(Round)(change.value))


class SimulatedMember:
    """A member, its clock and its line."""

    def __init__(self, run: SimulatedRun, name: str, rules: Rules) -> None:
        self.name = name
        self.skew_s = 0.0
        self.line = Line(run.store, name, run.wrote)
        self.alive = True
        self.frozen = False  # stopped, as by SIGSTOP
        self.session = Session(
            self.line, RUN, name, rules, address=f"{name}:1", archive=run.archive, clock=lambda: run.now + self.skew_s
        )
        self.places: list[Place] = []

    def do(self, action: Callable[[], object]) -> None:
        """What the program of this member does; a death ends it."""
        if not self.alive or self.frozen:
            return
        try:
            action()
        except Killed:
            self.alive = False
        view = self.session.view
        if view.place is not None and (not self.places or self.places[-1] != view.place):
            self.places.append(view.place)

    @property
    def state(self) -> State:
        return self.session.view.state

    @property
    def exit_code(self) -> int:
        return self.session.rules.exit_codes.of(self.session.view.closing)


class SimulatedRun:
    """All members, the store, and everything that was ever written as the round."""

    def __init__(self, folder: Path | None = None, rules: Rules = RULES) -> None:
        self.now = 1000.0
        self.rules = rules
        self.store = MemoryStore(clock=lambda: self.now)
        self.archive = Archive(folder / "run.closed.json") if folder is not None else None
        self.members: list[SimulatedMember] = []
        self.written: list[tuple[str, Round]] = []
        self.rosters: dict[tuple[str, int], Roster] = {}

    def wrote(self, name: str, current: Round) -> None:
        self.written.append((name, current))
        if current.phase is RoundPhase.RUNNING:
            entry = self.store.get(f"rendezvous/{RUN}/{current.number}/roster")
            assert entry is not None
            roster = json_decoder(Roster)(entry.value)
            self.check_roster(current, roster)
            self.rosters[current.incarnation, current.number] = roster

    def check_roster(self, current: Round, roster: Roster) -> None:
        """Ranks are a permutation of those here, each once, and all of this round."""
        assert roster.round == current.number
        names = [peer.member for peer in roster.peers]
        assert len(set(names)) == len(names)
        assert current.least <= len(names) <= current.most
        ranks = []
        for key, entry in self.store.scan(f"rendezvous/{RUN}/{current.number}/place/").items():
            place = json_decoder(Place)(entry.value)
            assert place.round == current.number, f"{key} is of round {place.round}"
            assert place.size == len(names)
            if place.rank >= 0:
                assert names[place.rank] == place.member
                ranks.append(place.rank)
        assert sorted(ranks) == list(range(len(names)))

    def member(self, name: str | None = None) -> SimulatedMember:
        """A new process."""
        self.members.append(SimulatedMember(self, name or f"m{len(self.members)}", self.rules))
        return self.members[-1]

    def joined(self, count: int) -> list[SimulatedMember]:
        """New processes that want a place."""
        new = [self.member() for _ in range(count)]
        for each in new:
            each.do(each.session.join)
        return new

    def run(self, seconds: float, step_s: float = 1.0) -> None:
        """Let everybody step every ``step_s``."""
        end = self.now + seconds
        while self.now < end:
            self.now += step_s
            for member in self.members:
                member.do(member.session.step)
                self.check_ranks()

    def check_ranks(self) -> None:
        """No two members work under one rank of a run at one time: one that is done, and was cut off, works no more."""
        held: dict[tuple[str | None, int], str] = {}
        for member in self.members:
            place, seated = member.session.view.place, member.session._seated
            done = seated is not None and seated.seat.status is Status.DONE
            if member.alive and not member.frozen and not done and place is not None and place.rank >= 0:
                key = member.session._member.incarnation, place.rank
                assert held.setdefault(key, member.name) == member.name, (
                    f"{held[key]} and {member.name} have rank {key}"
                )

    def round(self) -> Round | None:
        """As it stands in the store."""
        entry = self.store.get(f"rendezvous/{RUN}/round")
        return None if entry is None else json_decoder(Round)(entry.value)

    def closings(self) -> set[tuple[str, Reason]]:
        """Every (incarnation, reason) that was ever written."""
        return {(each.incarnation, each.closing.reason) for _, each in self.written if each.closing is not None}

    def check_history(self) -> None:
        """At most one acts in a term, terms and rounds only grow, and nothing follows a closing."""
        actors: dict[tuple[str, int], str] = {}
        last: dict[str, Round] = {}
        for name, current in self.written:
            before = last.get(current.incarnation)
            if before is not None:
                assert before.phase is not RoundPhase.CLOSED, "a closed run went on"
                assert current.term >= before.term
                assert before.number <= current.number <= before.number + 1
                assert current.term > before.term or current.host == before.host
            if current.phase is not RoundPhase.CLOSED:  # whoever is of the round may close it
                assert current.host == name
                assert actors.setdefault((current.incarnation, current.term), name) == name
            last[current.incarnation] = current

    def check_archive(self) -> Closing | None:
        """The second place says what the store said first."""
        closing = self.archive.read() if self.archive is not None else None
        if closing is not None:
            assert (closing.incarnation, closing.reason) in self.closings()
        return closing

    def __enter__(self) -> SimulatedRun:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(Exception):
            self.store.close()
        if kind is None:
            self.check_history()
            self.check_archive()
