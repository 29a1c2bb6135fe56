"""Leases on slots: a write that publishes or rolls back, a read that is finalised exactly once.

A ring that is closed meanwhile, by whichever thread, leaves the slots of open leases to them: no slot is freed under
its user, whose lease then ends with ClosedError. A lease that is dropped without being ended gives its slot back, with
a warning, as soon as no array looks into it any more.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec
import numpy as np

from transport import _ring
from transport._ring import Loan
from transport.errors import ClosedError, InvalidTransition, SchemaError
from transport.ring.packing import views, zero_gaps
from transport.schema import Layout, Schema
from transport.ticket import Ticket, host_identity


class Slots(Protocol):
    """What a lease asks of its ring."""

    native: _ring.Ring
    name: str
    ring_id: str
    schema: Schema | None

    def key(self, slot: int, generation: int) -> int: ...
    def register(self, slot: int, device: int) -> bool: ...
    def acknowledge(self, ticket: Ticket, rank: int = 0) -> bool: ...
    def settle(self) -> None: ...


log = logging.getLogger(__name__)


def ordered_lengths(schema: Schema, named: Mapping[str, int]) -> tuple[int, ...]:
    """The lengths of the ragged tensors in the schema's order. SchemaError when names are missing or unknown."""
    ragged = [spec.name for spec in schema.ragged]
    if set(named) != set(ragged):
        raise SchemaError(f"reserve() needs the lengths of {ragged}, the ragged tensors, and got {sorted(named)}")
    return tuple(int(named[name]) for name in ragged)


