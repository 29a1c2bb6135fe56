"""A member and the store: one `step` reads the store, applies it to member_states.py, and acts on the result.

Synchronous, with an injected clock, so that one thread can run thousands of members and stop any of them between two
calls to the store. `Rendezvous` is what programs use.

Each step: read round, host and own place → take slot and seat if the round is open → renew due leases → act as host, or
become host if there is none. A step may fail anywhere: the next one reads again.

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
from typing import NamedTuple

import msgspec

from transport.errors import JoinTimeoutError, RunLostError, StaleRoundError, StoreError, UsageError
from transport.rendezvous.closing import Archive, close_run, write_archive
from transport.rendezvous.hosting import Hosting
from transport.rendezvous.leased import Leased
from transport.rendezvous.member_states import Event, Member, State
from transport.rendezvous.records import (
    Closing,
    Keys,
    Place,
    Reason,
    Roster,
    Round,
    Seat,
    Status,
    check_name,
    decode,
    encode,
    text,
)
from transport.rendezvous.rules import Rules
from transport.store.base import ABSENT, Store

log = logging.getLogger(__name__)


class View(NamedTuple):
    """The state of a session at one moment. ``why``: the reason for the round that was seen last."""

    state: State
    place: Place | None
    closing: Closing | None
    error: Exception | None
    why: str = ""


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
        self.error: Exception | None = None
        self._store = store
        self._address = address
        self._where = where
        self._why = ""
        self._archive = archive
        self._clock = clock
        self._lock = threading.RLock()
        self._member = Member()
        self._hosting = Hosting(store, self.keys, self.name, rules)
        self._waiting = Leased(store, self.keys.waiting + self.name)  # tells the host of a spare
        self._seated = Leased(store)  # the record of the seat
        self._seat: Seat | None = None  # Invariant: as it stands in the store, while _seated stands
        self._seat_until = 0.0  # by our clock, read before the store's, so that it is never later than the lease's end
        self._wanted = Status.HERE
        self._wanted_message = ""
        self._surrendered = False
        self._beaten_at = self._used_at = clock()
        self._seated_at: float | None = None  # when the gate's wait began
        self._view = View(State.AWAY, None, None, None)

    def __repr__(self) -> str:
        return f"<Session {self.name} of {self.keys.run}: {self._member!r}{' host' if self.is_host else ''}>"

    @property
    def view(self) -> View:
        """As of the last step; away as soon as the seat's lease has ended. Never waits."""
        view = self._view
        if view.state is State.ACTIVE and self.seat_ended:
            # The thread may be blocked in the store; the host may already give this place to another member.
            self._surrendered = True
            return view._replace(state=State.AWAY, place=None)
        return view

    @property
    def ended(self) -> bool:
        """Whether the run has ended for this member; steps then do nothing."""
        return self._member.state is State.ENDED

    @property
    def is_host(self) -> bool:
        """Whether this member is host, as far as it knows."""
        return self._hosting.held.stands

    @property
    def seat_ended(self) -> bool:
        """Whether the seat's lease has ended, as no renewal was confirmed in time. Never waits."""
        return self._seated.stands and self._clock() >= self._seat_until

    @property
    def silent_s(self) -> float:
        """Seconds since the store was last available; 0 when the run has ended."""
        return 0.0 if self.ended else self._clock() - self._used_at

    def check_silence(self) -> None:
        """Raise RunLostError if a call to the store does not return, so that a waiting call ends. Never waits."""
        if self.silent_s > self.rules.store_patience_s + self.rules.lease_s:
            raise RunLostError(f"store unavailable for {self.silent_s:.0f} s: a call does not return")

    def wait_s(self) -> float:
        """Seconds until the next step, unless the round changes."""
        now = self._clock()
        beat = self._beaten_at + self.rules.beat_s - now
        host = self._hosting.next_at - now if self.is_host else self.rules.poll_s
        return min(max(min(beat, host), 0.0), self.rules.poll_s)

    # --- what a program asks for ---------------------------------------------------------------------
    def join(self, address: str | None = None) -> None:
        """Ask for a place in the next round. ``address`` replaces the address that others reach this member by."""
        with self._lock:
            self._address = self._address if address is None else address
            self._give_up()
            if self._member.state is State.ACTIVE:
                raise UsageError(
                    f"{self.name} still has a rank in a running round; it joins again when that round is over"
                )
            self._member.apply(Event.JOIN)
        self.step()

    def say(self, status: Status, message: str = "") -> None:
        """Report that this round's work is done, or ask for a new round. Does nothing without a rank."""
        said = text(message)
        with self._lock:
            if self._member.state is State.ACTIVE:
                self._wanted, self._wanted_message = status, said
        self.step()

    def surrender(self) -> None:
        """Give up the seat at the next step, even if its lease was renewed meanwhile. Never waits."""
        self._surrendered = True

    def leave(self) -> None:
        """Give up the seat and the host's lease, so that no member waits for their end."""
        with self._lock:
            if self._member.state is not State.ENDED:
                self._member.apply(Event.LEAVE)
                self._show()
            seat, self._seat = self._seat, None
            self._waiting.give_up()
            if not self._stays(seat):
                self._seated.give_up()
            self._seated.version = ABSENT
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
            if self._member.state is not State.ENDED:
                self._settle(close_run(self._store, self.keys, reason, self.name, message, member=self._member))
                self._show()
            if self._member.closing is None:
                raise self.error or RunLostError(
                    f"the end of run {self.keys.run} is unknown: neither store nor archive has it"
                )
            return self._member.closing

    def roster(self) -> Roster:
        """All members with a rank in this member's round."""
        with self._lock:
            place = self._member.place
            entry = self._store.get(self.keys.roster(place.round)) if place is not None else None
            if entry is None:
                raise StaleRoundError(f"{self.name} has no place in a running round")
            return decode(Roster, self.keys.roster(self._member.round), entry.value)

    # --- the step -------------------------------------------------------------------------------------
    def step(self) -> None:
        """Read and act once. A permanent error is stored in `error`; a temporary one is retried at the next step."""
        with self._lock:
            if self._member.state is State.ENDED:
                return
            try:
                self._give_up()
                self._look_and_act()
                self._used_at = self._clock()
            except StoreError as error:
                self._failed(error)
            except (JoinTimeoutError, RunLostError) as error:
                self._end(None, error)
            self._member.validate()
            self._show()

    def _show(self) -> None:
        """What other threads see: one assignment, so that no state is seen without its place."""
        self._view = View(self._member.state, self._member.place, self._member.closing, self.error, self._why)

    def _failed(self, error: StoreError) -> None:
        now = self._clock()
        if self.seat_ended:
            self._seat_lost()
        with contextlib.suppress(OSError):
            closing = self._archived()
            if closing is not None and self._member.incarnation in (None, closing.incarnation):
                self._end(closing, None)
                return
        if not error.retryable:
            self._end(None, error)
        elif now - self._used_at >= self.rules.store_patience_s:
            silent = f"{now - self._used_at:.0f} s"
            lost = RunLostError(f"store unavailable for {silent} (run {self.keys.run}): {error}")
            lost.__cause__ = error
            self._end(None, lost)

    def _archived(self) -> Closing | None:
        closing = None if self._archive is None else self._archive.read()
        return closing if closing is not None and closing.run == self.keys.run else None

    def _end(self, closing: Closing | None, error: Exception | None) -> None:
        self._member.ended(closing)
        self.error = error

    def _beat(self, looked_at: float) -> None:
        """Renew what is due; ``looked_at``: our clock before the look of this step."""
        if looked_at - self._beaten_at < self.rules.beat_s:
            return
        kept_up = [self._hosting.held, self._waiting]
        seated = self._seated.stands and not self._stays(self._seat)
        if seated:
            kept_up.append(self._seated)
        leases = {each.key: each.version for each in kept_up if each.stands}
        kept = self._store.renew(leases, self.rules.lease_s) if leases else set()
        self._beaten_at = looked_at
        for each in kept_up:
            each.renewed(kept)
        if seated and self._seated.stands:
            self._seat_until = looked_at + self.rules.lease_s
        elif seated:
            self._seat_lost()

    def _give_up(self) -> None:
        if self._surrendered and self._seated.stands and not self._stays(self._seat):
            self._seated.give_up()
            self._seat_lost()
        self._surrendered = False

    def _show_waiting(self) -> None:
        """Tell the host that a newcomer waits, or no longer, only where the rules let a newcomer end a round."""
        if self._member.state is not State.SPARE:
            self._waiting.give_up()
        elif self.rules.grow and not self._waiting.stands:
            self._waiting.version = self._store.put(self._waiting.key, self.name.encode(), lease_s=self.rules.lease_s)

    def _seat_lost(self) -> None:
        log.info("%s lost its seat in round %d: the lease ended", self.name, self._member.round)
        self._seat, self._seated.version = None, ABSENT
        self._member.apply(Event.SEAT_LOST)

    def _look_and_act(self) -> None:
        member = self._member
        begun = self._clock()
        current, hosted = self._look()
        if current is None and not self.ended:
            current, hosted = self._found(self._clock())
        if self.ended:
            self._settle(member.closing)
            return
        if current is None:
            return
        now = self._clock()
        self._why = current.why
        self._show_waiting()
        if member.state is State.TAKING:
            # The counter gives 1 first. A slot that is lost between these calls stays a hole.
            member.took(self._store.add(self.keys.slots(member.round)) - 1)
        if member.state is State.SEATING:
            self._sit()
        self._say(begun)
        self._beat(begun)
        self._check_wait(now)
        if not hosted:
            if not self._hosting.take(current, self.version, now):
                return
            log.info("%s is now host of run %s: the lease of the previous host ended", self.name, self.keys.run)
        elif self.is_host and now >= self._hosting.next_at:
            closing = self._hosting.duty(now)
            if closing is not None:
                self._settle(closing)

    def _look(self) -> tuple[Round | None, bool]:
        """The round in the store, and whether a member holds the host's lease, in one snapshot."""
        member = self._member
        keys = [self.keys.round, self.keys.host]
        if member.slot is not None:
            keys.append(self.keys.place(member.round, member.slot))
        entries = self._store.get_many(keys)
        round_entry, host_entry = entries[:2]
        place_entry = entries[2] if len(entries) > 2 else None
        current = None if round_entry is None else decode(Round, keys[0], round_entry.value)
        place = None if place_entry is None else decode(Place, keys[2], place_entry.value)
        if place is not None and (place.member != self.name or place.round != member.round):
            place = None  # of an earlier round or member
        self.version = ABSENT if round_entry is None else round_entry.version
        self._hosting.saw(current, host_entry)
        member.look(current, place)
        return current, host_entry is not None

    def _found(self, now: float) -> tuple[Round | None, bool]:
        """The run is not in the store: create it, unless the archive has its end. Then read again."""
        closing = self._archived()
        if closing is not None:
            self._end(closing, None)
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
        self._seat, self._seat_until = seat, begun + self.rules.lease_s
        self._seated.key, self._seated.version = key, version
        self._wanted, self._wanted_message = Status.HERE, ""
        self._surrendered = False
        self._seated_at = begun
        member.apply(Event.SEAT)

    def _say(self, looked_at: float) -> None:
        """Write the requested status to the seat in the store; the lease counts from the look, as for `_beat`."""
        seat = self._seat
        if seat is None or self._member.state is not State.ACTIVE or seat.status is self._wanted:
            return
        said = msgspec.structs.replace(seat, status=self._wanted, message=self._wanted_message)
        key = self.keys.seat(seat.round, seat.slot)
        lease_s = None if self._stays(said) else self.rules.lease_s
        version = self._store.compare_and_set(key, encode(said), self._seated.version, lease_s=lease_s)
        if version is None:
            # The answer to an earlier try may have been lost; what stands there decides.
            entry = self._store.get(key)
            if entry is None or decode(Seat, key, entry.value) != said:
                self._seat_lost()
                return
            version = entry.version
        until = math.inf if lease_s is None else looked_at + lease_s
        self._seat, self._seat_until, self._seated.version = said, until, version

    def _stays(self, seat: Seat | None) -> bool:
        """Whether the seat has no lease, since what it reports stays true when its member ends."""
        return self.rules.done_stays and seat is not None and seat.status is Status.DONE

    def _check_wait(self, now: float) -> None:
        """Time limit for an open round. Usually the host closes the run; this is for runs whose hosts fail in turn."""
        if self._member.state is not State.SEATED:
            self._seated_at = None
        elif self._seated_at is None:
            self._seated_at = now
        elif now - self._seated_at > self.rules.join_timeout_s + 2 * self.rules.lease_s:
            what = f"round {self._member.round} of run {self.keys.run}"
            raise JoinTimeoutError(
                f"{what} is not complete after {now - self._seated_at:.0f} s: too few members joined"
            )

    def _settle(self, closing: Closing | None) -> None:
        """The run has ended. Store and archive have the closing before any waiting call returns it."""
        if closing is None:
            self._end(None, RunLostError(f"run {self.keys.run} is no longer in the store; its end is unknown"))
            with contextlib.suppress(OSError, StoreError):
                closing = self._archived()
            if closing is not None and closing.incarnation == self._member.incarnation:
                self._member.closing, self.error = closing, None
            return
        write_archive(self._archive, closing)
        self._end(closing, None)
