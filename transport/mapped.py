"""Reading on the writer's own host: attach to the segment, pin the slot, look at its memory. No copy, no network.

Mapped readers can write to the control area of the segment: same user, same trust.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from typing import Any

import numpy as np

from transport import _native
from transport.errors import ClosedError, TransportError
from transport.leases import ReadLease
from transport.ring import SharedRingBuffer
from transport.ticket import Ticket, host_identity

log = logging.getLogger(__name__)

_TRY_AGAIN_S = 30.0  # after an attachment was refused
_SHARE_OF_SLOTS = 0.5  # views beyond it become copies, so that a hoarding reader cannot stop the writer


class Hold:
    """What is done when a view's last array is gone."""

    __slots__ = ("consume", "lease")

    def __init__(self, lease: ReadLease, consume: bool) -> None:
        self.lease = lease
        self.consume = consume

    def acknowledge(self) -> bool:
        """Consume now; the memory stays pinned until the last array is gone. False: it had been consumed."""
        self.consume = False
        return self.lease.acknowledge()

    def abandon(self) -> None:
        """Letting go is no acknowledgement: the payload stays for another attempt."""
        self.consume = False


class MappedView:
    """A pinned payload's bytes. The pin lasts as long as any array that looks into ``data``.

    Who keeps something to call later keeps methods of ``hold``, which do not keep the memory.
    """

    def __init__(self, lease: ReadLease, consume: bool) -> None:
        self.hold = Hold(lease, consume)
        self.data = np.asarray(lease.view)


class MappedRings:
    """This process's attachments to rings of this host. Belongs to the client's loop."""

    def __init__(self) -> None:
        self._rings: dict[str, SharedRingBuffer] = {}
        self._refused: dict[str, float] = {}
        self._holds: dict[str, set[Hold]] = {}  # views that are out, by ring
        self._warned: set[str] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<MappedRings {len(self._rings)} attached, {sum(map(len, self._holds.values()))} views>"

    def find(self, ticket: Ticket) -> SharedRingBuffer | None:
        """The ticket's ring, if it is on this host and can be attached; None: read it through the network."""
        ring = self._rings.get(ticket.ring)
        if ring is not None:
            return ring
        if not ticket.segment or ticket.host != host_identity():
            return None
        if time.monotonic() < self._refused.get(ticket.ring, 0.0):
            return None
        self.detach_finished()  # rings come and go with their writers; memory that one keeps mapped is not given back
        try:
            ring = SharedRingBuffer.attach(ticket.segment, role="reader")
        except TransportError as error:
            self._refuse(ticket, str(error))
            return None
        if _readers(ring) > _native.MAX_OWNERS - 2 - max(1, len(ring.native.ports())):
            ring.native.close()
            self._refuse(ticket, "its other owner places are kept for its writer and listeners")
            return None
        if ring.ring_id != ticket.ring:
            ring.native.close()
            self._refuse(ticket, "its segment belongs to another ring now")
            return None
        self._rings[ticket.ring] = ring
        return ring

    def _refuse(self, ticket: Ticket, why: str) -> None:
        self._refused[ticket.ring] = time.monotonic() + _TRY_AGAIN_S
        log.info("ring %s cannot be mapped (%s); reading it through the network", ticket.ring[:8], why)

    def read(self, ring: SharedRingBuffer, ticket: Ticket, rank: int, *, consume: bool) -> MappedView | None:
        """The payload's bytes as a read-only view that holds the pin, or None when too many views are out already.

        ``consume``: letting go of the view is its acknowledgement, unless told otherwise by then.
        Raises what `SharedRingBuffer.read_raw` raises.
        """
        holds = self._holds.setdefault(ticket.ring, set())
        if len(holds) >= max(1, int(ring.slot_count * _SHARE_OF_SLOTS)):
            if ticket.ring not in self._warned:
                self._warned.add(ticket.ring)
                log.warning("%d views of ring %s are held; further payloads are copied", len(holds), ticket.ring[:8])
            return None
        lease = ring.read_raw(ticket, rank)
        ring.native.count("bytes_read", ticket.size)
        view = MappedView(lease, consume)
        holds.add(view.hold)
        # At the end of the process, too: a segment whose last reader ends with views in hand must not stay behind.
        weakref.finalize(view.data, self.let_go, ring, view.hold)
        return view

    def pin(self, ring: SharedRingBuffer, ticket: Ticket, rank: int) -> Hold:
        """Pin a payload for a copy that goes on after the read; end with `let_go`. Raises as `read` does."""
        hold = Hold(ring.read_raw(ticket, rank), consume=False)
        ring.native.count("bytes_read", ticket.size)
        self._holds.setdefault(ticket.ring, set()).add(hold)
        return hold

    def let_go(self, ring: SharedRingBuffer, hold: Hold) -> None:
        """The last array that looked into a slot is gone. Runs on whichever thread dropped it."""
        holds = self._holds[ring.ring_id]
        holds.discard(hold)
        with contextlib.suppress(ClosedError):  # in a forked child, whose copy of the view holds nothing
            if hold.consume:
                hold.lease.consume()
            else:
                hold.lease.release()
        if not holds and self._closed:
            ring.close()

    def copy_out(self, ring: SharedRingBuffer, ticket: Ticket, rank: int, destination: Any) -> None:
        """Copy the payload from its slot into ``destination`` (flat bytes of the payload's size)."""
        with ring.read_raw(ticket, rank) as lease:
            _native.copy(destination, lease.view)
        ring.native.count("bytes_read", ticket.size)

    def detach_finished(self) -> int:
        """Let go of rings whose writer is gone and that hold nothing more; how many."""
        finished = [
            ring_id
            for ring_id, ring in self._rings.items()
            if not self._holds.get(ring_id) and not ring.native.keeper_alive and _empty(ring)
        ]
        for ring_id in finished:
            self._rings.pop(ring_id).close()
        return len(finished)

    def close(self) -> None:
        """Detach from every ring; from those with views that are still held, when the last of them is gone.

        What was to be acknowledged by letting go is acknowledged now: it has been delivered.
        """
        self._closed = True
        for ring_id, ring in self._rings.items():
            holds = list(self._holds.get(ring_id, ()))
            for hold in holds:
                if hold.consume:
                    hold.consume = False
                    hold.lease.acknowledge()
            if not holds:
                ring.close()
        self._rings.clear()


def _readers(ring: SharedRingBuffer) -> int:
    return sum(owner.alive and owner.role == _native.ROLE_READER for owner in ring.native.owners())


def _empty(ring: SharedRingBuffer) -> bool:
    _, _, ready, reading = ring.native.state_counts()
    return ready + reading == 0
