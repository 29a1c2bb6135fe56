"""Rendezvous: a member of a run, for asyncio programs. A thread renews leases, reads the store and acts as host.

    async with Rendezvous(store, "run-7", Rules(least=4), archive=Archive(path)) as rendezvous:
        while isinstance(found := await rendezvous.join(), Place):
            worker = start(found.rank, found.size)
            ...
            await rendezvous.finish()       # or restart(), or over()
        sys.exit(rendezvous.exit_code)

It has its own thread, so that a blocked event loop does not end the member's leases.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from transport.errors import ClosedError, RunLostError, TransportError, UsageError
from transport.rendezvous.closing import Archive
from transport.rendezvous.member_states import State, View
from transport.rendezvous.records import Closing, Place, Reason, Roster, Status
from transport.rendezvous.rules import Rules
from transport.rendezvous.session import Session
from transport.runtime import threads
from transport.runtime.blocking_calls import in_thread
from transport.runtime.event_loop import check_loop
from transport.runtime.waits import Flag
from transport.store.base import Store

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Rendezvous:
    """One member of a run. Belongs to the loop that it is entered in.

    Args:
        store: shared by all members; not closed here. Watching it takes one thread of this process.
        run: the run's name, which is never reused: a closed run remains closed.
        rules: the same for all members.
        archive: a file that the run's end is also written to; best the same file for all members.
        address: the address that others reach this member by; they find it in `roster`.
        where: its position in the network, such as "pod1/rack3/host7"; ranks of members that have one follow it.
        member: a name that no other member has; default: a new one.

    Waits raise RunLostError if the store is unavailable for ``store_patience_s`` or no longer has the run, and the
    archive does not have its end either; JoinTimeoutError if too few members join and no host closes the run;
    StoreError if the store fails for good; ClosedError after `aclose`. Cancelling a wait changes nothing.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        rules: Rules | None = None,
        *,
        archive: Archive | None = None,
        address: str = "",
        where: str = "",
        member: str | None = None,
    ) -> None:
        name = member or f"{socket.gethostname()[:64]}:{os.getpid()}:{secrets.token_hex(4)}"
        self._session = Session(store, run, name, rules or Rules(), address=address, where=where, archive=archive)
        self._store = store
        self._stopping = Flag()  # the member leaves
        self._thread = threading.Thread(target=self._live, name="transport rendezvous", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = os.getpid()
        self._changed = asyncio.Event()
        self._joining = False  # asked for a rank that no call has returned yet
        self._calls: set[asyncio.Future[Any]] = set()

    def __repr__(self) -> str:
        return f"<Rendezvous {self._session!r}>"

    @property
    def member(self) -> str:
        """This member's name."""
        return self._session.name

    @property
    def place(self) -> Place | None:
        """This member's place in the running round: a rank or standby. None when its lease has ended."""
        return self._session.view.place

    @property
    def closing(self) -> Closing | None:
        """End of the run, if it has ended."""
        return self._session.view.closing

    @property
    def in_round(self) -> bool:
        """True if this member has a rank in a running round. Otherwise its work must stop. Never waits."""
        return self._session.view.seat is not None

    @property
    def is_host(self) -> bool:
        """True if this member is the host."""
        return self._session.is_host

    @property
    def exit_code(self) -> int:
        """Exit code of the process, by the run's closing; the code of a failure while the run has not ended."""
        return self._session.rules.exit_codes.of(self.closing)

    # --- what a launcher does ---------------------------------------------------------------------------
    async def join(self, address: str | None = None) -> Place | Closing:
        """Wait for a rank, without a time limit as standby or hot spare; or for the run's end.

        A member that has a rank first waits for the end of its round. After `finish` or `restart`, join again. A rank
        that came after a `join` was cancelled is what the next one returns. ``address`` replaces the address that
        others reach this member by.
        """
        if not self._joining:
            await self._until(lambda view: view.state is not State.ACTIVE)
        if not self._joining or self._session.view.state is State.AWAY:
            again, self._joining = self._joining, True
            try:
                await self._call(partial(self._session.join, address))
            except UsageError:  # the rank came meanwhile, from the join that was cancelled
                if not again:
                    raise
        view = await self._until(lambda view: view.state in (State.ACTIVE, State.ENDED))
        self._joining = False
        found = view.closing or view.place
        assert found is not None  # ENDED without a closing is raised, ACTIVE has a place
        return found

    async def over(self) -> Closing | None:
        """Wait until this member's round is over: the run's closing, or None: stop the work and join again."""
        view = await self._until(lambda view: view.state not in (State.ACTIVE, State.ENDING))
        return view.closing

    async def finish(self) -> Closing | None:
        """Report that this member's work is done. The run succeeds when all with a rank are done; then as `over`.

        None: a member was lost before all were done, and the work continues in another round. Join again.
        """
        await self._call(lambda: self._session.say(Status.DONE))
        return await self.over()

    async def restart(self, why: str) -> Closing | None:
        """Ask for a new round, because this member's work failed; then as `over`."""
        await self._call(lambda: self._session.say(Status.RESTART, why))
        return await self.over()

    async def close(self, reason: Reason, message: str = "") -> Closing:
        """End the run for all members, and return its closing: the first call decides.

        When it returns, the closing is in the store and in the archive. Raises StaleRoundError for a member of an older
        round, StoreError if the store failed and the result is unknown, RunLostError if the run is not in the store.
        """
        return await self._call(lambda: self._session.close(reason, message))

    async def roster(self) -> Roster:
        """Return all members with a rank in this member's round. Raises StaleRoundError if it has no place."""
        return await self._call(self._session.roster)

    async def wait_closed(self) -> Closing:
        """Wait for the run's end."""
        view = await self._until(lambda view: view.state is State.ENDED)
        assert view.closing is not None  # otherwise it is raised
        return view.closing

    # --- its thread ---------------------------------------------------------------------------------------
    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise UsageError("this rendezvous was already entered; make a new one")
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        threads.start(self._thread)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Leave the run and give up the leases, so that others need not wait for their end. Idempotent.

        Takes up to one poll, and as long as a running call to the store. Nothing in a forked child, which is no member.
        UsageError in another loop than the member's.
        """
        if os.getpid() != self._pid:
            return
        if self._loop is not None:
            check_loop(self._loop, self._pid, "this rendezvous", "leave it in its own")
        self._stopping.set()
        if self._loop is not None:
            await asyncio.shield(self._gone())

    async def _gone(self) -> None:
        """Wait for the thread and for calls, but not for a store that hangs."""
        rules = self._session.rules
        ended = in_thread(self._thread.join)
        if (await asyncio.wait({ended, *self._calls}, timeout=rules.store_patience_s + rules.lease_s))[1]:
            log.warning("%r left without giving up its leases, which will end: a call does not return", self)

    def _live(self) -> None:
        """Repeat a step, a wait until the round changes, and so on until the member leaves."""
        session = self._session
        try:
            while not self._stopping.is_set:
                session.step()
                self._tell()
                if session.ended:
                    self._stopping.wait()
                    break
                try:
                    self._store.watch(session.keys.round, session.version, session.wait_s())
                except TransportError:
                    self._stopping.wait(session.rules.poll_s)  # the next step handles the error
            with contextlib.suppress(ClosedError):  # the store: its leases end by themselves
                session.leave()
        finally:
            self._tell()

    def _tell(self) -> None:
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._publish)
        except RuntimeError:  # the loop was closed without `aclose`
            self._stopping.set()

    # --- on the loop --------------------------------------------------------------------------------------
    def _publish(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _check_entered(self) -> None:
        if self._stopping.is_set or self._loop is None:
            raise ClosedError("this rendezvous is not entered, or was left")
        check_loop(self._loop, self._pid, "this rendezvous", "make a member for each loop")

    def _view(self) -> View:
        view = self._session.view
        if view.state is State.ENDED and view.closing is None:
            raise view.error or RunLostError("the run's end is unknown: neither store nor archive has it")
        return view

    async def _until(self, reached: Callable[[View], bool]) -> View:
        while True:
            changed = self._changed
            self._check_entered()
            view = self._view()
            if reached(view) or view.state is State.ENDED:
                return view
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), self._session.rules.poll_s)
            self._session.check_silence()

    async def _call(self, action: Callable[[], Result]) -> Result:
        """Run a blocking call in a thread. If cancelled, the call continues, and `aclose` waits for it."""
        self._check_entered()
        done = in_thread(action)
        self._calls.add(done)
        done.add_done_callback(self._calls.discard)
        while not (await asyncio.wait({done}, timeout=self._session.rules.poll_s))[0]:
            self._session.check_silence()
        self._publish()
        return done.result()
