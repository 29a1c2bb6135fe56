"""ReadPart: payloads that were read by ticket, as a part of `Payloads`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from transport import _ring
from transport.client.payload import Payload
from transport.wires import Wire


class ReadPart(_ring.ReceivedPayloads):
    """Payloads of one ring that were read over one wire. Their claims are another process's, or the planner's.

    Args:
        notes: their tickets, encoded.
        versions: of the policies that made them; None: the writer gave none.
    """

    def __init__(self, payloads: Sequence[Payload], notes: Sequence[bytes], versions: Sequence[int | None]) -> None:
        first = payloads[0]
        self.ring = first.ticket.ring
        self.wire: Wire = first.wire
        numbers = {
            "slot": [each.ticket.slot for each in payloads],
            "generation": [each.ticket.generation for each in payloads],
            "rank": [each.rank for each in payloads],
            "attempts": [1] * len(payloads),
            "length": [each.ticket.size for each in payloads],
            "policy_version": [_ring.NO_VERSION if version is None else version for version in versions],
        }
        nothing = [0] * len(payloads)
        columns = np.array([numbers.get(name, nothing) for name in _ring.BATCH_COLUMNS], np.int64)
        rows = np.zeros((len(_ring.RECEIVED_ROWS), len(payloads)), np.uint64)
        sizes = [len(note) for note in notes]
        rows[0] = np.arange(1, len(payloads) + 1)
        rows[2] = numbers["length"]
        rows[4] = np.cumsum([0, *sizes[:-1]])
        rows[5] = sizes
        rows[7] = True  # compared as it was read
        super().__init__([b"".join(notes), *(each.data for each in payloads)], rows, columns)

    def __repr__(self) -> str:
        return f"<ReadPart of {len(self)} payloads of {self.ring[:8]}>"

    def drop(
        self,
        index: int,
        reason: str,
        dead: bool,
        consumer: str = "",
        delay_s: float = 0.0,
        in_vain: bool = True,
    ) -> None:
        """See `ClaimedPart`; its claim is the planner's."""
        self.leave(index)

    def release(self, delay_s: float = 0.0, in_vain: bool = True) -> None:
        """See `ClaimedPart`: there is nothing to give back."""


def read_parts(payloads: Sequence[Payload], notes: Sequence[bytes], versions: Sequence[int | None]) -> list[ReadPart]:
    """Return the parts of payloads in this order: one for each run of payloads of one ring, over one wire."""
    rows = list(zip(payloads, notes, versions, strict=True))
    runs = [list(run) for _, run in groupby(rows, key=lambda row: (row[0].ticket.ring, row[0].wire))]
    return [ReadPart(*zip(*run, strict=True)) for run in runs]
