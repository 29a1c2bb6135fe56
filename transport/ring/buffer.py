"""SharedRingBuffer: payloads in shared memory, written and read under leases.

A slot goes FREE → WRITING → READY → READING → FREE; the transitions are compare-and-swaps on one atomic word in the
segment (native/ring/slot_word.hpp has the table). This file adds what needs no atomics: packing by schema, tickets,
overflow policies, leases that publish or roll back, and errors by name.

Any thread may call any method. Blocking calls release the GIL; inside an event loop use `asyncio.to_thread`.
"""

from __future__ import annotations

import logging
import math
import numbers
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from transport import _ring
from transport.devices.arrays import DeviceTensor
from transport.errors import (
    InternalError,
    PayloadTooLargeError,
    RingFullError,
    SchemaError,
    TicketError,
    UsageError,
)
from transport.ring.leases import Draft, WriteLease, ordered_lengths
from transport.ring.packing import describe, describe_exact, flat, pack_into
from transport.ring.reading import MAX_READERS, RingReading
from transport.ring.states import RingStatistics, SlotState, named, statistics_of
from transport.ring.writes import Batch, Terms, Tickets, metadata_of, terms_of, version_of
from transport.runtime.arguments import expect, whole
from transport.runtime.explaining import explained
from transport.schema import Schema
from transport.ticket import Ticket

__all__ = ["MAX_READERS", "SharedRingBuffer"]

log = logging.getLogger(__name__)

_ALL_DONE: Final = (1 << MAX_READERS) - 1
_FOR_EVER_S: Final = 1e9  # 30 years


class Unread(NamedTuple):
    """A payload that is not consumed by all of its ranks: its ticket, and the version that its writer gave."""

    ticket: Ticket
    policy_version: int | None


