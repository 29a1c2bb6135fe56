"""A batch of payloads of mapped rings without a trainer: what `Gathered` makes of their claims, and their ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from transport import SharedRingBuffer, _ring
from transport.devices.landing import landing_for
from transport.ring.batch import Gathered
from transport.ring.batch_shape import Shape


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
