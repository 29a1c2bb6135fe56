"""Payloads of mapped rings without a trainer: claims, a batch that `Gathered` makes of them, and their ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from transport import Schema, SharedRingBuffer, _ring
from transport.devices.landing import landing_for
from transport.ring.batch import Gathered, columns_of
from transport.ring.batch_shape import Shape
from transport.ticket import Ticket
from transport.training.payloads import Payloads


class OneClaim:
    """One payload of a mapped ring, claimed."""

    def __init__(self, part: _ring.ClaimedBatch, schema: Schema | None) -> None:
        self.part = part
        self.payload = Payloads([part], None, Shape(), {} if schema is None else {schema.fingerprint: schema})[0]

    @property
    def ticket(self) -> Ticket:
        return self.payload.ticket

    @property
    def in_vain(self) -> int:
        return int(columns_of([self.part])[7, 0])

    def release(self, delay_s: float = 0.0) -> None:
        self.part.release(delay_s)

    def consume(self, keep: bool = False) -> bool:
        """Whether it was held, and counts; its memory stays with ``keep``."""
        return self.part.finish(keep) == b"\1"


def claim_each(
    ring: SharedRingBuffer, n: int = 1, timeout_s: float = 0.0, *, rank: int | str = 0, **limits: Any
) -> list[OneClaim]:
    """Up to ``n`` payloads of the ring, the oldest first."""
    part = ring.native.claim_batch(n, timeout_s, rank=ring.rank_of(rank), **limits)
    return [OneClaim(each, ring.schema) for each in part.divide()]


def consumed(ring: SharedRingBuffer, n: int, rank: int | str = 0) -> int:
    """Consume up to ``n`` payloads; how many there were."""
    return sum(ring.native.claim_batch(n, 0.0, rank=ring.rank_of(rank)).finish())


class Claimed(Gathered):
    """A batch whose claims end here."""

    _parts: Sequence[_ring.ClaimedBatch]

    def column(self, name: str) -> list[int]:
        """One of BATCH_COLUMNS."""
        column: list[int] = self.columns[_ring.BATCH_COLUMNS.index(name)].tolist()
        return column

    def consume(self) -> npt.NDArray[np.bool_]:
        """Which payloads were still held."""
        return np.frombuffer(b"".join(part.finish(self.layout == "list") for part in self._parts), np.bool_)


def claim_batch(
    ring: SharedRingBuffer | Sequence[SharedRingBuffer],
    n: int,
    timeout_s: float = 0.0,
    *,
    rank: int | str = 0,
    max_deliveries: int = 5,
    consumer: str = "",
    **shape: Any,
) -> Claimed:
    """Up to ``n`` payloads of one ring, or of several of one schema; waits at each for so long."""
    rings = [ring] if isinstance(ring, SharedRingBuffer) else list(ring)
    wanted, schema = Shape(**shape), rings[0].schema
    wanted.fills(schema)
    assert schema is not None
    landing = landing_for(wanted.memory, wanted.out, wanted.most_memory)
    parts = []
    for each in rings:
        part = each.native.claim_batch(
            n, timeout_s, rank=each.rank_of(rank), most_attempts=max_deliveries, consumer=consumer
        )
        if part:
            parts.append(part)
    return Claimed.gathered(parts, schema, wanted, landing=landing, max_deliveries=max_deliveries, consumer=consumer)
