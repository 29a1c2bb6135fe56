"""Leases on slots: a write that publishes or rolls back, a read that is finalised exactly once.

A ring that is closed meanwhile, by whichever thread, leaves the slots of open leases to them: no slot is freed under
its user, whose lease then ends with ClosedError. A lease that is dropped without being ended gives its slot back, with
a warning, as soon as no array looks into it any more.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, ClassVar, Self

from transport import _ring
from transport._ring import Loan
from transport.errors import ClosedError, RingError, SchemaError
from transport.ring.packing import views, zero_gaps
from transport.ring.writes import Slots, Terms
from transport.schema import PayloadLayout, Schema
from transport.ticket import NO_SCHEMA, Ticket, host_identity

log = logging.getLogger(__name__)


def ordered_lengths(schema: Schema, named: Mapping[str, int | None]) -> tuple[int, ...]:
    """Return the numbers that a ticket has for tensors of these lengths. SchemaError when names are missing or unknown.

    An optional tensor without a length is absent; of one that is not ragged any number says that it is there.
    """
    needed = [spec.name for spec in schema.ragged if not spec.optional]
    if not set(needed) <= set(named) <= {spec.name for spec in schema.counted}:
        may = [spec.name for spec in schema.optional]
        more = f", and may have those of {may}, the optional ones" if may else ""
        raise SchemaError(f"reserve() needs the lengths of {needed}, the ragged tensors{more}, and got {sorted(named)}")
    given = ((spec, named.get(spec.name)) for spec in schema.counted)
    return tuple(spec.count(None if entries is None else int(entries)) for spec, entries in given)


@functools.lru_cache(maxsize=16)  # the same at every write, unless a server starts
def addresses_of(text: str) -> tuple[str, ...]:
    """Return the addresses that a ring's header has."""
    return tuple(filter(None, text.split(",")))


class _Lease:
    """Memory of a slot, which goes back when the lease ends, or is dropped."""

    _ends: ClassVar[str]  # the calls that end it
    _ring: Slots
    _loan: Loan

    @property
    def slot(self) -> int:
        """The slot's number."""
        return self._loan.slot

    def register(self, device: int) -> None:
        """Register the slot's memory for copies between it and ``device``: see `SharedRingBuffer.register`."""
        self._ring.register(self.slot, device)

    def _settle(self) -> None:
        if self._ring.native.closed:
            self._ring.settle()

    def __del__(self) -> None:
        loan = getattr(self, "_loan", None)  # none: it could not be made
        if loan is not None and not (loan.ended or self._ring.native.closed or sys.is_finalizing()):
            what = repr(self)  # a log record that has the lease would keep it
            log.warning(
                "%s was garbage-collected without %s; its slot is released. Use it in a `with` block",
                what,
                self._ends,
                extra={"ring": self._ring.ring_id},
            )

    def __enter__(self) -> Self:
        return self


class WriteLease(_Lease):
    """A slot being written. Leaving the ``with`` publishes it; an exception, or `abort`, gives the slot back."""

    _ends = "publish() or abort()"

    def __init__(
        self,
        ring: Slots,
        loan: Loan,
        schema: Schema | None,
        lengths: tuple[int, ...],
        layout: PayloadLayout,
        metadata: dict[str, Any],
        terms: Terms,
    ) -> None:
        self._ring = ring
        self._loan = loan
        self._schema = schema
        self._lengths = lengths
        self._readers = terms.readers
        self._created, self._deadline = terms.times()
        self._ticket: Ticket | None = None
        self._arrays: dict[str, Any] | None = None
        self.layout = layout
        self.metadata: dict[str, Any] = metadata
        """Small values that travel in the ticket; may be changed until publishing."""
        self.checksum: int | None = None
        self.policy_version = terms.policy_version
        self.memory: memoryview = memoryview(loan)[: layout.total]

    def __repr__(self) -> str:
        state = "published" if self._ticket is not None else "aborted" if self._loan.ended else "writing"
        return f"<WriteLease slot {self.slot} generation {self._loan.generation} {state}>"

    @property
    def arrays(self) -> dict[str, Any]:
        """The slot's memory as writable arrays by name; None: absent. Not to be used after publishing."""
        if self._arrays is None:
            self._arrays = views(self.layout, self.memory, writable=True)
        return self._arrays

    def __getitem__(self, name: str) -> Any:
        return self.arrays[name]

    @property
    def ticket(self) -> Ticket:
        """The published payload's ticket. Raises RingError before publishing."""
        if self._ticket is None:
            raise RingError(f"{self!r} has no ticket: it has not been published")
        return self._ticket

    def publish(self) -> Ticket:
        """Make the payload readable. Raises RingError when the slot is not this lease's any more."""
        if self._loan.ended:
            raise RingError(f"{self!r} cannot be published")
        ring, loan = self._ring, self._loan
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
                addresses=addresses_of(ring.native.addresses),
                ports=ring.native.ports(),
                slot=loan.slot,
                generation=loan.generation,
                key=ring.key(loan.slot, loan.generation),
                size=self.layout.total,
                checksum=self.checksum,
                readers=self._readers,
                schema_fingerprint=NO_SCHEMA if self._schema is None else self._schema.fingerprint,
                schema=self._schema if ring.schema is None else None,
                lengths=self._lengths,
                created=self._created,
                deadline=self._deadline,
                metadata=self.metadata,
            )
            published = loan.publish(
                self.layout.total,
                self.checksum,
                self._readers,
                int(self._deadline * 1e9) if self._deadline is not None else 0,
                ticket.encode(),
                self.policy_version,
            )
        except BaseException:  # such as: closed by another thread since we looked, or a ticket that is too large
            self.abort()
            raise
        self._settle()
        if not published:
            raise RingError(f"slot {self.slot} no longer belongs to this writer")
        self._ticket = ticket
        return ticket

    def abort(self) -> None:
        """Give the slot back unpublished. Does nothing after publishing."""
        self._loan.release()
        self._settle()

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is not None:
            self.abort()
        elif not self._loan.ended:
            self.publish()


class ReadLease(_Lease):
    """A pinned payload. Finalised exactly once: `consume`, or `release` (the default at the end of a ``with``)."""

    _ends = "consume() or release()"

    def __init__(self, ring: Slots, ticket: Ticket, rank: int, loan: Loan) -> None:
        self._ring = ring
        self._loan = loan
        self.ticket = ticket
        self.rank = rank
        self.view: memoryview = memoryview(loan)

    def __repr__(self) -> str:
        return f"<ReadLease {self.ticket.name} rank {self.rank} {'ended' if self._loan.ended else 'open'}>"

    def consume(self) -> bool:
        """Say that this rank has the payload, and unpin. False: finalised before, or consumed through another port."""
        try:
            return self._loan.consume(self.rank)  # of a closed ring the end of the loan unpins
        finally:
            self._settle()

    def acknowledge(self) -> bool:
        """Say that this rank has the payload, and keep the memory pinned until `release`. False: said before."""
        return self._ring.acknowledge(self.ticket, self.rank)

    def release(self) -> bool:
        """Unpin; the payload stays for the next attempt. False: this lease was finalised before."""
        released = self._loan.release()
        self._settle()
        return released

    def __exit__(self, *_: object) -> None:
        self.release()
