"""Many payloads written in one call: looked at first, all of them, then packed, hashed and published by native code.

A plan is made of the payloads before the first slot is taken, so that what is refused leaves nothing behind. Plain
contiguous arrays that are what the ring's schema says go into it without any work in Python; the others are looked at
here as `SharedRingBuffer.write` does, and converted.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Protocol, overload

import msgspec
import numpy as np

from transport import _ring
from transport.devices.arrays import DeviceTensor
from transport.errors import InternalError, PayloadTooLargeError, RankError, UsageError
from transport.ring.packing import Casting, describe, describe_exact, flat
from transport.runtime.arguments import seconds
from transport.schema import Schema
from transport.ticket import MAX_ENCODED_BYTES, Ticket, encoded_metadata, host_identity

_FOR_EVER_S: Final = 1e9  # 30 years
_NO_METADATA = msgspec.msgpack.encode({})
_encode = msgspec.msgpack.Encoder().encode


class Slots(Protocol):
    """The part of a `SharedRingBuffer` that a lease, a claim or a batch uses."""

    native: _ring.Ring
    name: str
    ring_id: str
    schema: Schema | None

    def key(self, slot: int, generation: int) -> int: ...
    def register(self, slot: int, device: int) -> bool: ...
    def acknowledge(self, ticket: Ticket, rank: int = 0) -> bool: ...
    def settle(self) -> None: ...


class Tickets(Sequence[Ticket]):
    """The tickets of payloads that were written together, in their order. Each is made when it is looked at.

    Attributes:
        encoded: what `Ticket.encode` would give, in which form queues take tickets.
    """

    def __init__(self, encoded: Sequence[bytes]) -> None:
        self.encoded = encoded

    def __len__(self) -> int:
        return len(self.encoded)

    @overload
    def __getitem__(self, at: int) -> Ticket: ...
    @overload
    def __getitem__(self, at: slice) -> Tickets: ...
    def __getitem__(self, at: int | slice) -> Ticket | Tickets:
        if isinstance(at, slice):
            return Tickets(self.encoded[at])
        return Ticket.decode(self.encoded[at])

    def __repr__(self) -> str:
        return f"<Tickets of {len(self)} payloads>"


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """Properties that the payloads of one call share.

    Attributes:
        deadline_s: after which each may be discarded unread, counted from when there is room for it.
        deadline: of a copy, where there is no ``deadline_s``: that of its original.
    """

    readers: int
    policy_version: int | None
    deadline_s: float | None
    deadline: float | None

    @property
    def expire(self) -> bool:
        """True if the payloads have a deadline."""
        return self.deadline_s is not None or self.deadline is not None

    def times(self) -> tuple[float, float | None]:
        """Return creation and deadline of a payload whose slot was just taken, by the clock of this host."""
        now = time.time()
        return now, self.deadline if self.deadline_s is None else now + self.deadline_s


class PlannedWrite:
    """Payloads of one call, on their way into slots: all are looked at when it is made, and then written.

    Raises what `SharedRingBuffer.write_many` raises for payloads that cannot be written.

    Args:
        ring: into which they are written.
        payloads: each with its metadata.
        take: waits for a slot for so many seconds.
        write_alone: writes one payload, waiting for so many seconds.
    """

    def __init__(
        self,
        ring: Slots,
        casting: Casting,
        terms: Terms,
        payloads: Sequence[tuple[Mapping[str, Any], Mapping[str, Any] | None]],
        take: Callable[[float | None], _ring.Loan],
        write_alone: Callable[[Mapping[str, Any], Mapping[str, Any] | None, float | None], Ticket],
    ) -> None:
        self._ring = ring
        self._native = native = ring.native
        self._schema = schema = ring.schema
        self._casting = casting
        self._terms = terms
        self._payloads = payloads
        self._take = take
        self._write_alone = write_alone
        self._written = 0
        self._alone: list[bytes] = []  # of payloads in device memory
        head = _head(native.ring_id.hex(), native.name, native.addresses, native.ports())
        fields, middle = ([], b"") if schema is None else _fields(schema)
        self._plan = _ring.WritePlan(fields, np.ndarray, head, middle, _NO_METADATA)
        on_host = [self._add(values, metadata) for values, metadata in payloads]
        self._on_host = all(on_host)
        self._check()

    @property
    def left(self) -> int:
        """Payloads that are not written yet."""
        return len(self._payloads) - self._written

    def write_all(self, write_some: Callable[[], object]) -> Tickets:
        """Publish all payloads by calls of ``write_some``, which calls `write`.

        An exception that ends it midway, KeyboardInterrupt included, has the tickets of what is written as ``written``.
        """
        try:
            while self.left:
                write_some()
        except BaseException as error:
            error.written = self.published  # type: ignore[attr-defined]
            raise
        return self.published

    @property
    def published(self) -> Tickets:
        """Tickets of the payloads that are written, also of those that an interrupted call wrote."""
        return Tickets(self._plan.notes(0) if self._on_host else self._alone)

    def _add(self, values: Mapping[str, Any], metadata: Mapping[str, Any] | None) -> bool:
        """Take one more payload into the plan. False: a tensor of it is in device memory."""
        encoded = encoded_metadata(metadata) if metadata else None
        if self._schema is not None and not self._schema.kinds and self._plan.add(values, encoded):
            return True
        if self._schema is None:
            schema, fields, lengths = describe_exact(values)
            middle = _middle(schema, inline=True)
        else:
            schema, middle = self._schema, None
            fields, lengths = describe(schema, values, casting=self._casting)
        layout = schema.layout(lengths)
        arrays: Sequence[Any] = fields
        if schema.kinds:
            layout, arrays = flat(layout, fields)
        if any(isinstance(array, DeviceTensor) for array in arrays):
            return False
        placed: list[tuple[int, Any]] = []
        for array, placement in zip(arrays, layout.placements, strict=True):
            if isinstance(array, DeviceTensor):
                raise InternalError("device tensors are written one by one")
            with np.errstate(all="ignore"):  # a cast that loses something was asked for
                plain = np.ascontiguousarray(array.astype(placement.dtype, casting="unsafe", copy=False))
            placed.append((placement.offset, plain))
        self._plan.add_placed(layout.total, lengths, placed, middle, encoded)
        return True

    def _check(self) -> None:
        """Refuse what no slot can hold, before any slot is taken."""
        size, note = self._plan.largest()
        if size > self._native.slot_capacity:
            raise PayloadTooLargeError(
                f"a payload of {size} bytes does not fit a slot of {self._native.slot_capacity}: "
                "make the ring with a larger slot_bytes"
            )
        if note > MAX_ENCODED_BYTES:
            raise UsageError(
                f"a ticket of up to {note} bytes does not fit the {MAX_ENCODED_BYTES} that a slot has for it: "
                "less metadata, fewer addresses, or a ring with a schema"
            )

    def write(self, timeout_s: float | None) -> Tickets:
        """Publish as many as there is room for, and wait for that of the first of them; their tickets.

        Those of payloads in device memory are written alone. RingFullError: no slot became free in time.
        """
        if not self._on_host:
            notes = [self._write_alone(*self._payloads[self._written], timeout_s).encode()] if self.left else []
            self._alone += notes
        else:
            self._publish(None)
            notes = self._plan.notes(self._written)
            if self.left and not notes:
                loan = self._take(timeout_s)
                try:
                    self._publish(loan)
                finally:
                    loan.release()  # what was not used goes back
                    self._ring.settle()
                notes = self._plan.notes(self._written)
        self._written += len(notes)
        return Tickets(notes)

    def _publish(self, loan: _ring.Loan | None) -> None:
        """Publish until no slot is free, in this one first."""
        slot = None if loan is None else (loan.slot, loan.generation)
        terms = self._terms
        self._plan.write(self._native, slot, terms.readers, *terms.times(), terms.policy_version)


def version_of(policy_version: int) -> int:
    """Return a policy version that a slot can hold. UsageError for any other."""
    number = operator.index(policy_version)
    if not -(1 << 63) < number < 1 << 63:
        raise UsageError(f"policy_version={number} does not fit 64 bits")
    return number


def _held(value: Any, what: str) -> float:
    """Return a time that a slot can hold. UsageError for any other."""
    seconds(value, what)
    if abs(value) > _FOR_EVER_S:
        raise UsageError(f"{what}={value!r}; give a number of seconds, or None for no limit")
    return float(value)


def terms_of(
    readers: int, deadline_s: float | None, policy_version: int | None = None, *, deadline: float | None = None
) -> Terms:
    """Return the terms, checked."""
    readers = operator.index(readers)
    if not 1 <= readers <= _ring.MAX_READERS:
        raise RankError(f"readers={readers}; a payload is written for 1 to {_ring.MAX_READERS} ranks")
    if policy_version is not None:
        policy_version = version_of(policy_version)
    if deadline_s is not None:
        deadline_s = _held(deadline_s, "deadline_s")
    if deadline is not None:
        _held(deadline - time.time(), "deadline, from now")
    return Terms(readers=readers, policy_version=policy_version, deadline_s=deadline_s, deadline=deadline)


def metadata_of(
    metadata: Mapping[str, Any] | Iterable[Mapping[str, Any] | None] | None, count: int
) -> Sequence[Mapping[str, Any] | None]:
    """One for each payload: a mapping is for all of them."""
    if metadata is None or isinstance(metadata, Mapping):
        return [metadata] * count
    each = list(metadata)
    if len(each) != count:
        raise UsageError(f"{len(each)} mappings of metadata for {count} payloads")
    return each


@lru_cache(maxsize=64)
def _head(ring_id: str, segment: str, addresses: str, ports: tuple[int, ...]) -> bytes:
    """Return the beginning of every ticket of a ring, of `Ticket.encode`."""
    row = (ring_id, segment, host_identity(), tuple(filter(None, addresses.split(","))), ports)
    return Ticket.head_of(row)


@lru_cache(maxsize=64)
def _fields(schema: Schema) -> tuple[list[tuple[str, np.dtype[Any], tuple[int, ...], int, bool, bool]], bytes]:
    fields = [
        (spec.name, spec.storage, spec.shape, spec.storage.itemsize, spec.ragged, spec.optional)
        for spec in schema.tensors
    ]
    return fields, _middle(schema, inline=False)


def _middle(schema: Schema, *, inline: bool) -> bytes:
    return _encode(schema.fingerprint) + _encode(schema.encode() if inline else None)