class SharedRingBuffer(RingReading):
    """A ring of slots in one shared-memory segment. Make it with `create` or `attach`.

    Attributes:
        name: of the segment; `attach` and same-host readers use it.
        ring_id: 32 hex digits, random, in every ticket.
        schema: what payloads look like, or None: any mapping of names to values, described by its ticket.
    """

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
            readers: how many ranks (1 to 16) read the payload once each; None: the named consumers, or one.
            metadata: small values of the caller's own that travel in the ticket.
            policy_version: of the policy that made it, for claims with an ``oldest_version``.
            deadline_s: seconds from now after which the payload may be discarded unread, by the clock of this host.
            timeout_s: longest wait for a slot where overflow is "block"; None: no limit.

        Raises:
            SchemaError: the values do not fit the schema.
            UsageError: readers, metadata, deadline_s or timeout_s are not what they are said to be; no slot is taken.
            PayloadTooLargeError: a payload without a schema that is larger than a slot.
            RingFullError: no slot became free in time.
            MissingDependencyError: a value is in device memory, and CuPy is not installed.
        """
        if type(values) is not dict:  # the usual one, without a look at abstract classes
            expect(values, Mapping, "write()", "a mapping of names to arrays")
        if policy_version is not None:
            policy_version = version_of(policy_version)
        arrays, lengths, schema = self._describe(values, casting)
        with self._reserve(schema, lengths, None, readers, metadata, deadline_s, timeout_s) as lease:
            lease.policy_version = policy_version
            if lease.layout is None:
                raise InternalError("a lease by schema has a layout")
            layout = lease.layout
            if schema.kinds:
                layout, arrays = flat(layout, arrays)
            on_device = next((array for array in arrays if isinstance(array, DeviceTensor)), None)
            if on_device is not None:
                self.register(lease.slot, on_device.device)
            lease.checksum = pack_into(layout, arrays, lease.memory, checksum=True)
        return lease.ticket

    @explained
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
            RingFullError: not all found a slot in time; ``written`` has the tickets of those that did.
            SchemaError, PayloadTooLargeError, UsageError: as `write`; nothing was written.
        """
        batch = list(payloads)
        each = metadata_of(metadata, len(batch))
        terms = terms_of(self.readers_of(readers), deadline_s, policy_version)
        deadline = None if timeout_s is None else _ring.Deadline(timeout_s)

        def left_s() -> float | None:
            return None if deadline is None else deadline.left_s

        plan = self._call(Batch, self.native, self.schema, casting)
        on_host = [plan.add(values, note) for values, note in zip(batch, each, strict=True)]
        plan.check()
        self._overflowing.may_expire |= deadline_s is not None
        if all(on_host):
            return self._call(plan.write, terms, lambda: self._take(left_s()))
        return self._write_each(batch, each, terms, left_s, casting)

    def _write_each(
        self,
        batch: Sequence[Mapping[str, Any]],
        metadata: Sequence[Mapping[str, Any] | None],
        terms: Terms,
        left_s: Callable[[], float | None],
        casting: Any,
    ) -> Tickets:
        """Payloads in device memory."""
        deadline_s = None if terms.deadline is None else terms.deadline - terms.created
        written: list[bytes] = []
        for values, note in zip(batch, metadata, strict=True):
            try:
                ticket = self.write(
                    values,
                    readers=terms.readers,
                    metadata=note,
                    policy_version=terms.policy_version,
                    deadline_s=deadline_s,
                    timeout_s=left_s(),
                    casting=casting,
                )
            except RingFullError as error:
                error.written = Tickets(written)
                raise
            written.append(ticket.encode())
        return Tickets(written)

    @explained
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
        if isinstance(data, str) or data is None:
            expect(data, bytes, "write_raw()", "bytes, or what has the buffer protocol")
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
            lengths: actual length of each ragged tensor by name; where the ring has no schema, this payload's `Schema`.
        """
        if lengths is not None:
            expect(lengths, (Schema, Mapping), "reserve()", "the lengths by name, or this payload's Schema")
        if isinstance(lengths, Schema):
            if self.schema is not None:
                raise SchemaError("this ring has a schema; give the lengths of its ragged tensors only")
            return self._reserve(lengths, None, None, readers, metadata, deadline_s, timeout_s)
        if self.schema is None:
            raise SchemaError("a ring without a schema needs reserve(Schema(...)), the description of this payload")
        return self._reserve(self.schema, None, lengths or {}, readers, metadata, deadline_s, timeout_s)

    def _describe(self, values: Mapping[str, Any], casting: Any) -> tuple[Sequence[Any], tuple[int, ...], Schema]:
        if self.schema is not None:
            arrays, lengths = describe(self.schema, values, casting=casting)
            return arrays, lengths, self.schema
        schema, arrays, lengths = describe_exact(values)
        return arrays, lengths, schema

    def _reserve(
        self,
        schema: Schema,
        lengths: tuple[int, ...] | None,
        named_lengths: Mapping[str, int] | None,
        readers: int | None,
        metadata: Mapping[str, Any] | None,
        deadline_s: float | None,
        timeout_s: float | None,
    ) -> WriteLease:
        # Whatever can be refused is refused before there is a slot that the refusal would keep.
        readers = self.readers_of(None if readers is None else whole(readers, "readers"))
        if not 1 <= readers <= MAX_READERS:
            raise UsageError(f"readers={readers}; a payload is written for 1 to {MAX_READERS} ranks")
        try:
            small = dict(metadata or {})
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"metadata is a {type(metadata).__name__}; give a mapping of names to small values"
            ) from error
        now = time.time()
        deadline = None if deadline_s is None else now + _seconds(deadline_s, "deadline_s")
        wait_s = None if timeout_s in (None, math.inf) else _seconds(timeout_s, "timeout_s")
        if lengths is None:
            lengths = ordered_lengths(schema, named_lengths or {})
        layout = schema.layout(lengths)
        if layout.total > self.slot_capacity:
            raise PayloadTooLargeError(
                f"a payload of {layout.total} bytes does not fit a slot of {self.slot_capacity}: "
                "make the ring with a larger slot_bytes"
            )
        draft = Draft(
            schema=schema, lengths=lengths, readers=int(readers), metadata=small, created=now, deadline=deadline
        )
        taken: list[tuple[int, int]] = []
        try:
            slot, generation = self._take(wait_s, taken)
            self._overflowing.may_expire |= deadline is not None
            lease = WriteLease(self, slot, generation, layout, draft)
            draft.created = time.time()
            if deadline is not None:  # counts from when there is room
                draft.deadline = deadline + draft.created - now
            return lease
        except _ring.RingFault as fault:  # closed by another thread, which has freed the slot
            raise named(fault) from None
        except BaseException:
            if taken and not self.native.closed:
                self.native.abort(*taken[0])
            raise

    def _take(self, timeout_s: float | None, into: list[tuple[int, int]] | None = None) -> tuple[int, int]:
        """A slot to write, by the ring's overflow policy."""
        return self._call(self._overflowing.take, timeout_s, into)

    # --- looking and tidying ----------------------------------------------------------------------------
    def get_ready_count(self) -> int:
        """Slots that are READY: published, and not being read."""
        return self._call(self.native.state_counts)[2]

    def statistics(self) -> RingStatistics:
        """States and counters at this moment."""
        return self._call(statistics_of, self.native)

    def tickets(self) -> list[Ticket]:
        """Tickets of all published, not fully consumed payloads, oldest first, as `unread` has them."""
        return [each.ticket for each in self.unread()]

    def unread(self) -> list[Unread]:
        """All published, not fully consumed payloads, oldest first; for republishing after a crash.

        A payload whose ticket in the ring cannot be read is left out, with a warning that names its slot.
        """
        found = []
        for slot in range(self.slot_count):
            info = self._call(self.native.info, slot)
            if info.state in (SlotState.READY, SlotState.READING) and info.done != _ALL_DONE:
                note = self._call(self.native.note, slot, info.generation)
                if note is None:
                    continue
                try:
                    version = None if info.policy_version == _ring.NO_VERSION else info.policy_version
                    found.append((info.sequence, Unread(Ticket.decode(note), version)))
                except TicketError as error:
                    log.warning(
                        "ring %s: the ticket of slot %d generation %d cannot be recovered (%s); only a process "
                        "that already has this ticket can read or free the payload",
                        self.ring_id[:8],
                        slot,
                        info.generation,
                        error,
                        extra={"ring": self.ring_id},
                    )
        return [payload for _, payload in sorted(found, key=lambda each: each[0])]

    @explained
    def discard_expired(self, now: float | None = None) -> int:
        """Discard READY payloads whose deadline has passed (``now`` in Unix seconds); how many."""
        return self._call(self._overflowing.discard_expired, time.time() if now is None else now)


def _seconds(value: Any, name: str) -> float:
    if not _is(value, numbers.Real) or not -_FOR_EVER_S <= value <= _FOR_EVER_S:  # not a number is neither
        raise UsageError(f"{name}={value!r}; give a number of seconds, or None for no limit")
    return float(value)


def _is(value: object, kind: type) -> bool:
    """`isinstance`, for what callers pass whatever its type says; numpy's numbers are registered with `numbers`."""
    return isinstance(value, kind)
