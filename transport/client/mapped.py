"""Reading on the writer's own host: attach to the segment, pin the slot, look at its memory. No copy, no network.

Mapped readers can write to the control area of the segment: same user, same trust.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from transport import _ring
from transport._ring import Loan
from transport.errors import TransportError
from transport.ring.attached import AttachedRings
from transport.ring.buffer import SharedRingBuffer
from transport.ticket import Ticket, host_identity

log = logging.getLogger(__name__)

_TRY_AGAIN_S = 30.0  # after an attachment was refused


class MappedRings:
    """Reads of rings of this host, by ticket. Belongs to the client's loop; any thread may `acknowledge`.

    Args:
        allowed: whether payloads may be mapped at all.

    Attributes:
        attached: the attachments, its own or those that it shares.
    """

    def __init__(self, *, allowed: bool = True) -> None:
        self._allowed = allowed
        self._own = self.attached = AttachedRings()
        self._refused: dict[str, float] = {}  # by ring, until when
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"<MappedRings {len(self.attached)} attached, {self.attached.lent} views>"

    def share(self, attached: AttachedRings) -> None:
        """Read through these attachments from now on. They are another's to close."""
        self.attached = attached

    def find(self, ticket: Ticket) -> SharedRingBuffer | None:
        """Return the ticket's ring, if it is here, allowed and attachable; None: read it through the network."""
        if not self._allowed:  # though claims may have attached it
            return None
        if (ring := self.attached.get(ticket.ring)) is not None:
            return ring
        if not ticket.segment or ticket.host != host_identity():
            return None
        if time.monotonic() < self._refused.get(ticket.ring, 0.0):
            return None
        try:
            ring = self.attached.attach(ticket.segment, lambda ring: ring.ring_id == ticket.ring)
            why = "its segment now belongs to another ring"
        except TransportError as error:
            why = str(error)
        if ring is None:
            self._refused[ticket.ring] = time.monotonic() + _TRY_AGAIN_S
            log.info("ring %s cannot be mapped (%s); reading it over the network", ticket.ring[:8], why)
        return ring

    def acknowledge(self, ticket: Ticket, rank: int) -> bool | None:
        """Acknowledge a payload of a ring that is mapped or can be; None: the network has to. Any thread."""
        with self.attached.lock:  # else the ring may be detached between the look and the acknowledgement
            ring = self.find(ticket)
            return None if ring is None else ring.acknowledge(ticket, rank)

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
        """Detach from rings that have ended, and forget refusals that are over."""
        now = time.monotonic()
        self._refused = {ring_id: until for ring_id, until in self._refused.items() if now < until}
        self._warned = {ring_id for ring_id in self._warned if self.attached.get(ring_id) is not None}
        self.attached.leave_ended()

    def close(self) -> None:
        """Detach from every ring of its own; from one with views in use when the last view is gone.

        A payload that was not acknowledged keeps such a ring attached, so that it can still be.
        """
        self._own.close(but_lent=True)
