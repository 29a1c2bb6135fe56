"""Rings of this host that a process is attached to: each once, with one owner number, until its data has ended."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from transport import _ring
from transport.errors import ClosedError
from transport.ring.buffer import SharedRingBuffer, attached_reader


class AttachedRings:
    """Attachments for claims and for reads by ticket. Any thread.

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

    def __len__(self) -> int:
        return len(self._rings)

    @property
    def lent(self) -> int:
        """Views of payloads that are in use."""
        return sum(ring.native.lent for ring in self._rings.values())

    def get(self, ring_id: str) -> SharedRingBuffer | None:
        """Return the ring, if it is attached."""
        return self._rings.get(ring_id)

    def attach(self, name: str, fits: Callable[[SharedRingBuffer], bool]) -> SharedRingBuffer | None:
        """Return the ring in this segment, attached now or before. None: it is not one that the caller wants.

        Raises what `attached_reader` raises.
        """
        with self.lock:
            self.leave_ended()  # their memory stays allocated while it is mapped
            for ring in self._rings.values():
                if ring.name == name and ring.native.still_named:
                    return ring if fits(ring) else None
            ring = attached_reader(name)
            if not fits(ring):
                ring.close()
                return None
            ring.set_lease(self._lease_s)
            self._rings[ring.ring_id] = ring
            return ring

    def leave_ended(self) -> None:
        """Detach from every ring whose data has ended."""
        with self.lock:
            for ring in [ring for ring in self._rings.values() if has_ended(ring)]:
                self._left(ring)
                del self._rings[ring.ring_id]
                ring.close()

    def close(self, *, but_lent: bool = False) -> None:
        """Detach from every ring; what is claimed of it can be claimed by others. Idempotent.

        ``but_lent``: from one with views in use when the last view is gone, so that its payloads can be acknowledged.
        """
        with self.lock:
            for ring in self._rings.values():
                if not (but_lent and ring.native.lent):
                    ring.close()
            self._rings.clear()


def has_ended(ring: SharedRingBuffer) -> bool:
    """Tell whether nothing of the ring is written, unread or looked at here any more."""
    if ring.native.closed:
        return True
    with contextlib.suppress(ClosedError):
        writing = ring.native.state_counts()[_ring.WRITING]
        return not (ring.native.keeper_alive or writing or ring.native.unread or ring.native.lent)
    return True
