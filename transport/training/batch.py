"""Batch: payloads that a trainer has claimed together, their arrays, and the ends of their claims.

    claimed ──consume──► asked ──(the rings' answers)──► consumed: no other trainer gets them
       │                    └──(a ring out of reach)───► in question: `consume` again asks the ring
       ├──accept──► accepted: a checkpoint's record has them before they are consumed
       └──give_back, or dropped──► may be claimed again, by any trainer

A batch is columns; an object for one payload, and arrays of another layout, are made when somebody looks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, Self, overload

import numpy as np
import numpy.typing as npt

from transport import _ring
from transport.claims.in_place import TakenPart
from transport.client.payload import no_field
from transport.errors import ClosedError, SchemaError, UsageError
from transport.ring.batch import Gathered, columns_of, memory_of
from transport.ring.batch_shape import Shape
from transport.ring.packing import decoded_views
from transport.schema import Layout, Schema
from transport.ticket import Ticket
from transport.training.joining import Joined
from transport.wires import Wire

Part = _ring.ClaimedBatch | TakenPart
Numbers = npt.NDArray[np.int64]

_NONE: Final = np.zeros(0, np.bool_)


class Payload(Mapping[str, Any]):
    """One payload of a `Batch`: a read-only mapping from field names to arrays, text, bytes and values.

    The memory of its arrays is the batch's: a slot of a mapped ring, or what came over the network. The arrays keep
    that memory, also when the batch was consumed; what was given back may change under them.
    """

    __slots__ = ("_at", "_batch")

    def __init__(self, batch: Batch, at: int) -> None:
        self._batch = batch
        self._at = at

    def __repr__(self) -> str:
        return f"<Payload {self.name} rank {self.rank}, attempt {self.attempts}, {self.nbytes} bytes>"

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
    def ticket(self) -> Ticket:
        """The payload's ticket, decoded anew each time."""
        return self._batch.ticket(self._at)

    @property
    def metadata(self) -> dict[str, Any]:
        """The writer's own small values, decoded anew each time."""
        return self.ticket.metadata

    @property
    def data(self) -> memoryview:
        """The payload's bytes, read-only, in the batch's memory."""
        return self._batch.data(self._at)

    def layout(self) -> Layout:
        """Return where each field stands in `data`."""
        ticket = self.ticket
        return ticket.layout(self._batch.schema_of(ticket))

    @property
    def fields(self) -> Mapping[str, Any]:
        """All fields by name."""
        return self._batch.fields(self._at)

    def __getitem__(self, name: str) -> Any:
        fields = self.fields
        if name not in fields:
            raise no_field(name, self)
        return fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)


class Book(Protocol):
    """A trainer's book of its batches."""

    def accepted(self, batch: Batch) -> None: ...
    def asked(self, batch: Batch) -> None: ...
    def consumed(self, batch: Batch, verdicts: npt.NDArray[np.bool_]) -> None: ...
    def given_back(self, batch: Batch) -> None: ...


def ring_of(part: Part) -> str:
    """Return the id of the ring that has a part's payloads."""
    return part.ring if isinstance(part, TakenPart) else part.ring.ring_id.hex()


