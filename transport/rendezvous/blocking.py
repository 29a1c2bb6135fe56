"""Rendezvous for programs without an event loop, such as the launchers of other frameworks.

    member = BlockingRendezvous(store, "run-7", Rules(least=4))
    member.start()
    while isinstance(found := member.join(address), Place):
        ...                             # look at `in_round` now and then; stop the work when it is False
        member.done()                   # or restart()
        member.wait_over()
    member.leave()

It is a `Rendezvous` on a loop of its own, so a signal handler that raises in the waiting thread interrupts no write.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Coroutine
from functools import partial
from typing import Any, Final, TypeVar

from transport.errors import UsageError
from transport.rendezvous.closing import Archive
from transport.rendezvous.member_states import View
from transport.rendezvous.records import Closing, Place, Reason, Status
from transport.rendezvous.rendezvous import Rendezvous
from transport.rendezvous.rules import Rules
from transport.runtime.loop_thread import LoopThread
from transport.store.base import Store

Result = TypeVar("Result")

_LEAVE_S: Final = 5.0  # for a store that does not answer: the leases then end by themselves


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
        self._rendezvous = Rendezvous(store, run, rules, archive=archive, where=where, member=member)
        self._session = self._rendezvous._session
        self._thread: LoopThread | None = None
        self._pid = os.getpid()

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
        """True if this member has a rank in a running round. Otherwise its work must stop. Never waits."""
        return self._rendezvous.in_round and os.getpid() == self._pid

    def start(self) -> None:
        """Read the store for the first time, so that `view` has the end of a closed run, and begin to renew leases."""
        if self._thread is None:
            self._thread = LoopThread("transport rendezvous loop")
            self._thread.closes(self._left)
        self._run(self._rendezvous.__aenter__())
        self._run(self._rendezvous._call(self._session.step))

    def join(self, address: str) -> Place | Closing:
        """Wait for a rank, without a time limit as standby or hot spare; or for the run's end.

        ``address``: what others find in `Place.leader` if this member gets rank 0.
        """
        return self._run(self._rendezvous.join(address))

    def done(self) -> None:
        """Report that this member's work is done. If its round is over already, give up the seat: no member waits."""
        self._say(Status.DONE)
        if not self.in_round:
            self._session.surrender()

    def restart(self, why: str) -> None:
        """Ask for a new round, if this member has a rank, because its work failed."""
        if self.in_round:
            self._say(Status.RESTART, why)

    def _say(self, status: Status, message: str = "") -> None:
        self._run(self._rendezvous._call(partial(self._session.say, status, message)))

    def wait_over(self) -> Closing | None:
        """Wait until this member has no rank in a running round; returns how the run ended, if it has."""
        return self._run(self._rendezvous.over())

    def wait_closed(self) -> Closing:
        """Wait for the run's end."""
        return self._run(self._rendezvous.wait_closed())

    def close(self, reason: Reason, message: str = "") -> Closing:
        """End the run for all members, and return its closing: the first call decides. Raises as `Rendezvous.close`."""
        return self._run(self._rendezvous.close(reason, message))

    def leave(self) -> None:
        """Give up the leases, so that others need not wait for their end. Idempotent. Never raises."""
        if self._thread is not None:
            self._thread.close()

    async def _left(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await self._rendezvous.aclose()

    def _run(self, call: Coroutine[Any, Any, Result]) -> Result:
        if os.getpid() != self._pid or self._thread is None:
            call.close()
            raise UsageError("a forked child is not the member of its parent; make and start a member of its own")
        return self._thread.run(call)
