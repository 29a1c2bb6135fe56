"""Some fields of payloads that were taken: which ranges of them are read, and the batch that is made of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from transport import _ring
from transport.claims.batch import ClaimedRows, Rows, TakenBatch
from transport.client.connections.connection import Want
from transport.devices.buffers import BufferPool
from transport.ring.parts import part_of
from transport.schema import Schema
from transport.ticket import Ticket


class WantedFields:
    """The fields that are wanted of each payload of one answer. What was brought is a batch of payloads of these alone.

    Raises SchemaError where a payload has no such field, or its schema is not known.

    Args:
        tickets: of the payloads, in the order of the answer's rows.
        known: schemas of payloads whose tickets do not say theirs, by fingerprint; those of the fields are added.
        buffers: where memory for payloads comes from.
        verify: compare checksums.

    Attributes:
        wants: what is to be read; no listener joins payloads to an answer of which fields are wanted.
    """

    def __init__(
        self,
        tickets: Sequence[Ticket],
        rows: Rows,
        fields: tuple[str, ...],
        known: Mapping[str, Schema],
        buffers: BufferPool,
        *,
        verify: bool,
    ) -> None:
        self._tickets = tickets
        self._known = dict(known)
        self._parts = [part_of(each, each.schema or known.get(each.schema_fingerprint), fields) for each in tickets]
        self._own = [memoryview(buffers.take(part.layout.total)) for part in self._parts]
        self._owners: list[int] = []  # of the wants
        self.wants: list[Want] = []
        check = 0 if verify else None
        ranks = rows["rank"].tolist()
        for at, (ticket, rank, part) in enumerate(zip(tickets, ranks, self._parts, strict=True)):
            for begin, place, size in part.ranges:
                self.wants.append(Want(ticket, rank, self._own[at][place : place + size], check, begin))
                self._owners.append(at)

    def payloads_of(self, wants: Iterable[int]) -> set[int]:
        """Positions of the payloads of which these wants are."""
        return {self._owners[each] for each in wants}

    def batch(
        self,
        hold: Callable[[Rows], tuple[ClaimedRows, _ring.OwnedClaims]],
        rows: Rows,
        kept: npt.NDArray[np.intp],
        dropped: int,
    ) -> TakenBatch:
        """The payloads at these positions, whose rows are changed: their tickets are of payloads of these fields."""
        notes = bytearray()
        for new, at in enumerate(kept.tolist()):
            ticket, rows["checksum"][new] = self._parts[at].ticket(self._tickets[at], self._own[at])
            note = ticket.encode()
            rows["length"][new], rows["note_bytes"][new] = ticket.size, len(note)
            notes += note
            self._known[ticket.schema_fingerprint] = self._parts[at].schema
        begins = np.cumsum(rows["note_bytes"].astype(np.int64)) - rows["note_bytes"]
        read = {new: self._own[at] for new, at in enumerate(kept.tolist())}
        nowhere = np.zeros(len(rows), np.int64)
        return TakenBatch(*hold(rows), bytes(notes), begins, nowhere, read, self._known, dropped)