@functools.lru_cache(maxsize=16)  # the same at every write, unless a server starts
def _addresses(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


class Draft(msgspec.Struct, kw_only=True):
    """What a ticket needs besides the slot."""

    schema: Schema
    lengths: tuple[int, ...]
    readers: int
    metadata: dict[str, Any]
    created: float
    deadline: float | None


class WriteLease:
    """A slot being written. Leaving the ``with`` publishes it; an exception, or `abort`, gives the slot back."""

    _open = False

    def __init__(self, ring: Slots, slot: int, generation: int, layout: Layout, draft: Draft) -> None:
        self._ring = ring
        self._slot = slot
        self._generation = generation
        self._draft = draft
        self._ticket: Ticket | None = None
        self.layout = layout
        self.checksum: int | None = None
        self.policy_version: int | None = None
        self._arrays: dict[str, np.ndarray[Any, Any]] | None = None
        self._loan = Loan(ring.native, slot, generation)
        self.memory: memoryview = memoryview(self._loan)[: layout.total]
        self._open = True

    def __repr__(self) -> str:
        state = "writing" if self._open else "published" if self._ticket is not None else "aborted"
        return f"<WriteLease slot {self._slot} generation {self._generation} {state}>"

    @property
    def slot(self) -> int:
        """The slot's number."""
        return self._slot

    def register(self, device: int) -> None:
        """Copies from ``device`` into the slot are to come: see `SharedRingBuffer.register`."""
        self._ring.register(self._slot, device)

    @property
    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """The slot's memory as writable arrays by name. Not to be used after publishing."""
        if self._arrays is None:
            self._arrays = views(self.layout, self.memory, writable=True)
        return self._arrays

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        return self.arrays[name]

    @property
    def metadata(self) -> dict[str, Any]:
        """Small values that travel in the ticket; may be changed until publishing."""
        return self._draft.metadata

    @property
    def ticket(self) -> Ticket:
        """The published payload's ticket. Raises InvalidTransition before publishing."""
        if self._ticket is None:
            raise InvalidTransition(f"{self!r} has no ticket: it has not been published")
        return self._ticket

    def publish(self) -> Ticket:
        """Make the payload readable. Raises InvalidTransition when the slot is not this lease's any more."""
        if not self._open:
            raise InvalidTransition(f"{self!r} cannot be published")
        ring, draft = self._ring, self._draft
        if ring.native.closed:
            what = repr(self)
            self.abort()
            raise ClosedError(f"{what} cannot be published: its ring is closed")
        try:
            if self.checksum is None:  # filled in place
                zero_gaps(self.layout, self.memory)
                self.checksum = _ring.checksum(self.memory)
            ticket = Ticket(
                ring=ring.ring_id,
                segment=ring.name,
                host=host_identity(),
                addresses=_addresses(ring.native.addresses),
                ports=ring.native.ports(),
                slot=self._slot,
                generation=self._generation,
                key=ring.key(self._slot, self._generation),
                size=self.layout.total,
                checksum=self.checksum,
                readers=draft.readers,
                schema_fingerprint=draft.schema.fingerprint,
                schema=draft.schema if ring.schema is None else None,
                lengths=draft.lengths,
                created=draft.created,
                deadline=draft.deadline,
                metadata=draft.metadata,
            )
            note = ticket.encode()
            published = ring.native.publish(
                self._slot,
                self._generation,
                self.layout.total,
                self.checksum,
                draft.readers,
                int(draft.deadline * 1e9) if draft.deadline is not None else 0,
                note,
                _ring.NO_VERSION if self.policy_version is None else self.policy_version,
            )
        except BaseException:
            self.abort()
            raise
        self._open = False
        self._end()
        if not published:
            raise InvalidTransition(f"slot {self._slot} no longer belongs to this writer")
        self._ticket = ticket
        return ticket

    def abort(self) -> None:
        """Give the slot back unpublished. Does nothing after publishing."""
        if self._open:
            self._open = False
            with contextlib.suppress(ClosedError):  # closed: the end of the loan gives the slot back
                self._ring.native.abort(self._slot, self._generation)
            self._end()

    def _end(self) -> None:
        self._loan.end()
        if self._ring.native.closed:
            self._ring.settle()

    def __del__(self) -> None:
        if self._open:
            _dropped(self, self._ring, "publish() or abort()")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is not None:
            self.abort()
        elif self._open:
            self.publish()


class ReadLease:
    """A pinned payload. Finalised exactly once: `consume`, or `release` (the default at the end of a ``with``)."""

    _loan: Loan | None = None

    def __init__(self, ring: Slots, ticket: Ticket, rank: int, loan: Loan) -> None:
        self._ring = ring
        self.ticket = ticket
        self.rank = rank
        self.view: memoryview = memoryview(loan)[: ticket.size].toreadonly()
        self._loan = loan

    def __repr__(self) -> str:
        return f"<ReadLease {self.ticket.name} rank {self.rank} {'open' if self._open else 'ended'}>"

    @property
    def _open(self) -> bool:
        return self._loan is not None and not self._loan.ended

    def register(self, device: int) -> None:
        """Copies out of the slot to ``device`` are to come: see `SharedRingBuffer.register`."""
        self._ring.register(self.ticket.slot, device)

    def consume(self) -> bool:
        """Say that this rank has the payload, and unpin. False: finalised before, or consumed through another port."""
        assert self._loan is not None
        try:
            return self._loan.consume(self.rank)  # of a closed ring the end of the loan unpins
        finally:
            self._settle()

    def acknowledge(self) -> bool:
        """Say that this rank has the payload, and keep the memory pinned until `release`. False: said before."""
        return self._ring.acknowledge(self.ticket, self.rank)

    def release(self) -> bool:
        """Unpin; the payload stays for the next attempt. False: this lease was finalised before."""
        assert self._loan is not None
        released = self._loan.release()
        self._settle()
        return released

    def _settle(self) -> None:
        if self._ring.native.closed:
            self._ring.settle()

    def __del__(self) -> None:
        if self._open:
            _dropped(self, self._ring, "consume() or release()")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _dropped(lease: WriteLease | ReadLease, ring: Slots, end: str) -> None:
    """Say so; the end of the loan gives the slot back, when the last array is gone."""
    if not ring.native.closed and not sys.is_finalizing():
        what = repr(lease)  # a log record that has the lease would keep it
        fields = {"ring": ring.ring_id}
        log.warning(
            "%s was garbage-collected without %s; its slot is released. Use it in a `with` block",
            what,
            end,
            extra=fields,
        )
