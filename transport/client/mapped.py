"""Reading on the writer's own host: attach to the segment, pin the slot, look at its memory. No copy, no network.

Mapped readers can write to the control area of the segment: same user, same trust.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from transport import _ring
from transport._ring import PayloadView, Views
from transport.errors import TransportError
from transport.ring.buffer import SharedRingBuffer
from transport.ring.mapping import attached_reader, views_of
from transport.ticket import Ticket, host_identity

log = logging.getLogger(__name__)

_TRY_AGAIN_S = 30.0  # after an attachment was refused


class MappedRings:
    """This process's attachments to rings of this host. Belongs to the client's loop.

    Args:
        allowed: whether payloads may be mapped at all.
    """

    def __init__(self, *, allowed: bool = True) -> None:
        self._allowed = allowed
        self._rings: dict[str, SharedRingBuffer] = {}
        self._refused: dict[str, float] = {}
        # Invariant: the same keys. A view keeps its ring attached, also without this object.
        self._views: dict[str, Views] = {}
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"<MappedRings {len(self._rings)} attached, {sum(map(len, self._views.values()))} views>"

    def find(self, ticket: Ticket) -> SharedRingBuffer | None:
        """The ticket's ring, if it is on this host, allowed and can be attached; None: read it through the network."""
        ring = self._rings.get(ticket.ring)
        if ring is not None:
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
        self._views[ticket.ring] = views_of(ring)
        return ring

    def _refuse(self, ticket: Ticket, why: str) -> None:
        self._refused[ticket.ring] = time.monotonic() + _TRY_AGAIN_S
        log.info("ring %s cannot be mapped (%s); reading it over the network", ticket.ring[:8], why)

    def read(self, ring: SharedRingBuffer, ticket: Ticket, rank: int) -> PayloadView | None:
        """The payload's bytes as a read-only view that holds the pin, or None if too many views are in use.

        Raises what `SharedRingBuffer.read_raw` raises.
        """
        views = self._views[ticket.ring]
        view = views.read(ring, ticket.slot, ticket.generation, ticket.key, ticket.size, rank)
        if type(view) is PayloadView:
            return view
        if view is not None:
            raise ring.refusal(view, ticket, rank)
        if ticket.ring not in self._warned:
            self._warned.add(ticket.ring)
            log.warning("%d views of ring %s are held; further payloads are copied", len(views), ticket.ring[:8])
        return None

    def copy_out(self, ring: SharedRingBuffer, ticket: Ticket, rank: int, destination: Any) -> None:
        """Copy the payload from its slot into ``destination`` (flat bytes of the payload's size)."""
        with ring.read_raw(ticket, rank) as lease:
            _ring.copy(destination, lease.view)
        ring.native.count("bytes_mapped", ticket.size)

    def detach_finished(self) -> None:
        """Detach from empty rings whose writer has ended. Also forget refusals that are over."""
        now = time.monotonic()
        self._refused = {ring_id: until for ring_id, until in self._refused.items() if now < until}
        finished = [
            ring_id
            for ring_id, ring in self._rings.items()
            if not self._views[ring_id] and not ring.native.keeper_alive and ring.native.unread == 0
        ]
        for ring_id in finished:
            del self._views[ring_id]
            self._warned.discard(ring_id)
            self._rings.pop(ring_id).close()

    def close(self) -> None:
        """Detach from every ring; from rings with views in use when the last view is released."""
        for ring_id, ring in self._rings.items():
            if self._views[ring_id].close():
                ring.close()
        self._rings.clear()
        self._views.clear()
