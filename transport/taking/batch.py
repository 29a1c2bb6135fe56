"""What one TAKE brought: payloads that are claimed for this connection, their bytes in one buffer.

The batch is columns (`TakenBatch.rows`); an object for one payload is made only when it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from transport import _ring
from transport.errors import ProtocolError, TicketError, UsageError
from transport.ring.packing import looked_at
from transport.runtime.arguments import whole
from transport.runtime.explaining import explained
from transport.schema import Layout, Schema
from transport.ticket import Ticket

# A payload in the answer to TAKE, as native/ucp/frames.hpp has it.
TAKEN = np.dtype(
    [
        ("slot", "<u4"),
        ("generation", "<u4"),
        ("rank", "u1"),
        ("flags", "u1"),
        ("attempts", "<u2"),
        ("note_bytes", "<u2"),
        ("in_vain", "<u2"),
        ("length", "<u8"),
        ("checksum", "<u8"),
        ("sequence", "<u8"),
        ("policy_version", "<i8"),
    ]
)
JOINED = 0x01
_ALIGNMENT = 64
_HEADER = struct.Struct("<QBBHIII")

Rows = np.ndarray[Any, Any]
Verdicts = np.ndarray[Any, np.dtype[np.bool_]]


class Holder(Protocol):
    """The connection that holds the claims of a batch."""

    ring: str

    @property
    def lost(self) -> bool: ...

    @property
    def in_question(self) -> Collection[bytes]:
        """Rows of claims that the ring may have consumed: it was not reached yet. `finish` asks it again."""

    def renew(self) -> None: ...

    def changed(self, count: int) -> None:
        """So many payloads came with bytes that had changed. Any thread."""

    async def finish(self, rows: Rows) -> Verdicts: ...

    async def give_back(self, rows: Rows, delay_s: float = 0.0) -> Verdicts: ...

    def let_go(self, rows: Rows, delay_s: float = 0.0, in_vain: bool = True) -> None: ...


def _aligned(value: Any) -> Any:
    return (value + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


class TakenPayload:
    """One payload of a batch. No other consumer of this rank gets it until its claim ends."""

    __slots__ = ("_at", "_batch")

    def __init__(self, batch: TakenBatch, at: int) -> None:
        self._batch = batch
        self._at = at

    def __repr__(self) -> str:
        row = self._batch.rows[self._at]
        return (
            f"<TakenPayload {self._batch.ring[:4]}…/{row['slot']}@{row['generation']} rank {row['rank']}, "
            f"attempt {row['attempts']}, {row['length']} bytes>"
        )

    @property
    def name(self) -> str:
        """``ring/slot/generation``: the id that queues give the payload's ticket."""
        row = self._batch.rows[self._at]
        return f"{self._batch.ring}/{row['slot']}/{row['generation']}"

    @property
    def attempts(self) -> int:
        """How often this delivery was claimed, this time included."""
        return int(self._batch.rows["attempts"][self._at])

    @property
    def policy_version(self) -> int | None:
        """Of the policy that made the payload, where the writer said so."""
        version = int(self._batch.rows["policy_version"][self._at])
        return None if version == _ring.NO_VERSION else version

    @property
    def encoded(self) -> bytes:
        """The payload's ticket, encoded."""
        return bytes(self._batch.note(self._at))

    @property
    def ticket(self) -> Ticket:
        """The payload's ticket."""
        return Ticket.decode(self.encoded)

    @property
    def data(self) -> memoryview:
        """The payload's bytes, read-only; they stay after the claim has ended."""
        return self._batch.data(self._at)

    def layout(self) -> Layout:
        """Where the tensors stand, by the ticket's own schema or the one that the client was given."""
        ticket = self.ticket
        return ticket.layout(self._batch.schemas.get(ticket.schema_fingerprint))

    def arrays(self) -> Mapping[str, Any]:
        """The tensors by name, read-only, in the batch's memory. Text, bytes and values are decoded."""
        ticket = self.ticket
        schema = ticket.schema or self._batch.schemas.get(ticket.schema_fingerprint)
        return looked_at(ticket.layout(schema), self.data, schema.kinds if schema else {})


