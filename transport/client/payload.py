"""A payload in hand: its fields, and how to acknowledge and release it."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import msgspec
import numpy as np

from transport._ring import Loan
from transport.devices.buffers import Block
from transport.errors import ClosedError, SchemaError, TransportError, UsageError
from transport.ring.packing import decoded_views
from transport.schema import PayloadLayout, Schema
from transport.ticket import Ticket
from transport.wires import Wire

AckMode = Literal["on_arrival", "on_consumed", "manual"]


class Payload(Mapping[str, Any]):
    """One payload in this process's memory: a read-only mapping from field names to arrays, text, bytes and values.

    It comes with a batch (`Batch.payloads`), or by a read of its ticket (`UCXXClient.read`, a `ReadPayload`). Text is a
    str, bytes are bytes, and a value is what was written; each is made when somebody looks, and `PayloadDamagedError`
    says that its bytes are none.

    The end of a ``with`` acknowledges a payload that was read, unless an exception ends it; one of a batch ends with
    the batch.

    The arrays keep their memory: a pooled buffer is returned, and a slot of a mapped ring is free, when the last array
    is released. `copy.copy`, `copy.deepcopy` and `pickle` make a dict of arrays and values of it, with memory of their
    own.
    """

    __slots__ = ("__weakref__",)

    # --- its source knows ---------------------------------------------------------------------------
    @property
    @abstractmethod
    def ticket(self) -> Ticket:
        """The payload's ticket."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Reader rank of this delivery."""

    @property
    @abstractmethod
    def wire(self) -> Wire:
        """The wire that carried the bytes: mapped, shm, tcp, rdma or cuda."""

    @property
    @abstractmethod
    def data(self) -> Any:
        """The payload's bytes, a uint8 array. Raises ClosedError when they are not held any more."""

    @property
    @abstractmethod
    def schema(self) -> Schema | None:
        """Schema of the fields; None: the ticket brings none, and its reader was not given the ring's."""

    @property
    @abstractmethod
    def fields(self) -> Mapping[str, Any]:
        """All fields by name, without a copy, read-only. Raises SchemaError where nothing describes them."""

    # --- the same for all ---------------------------------------------------------------------------
    def __repr__(self) -> str:
        return f"<Payload {self.name} rank {self.rank}, {self.nbytes} bytes by {self.wire}>"

    @property
    def name(self) -> str:
        """``ring/slot/generation``, as logs and `transport queue` have it."""
        return self.ticket.id

    @property
    def metadata(self) -> dict[str, Any]:
        """The writer's own small values."""
        return self.ticket.users_metadata

    @property
    def nbytes(self) -> int:
        """Bytes of the payload, with the gaps between tensors."""
        return self.ticket.size

    def layout(self) -> PayloadLayout:
        """Return where each field stands in `data`. Raises SchemaError where nothing describes the payload."""
        if undescribed := self.undescribed:
            raise SchemaError(undescribed)
        return self.ticket.layout(self.schema)

    @property
    def undescribed(self) -> str:
        """Reason why `fields` cannot be had; "": they can."""
        ticket = self.ticket
        if self.schema is not None or ticket.bare:
            return ""
        return (
            f"payload {ticket.name} has schema {ticket.schema_fingerprint}, which this client does not know; "
            "make the client with schemas=[schema]"
        )

    def __getitem__(self, name: str) -> Any:
        fields = self.fields
        if name not in fields:
            raise no_field(name, self)
        return fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    # --- its end ------------------------------------------------------------------------------------
    @property
    def acknowledged(self) -> bool:
        """True if it was acknowledged through this object."""
        return False

    def ack(self) -> bool:
        """Acknowledge: this rank has consumed the payload, and its slot may be reused. False: acknowledged before.

        Raises UsageError for a payload of a batch, which ends with it.
        """
        raise UsageError(f"payload {self.name} came with a batch, and ends with that: batch.consume()")

    def release(self) -> None:
        """Drop the references to the memory. Arrays that the caller holds stay valid. Idempotent."""

    def __reduce__(self) -> tuple[Callable[..., dict[str, Any]], tuple[dict[str, Any]]]:
        """Return a dict for `copy` and `pickle`: arrays and values with memory of their own. The right to ack stays."""
        return dict, ({name: self._copied(array) for name, array in self.items()},)

    @staticmethod
    def _copied(array: Any) -> Any:
        return np.array(array) if isinstance(array, np.ndarray) else copy.deepcopy(array)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self.release()


