"""Reading on the writer's own host: attach to the segment, pin the slot, look at its memory. No copy, no network.

Mapped readers can write to the control area of the segment: same user, same trust.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from transport import _ring
from transport._ring import Loan
from transport.errors import TransportError
from transport.ring.buffer import SharedRingBuffer, attached_reader
from transport.ticket import Ticket, host_identity

log = logging.getLogger(__name__)

_TRY_AGAIN_S = 30.0  # after an attachment was refused


class MappedRings:
    """This process's attachments to rings of this host. Belongs to the client's loop; any thread may `acknowledge`.

    Args:
        allowed: whether payloads may be mapped at all.
    """

    def __init__(self, *, allowed: bool = True) -> None:
        self._allowed = allowed
        self._lock = threading.RLock()  # held wherever attachments come and go
        self._rings: dict[str, SharedRingBuffer] = {}
        self._refused: dict[str, float] = {}
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return (
            f"<MappedRings {len(self._rings)} attached, {sum(ring.native.lent for ring in self._rings.values())} views>"
        )

    def find(self, ticket: Ticket) -> SharedRingBuffer | None:
        """The ticket's ring, if it is on this host, allowed and can be attached; None: read it through the network."""
        ring = self._rings.get(ticket.ring)
        if ring is not None:
            return ring
        with self._lock:
            return self._attached(ticket)

    def acknowledge(self, ticket: Ticket, rank: int) -> bool | None:
        """Acknowledge a payload of a ring that is mapped or can be; None: the network has to. Any thread."""
        with self._lock:  # else the ring may be detached between the look and the acknowledgement
            ring = self.find(ticket)
            return None if ring is None else ring.acknowledge(ticket, rank)

    def _attached(self, ticket: Ticket) -> SharedRingBuffer | None:
        if (ring := self._rings.get(ticket.ring)) is not None:  # meanwhile, by another thread
            return ring
        if not self._allowed or not ticket.segment or ticket.host != host_identity():
            return None
        if time.monotonic() < self._refused.get(ticket.ring, 0.0):
            return None
        self.detach_finished()  # rings of ended writers: their memory stays allocated while it is mapped
        try:
            ring = attached_reader(ticket.segment)
        except TransportError as error:
            self._refuse(ticket, str(error))
            return None
        if ring.ring_id != ticket.ring:
            ring.close()
            self._refuse(ticket, "its segment now belongs to another ring")
            return None
        self._rings[ticket.ring] = ring
        return ring

    def _refuse(self, ticket: Ticket, why: str) -> None:
        self._refused[ticket.ring] = time.monotonic() + _TRY_AGAIN_S
        log.info("ring %s cannot be mapped (%s); reading it over the network", ticket.ring[:8], why)

    def read(self, ring: SharedRingBuffer, ticket: Ticket, rank: int) -> Loan | None:
        """The payload's bytes, read-only, pinned while anything looks into them, or None if too many slots are in use.

        Raises what `SharedRingBuffer.read_raw` raises.
        """
        loan = ring.native.begin_read(ticket.slot, ticket.generation, ticket.key, ticket.size, rank, ring.most_views)
        if type(loan) is Loan:
            return loan
        if loan is not None:
            raise ring.refusal(loan, ticket, rank)
        if ticket.ring not in self._warned:
            self._warned.add(ticket.ring)
            held = ring.native.lent
            log.warning("%d views of ring %s are held; further payloads are copied", held, ticket.ring[:8])
        return None

    def copy_out(self, ring: SharedRingBuffer, ticket: Ticket, rank: int, destination: Any) -> None:
        """Copy the payload from its slot into ``destination`` (flat bytes of the payload's size)."""
        with ring.read_raw(ticket, rank) as lease:
            _ring.copy(destination, lease.view)

    def detach_finished(self) -> None:
        """Detach from empty rings whose writer has ended. Also forget refusals that are over."""
        now = time.monotonic()
        with self._lock:
            self._refused = {ring_id: until for ring_id, until in self._refused.items() if now < until}
            finished = [
                ring_id
                for ring_id, ring in self._rings.items()
                if not ring.native.lent and not ring.native.keeper_alive and ring.native.unread == 0
            ]
            for ring_id in finished:
                self._warned.discard(ring_id)
                self._rings.pop(ring_id).close()

    def close(self) -> None:
        """Detach from every ring; from one with views in use when the last view is gone.

        A payload that was not acknowledged keeps such a ring attached, so that it can still be.
        """
        with self._lock:
            for ring in self._rings.values():
                if not ring.native.lent:
                    ring.close()
            self._rings.clear()
