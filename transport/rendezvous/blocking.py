"""Rendezvous for programs without an event loop, such as the launchers of other frameworks.

    member = BlockingRendezvous(store, "run-7", Rules(least=4))
    member.start()
    while isinstance(found := member.join(address), Place):
        ...                             # look at `in_round` now and then; stop the work when it is False
        member.done()                   # or restart()
        member.wait_over()
    member.leave()

All calls to the store are made in threads, so a signal handler that raises in the waiting thread interrupts no write.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import wait
from typing import TypeVar

from transport.errors import UsageError
from transport.rendezvous.archive import Archive
from transport.rendezvous.living import Life, own_name
from transport.rendezvous.member_states import State
from transport.rendezvous.records import Closing, Place, Reason, Status
from transport.rendezvous.rules import Rules
from transport.rendezvous.session import Session, View
from transport.runtime.blocking_calls import started
from transport.store.base import Store

Result = TypeVar("Result")


class BlockingRendezvous:
    """One member of a run. Takes the arguments and raises the errors of `Rendezvous`. Thread-safe.

    A forked child is no member: there `leave` does nothing, and every other call raises UsageError.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        rules: Rules | None = None,
        *,
        archive: Archive | None = None,
        where: str = "",
        member: str | None = None,
    ) -> None:
        self._session = Session(store, run, member or own_name(), rules or Rules(), where=where, archive=archive)
        self._life = Life(self._session, store, self._publish)
        self._pid = os.getpid()
        # `with` is on the lock: a Condition's own is Python code, in which an interrupt would leave the lock held.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def __repr__(self) -> str:
        return f"<BlockingRendezvous {self._session!r}>"

    @property
    def name(self) -> str:
        """This member's name."""
        return self._session.name

    @property
    def view(self) -> View:
        """See `Session.view`."""
        return self._session.view

    @property
    def in_round(self) -> bool:
        """Whether this member has a rank in a running round. Otherwise its work must stop. Never waits."""
        return self._session.view.state is State.ACTIVE and not self._life.failed and os.getpid() == self._pid

    # --- what a launcher does ---------------------------------------------------------------------------
    def start(self) -> None:
        """Read the store for the first time, so that `view` has the end of a closed run, and begin to renew leases."""
        self._call(self._session.step)
        self._life.thread.start()

    def join(self, address: str) -> Place | Closing:
        """Wait for a rank, without a time limit as standby or hot spare; or for the run's end.

        ``address``: what others find in `Place.leader` if this member gets rank 0.
        """
        self.wait_over()
        self._call(lambda: self._session.join(address))
        view = self._until(lambda view: view.state in (State.ACTIVE, State.ENDED))
        found = view.closing or view.place
        assert found is not None  # ENDED without a closing is raised, ACTIVE has a place
        return found

    def done(self) -> None:
        """Report that this member's work is done. If its round is over already, give up the seat: no member waits."""
        self._call(lambda: self._session.say(Status.DONE))
        if not self.in_round:
            self._session.surrender()

    def restart(self, why: str) -> None:
        """Ask for a new round, if this member has a rank, because its work failed."""
        if self.in_round:
            self._call(lambda: self._session.say(Status.RESTART, why))

    def wait_over(self) -> Closing | None:
        """Wait until this member has no rank in a running round; returns how the run ended, if it has."""
        return self._until(lambda view: view.state is not State.ACTIVE).closing

    def wait_closed(self) -> Closing:
        """Wait for the run's end."""
        closing = self._until(lambda view: view.state is State.ENDED).closing
        assert closing is not None  # otherwise it is raised
        return closing

    def close(self, reason: Reason, message: str = "") -> Closing:
        """End the run for all members, and return its closing: the first call decides. Raises as `Rendezvous.close`."""
        return self._call(lambda: self._session.close(reason, message))

    def leave(self, patience_s: float = 5.0) -> None:
        """Give up the leases, so that others need not wait for their end. Idempotent. Never raises."""
        if os.getpid() != self._pid:
            return
        self._life.stopping.set()
        wait([started(self._session.leave)], patience_s)  # where the store fails, the leases end by themselves
        if self._life.thread.is_alive():
            self._life.thread.join(patience_s)

    # --- its thread -------------------------------------------------------------------------------------
    def _publish(self) -> None:
        with self._lock:
            self._changed.notify_all()

    def _until(self, reached: Callable[[View], bool]) -> View:
        with self._lock:
            while True:
                self._check_process()
                view = self._life.view()
                if reached(view) or view.state is State.ENDED:
                    return view
                self._changed.wait(self._session.rules.poll_s)
                self._session.check_silence()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError("a forked child is not the member of its parent; make a member of its own")

    def _call(self, action: Callable[[], Result]) -> Result:
        """Run a blocking call in a thread; if the wait is interrupted, the call continues."""
        self._check_process()
        answer = started(action)
        while not wait([answer], self._session.rules.poll_s).done:
            self._session.check_silence()
        self._publish()
        return answer.result()
