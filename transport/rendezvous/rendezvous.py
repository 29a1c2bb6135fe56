"""Rendezvous: a member of a run for programs with an event loop. A thread beats, looks and hosts; the loop only waits.

    async with Rendezvous(store, "run-7", Rules(least=4), archive=Archive(path)) as rendezvous:
        while isinstance(found := await rendezvous.join(), Place):
            worker = start(found.rank, found.size)
            ...
            await rendezvous.finish()       # or restart(), or over()
        sys.exit(rendezvous.exit_code)

The thread is its own, so that a loop that is kept from running costs a member nothing: its leases go on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from transport.errors import ClosedError, RunLostError, StoreError, UsageError
from transport.rendezvous.archive import Archive
from transport.rendezvous.member_states import State
from transport.rendezvous.records import Closing, Place, Reason, Roster, Status
from transport.rendezvous.rules import Rules
from transport.rendezvous.session import Session, View
from transport.store.base import Store

log = logging.getLogger(__name__)

Result = TypeVar("Result")


def own_name() -> str:
    """A name that no other member has: host, process, and a random part."""
    return f"{socket.gethostname()[:64]}:{os.getpid()}:{secrets.token_hex(4)}"


class Rendezvous:
    """One member of a run. Belongs to the loop that it is entered in.

    Args:
        store: shared by all members; stays open. Watching it takes one thread of this process.
        run: the run's name, never used again for another one: a closed run stays closed.
        rules: equal for all members.
        archive: where the run's end is also written; all members that can should name the same file.
        address: what others reach this member by; they find it in `roster`.
        member: a name that nobody else has; default: a new one.

    Waits raise RunLostError when the store was of no use for ``store_patience_s`` or has forgotten the run and the
    archive does not say how it ended; JoinTimeoutError when a round does not come together and nobody closes the run;
    StoreError when the store fails for good; ClosedError after `aclose`. Cancelling a wait changes nothing.
    """

    def __init__(
        self,
        store: Store,
        run: str,
        rules: Rules | None = None,
        *,
        archive: Archive | None = None,
        address: str = "",
        member: str | None = None,
    ) -> None:
        self._store = store
        self._session = Session(store, run, member or own_name(), rules or Rules(), address=address, archive=archive)
        self._view = self._session.view
        self._failure: Exception | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._thread_ended = asyncio.Event()
        self._calls: set[asyncio.Future[Any]] = set()

    def __repr__(self) -> str:
        return f"<Rendezvous {self._session!r}>"

    @property
    def member(self) -> str:
        """This member's name."""
        return self._session.name

    @property
    def place(self) -> Place | None:
        """What this member has in the round that runs, rank or standby."""
        return self._view.place

    @property
    def closing(self) -> Closing | None:
        """How the run ended, if it has."""
        return self._view.closing

    @property
    def is_host(self) -> bool:
        """Whether this member decides now."""
        return self._session.is_host

    @property
    def exit_code(self) -> int:
        """What the process should end with, by the run's end; that of a failure while there is none."""
        return self._session.rules.exit_codes.of(self.closing)

    # --- what a launcher does ---------------------------------------------------------------------------
    async def join(self) -> Place | Closing:
        """Wait for a rank, as standby or hot spare for as long as it takes; or for the run's end.

        A member that has a rank waits for that round's end first; so after `finish` or `restart` just join again.
        """
        await self._until(lambda view: view.state is not State.ACTIVE)
        await self._call(self._session.join)
        view = await self._until(lambda view: view.state in (State.ACTIVE, State.ENDED))
        found = view.closing or view.place
        assert found is not None  # ENDED without a closing is raised, ACTIVE has a place
        return found

    async def over(self) -> Closing | None:
        """Wait until this member's round is over: the run's end, or None when it is to stop its work and join again."""
        view = await self._until(lambda view: view.state is not State.ACTIVE)
        return view.closing

    async def finish(self) -> Closing | None:
        """This member's work is proven done. The run succeeds when all with a rank say so; then as `over`.

        None: somebody was lost before everybody was done, and the work goes on in another round. Join again.
        """
        await self._call(lambda: self._session.say(Status.DONE))
        return await self.over()

    async def restart(self, why: str) -> Closing | None:
        """Ask for a new round, since this member's work failed; then as `over`."""
        await self._call(lambda: self._session.say(Status.RESTART, why))
        return await self.over()

    async def close(self, reason: Reason, message: str = "") -> Closing:
        """End the run for everybody, and return how it ended: the first who closes decides.

        When it returns, the closing stands in the store and in the archive. Raises StaleRoundError for a member of an
        older round, StoreError when the store failed and nothing is settled, RunLostError when it has no such run.
        """
        return await self._call(lambda: self._session.close(reason, message))

    async def roster(self) -> Roster:
        """Everybody with a rank in this member's round. Raises StaleRoundError without a place."""
        return await self._call(self._session.roster)

    async def wait_closed(self) -> Closing:
        """Wait for the run's end."""
        view = await self._until(lambda view: view.state is State.ENDED)
        assert view.closing is not None  # otherwise it is raised
        return view.closing

    # --- its thread ---------------------------------------------------------------------------------------
    async def __aenter__(self) -> Self:
        if self._thread is not None:
            raise UsageError("this rendezvous was already entered; make a new one")
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._live, name="transport rendezvous", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Leave, so that others need not wait for this member's leases to end. Idempotent.

        Takes up to one poll, and as long as the store holds a call back.
        """
        self._stopping.set()
        if self._thread is not None:
            await asyncio.shield(self._gone())

    async def _gone(self) -> None:
        await self._thread_ended.wait()
        if self._calls:
            await asyncio.wait(set(self._calls))
        if self._thread is not None:
            self._thread.join()

    def _live(self) -> None:
        session = self._session
        try:
            while not self._stopping.is_set():
                session.step()
                self._tell(self._publish)
                if session.view.state is State.ENDED:
                    self._stopping.wait()
                    break
                try:
                    self._store.watch(session.keys.round, session.version, session.wait_s())
                except StoreError:
                    self._stopping.wait(session.rules.poll_s)  # the next step tells what it means
            try:
                session.leave()
            except StoreError as error:
                log.debug("%r left without giving up its leases, which will end: %s", session, error)
        except Exception as error:  # whoever waits must learn of a thread that ended
            log.debug("%r failed", session, exc_info=True)
            self._failure = error
        finally:
            self._tell(self._publish)
            self._tell(self._thread_ended.set)

    def _tell(self, what: Callable[[], object]) -> None:
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(what)
        except RuntimeError:  # the loop was closed without `aclose`: there is nobody to tell
            self._stopping.set()

    # --- on the loop --------------------------------------------------------------------------------------
    def _publish(self) -> None:
        self._view = self._session.view
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _until(self, reached: Callable[[View], bool]) -> View:
        while True:
            view, changed = self._view, self._changed
            if self._stopping.is_set() or self._thread is None:
                raise ClosedError("this rendezvous is not entered, or was left")
            if self._failure is not None:
                raise self._failure
            if view.state is State.ENDED:
                if view.closing is None:
                    raise view.error or RunLostError("the run's end is unknown: neither store nor archive has it")
                return view
            if view.state is State.ACTIVE and self._session.seat_ended:
                # The thread may be waiting for the store; others may already give this place away.
                self._session.surrender()
                view = view._replace(state=State.AWAY, place=None)
            if reached(view):
                return view
            try:
                await asyncio.wait_for(changed.wait(), self._session.rules.poll_s)
            except TimeoutError:
                rules = self._session.rules
                if self._session.silent_s > rules.store_patience_s + rules.lease_s:
                    silent = f"{self._session.silent_s:.0f} s"
                    raise RunLostError(f"store unavailable for {silent}: a call does not return") from None

    async def _call(self, action: Callable[[], Result]) -> Result:
        """Run a call that blocks in a thread; cancelled, it goes on there, and `aclose` waits for it."""
        if self._stopping.is_set() or self._loop is None:
            raise ClosedError("this rendezvous is not entered, or was left")
        done = self._loop.run_in_executor(None, action)
        self._calls.add(done)
        done.add_done_callback(self._calls.discard)
        result = await asyncio.shield(done)
        self._publish()
        return result