class Batch(Sequence[Payload]):
    """Payloads that were claimed together. Belongs to one thread at a time.

        batch["tokens"]         a tensor of all payloads: padded, or as the trainer's ``layout`` says
        batch.payloads          a mapping of fields for each payload; so does iterating over the batch
        batch.consume()         they were used: no other trainer gets them

    Dropped without `consume`, a batch gives its payloads back. Payloads that were consumed from mapped rings stay in
    their slots until the trainer takes again: look before, or keep their arrays.

    Attributes:
        schema: of the payloads; None where they may have any, which their tickets describe.
        slots, generations, ranks, attempts, in_vain, versions, sizes: columns, int64; ``versions`` has NO_VERSION for a
            payload that was written without one, ``sizes`` are bytes.
        parts: what was claimed of each ring; the claims are the batch's to end.
        joined: by position, payloads with the parents that they name.
        dropped: payloads that were claimed for the batch and left out, because they were damaged or do not fit.
        training_version: the version that the trainer was at when it took the batch, which `ages` count from.
    """

    NO_VERSION: Final = _ring.NO_VERSION

    def __init__(
        self,
        parts: Sequence[Part],
        gathered: Gathered | None,
        shape: Shape,
        schemas: Mapping[str, Schema],
        book: Book,
        training_version: int | None = None,
    ) -> None:
        self.parts = parts
        self._gathered = gathered
        self._shape = shape
        self._schemas = schemas
        self._book = book
        self._laid_out = gathered if gathered is not None and shape.layout != "list" else None
        self._state: Literal["claimed", "accepted", "asked", "in question", "consumed", "given back"] = "claimed"
        self._finished: dict[int, bytes] = {}  # answers of mapped rings, by part
        self._verdicts: npt.NDArray[np.bool_] = _NONE
        self._places: list[tuple[Part, int]] | None = None
        self._fields: dict[int, Mapping[str, Any]] = {}  # of payloads that were looked at
        self._ended = False  # nothing refers to the payloads from here
        self.joined: Mapping[int, Joined] = {}
        self.schema = None if gathered is None else gathered.schema
        self.dropped = 0 if gathered is None else gathered.dropped
        self.training_version = training_version
        columns = gathered.columns if gathered is not None else columns_of(parts)
        self.slots, self.generations, self.ranks, self.attempts, self.sizes, self.versions = columns[:6]
        self._offsets, self.in_vain = columns[6:]
        self._count: int = columns.shape[1]

    # --- payloads -----------------------------------------------------------------------------------
    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<Batch of {len(self)} payloads, {int(self.sizes.sum())} bytes, {self._state}>"

    @overload
    def __getitem__(self, key: str) -> Any: ...
    @overload
    def __getitem__(self, key: int) -> Payload: ...
    @overload
    def __getitem__(self, key: slice) -> list[Payload]: ...
    def __getitem__(self, key: str | int | slice) -> Any:
        """Return a tensor of all payloads by its name, or one payload, or some."""
        if isinstance(key, str):
            return self._arrays()[key]
        if isinstance(key, slice):
            return [Payload(self, at) for at in range(*key.indices(len(self)))]
        if not -len(self) <= key < len(self):
            raise IndexError(f"payload {key} of {len(self)}")
        return Payload(self, key % len(self))

    def __iter__(self) -> Iterator[Payload]:
        return (Payload(self, at) for at in range(len(self)))

    @property
    def payloads(self) -> list[Payload]:
        """The payloads, each a read-only mapping of its fields."""
        return list(self)

    @property
    def bytes_by_wire(self) -> dict[str, int]:
        """Bytes of the payloads by what carried them: mapped, shm, tcp or rdma."""
        found: Counter[str] = Counter()
        begin = 0
        for part in self.parts:
            wire: str = part.wire if isinstance(part, TakenPart) else "mapped"
            found[wire] += int(self.sizes[begin : begin + len(part)].sum())
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
        return [self.ticket(at).metadata for at in range(len(self))]

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
    def cu_seqlens(self) -> dict[str, Any]:
        """Beginnings of the payloads' rows in each packed tensor, and the end of the last (int32); else empty."""
        return self._arrays().cu_seqlens

    def _arrays(self) -> Gathered:
        """The payloads laid out: as they were taken, or padded now, without a second look at their checksums."""
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
            self._laid_out = Gathered.gathered(self.parts, self._gathered._whole, shape)
        return self._laid_out

    # --- what `Payload` asks for ------------------------------------------------------------------------
    def part(self, at: int) -> tuple[Part, int]:
        """Return the part of the payload at this position, and the payload's position in it."""
        if self._ended:
            raise ClosedError(
                "the payloads of this batch are gone: it was given back, or consumed before the trainer took another"
            )
        if self._places is None:
            self._places = [(part, index) for part in self.parts for index in range(len(part))]
        return self._places[at]

    def wire(self, at: int) -> Wire:
        """Return what carried the payload at this position."""
        part, _ = self.part(at)
        return part.wire if isinstance(part, TakenPart) else "mapped"

    def name(self, at: int) -> str:
        """Return ``ring/slot/generation`` of the payload at this position."""
        return f"{ring_of(self.part(at)[0])}/{self.slots[at]}/{self.generations[at]}"

    def ticket(self, at: int) -> Ticket:
        """Return the ticket of the payload at this position."""
        part, index = self.part(at)
        return Ticket.decode(part.note(index))

    def fields(self, at: int) -> Mapping[str, Any]:
        """Return the fields of the payload at this position, by name."""
        if (known := self._fields.get(at)) is None:
            known = self._fields[at] = self._fields_of(at)
        return known

    def _fields_of(self, at: int) -> Mapping[str, Any]:
        if (joined := self.joined.get(at)) is not None and joined.payload is not None:
            return joined.payload
        if self._gathered is not None:
            return self._gathered[at]
        ticket = self.ticket(at)
        schema = self.schema_of(ticket)
        kinds = schema.kinds if schema else {}
        return decoded_views(ticket.layout(schema), np.frombuffer(self.data(at), np.uint8), kinds)

    def schema_of(self, ticket: Ticket) -> Schema | None:
        """Return the schema that describes a payload; None: neither its ticket nor the trainer has it."""
        return ticket.schema or self._schemas.get(ticket.schema_fingerprint)

    def data(self, at: int) -> memoryview:
        """Return the bytes of the payload at this position, read-only."""
        part, index = self.part(at)
        memory, begin = memory_of(part, index)
        begin = int(self._offsets[at]) if begin is None else begin
        return memoryview(memory).cast("B").toreadonly()[begin : begin + int(self.sizes[at])]

    # --- the ends of the claims -----------------------------------------------------------------------
    def accept(self) -> None:
        """Say that the model has learned from the payloads, which are consumed later: `Trainer.record` has them now.

        For checkpoints: learn, accept, store the weights and the record, and only then `consume`. Killed before the
        checkpoint is stored, a trainer gets the payloads again; killed behind it, its successor leaves them out.
        """
        self._require("accept")
        self._book.accepted(self)
        self._state = "accepted"

    def consume(self) -> None:
        """Say that the payloads were used. Rings of this host know it at once; those elsewhere are told without a wait.

        Their answers are waited for when somebody looks at `accepted`, when the trainer has taken two more batches, and
        at its `close`. Called again it does nothing, but asks again the rings of payloads that are `in_question`.
        """
        if self._state in ("asked", "consumed"):
            return
        self._require("consume")
        keep = self._gathered is None or self._shape.layout == "list"  # payloads stay where they are
        for at, part in enumerate(self.parts):
            if isinstance(part, TakenPart):
                part.ask_to_consume()
            else:
                self._finished[at] = part.finish(keep)
        self._state = "asked"
        self._book.asked(self)

    @property
    def answered(self) -> bool:
        """Whether every ring has answered `consume`, so that `accepted` does not wait."""
        return len(self._finished) == len(self.parts) or all(
            part.answered for part in self.parts if isinstance(part, TakenPart)
        )

    @property
    def accepted(self) -> npt.NDArray[np.bool_]:
        """True for each payload that counts as consumed by this trainer; waits for the rings' answers.

        What is False another trainer has: this one was silent for longer than its lease, or its connection was lost.
        UsageError before `consume`.
        """
        if self._state == "asked":
            answers = [
                part.consumption().tobytes() if isinstance(part, TakenPart) else self._finished[at]
                for at, part in enumerate(self.parts)
            ]
            self._verdicts = verdicts = np.frombuffer(b"".join(answers), np.bool_)
            self._state = "consumed" if verdicts.all() or not self.in_question.any() else "in question"
            self._book.consumed(self, verdicts)
        elif self._state not in ("consumed", "in question"):
            raise UsageError(f"accepted of a batch that is {self._state}: consume() it first")
        return self._verdicts

    @property
    def in_question(self) -> npt.NDArray[np.bool_]:
        """True for each payload whose ring went out of reach before its answer: it may count as consumed."""
        none = np.zeros(self._count, np.bool_)
        of = [part.in_question() if isinstance(part, TakenPart) else none[: len(part)] for part in self.parts]
        return np.concatenate(of) if of else none

    def give_back(self, delay_s: float = 0.0) -> None:
        """Let other trainers claim the payloads, after the delay. For weights that have not learned from them.

        It counts as a delivery in vain: what was delivered ``max_deliveries`` times is dead.
        """
        self._require("give_back")
        self._book.given_back(self)
        self._state = "given back"
        for part in self.parts:
            part.release(delay_s)
        self._let_go()

    def release(self) -> None:
        """Let the payloads go; what was not consumed goes back, uncounted. Idempotent; so does dropping the batch."""
        if self._state in ("claimed", "accepted"):
            self._book.given_back(self)
            self._state = "given back"
            for part in self.parts:
                part.release(in_vain=False)
        elif self._state != "given back":
            _ = self.accepted
        self._let_go()

    def let_go_of_slots(self) -> None:
        """Let consumed payloads of mapped rings go: their slots are free when no array looks into them."""
        in_slots = self._shape.layout == "list" and not all(isinstance(part, TakenPart) for part in self.parts)
        if self._state == "consumed" and in_slots:
            self._let_go()

    def _let_go(self) -> None:
        self._ended = True
        self.parts, self._places, self._gathered, self.joined, self._fields = (), None, None, {}, {}
        if self._shape.layout == "list":
            self._laid_out = None

    def _require(self, call: str) -> None:
        asked = self._state in ("asked", "in question")
        if self._state in ("consumed", "given back") or (call != "consume" and asked):
            raise UsageError(f"{call}() of a batch that is {self._state}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
