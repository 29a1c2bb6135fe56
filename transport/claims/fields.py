"""Some fields of payloads that were taken: which ranges of them are read, and the batch that is made of these."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from transport import _ring
from transport.claims.batch import JOINED, ClaimedRows, Rows, TakenBatch
from transport.client.connections.connection import Want
from transport.devices.buffers import BufferPool
from transport.ring.parts import part_of
from transport.schema import Schema
from transport.ticket import Ticket


class WantedFields:
    """The fields that are wanted of each payload of one answer. What was brought is a batch of payloads of these alone.

    Raises SchemaError where a payload has no such field, or its schema is not known.

    Args:
        known: schemas of payloads whose tickets do not say theirs, by fingerprint; those of the fields are added.
        buffers: where memory for payloads comes from.

    Attributes:
        wants: what is to be read.
    """

    def __init__(
        self, tickets: Sequence[Ticket], fields: tuple[str, ...], known: Mapping[str, Schema], buffers: BufferPool
    ) -> None:
        self._tickets = tickets
        self._known = dict(known)
        self._buffers = buffers
        self._parts = [part_of(each, each.schema or known.get(each.schema_fingerprint), fields) for each in tickets]
        self._own = {at: memoryview(buffers.take(part.layout.total)) for at, part in enumerate(self._parts)}
        self._whole: dict[int, memoryview] = {}  # payloads
        self._owners: list[int] = []  # of the wants
        self.wants: list[Want] = []

    def look(self, rows: Rows, offsets: Rows, answer: Any, *, verify: bool) -> None:
        """Note what has to be read."""
        memory = memoryview(answer)
        check = 0 if verify else None
        for at, (ticket, part) in enumerate(zip(self._tickets, self._parts, strict=True)):
            rank = int(rows["rank"][at])
            if rows["flags"][at] & JOINED:
                begin = int(offsets[at])
                self._whole[at] = memory[begin : begin + ticket.size]
            else:
                for begin, place, size in part.ranges:
                    self.wants.append(Want(ticket, rank, self._own[at][place : place + size], check, begin))
                    self._owners.append(at)

    def arrived(self, failed: Iterable[int], wrong: Iterable[int]) -> set[int]:
        """Everything was read but the wants that ``failed``; the payloads that failed, or came ``wrong``."""
        lost = {self._owners[each] for each in failed} | set(wrong)
        self._own.update({at: self._parts[at].copied(data) for at, data in self._whole.items() if at not in lost})
        return lost

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