class ReadPayload(Payload):
    """A payload that was read by its ticket. One in device memory is a `DevicePayload`.

    Attributes:
        ticket: the ticket that was read; its metadata are the writer's small values.
    """

    __slots__ = ("_acknowledge", "_data", "_fields", "_layout", "_schema", "rank", "ticket", "wire")

    ticket: Ticket
    rank: int
    wire: Wire

    def __init__(
        self,
        ticket: Ticket,
        rank: int,
        wire: Wire,
        data: Any,
        schema: Schema | None,
        acknowledge: Callable[[], bool],
        layout: PayloadLayout | None = None,
    ) -> None:
        self.ticket = ticket
        self.rank = rank
        self.wire = wire
        self._data: Any = data
        self._fields: Mapping[str, Any] | None = None
        self._schema = schema
        self._layout = layout  # of some fields only; otherwise it is made when it is asked for
        self._acknowledge: Callable[[], bool] | None = acknowledge  # it keeps the ring: forgotten once called

    def __repr__(self) -> str:
        state = "released" if self._data is None else "acknowledged" if self.acknowledged else "not acknowledged"
        return f"<Payload {self.ticket.name} rank {self.rank} {self.ticket.size} bytes by {self.wire}, {state}>"

    @property
    def acknowledged(self) -> bool:
        """True if it was acknowledged through this object."""
        return self._acknowledge is None

    @property
    def data(self) -> Any:
        """The payload's bytes, or the caller's `out`; of some fields only: what `layout` describes."""
        data = self._data
        if data is None:
            raise ClosedError(f"payload {self.ticket.name} was released")
        if type(data) is Block or type(data) is Loan:  # an array only where one is asked for
            data = self._data = np.frombuffer(memoryview(data), np.uint8)
        return data

    @property
    def fields(self) -> Mapping[str, Any]:
        """All fields that were read, by name. SchemaError: neither ticket nor client has a description."""
        if (fields := self._fields) is None:
            layout = self.layout()
            if self._data is None:
                raise ClosedError(f"payload {self.ticket.name} was released")
            fields = self._fields = decoded_views(layout, self._data, self._schema.kinds if self._schema else {})
        return fields

    @property
    def schema(self) -> Schema | None:
        """Schema of the fields; None: the ticket brings none, and the client was not given the ring's."""
        return self._schema

    def layout(self) -> PayloadLayout:
        """Return where each field that was read stands in `data`. Raises SchemaError as `fields` does."""
        return super().layout() if self._layout is None else self._layout

    def ack(self) -> bool:
        """Acknowledge: this rank has consumed the payload, and its slot may be reused. False: acknowledged before."""
        if (acknowledge := self._acknowledge) is None:
            return False
        accepted = acknowledge()
        self._acknowledge = None
        return accepted

    def release(self) -> None:
        """Drop the references to the memory. Arrays that the caller holds stay valid. Idempotent."""
        self._data = None
        self._fields = None

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None:
            self.ack()
        self.release()


def no_field(name: str, fields: Iterable[str]) -> KeyError:
    """Return the error that a payload of these fields has none of this name."""
    return KeyError(f"{name}; the fields are {', '.join(fields)}")


class ReadOutcome(NamedTuple):
    """The result for one ticket of `read_many`: exactly one of payload and error is set.

    Attributes:
        index: where the ticket stands among those that were given; outcomes come as they complete.
    """

    index: int  # type: ignore[assignment]  # a tuple has a method of this name
    ticket: Ticket
    payload: Payload | None
    error: TransportError | None


class ClientStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the client was made, and its present connections and acknowledgements."""

    reads: int
    bytes_by_wire: dict[str, int]
    retries: int  # attempts beyond the first
    stale: int
    checksum_failures: int
    failed_reads: int
    links_opened: int
    warm_up_failures: int = 0
    links_idle: int
    links_in_use: int
    acks_pending: int
    acks_unconfirmed: int
    acks_dropped: int
    quarantined_ports: tuple[str, ...]
