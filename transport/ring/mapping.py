"""Attaching to a ring of this host to look at payloads in place: how many readers and views there may be."""

from __future__ import annotations

import weakref
from typing import Final

from transport import _ring
from transport.errors import NoOwnerError
from transport.ring.buffer import SharedRingBuffer

_SHARE_OF_SLOTS: Final = 0.5  # views beyond it become copies, so that a reader with many views cannot block the writer


def attached_reader(name: str) -> SharedRingBuffer:
    """Attach as a reader, unless that would leave too few owner numbers to the ring's writer and listeners.

    Raises what `SharedRingBuffer.attach` raises.
    """
    ring = SharedRingBuffer.attach(name, role="reader")
    readers = sum(owner.alive and owner.role == _ring.ROLE_READER for owner in ring.native.owners())
    if readers > _ring.MAX_OWNERS - 2 - max(1, len(ring.native.ports())):
        ring.close()  # not native.close(): all other owners may have detached meanwhile
        raise NoOwnerError("its remaining owner numbers are reserved for its writer and listeners")
    return ring


def views_of(ring: SharedRingBuffer) -> _ring.Views:
    """The views of a reader. At the end of the process they end before the ring: else its segment would stay behind."""
    views = _ring.Views(ring.native, int(ring.slot_count * _SHARE_OF_SLOTS))
    weakref.finalize(ring, views.unpin_all)
    return views
