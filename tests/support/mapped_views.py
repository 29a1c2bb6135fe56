"""What the tests of mapped reads do with a view."""

from __future__ import annotations

import numpy as np

from transport import SharedRingBuffer, Ticket
from transport._ring import Loan
from transport.ring.attached import AttachedRings


def states(ring: SharedRingBuffer) -> tuple[int, int, int]:
    look = ring.statistics()
    return look.free, look.ready, look.reading


def view(mapped: AttachedRings, ticket: Ticket, consume: bool = True) -> Loan:
    ring = mapped.find(ticket)
    assert ring is not None
    made = ring.lend(ticket, 0)
    assert made is not None
    if consume:
        assert ring.acknowledge(ticket)
    return made


def look(made: Loan) -> np.ndarray:
    return np.frombuffer(made, np.uint8)
