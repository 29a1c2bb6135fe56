"""SharedRingBuffer: payloads in shared memory, written and read under leases.

A slot goes FREE → WRITING → READY → READING → FREE; the transitions are compare-and-swaps on one atomic word in the
segment (native/ring/slot_word.hpp has the table). This file adds what needs no atomics: packing by schema, tickets,
overflow policies, leases that publish or roll back, and errors by name.

Any thread may call any method. Blocking calls release the GIL; inside an event loop use `asyncio.to_thread`.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, NoReturn, Self

import numpy as np

from transport import _ring
from transport.devices.arrays import DeviceTensor
from transport.devices.streams import RegisteredPages
from transport.errors import (
    LayoutError,
    LengthMismatchError,
    NoOwnerError,
    PayloadTooLargeError,
    SchemaError,
    StaleSlotError,
    TicketError,
    TransportError,
    UsageError,
    WrongKeyError,
    WrongRingError,
)
from transport.ring import attachment
from transport.ring.attachment import Attachment
from transport.ring.consumers import Consumers, consumers_of, consumers_text, rank_of, ranks_of
from transport.ring.leases import ReadLease, WriteLease, addresses_of, ordered_lengths
from transport.ring.overflow import Overflow, Overflowing
from transport.ring.packing import describe, describe_exact, flat, pack_into
from transport.ring.states import RingStatistics, statistics_of
from transport.ring.writes import PlannedWrite, Terms, Tickets, metadata_of, terms_of
from transport.runtime.arguments import waiting
from transport.runtime.descriptors import OF_A_RING, promised
from transport.schema import NOTHING, Schema
from transport.ticket import NO_SCHEMA, Identity, Ticket, host_identity

log = logging.getLogger(__name__)

MAX_READERS: Final = _ring.MAX_READERS
_PUBLISHED: Final = (_ring.READY, _ring.READING)
_ALL_DONE: Final = (1 << MAX_READERS) - 1
_VIEWED_SHARE: Final = 0.5  # views beyond it become copies, so that a reader with many views cannot block the writer


Sync = Literal["never", "publish"]
"""When what is written to a ring's file is on disk: when the system writes it there, or before it can be read."""


class Unread(NamedTuple):
    """A payload that is not consumed by all of its ranks: its ticket, and the version that its writer gave."""

    ticket: Ticket
    policy_version: int | None


class HeldPayload(NamedTuple):
    """A payload that `SharedRingBuffer.hold_unread` has pinned.

    Attributes:
        due: ranks that had not consumed it, at least one.
    """

    sequence: int  # of its publication
    slot: int
    generation: int
    size: int
    due: tuple[int, ...]
    policy_version: int | None


