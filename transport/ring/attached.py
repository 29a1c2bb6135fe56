"""Rings of this host that a process is attached to: each once, with one owner number, until its data has ended."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Hashable
from typing import Final, TypeVar

from transport import _ring
from transport.errors import ClosedError, RingNotFoundError, TransportError
from transport.ring.attachment import file_of, remove_if_dead
from transport.ring.buffer import SharedRingBuffer, attached_reader, open_here, share_here
from transport.ticket import Ticket, host_identity

log = logging.getLogger(__name__)
T = TypeVar("T")

_TRY_AGAIN_S: Final = 30.0  # after an attachment was refused
_LOOK_AGAIN_S: Final = 0.1  # after a segment was not there, or not made yet


class AttachedRings:
    """Attachments of a client, or of the rings of a run with its clients. Any thread.

    Reads by ticket go through any attachment of the process: a writer's own, or one that another client or run has.
    Claims go through an attachment of the run, since closing it ends them.

    Args:
        lease_s: after how much silence of this process its claims end; None: they last as long as it lives.
        left: called with each ring whose data has ended, before its attachment is closed.

    Attributes:
        lock: held wherever attachments come and go.
    """

    def __init__(
        self, lease_s: float | None = None, left: Callable[[SharedRingBuffer], object] = lambda _: None
    ) -> None:
        self.lock = threading.RLock()
        self._lease_s = lease_s
        self._left = left
        self._rings: dict[str, SharedRingBuffer] = {}  # by id: a newer ring may have the same name
        self._given: set[str] = set()  # of these, by id: closed by who gave them
        # Until when, and why, by segment and by whom it was asked for; None: for whomever. "": it is not who was asked.
        self._refused: dict[tuple[str, Hashable], tuple[float, str]] = {}

    def __repr__(self) -> str:
        lent = sum(ring.native.lent for ring in list(self._rings.values()))
        return f"<AttachedRings {len(self._rings)} attached, {lent} views>"

    # --- coming -------------------------------------------------------------------------------------
    def give(self, ring: SharedRingBuffer) -> SharedRingBuffer:
        """Add a ring that the caller is attached to, and closes; the attachment that counts, which may be older."""
        with self.lock:
            self.leave_ended()
            if ring.ring_id not in self._rings:
                ring.set_lease(self._lease_s)
                self._rings[ring.ring_id] = ring
                self._given.add(ring.ring_id)
            return self._rings[ring.ring_id]

    def attach(self, name: str, asked: Hashable, fits: Callable[[SharedRingBuffer], bool]) -> SharedRingBuffer | None:
        """Return the ring in this segment, attached now or before. None: refused now or a moment ago.

        Args:
            asked: stands for what ``fits`` asks: one that did not fit is not looked at again at once.
            fits: whether it is the ring that the caller wants.
        """
        with self.lock:
            for ring in self._rings.values():
                if ring.name == name and ring.native.still_named:
                    return ring if fits(ring) else None
            now = time.monotonic()
            if any(now < self._refused.get((name, by), (0.0, ""))[0] for by in (None, asked)):
                return None
            self.leave_ended()  # their memory stays allocated while it is mapped
            try:
                ring = attached_reader(name)
            except RingNotFoundError:  # gone, or being set up
                if not file_of(name):  # a file waits for its next run
                    remove_if_dead(name, only_empty=True)  # whose writer was killed meanwhile
                self._refused[name, None] = now + _LOOK_AGAIN_S, ""
                return None
            except TransportError as error:
                log.info("ring %s is not mapped: %s", name, error)
                self._refused[name, None] = now + _TRY_AGAIN_S, str(error)
                return None
            if not fits(ring):
                ring.close()
                self._refused[name, asked] = now + _TRY_AGAIN_S, ""
                return None
            ring.set_lease(self._lease_s)
            self._rings[ring.ring_id] = ring
            share_here(ring)
            return ring

    def refused(self) -> dict[str, str]:
        """Return why segments could not be attached, by their names."""
        with self.lock:
            return {name: why for (name, _), (_, why) in self._refused.items() if why}

    # --- reads by ticket ------------------------------------------------------------------------------
    def find(self, ticket: Ticket) -> SharedRingBuffer | None:
        """Return the ticket's ring, if it is here and attachable; None: read it through the network."""
        ring = self._rings.get(ticket.ring)
        if ring is None or ring.native.closed:
            ring = open_here(ticket.ring)
        if ring is None and ticket.segment and ticket.host == host_identity():
            ring = self.attach(ticket.segment, ticket.ring, lambda ring: ring.ring_id == ticket.ring)
        return ring

    # --- claims ---------------------------------------------------------------------------------------
    def heard(self) -> None:
        """Say to every ring that this process lives, so that its claims last."""
        with self.lock:
            for ring in self._rings.values():
                with contextlib.suppress(ClosedError):
                    ring.native.heard()

    # --- going ----------------------------------------------------------------------------------------
    def leave_ended(self) -> None:
        """Detach from every ring whose data has ended, and forget refusals that are over."""
        with self.lock:
            for ring in [ring for ring in self._rings.values() if may_leave(ring)]:
                self._left(ring)
                self._leave(ring)
            now = time.monotonic()
            self._refused = {key: each for key, each in self._refused.items() if now < each[0]}

    def _leave(self, ring: SharedRingBuffer) -> None:
        del self._rings[ring.ring_id]
        if ring.ring_id in self._given:
            self._given.remove(ring.ring_id)
        else:
            ring.close()

    def close(self, *, but_lent: bool = False) -> None:
        """Detach from every ring; what is claimed of it can be claimed by others. Idempotent.

        ``but_lent``: from one with views in use when the last view is gone, so that its payloads can be acknowledged.
        """
        with self.lock:
            for ring in list(self._rings.values()):
                if but_lent and ring.native.lent:
                    del self._rings[ring.ring_id]
                else:
                    self._leave(ring)


def through(
    find: Callable[[Ticket], SharedRingBuffer | None], ticket: Ticket, use: Callable[[SharedRingBuffer], T]
) -> T | None:
    """Return what ``use`` makes of the ticket's ring; None: it is not here. One closed meanwhile is found anew."""
    while (ring := find(ticket)) is not None:
        try:
            return use(ring)
        except ClosedError:
            if not ring.native.closed:
                raise
    return None


def may_leave(ring: SharedRingBuffer) -> bool:
    """Tell whether nothing of the ring is written, unread or looked at here any more."""
    if ring.native.closed:
        return True
    with contextlib.suppress(ClosedError):
        writing = ring.native.state_counts()[_ring.WRITING]
        return not (ring.native.keeper_alive or writing or ring.native.unread or ring.native.lent)
    return True
