"""Payloads: some payloads as columns; an object for one, and arrays of another layout, are made when somebody looks.

payloads["tokens"]      a tensor of all payloads: padded, or as the trainer's ``layout`` says
payloads.payloads       a mapping of fields for each payload; so does iterating over them
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, Final, overload

import numpy as np
import numpy.typing as npt

from transport import _ring
from transport.client.payload import Payload, no_field
from transport.errors import ClosedError, SchemaError
from transport.ring.batch import ClaimedPart, Gathered, columns_of, places_of
from transport.ring.batch_shape import Shape
from transport.ring.packing import decoded_views
from transport.schema import Schema
from transport.ticket import Ticket
from transport.training.joining import Joined
from transport.wires import Wire

Numbers = npt.NDArray[np.int64]


class BatchPayload(Payload):
    """A payload of a batch, in whose memory its arrays are: a slot of a mapped ring, or what came over the network.

    The arrays keep that memory, also when the batch was consumed; what was given back may change under them.
    """

    __slots__ = ("_at", "_batch")

    def __init__(self, batch: Payloads, at: int) -> None:
        self._batch = batch
        self._at = at

    @property
    def name(self) -> str:
        """``ring/slot/generation``, as logs and `transport queue` have it."""
        return self._batch.name(self._at)

    @property
    def version(self) -> int | None:
        """Version of the policy that made the payload, where the writer said so."""
        version = int(self._batch.versions[self._at])
        return None if version == _ring.NO_VERSION else version

    @property
    def rank(self) -> int:
        """Reader rank of this delivery."""
        return int(self._batch.ranks[self._at])

    @property
    def attempts(self) -> int:
        """Number of times that this delivery was claimed, this time included."""
        return int(self._batch.attempts[self._at])

    @property
    def nbytes(self) -> int:
        """Bytes of the payload, with the gaps between tensors."""
        return int(self._batch.sizes[self._at])

    @property
    def wire(self) -> Wire:
        """The wire that carried the bytes."""
        return self._batch.wire(self._at)

    @property
    def ticket(self) -> Ticket:
        """The payload's ticket, decoded anew each time."""
        return self._batch.ticket(self._at)

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The payload's bytes, read-only, in the batch's memory."""
        return self._batch.data(self._at)

    @property
    def schema(self) -> Schema | None:
        """Schema of the fields; None: neither the ticket nor the trainer has it."""
        return self._batch.schema_of(self.ticket)

    def __getitem__(self, name: str) -> Any:
        fields = self._batch._fields.get(self._at)
        if fields is None:
            fields = self.fields
        if name not in fields:
            raise no_field(name, self)
        return fields[name]

    @property
    def fields(self) -> Mapping[str, Any]:
        """All fields by name; made once for a batch."""
        batch, at = self._batch, self._at
        if (known := batch._fields.get(at)) is None:
            if (joined := batch.joined.get(at)) is not None and joined.payload is not None:
                known = joined.payload
            elif batch._gathered is not None:
                known = batch._gathered.payload(at)
            else:
                schema = self.schema
                known = decoded_views(self.ticket.layout(schema), self.data, schema.kinds if schema else {})
            batch._fields[at] = known
        return known


class Payloads(Sequence[BatchPayload]):
    """Payloads of one or several rings. Belongs to one thread at a time.

    Attributes:
        schema: of the payloads; None where they may have any, which their tickets describe.
        columns: `BATCH_COLUMNS` of native code, a row of int64 for each.
        slots, generations, ranks, attempts, in_vain, versions, sizes: some of these; ``versions`` has NO_VERSION for a
            payload that was written without one, ``sizes`` are bytes.
        parts: what there is of each ring, in the order of the payloads.
        joined: by position, payloads with the parents that they name.
        dropped: payloads that were left out, because they were damaged or do not fit.
        training_version: the version that the trainer was at when it took them, which `ages` count from.
    """

    NO_VERSION: Final = _ring.NO_VERSION

    def __init__(
        self,
        parts: Sequence[ClaimedPart],
        gathered: Gathered | None,
        shape: Shape,
        schemas: Mapping[str, Schema],
        training_version: int | None = None,
    ) -> None:
        self.parts = parts
        self._gathered = gathered
        self._shape = shape
        self._schemas = schemas
        self._laid_out = gathered if gathered is not None and shape.layout != "list" else None
        self._places: list[tuple[ClaimedPart, int]] | None = None
        self._fields: dict[int, Mapping[str, Any]] = {}  # of payloads that were looked at
        self._ended = False  # nothing refers to the payloads from here
        self.joined: Mapping[int, Joined] = {}
        self.schema = None if gathered is None else gathered.schema
        self.dropped = 0 if gathered is None else gathered.dropped
        self.training_version = training_version
        columns = gathered.columns if gathered is not None else columns_of(parts)
        self.columns = columns
        self.slots, self.generations, self.ranks, self.attempts, self.sizes, self.versions, _, self.in_vain = columns
        self._count: int = columns.shape[1]

    # --- payloads -----------------------------------------------------------------------------------
    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} payloads, {int(self.sizes.sum())} bytes>"

    @overload
    def __getitem__(self, key: str) -> Any: ...
    @overload
    def __getitem__(self, key: int) -> BatchPayload: ...
    @overload
    def __getitem__(self, key: slice) -> list[BatchPayload]: ...
    def __getitem__(self, key: str | int | slice) -> Any:
        """Return a tensor of all payloads by its name, or one payload, or some."""
        if isinstance(key, str):
            return self._arrays()[key]
        if isinstance(key, slice):
            return [BatchPayload(self, at) for at in range(*key.indices(len(self)))]
        if not -len(self) <= key < len(self):
            raise IndexError(f"payload {key} of {len(self)}")
        return BatchPayload(self, key % len(self))

    def __iter__(self) -> Iterator[BatchPayload]:
        return iter(self.payloads)

    @property
    def payloads(self) -> list[BatchPayload]:
        """Each payload, a read-only mapping of its fields."""
        return list(map(BatchPayload, repeat(self), range(self._count)))

    @property
    def bytes_by_wire(self) -> dict[str, int]:
        """Bytes of the payloads by what carried them: mapped, shm, tcp or rdma."""
        found: Counter[str] = Counter()
        begin = 0
        for part in self.parts:
            found[part.wire] += int(self.sizes[begin : begin + len(part)].sum())
            begin += len(part)
        return dict(found)

    @property
    def ages(self) -> Numbers:
        """Versions by which each payload is older than the trainer was (int64); -1 where one of the two has none."""
        if self.training_version is None:
            return np.full(len(self), -1, np.int64)
        return np.where(self.versions == _ring.NO_VERSION, -1, self.training_version - self.versions)

    @property
    def metadata(self) -> list[dict[str, Any]]:
        """The writers' small values, decoded anew each time."""
        return [self.ticket(at).users_metadata for at in range(len(self))]

    # --- arrays -------------------------------------------------------------------------------------
    def keys(self) -> tuple[str, ...]:
        """Return the names of the fields."""
        return self._arrays().keys()

    def arrays(self) -> dict[str, Any]:
        """Return all tensors by name, as ``batch[name]`` gives them."""
        return self._arrays().arrays()

    def torch(self) -> dict[str, Any]:
        """Return all tensors as torch's, in the same memory. MissingDependencyError without torch."""
        return self._arrays().torch()

    @property
    def lengths(self) -> dict[str, Numbers]:
        """Entries of each ragged tensor by name, a number for each payload; of text, bytes and values their bytes."""
        return self._arrays().lengths

    @property
    def present(self) -> dict[str, npt.NDArray[np.bool_]]:
        """Masks by an optional field's name: whether each payload has it; where False, a padded tensor has the fill."""
        return self._arrays().present

    @property
    def cu_seqlens(self) -> dict[str, Any]:
        """Beginnings of the payloads' rows in each packed tensor, and the end of the last (int32); else empty."""
        return self._arrays().cu_seqlens

    def _arrays(self) -> Gathered:
        """Return the payloads laid out: as they were taken, or padded now, without a second look at their checksums."""
        if self._laid_out is None:
            if self._ended:
                self.part(0)
            if self._gathered is None:
                raise SchemaError(
                    "a batch of payloads of any schema has no tensors of the whole batch: use batch.payloads, or make "
                    "the trainer with the schema, Trainer(schema)"
                )
            asked = self._shape
            shape = Shape(layout="padded", fill=asked.fill, pad_to=asked.pad_to, verify=False, fields=asked.fields)
            self._laid_out = Gathered.gathered(self.parts, self._gathered.whole, shape)
        return self._laid_out

    # --- what a `BatchPayload` asks for ------------------------------------------------------------------------
    def part(self, at: int) -> tuple[ClaimedPart, int]:
        """Return the part of the payload at this position, and the payload's position in it."""
        if self._ended:
            raise ClosedError(
                "these payloads are gone: they were given back, or consumed before the trainer took others"
            )
        if self._places is None:
            self._places = places_of(self.parts)
        return self._places[at]

    def wire(self, at: int) -> Wire:
        """Return what carried the payload at this position."""
        return self.part(at)[0].wire

    def name(self, at: int) -> str:
        """Return ``ring/slot/generation`` of the payload at this position."""
        return f"{self.part(at)[0].ring}/{self.slots[at]}/{self.generations[at]}"

    def ticket(self, at: int) -> Ticket:
        """Return the ticket of the payload at this position."""
        part, index = self.part(at)
        return Ticket.decode(part.note(index))

    def schema_of(self, ticket: Ticket) -> Schema | None:
        """Return the schema that describes a payload; None: neither its ticket nor the trainer has it."""
        return ticket.schema or self._schemas.get(ticket.schema_fingerprint)

    def data(self, at: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of the payload at this position, read-only."""
        part, index = self.part(at)
        memory, begin = part.place(index)
        return np.frombuffer(memoryview(memory).cast("B").toreadonly()[begin : begin + int(self.sizes[at])], np.uint8)

    def _let_go(self) -> None:
        """Refer to no payload any more: slots of mapped rings are free when no array looks into them."""
        self._ended = True
        self.parts, self._places, self._gathered, self.joined, self._fields = (), None, None, {}, {}
        if self._shape.layout == "list":
            self._laid_out = None