class SharedRingBuffer(Attachment):
    """A ring of slots in one shared-memory segment. Make it with `create` or `attach`.

    Attributes:
        name: of the segment; `attach` and same-host readers use it.
        file: the path of the file that it lies in; "": it lies in /dev/shm.
        ring_id: 32 hex digits, random, in every ticket.
        schema: what payloads look like, or None: any mapping of names to values, described by its ticket.
        fingerprint: of the schema, 16 bytes; zeros without one.
        data_ended: whether this object has said that no more is written (`end_data`).
        most_views: payloads that one attachment lends to views at a time, whose memory lasts as long as their arrays.
    """

    def __init__(self, native: _ring.Ring, schema: Schema | None, overflow: Overflow, *, writable: bool = True) -> None:
        super().__init__(native)
        self.schema = schema
        self._overflowing = Overflowing(native, overflow)
        self._secret = native.secret
        self._pages = RegisteredPages(read_only=not writable)
        self.data_ended = False
        self.file = native.file
        self.fingerprint = native.fingerprint
        self.most_views = max(int(self.slot_count * _VIEWED_SHARE), 1)
        self._ranks = ranks_of(native.consumers) if writable else 0
        self._originals: set[Identity] = set()  # of what was copied into it
        self._warned_of_views = False
        if writable:
            share_here(self)

    def __reduce__(self) -> NoReturn:
        """Raise UsageError, for `pickle` and `copy`."""
        raise UsageError(
            "a ring is not pickled: send its name, and attach there with SharedRingBuffer.attach(name, schema)"
        )

    @property
    def overflow(self) -> Overflow:
        """Behaviour of a write when every slot is in use; may be set."""
        return self._overflowing.policy

    @overflow.setter
    def overflow(self, policy: Overflow) -> None:
        self._overflowing.policy = policy

    # --- making one ---------------------------------------------------------------------------------
    @classmethod
    def create(
        cls,
        schema: Schema | None = None,
        *,
        slots: int = 64,
        slot_bytes: int | None = None,
        name: str | None = None,
        prefix: str = "",
        overflow: Overflow = "block",
        consumers: Sequence[str] | Mapping[str, int] | int | None = None,
        file: str | os.PathLike[str] | None = None,
        sync: Sync = "never",
        begins: bool = True,
    ) -> Self:
        """Make the ring, or take over the one of a dead writer when ``name`` or ``file`` exists.

        Args:
            schema: of every payload; None: each payload brings its own description.
            slots: payloads the ring holds, unread ones included.
            slot_bytes: payload bytes per slot; default the schema's largest payload.
            name: only for a ring that a restarted writer shall find again; default random.
            prefix: prefix of the random name, by which a parent process finds the segments of a killed writer.
            overflow: when every slot is in use, "block" waits, "error" raises, "overwrite" takes the oldest payload
                that nobody reads or has claimed, also where some of its ranks have consumed it.
            consumers: names of stages that each see every payload once, names with how many ranks each has, or how many
                ranks without names; at most 16 together. Every payload is written for all of them; `rank_of` and
                ``Trainer(rank="name")`` know the names. None: each write says for how many ranks it is.
            file: the ring lies in this file instead of /dev/shm, and outlives every process with what is unread in it
                (docs/UCXX.md#a-ring-in-a-file). The file names the ring. Only its user removes it.
            sync: of a file: "never", or "publish": a payload is on disk, and then it can be read; so it outlives a loss
                of power. `write_many` syncs once for all that it writes at a time.
            begins: False: nobody finds the ring before `begin_data`, and where what is set up with it fails, no trainer
                waits for it. One that was taken over is found meanwhile as it was left, in a file where a process still
                has it.

        Raises:
            RingBusyError: a living process keeps a ring of this name, or in this file.
            LayoutError: a dead writer's ring of this name has another layout or schema, other named consumers, or
                unread payloads for another number of ranks. Without ``name`` the new ring
                is made beside it. With one it is not: other processes attach by the name, and would find the old ring.
                Of a file: it has such a ring, or it is truncated, damaged or no ring; it is left as it is.
            SharedMemoryError: /dev/shm, or the file system, is too small or full; nothing is left behind.
            UsageError: a size that makes no sense, or ``name`` with ``file``.
        """
        if schema is not None and not isinstance(schema, Schema):
            raise UsageError(f'schema is a {type(schema).__name__}; make it with Schema.of(tokens=("int32", 1024), …)')
        if overflow not in ("block", "error", "overwrite"):
            raise UsageError(f"overflow={overflow!r}; choose 'block', 'error' or 'overwrite'")
        if slot_bytes is None:
            if schema is None:
                raise UsageError("a ring without a schema needs slot_bytes, the size of its largest payload")
            slot_bytes = schema.max_bytes
        elif schema is not None and slot_bytes < schema.max_bytes:
            raise PayloadTooLargeError(
                f"slot_bytes={slot_bytes} cannot hold the schema's largest payload of {schema.max_bytes} bytes"
            )
        if slots < 1 or slot_bytes < 1:
            raise UsageError(f"slots={slots} and slot_bytes={slot_bytes} must both be at least 1")
        if sync not in ("never", "publish"):
            raise UsageError(f"sync={sync!r}; choose 'never' or 'publish'")
        if file is None and sync != "never":
            raise UsageError(f"sync={sync!r} is for a ring in a file, and there is no file")
        if file is not None and name is not None:
            raise UsageError(f"name={name!r} and a file: the file names the ring; leave the name out")
        path = "" if file is None else attachment.placed(file)
        names = consumers_text(consumers)
        fingerprint = bytes.fromhex(schema.fingerprint) if schema is not None else bytes(16)
        given = attachment.name_in(path, prefix) if path else name
        chosen = attachment.random_name(prefix) if given is None else given
        native: _ring.Ring | None = None
        try:
            native = attachment.create(
                chosen, slots, slot_bytes, fingerprint, file=path, synced=sync == "publish", begins=begins
            )
            ring = cls(native, schema, overflow)
            ring._made_here = not path  # what is unread in a file stays in it
            ring._name_consumers(names)
            if schema is not None and len(schema.encode()) <= _ring.MAX_SCHEMA:
                native.schema = schema.encode()
            if given is None:  # one that is to be found again may be for a successor
                ring._forget_with(ring._pages.release, only_empty=False)
            return ring
        except LayoutError as error:
            if native is not None or path:  # it was attached to, and has other consumers, or the error says what to do
                raise
            raise LayoutError(
                f"{error}, expected {slots} slots of {slot_bytes} bytes and fingerprint {fingerprint.hex()}. The "
                "last process that serves the old ring removes it when its payloads are consumed. Give another name, "
                "or none, to make a new ring now; `transport reclaim` removes a ring that no process serves"
            ) from error
        except BaseException:  # an interrupt: the caller has no object yet through which to remove the segment
            attachment.give_up(native)
            raise

    @classmethod
    def attach(
        cls, name: str, schema: Schema | None = None, *, role: Literal["writer", "listener", "reader", "observer"]
    ) -> Self:
        """Attach to an existing ring. Each process that writes, serves or maps takes one of 16 owner places.

        Raises:
            RingNotFoundError: no such segment on this host, or its writer is still setting it up.
            LayoutError: not a ring, another layout version, or another schema than ``schema``.
            NoOwnerError: sixteen living processes are attached already.
            SharedMemoryError: the segment belongs to another user.
        """
        if role not in attachment.ROLES:
            raise UsageError(f"role={role!r}; choose 'writer', 'listener', 'reader' or 'observer'")
        native: _ring.Ring | None = None
        try:
            native = attachment.attach(name, role)
            if schema is not None and native.fingerprint.hex() != schema.fingerprint:
                raise SchemaError(
                    f"schema mismatch: ring {name} was made for {native.fingerprint.hex()}, "
                    f"got {schema.fingerprint}: both sides must use the same tensors, dtypes and shapes"
                )
            ring = cls(native, schema, "block", writable=role == "writer")
            ring._forget_with(ring._pages.release, only_empty=True)
            return ring
        except BaseException:  # an interrupt, too: the caller has no object yet through which to detach
            attachment.give_up(native)
            raise

    def _name_consumers(self, names: str) -> None:
        """Name the consumers of a new ring, or of one that was taken over and has as many ranks."""
        before = self.native.consumers
        if not names and not consumers_of(before):  # who makes it has no number of ranks: that of its payloads stays
            names = before
        self._ranks = ranks_of(names)
        if before != names:
            # Names stay: trainers have looked them up.
            others = {str(ticket.readers) for ticket in self.tickets() if ticket.readers != self._ranks}
            if others or consumers_of(before):
                self.close(keep_unread=True)
                raise LayoutError(
                    f"ring {self.name} was made for the consumers {before or ', '.join(sorted(others))}, not for "
                    f"{names or 'none'} (ranks of each name, or of none): make it with the same "
                    f"{'consumers' if consumers_of(before) else 'readers'}, or with another "
                    f"{'file' if self.file else 'name'}"
                )
            self.native.consumers = names

    @property
    def consumers(self) -> Consumers:
        """Ranks by the name of the stage, as the ring was made; empty: ranks have no names."""
        return consumers_of(self.native.consumers)

    def rank_of(self, consumer: str | int, rank: int | None = None) -> int:
        """Return the rank of this consumer's own ``rank``, for reads and acknowledgements; an int stays what it is.

        RankError: the ring has no consumer of this name, it has fewer ranks, or several and none was given.
        """
        return consumer if isinstance(consumer, int) else rank_of(self.consumers, consumer, rank)

    def readers_of(self, readers: int | None) -> int:
        """Return for how many ranks a payload is written: None: for all consumers, or one. UsageError: for others."""
        if readers is None:
            return self._ranks or 1
        if self._ranks and readers != self._ranks:
            raise UsageError(
                f"readers={readers!r:.40}; ring {self.ring_id[:8]} was made for readers={self._ranks}: leave "
                "readers out, or make the ring for as many"
            )
        return readers

    # --- writing ------------------------------------------------------------------------------------
    def write(
        self,
        values: Mapping[str, Any],
        *,
        readers: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        policy_version: int | None = None,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
        casting: Literal["safe", "same_kind", "unsafe"] = "safe",
    ) -> Ticket:
        """Copy named arrays into a slot (one pass over memory, checksum included) and publish it.

        Args:
            values: numpy, torch, CuPy, DLPack, buffers or scalars, by tensor name; text, bytes and nested values where
                the schema has them, anything where the ring has none (docs/PAYLOADS.md). What is in device memory is
                copied on the stream that is current in this thread, after what made it.
            readers: how many ranks (1 to 16) read the payload once each; None: the ring's consumers, or one.
            metadata: small values of the caller's own that travel in the ticket.
            policy_version: of the policy that made it, for claims with an ``oldest_version``.
            deadline_s: seconds after which the payload may be discarded unread, counted from when there is room for it,
                by the clock of this host.
            timeout_s: longest wait for a slot where overflow is "block"; None: no limit.

        Raises:
            SchemaError: the values do not fit the schema.
            UsageError: readers, metadata, deadline_s or timeout_s are not what they are said to be; no slot is taken.
            PayloadTooLargeError: a payload without a schema that is larger than a slot.
            RingFullError: no slot became free in time.
            MissingDependencyError: a value is in device memory, and CuPy is not installed.
        """
        terms = terms_of(self.readers_of(readers), deadline_s, policy_version)
        arrays: Any
        if self.schema is None:
            schema, arrays, lengths = describe_exact(values)
        else:
            schema = self.schema
            arrays, lengths = describe(schema, values, casting=casting)
        with self._reserve(schema, lengths, metadata, terms, timeout_s) as lease:
            layout = lease.layout
            if schema.kinds:
                layout, arrays = flat(layout, arrays)
            on_device = next((array for array in arrays if isinstance(array, DeviceTensor)), None)
            if on_device is not None:
                self.register(lease.slot, on_device.device)
            lease.checksum = pack_into(layout, arrays, lease.memory)
        return lease.ticket

    def write_many(
        self,
        payloads: Iterable[Mapping[str, Any]],
        *,
        readers: int | None = None,
        metadata: Mapping[str, Any] | Iterable[Mapping[str, Any] | None] | None = None,
        policy_version: int | None = None,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
        casting: Literal["safe", "same_kind", "unsafe"] = "safe",
    ) -> Tickets:
        """Write many payloads in one call, which costs a fraction of as many `write`; their tickets in order.

        All are looked at before the first is written: what is refused leaves nothing behind. Values of contiguous
        numpy arrays of exactly the schema's dtypes are the fastest. Payloads in device memory are written one by one.

        Args:
            payloads: as ``values`` of `write`.
            metadata: one mapping for all, or one for each payload.
            policy_version: of the policy that made them, for claims with an ``oldest_version``.
            timeout_s: longest wait for slots, for the whole call.

        Raises:
            RingFullError: not all found a slot in time; ``written`` has the tickets of those that did. So has whatever
                else ends the call midway, KeyboardInterrupt included.
            SchemaError, PayloadTooLargeError, UsageError: as `write`; nothing was written.
        """
        wait_s = waiting(timeout_s, "timeout_s")
        batch = self.plan_many(
            payloads,
            readers=readers,
            metadata=metadata,
            policy_version=policy_version,
            deadline_s=deadline_s,
            casting=casting,
        )
        deadline = None if wait_s is None else _ring.Deadline(wait_s)
        return batch.write_all(lambda: batch.write(None if deadline is None else deadline.left_s))

    def plan_many(
        self,
        payloads: Iterable[Mapping[str, Any]],
        *,
        readers: int | None = None,
        metadata: Mapping[str, Any] | Iterable[Mapping[str, Any] | None] | None = None,
        policy_version: int | None = None,
        deadline_s: float | None = None,
        casting: Literal["safe", "same_kind", "unsafe"] = "safe",
    ) -> PlannedWrite:
        """Look at many payloads for `PlannedWrite.write`, which writes them as there is room: `write_many` in steps.

        Arguments and errors are those of `write_many`.
        """
        batch = list(payloads)
        each = list(zip(batch, metadata_of(metadata, len(batch)), strict=True))
        terms = terms_of(self.readers_of(readers), deadline_s, policy_version)

        def write_alone(
            values: Mapping[str, Any], metadata: Mapping[str, Any] | None, timeout_s: float | None
        ) -> Ticket:
            return self.write(
                values,
                readers=terms.readers,
                metadata=metadata,
                policy_version=terms.policy_version,
                deadline_s=terms.deadline_s,
                timeout_s=timeout_s,
                casting=casting,
            )

        plan = PlannedWrite(self, casting, terms, each, self._overflowing.take, write_alone)
        self._overflowing.may_expire |= terms.expire
        return plan

    def write_copy(
        self,
        ticket: Ticket,
        data: Any,
        schema: Schema | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        policy_version: int | None = None,
        timeout_s: float | None = None,
    ) -> Ticket:
        """Write a payload as its bytes lay in the slot of another ring, for as many ranks, with the same deadline.

        Args:
            ticket: of the other ring. data: its ``size`` bytes, which the caller has verified.
            schema: of the payload, where neither the ticket nor this ring has it.

        Raises:
            SchemaError: the ticket does not fit the schema, or this ring has another one.
            UsageError: this ring's payloads are for another number of ranks.
            TicketError: the ticket that it would get here is too large.
            PayloadTooLargeError, RingFullError: as `write`.
        """
        known, terms = self._copied(ticket, schema, metadata, policy_version)
        with self._reserve(known, ticket.lengths, metadata, terms, timeout_s) as lease:
            _ring.copy(lease.memory, data)
            lease.checksum = ticket.checksum
        self._originals.add(ticket.origin)
        return lease.ticket

    def check_copy(
        self, ticket: Ticket, schema: Schema | None = None, *, metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Refuse what `write_copy` refuses, whichever slot it would get."""
        self._copied(ticket, schema, metadata, None)

    def _copied(
        self, ticket: Ticket, schema: Schema | None, metadata: Mapping[str, Any] | None, policy_version: int | None
    ) -> tuple[Schema | None, Terms]:
        """Return the schema and the terms of a copy, which is one that this ring can hold."""
        known = None if ticket.bare else ticket.schema or self.schema or schema
        ticket.layout(known)
        if not ticket.bare and self.fingerprint.hex() not in (NO_SCHEMA, ticket.schema_fingerprint):
            raise SchemaError(f"payload {ticket.name} has another schema than ring {self.ring_id[:8]}")
        terms = terms_of(self.readers_of(ticket.readers), None, policy_version, deadline=ticket.deadline)
        self._check_size(ticket.size)
        ticket.check_copy(
            ring=self.ring_id,
            segment=self.name,
            host=host_identity(),
            addresses=addresses_of(self.native.addresses),
            ports=self.native.ports(),
            schema=known if self.schema is None else None,
            metadata=dict(metadata or {}),
        )
        return known, terms

    def _check_size(self, size: int) -> None:
        if size > self.slot_capacity:
            raise PayloadTooLargeError(
                f"a payload of {size} bytes does not fit a slot of {self.slot_capacity}: "
                "make the ring with a larger slot_bytes"
            )

    def originals(self) -> set[Identity]:
        """`Ticket.origin` of all that `write_copy` of this object has written, and of what is unread."""
        return self._originals | {ticket.origin for ticket in self.tickets()}

    def mark(
        self, metadata: Mapping[str, Any], *, readers: int | None = None, timeout_s: float | None = None
    ) -> Ticket:
        """Publish a slot without fields, whose metadata says something; also in a ring with a schema.

        UsageError, RingFullError: as `write`.
        """
        terms = terms_of(self.readers_of(readers), None)
        with self._reserve(None, (), metadata, terms, timeout_s) as lease:
            pass
        return lease.ticket

    def write_raw(
        self,
        data: Any,
        *,
        readers: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Ticket:
        """Copy contiguous bytes into a slot and publish it; readers get one uint8 array named "data"."""
        source = np.frombuffer(data, dtype=np.uint8)
        if self.schema is not None:
            raise SchemaError("write_raw needs a ring without a schema; use write() with the schema's tensors")
        return self.write(
            {"data": source}, readers=readers, metadata=metadata, deadline_s=deadline_s, timeout_s=timeout_s
        )

    def reserve(
        self,
        lengths: Mapping[str, int] | Schema | None = None,
        *,
        readers: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
    ) -> WriteLease:
        """Hand out the slot's own memory as arrays to fill: a payload written without any copy.

        Use as a context manager: the end of the ``with`` publishes, an exception in it gives the slot back.

        Args:
            lengths: actual length of each ragged tensor by name, and of each optional one that is there (of one that is
                not ragged any number); where the ring has no schema, this payload's `Schema`.
        """
        terms = terms_of(self.readers_of(readers), deadline_s)
        if isinstance(lengths, Schema):
            if self.schema is not None:
                raise SchemaError("this ring has a schema; give the lengths of its ragged tensors only")
            return self._reserve(lengths, ordered_lengths(lengths, {}), metadata, terms, timeout_s)
        if self.schema is None:
            raise SchemaError("a ring without a schema needs reserve(Schema(...)), the description of this payload")
        return self._reserve(self.schema, ordered_lengths(self.schema, lengths or {}), metadata, terms, timeout_s)

    def _reserve(
        self,
        schema: Schema | None,
        lengths: tuple[int, ...],
        metadata: Mapping[str, Any] | None,
        terms: Terms,
        timeout_s: float | None,
    ) -> WriteLease:
        # Whatever can be refused is refused before there is a slot that the refusal would keep.
        try:
            small = dict(metadata or {})
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"metadata is a {type(metadata).__name__}; give a mapping of names to small values"
            ) from error
        wait_s = waiting(timeout_s, "timeout_s")
        layout = NOTHING if schema is None else schema.layout(lengths)
        self._check_size(layout.total)
        self._overflowing.may_expire |= terms.expire
        loan = self._overflowing.take(wait_s)
        try:  # nothing in between, where an interrupt could come
            return WriteLease(self, loan, schema, lengths, layout, small, terms)
        except BaseException:  # an interrupt: what it is handled with may keep the loan
            loan.release()
            raise

    # --- reading on this host -------------------------------------------------------------------------
    def check(self, ticket: Ticket, rank: int = 0) -> None:
        """Refuse a ticket of another ring, a wrong key or a rank out of range."""
        ticket.check_rank(rank)
        if ticket.ring != self.ring_id:
            raise WrongRingError(
                f"ticket {ticket.name} belongs to ring {ticket.ring[:8]}, this is ring {self.ring_id[:8]}"
            )
        if ticket.slot >= self.slot_count:
            raise StaleSlotError(f"ticket {ticket.name}: this ring has {self.slot_count} slots")
        if ticket.key != self.key(ticket.slot, ticket.generation):
            raise WrongKeyError(f"ticket {ticket.name}: key mismatch for this slot and generation")

    def key(self, slot: int, generation: int) -> int:
        """Return the key that a ticket for this slot and generation carries."""
        return _ring.slot_key(self._secret, slot, generation)

    def read_raw(self, ticket: Ticket, rank: int = 0) -> ReadLease:
        """Pin a payload and lend its bytes, read-only, until the lease is consumed or released.

        Raises:
            StaleSlotError: consumed by this rank, overwritten, discarded or expired.
            WrongRingError, WrongKeyError, RankError, LengthMismatchError: the ticket is not for this payload.
        """
        ticket.check_rank(rank)
        if ticket.ring != self.ring_id:
            raise WrongRingError(
                f"ticket {ticket.name} belongs to ring {ticket.ring[:8]}, this is ring {self.ring_id[:8]}"
            )
        loan = self.native.begin_read(ticket.slot, ticket.generation, ticket.key, ticket.size, rank)
        if isinstance(loan, int):
            raise self.refusal(loan, ticket, rank)
        return ReadLease(self, ticket, rank, loan)

    def lend(self, ticket: Ticket, rank: int, *, bounded: bool = True) -> _ring.Loan | None:
        """Pin a payload while anything looks into its bytes, read-only. None: too many slots are in use so: copy it.

        Args:
            bounded: at most `most_views` are lent at a time.

        Raises what `read_raw` raises.
        """
        most = self.most_views if bounded else 0
        loan = self.native.begin_read(ticket.slot, ticket.generation, ticket.key, ticket.size, rank, most)
        if isinstance(loan, int):
            raise self.refusal(loan, ticket, rank)
        if loan is None and not self._warned_of_views:
            self._warned_of_views = True
            held = self.native.lent
            log.warning("%d views of ring %s are held; further payloads are copied", held, self.ring_id[:8])
        return loan

    def copy_out(self, ticket: Ticket, rank: int, destination: Any) -> None:
        """Copy a payload from its slot into ``destination`` (flat bytes of its size). Raises what `read_raw` raises."""
        with self.read_raw(ticket, rank) as lease:
            _ring.copy(destination, lease.view)

    def refusal(self, answer: int, ticket: Ticket, rank: int) -> TransportError:
        """Return the error for an answer of the native `begin_read`. Raises it where the ticket alone explains it."""
        self.check(ticket, rank)
        if answer == _ring.READ_OTHER_LENGTH:
            length = self.native.info(ticket.slot).length
            return LengthMismatchError(
                f"payload {ticket.name}: size mismatch: slot {length} bytes, ticket {ticket.size}"
            )
        if answer == _ring.READ_EXPIRED:
            return StaleSlotError(f"the deadline of payload {ticket.name} has passed")
        what = "was consumed by this rank, or discarded" if answer == _ring.READ_DONE else "is no longer in its slot"
        return StaleSlotError(f"payload {ticket.name} {what}")

    def acknowledge(self, ticket: Ticket, rank: int = 0) -> bool:
        """Consume without unpinning: logical consumption and memory are separate. False: consumed before, or gone."""
        ticket.check_rank(rank)
        return self.native.consume(ticket.slot, ticket.generation, rank)

    def discard(self, ticket: Ticket) -> bool:
        """Free a payload that is not needed, for every rank. False: it was gone."""
        self.check(ticket)
        return self.native.discard(ticket.slot, ticket.generation)

    # --- leases of claims -----------------------------------------------------------------------------
    def set_lease(self, lease_s: float | None) -> None:
        """Let claims of this attachment end when it is silent for so long, as when its process is stopped.

        Every claim, and every end or renewal of one, is a sign of life. None: claims end with the process only, as they
        do without this call. The longest lease that was ever asked for counts.
        """
        if lease_s is not None and not lease_s > 0:
            raise UsageError(f"lease_s={lease_s}; a lease lasts for some time, and None for ever")
        self.native.set_lease(lease_s)

    # --- looking and tidying ----------------------------------------------------------------------------
    def get_ready_count(self) -> int:
        """Slots that are READY: published, and not being read."""
        return self.native.state_counts()[2]

    def statistics(self) -> RingStatistics:
        """States and counters at this moment, behind a reclaim: what only dead processes held counts as free."""
        self.reclaim()
        return statistics_of(self.native)

    def tickets(self) -> list[Ticket]:
        """Tickets of all published, not fully consumed payloads, oldest first, as `unread` has them."""
        return [each.ticket for each in self.unread()]

    def unread(self) -> list[Unread]:
        """All published, not fully consumed payloads, oldest first; for republishing after a crash.

        A payload whose ticket in the ring cannot be read is left out, with a warning that names its slot.
        """
        found = []
        for slot in range(self.slot_count):
            info = self.native.info(slot)
            if info.state in _PUBLISHED and info.done != _ALL_DONE:
                ticket = self.ticket_in(slot, info.generation)
                if ticket is not None:
                    found.append((info.sequence, Unread(ticket, info.policy_version)))
        return [payload for _, payload in sorted(found, key=lambda each: each[0])]

    def ticket_in(self, slot: int, generation: int) -> Ticket | None:
        """Return the ticket of a slot's payload. None: it is gone; or, with a warning, its ticket cannot be read."""
        note = self.native.note(slot, generation)
        try:
            return None if note is None else Ticket.decode(note)
        except TicketError as error:
            log.warning(
                "ring %s: the ticket of slot %d generation %d cannot be recovered (%s); only a process "
                "that already has this ticket can read or free the payload",
                self.ring_id[:8],
                slot,
                generation,
                error,
                extra={"ring": self.ring_id},
            )
            return None

    def hold_unread(self) -> list[HeldPayload]:
        """Pin all published, not fully consumed payloads, oldest first: their memory stays, whatever becomes of them.

        Others claim and consume them meanwhile. A `ReadLease` with a loan of the slot reads one and unpins it; what is
        not unpinned stays until this attachment is closed. One attachment pins a payload once: use one of its own.
        """
        native = self.native
        held = []
        ranks: dict[int, tuple[int, ...]] = {}  # due, by what is done
        for slot in range(self.slot_count):
            while True:
                info = native.info(slot)
                done = info.done
                if done == _ALL_DONE or info.state not in _PUBLISHED:
                    break
                due = ranks.get(done)
                if due is None:  # ranks that a payload is not written for begin as done
                    due = ranks[done] = tuple(rank for rank in range(_ring.MAX_READERS) if not done >> rank & 1)
                generation = info.generation
                if native.pin(slot, generation, due[0]) == _ring.PIN_OK:
                    held.append(HeldPayload(info.sequence, slot, generation, info.length, due, info.policy_version))
                    break  # else it was consumed or overwritten since the look
        return sorted(held)

    def discard_expired(self, now: float | None = None) -> int:
        """Discard READY payloads whose deadline has passed (``now`` in Unix seconds); how many."""
        return self._overflowing.discard_expired(time.time() if now is None else now)

    # --- the beginning and the end ---------------------------------------------------------------------
    def begin_data(self) -> None:
        """Let trainers and other processes find this ring, made with ``begins=False``."""
        self.native.begun = True

    def end_data(self) -> None:
        """Say that this writer writes nothing more, before it closes. A killed writer says nothing.

        Say it behind the last write. The data have ended when a writer has said so, and every other one has, too, or is
        gone; trainers that find this ring learn it then (`FoundRings.finished`).
        """
        self.native.end_data()
        self.data_ended = True

    def only_serve(self) -> None:
        """Say that this process writes nothing: the writers that attach say the end of the data."""
        self.native.only_serve()

    def close(self, *, keep_unread: bool = False) -> None:
        """Give up every hold and detach. Idempotent.

        Args:
            keep_unread: leave unread payloads to the next writer of this ring's ``name``, as a killed writer does; for
                one that took a ring over and then cannot work.

        When the writer closes, it discards unread payloads, because no process serves them. It removes the segment
        unless listeners or other writers are attached. Others leave unread payloads, because a successor may take over
        the ring of a dead writer. The last owner removes an empty segment. The writer of a ring in a file leaves as
        others do: what is unread waits there for the next one.

        It does not wait. A slot that a write, a lease or a view of another thread still uses stays theirs until they
        end, with ClosedError where there is something to publish or to consume, and so does the owner place.
        """
        if keep_unread:
            self._made_here = False
        super().close()

    def _leave(self) -> None:
        mapped = self.native.payload(0)  # what is registered with CUDA is given back before it is unmapped
        attachment.leave(self.native, only_empty=not self._made_here, give_up_unread=self._made_here)
        self.settle()
        mapped.release()

    def settle(self) -> None:
        """Note that a lease has ended, or the ring was closed: the last of them gives CUDA's registrations back."""
        if self.native.closed and not self.native.lent:
            self._pages.release()

    def register(self, slot: int, device: int) -> bool:
        """Register a slot's pages with CUDA, once, so that copies between them and a device run at the bus's speed.

        False where CUDA refuses; copies work all the same.
        """
        return self._pages.ensure(slot, lambda: self.native.payload(slot), device)


_HERE: Final[weakref.WeakValueDictionary[str, SharedRingBuffer]] = weakref.WeakValueDictionary()


def share_here(ring: SharedRingBuffer) -> None:
    """Let reads by ticket of this process go through this attachment, unless they go through another one."""
    if open_here(ring.ring_id) is None:
        _HERE[ring.ring_id] = ring


def open_here(ring_id: str) -> SharedRingBuffer | None:
    """Return an open attachment of this process for reads; None: there is none. Its holder may close it at any time."""
    ring = _HERE.get(ring_id)
    return None if ring is None or ring.native.closed else ring


def attached_reader(name: str) -> SharedRingBuffer:
    """Attach as a reader, unless that would leave too few owner numbers to the ring's writer, listeners and a snapshot.

    Raises what `SharedRingBuffer.attach` raises, and OpenFilesError.
    """
    with promised(OF_A_RING, "it"):
        ring = SharedRingBuffer.attach(name, role="reader")
    readers = sum(owner.alive and owner.role == _ring.ROLE_READER for owner in ring.native.owners())
    if readers > _ring.MAX_OWNERS - 2 - max(1, len(ring.native.ports())):
        ring.close()  # not native.close(): all other owners may have detached meanwhile
        raise NoOwnerError("its remaining owner numbers are reserved for its writer, its listeners and a snapshot")
    return ring
