"""The host's I/O: it wins the host's lease, reads a snapshot of all members, and writes what decisions.py decides.

Everything a host writes is one transaction with the next value of the round (`transport.store.decision.advance`), made
from the value that was read before the snapshot. If two members take themselves for the host, at most one can write.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

import msgspec

from transport.errors import StoreError
from transport.rendezvous.closing import closed
from transport.rendezvous.decisions import Act, CloseRun, Complete, OpenNext, RoundSnapshot, decide, without
from transport.rendezvous.leased import Leased
from transport.rendezvous.records import Closing, Keys, Peer, Place, Role, Roster, Round, RoundPhase, Seat, Status
from transport.rendezvous.rules import Rules
from transport.store.base import ABSENT, Change, Entry, Store
from transport.store.decision import Next, advance
from transport.store.stored import decode, decode_each, encode, readable

log = logging.getLogger(__name__)


class Hosting:
    """A member's side of being host. Owned by its session, under its lock."""

    def __init__(self, store: Store, keys: Keys, member: str, rules: Rules) -> None:
        self.held = Leased(store, keys.host)  # the host's lease
        self.next_at = 0.0  # time of the next snapshot
        self._store = store
        self._keys = keys
        self._me = member
        self._rules = rules
        self._opened = 0, 0.0  # the open round that was seen last, and since when
        self._roster: Roster | None = None  # the last that was read

    # --- the host's lease -----------------------------------------------------------------------------
    def saw(self, current: Round | None, lease: Entry | None) -> None:
        """Compare with the store: this member is host while round and lease name it."""
        if lease is None or lease.version != self.held.version or current is None or current.host != self._me:
            self.held.version = ABSENT

    def open_s(self, current: Round, now: float) -> float:
        """Return the seconds since this member has first seen an open round, as host or before."""
        if self._opened[0] != current.number:
            self._opened = current.number, now
        return now - self._opened[1]

    def found(self, incarnation: str, now: float) -> None:
        """Open the first round, unless another member does."""
        rules = self._rules
        first = Round(
            incarnation=incarnation,
            number=1,
            phase=RoundPhase.OPEN,
            term=1,
            host=self._me,
            least=rules.least,
            most=rules.places,
            why="the run begins",
        )
        self._win(Change(self._keys.round, encode(first), ABSENT), None, 1, now)

    def take(self, current: Round, version: int, now: float) -> bool:
        """Become host of a run whose host's lease has ended."""
        term = current.term + 1
        mine = msgspec.structs.replace(current, term=term, host=self._me)
        return self._win(Change(self._keys.round, encode(mine), version), ABSENT, term, now)

    def _win(self, change: Change, expected: int | None, term: int, now: float) -> bool:
        lease = Change(self._keys.host, encode(term), expected, self._rules.lease_s)
        versions = self._store.put_many([change, lease])
        if versions is None:
            return False
        self.held.version, self.next_at = versions[1], now
        return True

    def hand_over(self, now: float) -> Closing | None:
        """Decide once more, now that this member's seat is gone, and resign: others need not find out."""
        closing = None
        if self.held.stands:
            with contextlib.suppress(StoreError):  # the next host decides
                closing = self.duty(now)
            self.held.give_up()
        return closing

    # --- the host's work ------------------------------------------------------------------------------
    def duty(self, now: float) -> Closing | None:
        """Read a snapshot, decide and write; returns the closing if that closed the run. Raises StoreError."""
        after: Round | None = None

        def step(current: Round | None) -> Next[Round] | None:
            nonlocal after
            after = None
            if current is None or current.host != self._me or current.phase is RoundPhase.CLOSED:
                return None
            gate = current.phase is RoundPhase.OPEN
            snapshot = self._gate(current, now) if gate else self._everybody(current)
            self.next_at = now + self._rules.host_poll_s(max(len(snapshot.seats), len(snapshot.active)))
            act = decide(snapshot, self._rules)
            if act is None:
                return None
            after, changes = self._after(act, snapshot)
            return Next(after, changes)

        advance(self._store, self._keys.round, Round, step)
        if after is None:
            return None
        log.info("host %s: round %d is %s (%s)", self._me, after.number, after.phase, after.why)
        self.next_at = now
        if after.phase is RoundPhase.OPEN and after.number > 2:
            with contextlib.suppress(StoreError):  # cleaning up only; these records are not read any more
                self._forget(after.number - 2)
        return after.closing

    def _gate(self, current: Round, now: float) -> RoundSnapshot:
        """Return a snapshot of the members that joined; cheap while there are too few."""
        open_s = self.open_s(current, now)
        key = self._keys.slots(current.number)
        counter = self._store.get(key)
        taken = 0 if counter is None else decode(int, key, counter.value)
        if taken < current.least and open_s < self._rules.join_timeout_s:
            return RoundSnapshot(current, (), open_s=open_s)
        last = current.number - 1
        before = self._peers(last)
        # First the seats of this round: who takes one later has the seat of the round before, and is waited for.
        here = decode_each(Seat, self._store.scan(self._keys.seats(current.number)))
        stay = {(seat.slot, seat.member) for seat in self._seats(last, before) if not self._has_finished(seat)}
        returning = frozenset(peer.member for peer in before if (peer.slot, peer.member) in stay)
        return RoundSnapshot(current, list(here.values()), before, returning, open_s, self._waiting())

    def _everybody(self, current: Round) -> RoundSnapshot:
        """Return a snapshot of the members with a rank."""
        peers = self._peers(current.number)
        seats = self._seats(current.number, peers)
        waiting = self._waiting() if len(peers) < current.most else frozenset()
        return RoundSnapshot(current, seats, peers, waiting=waiting)

    def _seats(self, number: int, peers: Sequence[Peer]) -> list[Seat]:
        """Return the seats that these members still have in a round. One that cannot be read is none."""
        keys = [self._keys.seat(number, peer.slot) for peer in peers]
        found = zip(keys, self._store.get_many(keys), strict=True)
        seats = decode_each(Seat, ((key, entry) for key, entry in found if entry is not None))
        return [seat for seat in seats.values() if seat.round == number]

    def _has_finished(self, seat: Seat) -> bool:
        """Return whether its member is done for good, and does not come back."""
        return self._rules.done_stays and seat.status is Status.DONE

    def _waiting(self) -> frozenset[str]:
        """Return the names of the spares; read after the round, so a decision by them may be late, but not wrong."""
        if not self._rules.grow:
            return frozenset()
        return frozenset(key.removeprefix(self._keys.waiting) for key in self._store.scan(self._keys.waiting))

    def _peers(self, number: int) -> tuple[Peer, ...]:
        if number < 1:
            return ()
        if self._roster is None or self._roster.round != number:
            key = self._keys.roster(number)
            roster = readable(Roster, key, self._store.get(key))
            if roster is None or roster.round != number:
                roster = Roster(round=number, peers=())
            self._roster = roster
        return self._roster.peers

    def _after(self, act: Act, snapshot: RoundSnapshot) -> tuple[Round, list[Change]]:
        """Return the round after a decision, and the records that are written with it."""
        current = snapshot.round
        match act:
            case Complete(active, standby):
                why = current.why + without(snapshot.active, active, current.why)
                after = msgspec.structs.replace(current, phase=RoundPhase.RUNNING, why=why)
                return after, self._places(current.number, active, standby)
            case OpenNext(why):
                number = current.number + 1
                return msgspec.structs.replace(current, number=number, phase=RoundPhase.OPEN, why=why[:1024]), []
            case CloseRun(reason, message):
                return closed(self._keys.run, current, reason, self._me, message), []

    def _places(self, number: int, active: list[Seat], standby: list[Seat]) -> list[Change]:
        peers = tuple(Peer(seat.member, seat.slot, seat.address) for seat in active)
        leader = peers[0].address
        self._roster = None
        changes = [Change(self._keys.roster(number), encode(Roster(round=number, peers=peers)))]
        ranked = [*enumerate(active), *((-1, seat) for seat in standby)]
        for rank, seat in ranked:
            role = Role.STANDBY if rank < 0 else Role.ACTIVE
            mine = Place(round=number, member=seat.member, role=role, rank=rank, size=len(active), leader=leader)
            changes.append(Change(self._keys.place(number, seat.slot), encode(mine)))
        return changes

    def _forget(self, number: int) -> None:
        self._store.delete_all(list(self._store.scan(self._keys.of_round(number))))