class TakenBatch:
    """Payloads that one TAKE brought, in the order of their writing.

    Attributes:
        rows: one row of `TAKEN` for each payload.
        ring: whose payloads they are.
        link: the connection that holds the claims.
        nbytes: of all payloads together.
        dropped: payloads that came with wrong bytes and were given back.
    """

    def __init__(
        self,
        link: Holder,
        rows: Rows,
        buffer: Any,
        notes: Rows,
        offsets: Rows,
        read: Mapping[int, Any],
        schemas: Mapping[str, Schema],
        dropped: int = 0,
    ) -> None:
        self.link = link
        self.dropped = dropped
        self.rows = rows
        self.schemas = schemas
        self._buffer = memoryview(buffer).toreadonly()
        self._notes = notes
        self._offsets = offsets
        self._read = read  # by position: payloads that were not joined to the answer
        self.ring = link.ring
        self.nbytes = int(rows["length"].sum())
        self._places: list[tuple[int, int]] | None = None  # (begin, end): one element of an array costs more

    def __repr__(self) -> str:
        return f"<TakenBatch of {len(self)} payloads, {self.nbytes} bytes, ring {self.ring[:4]}…>"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> TakenPayload:
        if not -len(self) <= at < len(self):
            raise IndexError(at)
        return TakenPayload(self, at % len(self))

    def __iter__(self) -> Iterator[TakenPayload]:
        return (TakenPayload(self, at) for at in range(len(self)))

    def part(self, begin: int, end: int) -> TakenBatch:
        """Some of the payloads as a batch of their own, in the same memory."""
        chosen = slice(begin, end)
        read = {at - begin: own for at, own in self._read.items() if begin <= at < end}
        return TakenBatch(
            self.link, self.rows[chosen], self._buffer, self._notes[chosen], self._offsets[chosen], read, self.schemas
        )

    def split(self, most: int) -> Iterator[TakenBatch]:
        """The same payloads as batches of at most so many, in the same memory."""
        if len(self) <= most:
            yield self
            return
        for begin in range(0, len(self), most):
            yield self.part(begin, begin + most)

    def note(self, at: int) -> memoryview:
        """The encoded ticket of the payload at this position."""
        begin = int(self._notes[at])
        return self._buffer[begin : begin + int(self.rows["note_bytes"][at])]

    def data(self, at: int) -> memoryview:
        """The bytes of the payload at this position, read-only."""
        if self._places is None:
            ends = self._offsets + self.rows["length"].astype(np.int64)
            self._places = list(zip(self._offsets.tolist(), ends.tolist(), strict=True))
        begin, end = self._places[at]
        if self._read and at in self._read:
            return memoryview(self._read[at]).toreadonly()[: end - begin]
        return self._buffer[begin:end]

    def received(self) -> _ring.ReceivedPayloads:
        """The payloads in the form that a batch in place takes."""
        rows = np.zeros((len(_ring.RECEIVED_ROWS), len(self)), np.uint64)
        rows[1], rows[2] = self._offsets, self.rows["length"]
        rows[4], rows[5], rows[6] = self._notes, self.rows["note_bytes"], self.rows["checksum"]
        pieces = [self._buffer]
        for at, own in self._read.items():
            rows[:2, at] = len(pieces), 0
            pieces.append(memoryview(own).toreadonly())
        return _ring.ReceivedPayloads(pieces, rows)

    @property
    def lost(self) -> bool:
        """Whether the connection of the claims is gone, and every claim with it."""
        return self.link.lost

    def renew(self) -> None:
        """Say that the holder is alive; a silent one loses its claims after the listener's ``ack_timeout_s``."""
        self.link.renew()

    @explained
    async def consume(self, which: Sequence[int] | None = None) -> Verdicts:
        """Say that the payloads were used, all or those at some positions: True for each that was accepted.

        Drop what was made of the others: their claims had ended (the connection was lost, this process was stopped for
        too long), and another consumer may have them. If the connection is lost between the question and its answer,
        any port of the ring is asked what became of it, for as long as a listener takes to be replaced. Where the ring
        is out of reach for longer, a payload may count as consumed although it is False here: ask again, and the answer
        is the ring's, as long as that lives. Where this is cancelled, ask again: the answer is the same.
        """
        return await self.link.finish(self._chosen(which))

    @explained
    async def give_back(self, which: Sequence[int] | None = None, delay_s: float = 0.0) -> Verdicts:
        """Give the claims up: other trainers may take the payloads, after the delay. False: it had ended already."""
        return await self.link.give_back(self._chosen(which), delay_s)

    def _chosen(self, which: Sequence[int] | None) -> Rows:
        if which is None:
            return self.rows
        for position in which:
            if not 0 <= whole(position, "a position") < len(self.rows):
                raise UsageError(f"position {position} of {len(self.rows)} payloads: give one of them")
        return self.rows[np.asarray(which, dtype=np.intp)]


def apart(rows: Rows, notes: Rows, buffer: Any, *, every: bool = False) -> list[tuple[int, Ticket]]:
    """Position and ticket of each payload that did not come with the answer, or of ``every`` one.

    ProtocolError: a ticket contradicts its row.
    """
    view = memoryview(buffer)
    found = []
    for at in range(len(rows)) if every else np.flatnonzero((rows["flags"] & JOINED) == 0).tolist():
        slot, generation, length, size = rows[["slot", "generation", "length", "note_bytes"]][at].item()
        begin = int(notes[at])
        try:
            ticket = Ticket.decode(bytes(view[begin : begin + size]))
        except TicketError as error:
            raise ProtocolError(f"an answer to a demand has no ticket for slot {slot}: {error}") from error
        if (ticket.slot, ticket.generation, ticket.size) != (slot, generation, length):
            raise ProtocolError(
                f"an answer to a demand has {length} bytes in slot {slot}@{generation}, and their ticket has "
                f"{ticket.size} in {ticket.slot}@{ticket.generation}"
            )
        found.append((at, ticket))
    return found


def parsed(buffer: Any, count: int) -> tuple[Rows, Rows, Rows]:
    """(rows, where each ticket begins, where each joined payload begins) of an answer that native code has checked."""
    rows = np.frombuffer(buffer, TAKEN, count, _HEADER.size).copy()
    head = _HEADER.size + count * TAKEN.itemsize
    sizes = rows["note_bytes"].astype(np.int64)
    ends = head + np.cumsum(sizes)
    notes = ends - sizes
    lengths = np.where(rows["flags"] & JOINED, rows["length"], 0).astype(np.int64)
    spans = _aligned(lengths)
    first = int(_aligned(ends[-1])) if count else head
    return rows, notes, first + np.cumsum(spans) - spans
