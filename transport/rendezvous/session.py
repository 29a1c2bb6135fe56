"""Session: a member and the store. One `step` reads the store, applies it to member_states.py, and acts on the result.

Synchronous, with an injected clock, so that one thread can run thousands of members and stop any of them between two
calls to the store. `Rendezvous` is what programs use.

Each step: read round, host and own place → take slot and seat if the round is open → renew due leases → act as host, or
become host if there is none. A step may fail anywhere: the next one reads again.

A member has a rank while its view has a seat that runs. Whatever ends the rank takes the seat out of the view, or ends
it, before the next call to the store, which may wait: another member may have the rank by the time it returns.

A lease is renewed only after a look, and counts from before that look. So when a round has been open for ``lease_s``,
each member that has not seen it open considers its seat of the round before as gone.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable

import msgspec

from transport.errors import JoinTimeoutError, RunLostError, StaleRoundError, StoreError, UsageError
from transport.rendezvous.closing import Archive, close_run, write_archive
from transport.rendezvous.hosting import Hosting
from transport.rendezvous.leased import Leased, SeatLease
from transport.rendezvous.member_states import Event, Member, State, View
from transport.rendezvous.records import (
    Closing,
    Keys,
    Place,
    Reason,
    Roster,
    Round,
    RoundPhase,
    Seat,
    Status,
    check_name,
)
from transport.rendezvous.rules import Rules
from transport.runtime.error_text import reportable
from transport.store.base import ABSENT, Store
from transport.store.stored import decode, encode, readable

log = logging.getLogger(__name__)


class Session:
    """One member of one run. Thread-safe; calls block for as long as the store does.

    Args:
        member: a name that no other member has or had.
        address: the address that others reach it by.
        where: its position in the network, see `Seat`.
        clock: seconds; it never goes back.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        member: str,
        rules: Rules,
        *,
        address: str = "",
        where: str = "",
        archive: Archive | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rules = rules
        self.name = check_name("member", member)
        self.keys = Keys(run)
        self.version = ABSENT  # of the round as last seen; `watch` begins there
        self._store = store
        self._address, self._where = "", where
        self._use_address(address)
        self._archive = archive
        self._clock = clock
        self._lock = threading.RLock()
        self._member = Member()
        self._hosting = Hosting(store, self.keys, self.name, rules)
        self._waiting = Leased(store, self.keys.waiting + self.name)  # tells the host of a spare
        self._seated: SeatLease | None = None
        self._wanted = Status.HERE
        self._wanted_message = ""
        self._beaten_at = self._used_at = clock()

    def __repr__(self) -> str:
        return f"<Session {self.name} of {self.keys.run}: {self._member!r}{' host' if self.is_host else ''}>"

    @property
    def view(self) -> View:
        """The member's view; AWAY as soon as the seat's lease has ended. Never waits."""
        view = self._member.view
        if view.seat is not None and not view.seat.runs(self._clock()):
            return view._replace(state=State.AWAY, place=None, seat=None)
        return view

    @property
    def ended(self) -> bool:
        """True if the run has ended for this member; steps then do nothing."""
        return self._member.state is State.ENDED

    @property
    def is_host(self) -> bool:
        """True if this member is host, as far as it knows."""
        return self._hosting.held.stands

    @property
    def silent_s(self) -> float:
        """Seconds since the store was last available; 0 when the run has ended."""
        return 0.0 if self.ended else self._clock() - self._used_at

    def check_silence(self) -> None:
        """Raise RunLostError if a call to the store does not return, so that a waiting call ends. Never waits."""
        if self.silent_s > self.rules.store_patience_s + self.rules.lease_s:
            raise RunLostError(f"store unavailable for {self.silent_s:.0f} s: a call does not return")

    def wait_s(self) -> float:
        """Return the seconds until the next step, unless the round changes."""
        now = self._clock()
        beat = self._beaten_at + self.rules.beat_s - now
        host = self._hosting.next_at - now if self.is_host else self.rules.poll_s
        return min(max(min(beat, host), 0.0), self.rules.poll_s)

    # --- what a program asks for ---------------------------------------------------------------------
    def join(self, address: str | None = None) -> None:
        """Ask for a place in the next round. ``address`` replaces the address that others reach this member by."""
        with self._lock:
            if address is not None:
                self._use_address(address)
            self._give_up()
            if self._member.state is State.ACTIVE:
                raise UsageError(
                    f"{self.name} still has a rank in a running round; it joins again when that round is over"
                )
            self._member.apply(Event.JOIN)
        self.step()

    def _use_address(self, address: str) -> None:
        """Use this address from now on, or raise UsageError when others could not read it in a seat."""
        encode(Seat(round=0, slot=0, member=self.name, address=address, where=self._where))
        self._address = address

    def say(self, status: Status, message: str = "") -> None:
        """Report that this round's work is done, or ask for a new round. Does nothing without a rank."""
        said = reportable(message)
        with self._lock:
            if self._member.state is State.ACTIVE:
                self._wanted, self._wanted_message = status, said
        self.step()

    def surrender(self) -> None:
        """End the rank now, and give up the seat at the next step. Never waits."""
        if self._seated is not None:
            self._seated.end()

    def leave(self) -> None:
        """Give up the seat and the host's lease, so that no member waits for their end."""
        with self._lock:
            if not self.ended:
                self._member.apply(Event.LEAVE)
            seated, self._seated = self._seated, None
            self._waiting.give_up()
            if seated is not None and not self._stays(seated.seat):
                seated.give_up()
            closing = self._hosting.hand_over(self._clock())
            if closing is not None:
                write_archive(self._archive, closing)

    def close(self, reason: Reason, message: str = "") -> Closing:
        """Close the run, or return how it was already closed. On return the closing is in the store and the archive.

        Raises:
            StaleRoundError: this member is of an older round, and cannot close the current one.
            RunLostError: the run is not, or no longer, in the store.
            StoreError: the store failed; whether the run is closed is unknown until a later read.
        """
        with self._lock:
            if not self.ended:
                self._settle(close_run(self._store, self.keys, reason, self.name, message, member=self._member))
            view = self._member.view
            if view.closing is None:
                raise view.error or RunLostError(
                    f"the end of run {self.keys.run} is unknown: neither store nor archive has it"
                )
            return view.closing

    def roster(self) -> Roster:
        """Return all members with a rank in this member's round."""
        with self._lock:
            place = self._member.view.place
            entry = self._store.get(self.keys.roster(place.round)) if place is not None else None
            if entry is None:
                raise StaleRoundError(f"{self.name} has no place in a running round")
            return decode(Roster, self.keys.roster(self._member.round), entry.value)

    # --- the step -------------------------------------------------------------------------------------
    def step(self) -> None:
        """Read and act once. A permanent error ends the member; a temporary one is retried at the next step."""
        with self._lock:
            if self.ended:
                return
            try:
                self._give_up()
                self._look_and_act()
                self._used_at = self._clock()
            except StoreError as error:
                self._failed(error)
            except Exception as error:  # which every call of the member raises from now on
                log.debug("%r failed", self, exc_info=True)
                self._member.end(None, error)
            self._member.validate()

    def _failed(self, error: StoreError) -> None:
        with contextlib.suppress(StoreError):
            closing = self._archived()
            if closing is not None and self._member.incarnation in (None, closing.incarnation):
                self._member.end(closing, None)
                return
        silent_s = self._clock() - self._used_at
        if not error.retryable:
            self._member.end(None, error)
        elif silent_s >= self.rules.store_patience_s:
            lost = RunLostError(f"store unavailable for {silent_s:.0f} s (run {self.keys.run}): {error}")
            lost.__cause__ = error
            self._member.end(None, lost)

    def _archived(self) -> Closing | None:
        closing = None if self._archive is None else self._archive.read()
        return closing if closing is not None and closing.run == self.keys.run else None

    def _beat(self, looked_at: float) -> None:
        """Renew what is due; ``looked_at``: our clock before the look of this step."""
        if looked_at - self._beaten_at < self.rules.beat_s:
            return
        kept_up = [self._hosting.held, self._waiting]
        seated = self._seated
        if seated is not None and not self._stays(seated.seat):
            kept_up.append(seated)
        leases = {each.key: each.version for each in kept_up if each.stands}
        kept = self._store.renew(leases, self.rules.lease_s) if leases else set()
        self._beaten_at = looked_at
        for each in kept_up:
            each.renewed(kept)
        if seated is not None and not seated.stands:
            self._seat_lost()
        elif seated in kept_up:
            seated.until = looked_at + self.rules.lease_s

    def _give_up(self) -> None:
        """Give up a seat whose lease has ended by this member's clock, or that it has surrendered."""
        seated = self._seated
        if seated is not None and not self._stays(seated.seat) and not seated.runs(self._clock()):
            self._seat_lost()
            seated.give_up()

    def _show_waiting(self) -> None:
        """Tell the host that a newcomer waits, or no longer does; only where the rules let a newcomer end a round."""
        if self._member.state is not State.SPARE:
            self._waiting.give_up()
        elif self.rules.grow and not self._waiting.stands:
            self._waiting.version = self._store.put(self._waiting.key, encode(self.name), lease_s=self.rules.lease_s)

    def _seat_lost(self) -> None:
        log.info("%s lost its seat in round %d: the lease ended", self.name, self._member.round)
        self._seated = None
        self._member.apply(Event.SEAT_LOST)

    def _look_and_act(self) -> None:
        member = self._member
        begun = self._clock()
        current, hosted = self._look()
        if current is None and not self.ended:
            current, hosted = self._found(self._clock())
        if current is None or self.ended:
            return
        now = self._clock()
        self._show_waiting()
        if member.state is State.TAKING:
            # The counter gives 1 first. A slot that is lost between these calls stays a hole.
            member.took(self._store.add(self.keys.slots(member.round)) - 1)
        if member.state is State.SEATING:
            self._sit()
        self._say(begun)
        self._beat(begun)
        self._check_wait(current, now)
        if not hosted:
            if not self._hosting.take(current, self.version, now):
                return
            log.info("%s is now host of run %s: the lease of the previous host ended", self.name, self.keys.run)
        elif self.is_host and now >= self._hosting.next_at:
            closing = self._hosting.duty(now)
            if closing is not None:
                self._settle(closing)

    def _look(self) -> tuple[Round | None, bool]:
        """Read the round, and whether a member holds the host's lease, in one snapshot; end where the run is over."""
        member = self._member
        keys = [self.keys.round, self.keys.host]
        if member.slot is not None:
            keys.append(self.keys.place(member.round, member.slot))
        entries = self._store.get_many(keys)
        round_entry, host_entry = entries[:2]
        place_entry = entries[2] if len(entries) > 2 else None
        current = None if round_entry is None else decode(Round, keys[0], round_entry.value)
        place = None if place_entry is None else readable(Place, keys[2], place_entry)
        if place_entry is not None and place is None:
            self.surrender()  # a member with a rank that nobody can learn is as gone
        if place is not None and (place.member != self.name or place.round != member.round):
            place = None  # of an earlier round or member
        self.version = ABSENT if round_entry is None else round_entry.version
        self._hosting.saw(current, host_entry)
        if not member.look(current, place, self._seated):
            ours = current is not None and current.incarnation == member.incarnation
            self._settle(current.closing if current is not None and ours else None)
        return current, host_entry is not None

    def _found(self, now: float) -> tuple[Round | None, bool]:
        """Create the run, which is not in the store, unless the archive has its end. Then read again."""
        closing = self._archived()
        if closing is not None:
            self._member.end(closing, None)
            return None, False
        self._hosting.found(secrets.token_hex(8), now)
        return self._look()

    def _sit(self) -> None:
        member = self._member
        assert member.slot is not None  # SEATING
        seat = Seat(round=member.round, slot=member.slot, member=self.name, address=self._address, where=self._where)
        begun = self._clock()
        key = self.keys.seat(seat.round, seat.slot)
        version = self._store.put(key, encode(seat), lease_s=self.rules.lease_s)
        self._seated = SeatLease(self._store, key, version, seat, begun + self.rules.lease_s)
        self._wanted, self._wanted_message = Status.HERE, ""
        member.apply(Event.SEAT)

    def _say(self, looked_at: float) -> None:
        """Write the requested status to the seat in the store; the lease counts from the look, as for `_beat`."""
        seated = self._seated
        if seated is None or self._member.state is not State.ACTIVE or seated.seat.status is self._wanted:
            return
        said = msgspec.structs.replace(seated.seat, status=self._wanted, message=self._wanted_message)
        lease_s = None if self._stays(said) else self.rules.lease_s
        version = self._store.compare_and_set(seated.key, encode(said), seated.version, lease_s=lease_s)
        if version is None:
            # The answer to an earlier try may have been lost; what stands there decides.
            entry = self._store.get(seated.key)
            if entry is None or entry.value != encode(said):
                self._seat_lost()
                return
            version = entry.version
        seated.seat, seated.version = said, version
        seated.until = math.inf if lease_s is None else looked_at + lease_s

    def _stays(self, seat: Seat) -> bool:
        """Return whether the seat has no lease, since its report stays true when its member ends."""
        return self.rules.done_stays and seat.status is Status.DONE

    def _check_wait(self, current: Round, now: float) -> None:
        """Time limit for an open round. Usually the host closes the run; this is for runs whose hosts fail in turn."""
        open_s = self._hosting.open_s(current, now) if current.phase is RoundPhase.OPEN else 0.0
        if self._member.state is State.SEATED and open_s > self.rules.join_timeout_s + 2 * self.rules.lease_s:
            what = f"round {self._member.round} of run {self.keys.run}"
            raise JoinTimeoutError(f"{what} is not complete after {open_s:.0f} s: too few members joined")

    def _settle(self, closing: Closing | None) -> None:
        """End with the run: first the rank; store and archive have the closing before any waiting call returns it."""
        self._member.apply(Event.OVER)
        error = None
        if closing is not None:
            write_archive(self._archive, closing)
        else:
            with contextlib.suppress(StoreError):
                closing = self._archived()
            if closing is None or closing.incarnation != self._member.incarnation:
                closing = None
                error = RunLostError(f"run {self.keys.run} is no longer in the store; its end is unknown")
        self._member.end(closing, error)
