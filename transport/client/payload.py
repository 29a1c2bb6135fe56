"""A received payload: its arrays, and how to acknowledge and release it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import msgspec
import numpy as np

from transport._ring import Loan
from transport.devices.buffers import Block
from transport.errors import ClosedError, SchemaError, TransportError
from transport.ring.packing import decoded_views
from transport.schema import Layout, Schema
from transport.ticket import Ticket
from transport.wires import Wire

AckMode = Literal["on_arrival", "on_consumed", "manual"]


class ReceivedPayload(Mapping[str, Any]):
    """One payload in this process's memory; a mapping from tensor names to read-only arrays.

    A field that is text is a str, bytes are bytes, and a value is what was written; each is made when it is first
    looked at, and `PayloadDamagedError` says that its bytes are none.

    The arrays own their memory: a pooled buffer is returned, and a mapped slot unpinned, when the last array is
    released. `release` only drops this object's own references. A payload in device memory is a `DevicePayload`.
    `copy.copy`, `copy.deepcopy` and `pickle` make a dict of arrays and values of it, with memory of their own.

    Attributes:
        ticket: the ticket that was read; its metadata are the writer's small values.
        rank: the reader rank this delivery is for.
        wire: the wire that carried the bytes: mapped, shm, tcp, rdma or cuda.
        data: the bytes (a uint8 array), or the caller's `out`. Of some fields only: what `layout` describes.
    """

    __slots__ = (
        "__weakref__",
        "_acknowledge",
        "_arrays",
        "_data",
        "_layout",
        "_schema",
        "rank",
        "ticket",
        "wire",
    )

    def __init__(
        self,
        ticket: Ticket,
        rank: int,
        wire: Wire,
        data: Any,
        schema: Schema | None,
        acknowledge: Callable[[], bool],
        layout: Layout | None = None,
    ) -> None:
        self.ticket = ticket
        self.rank = rank
        self.wire: Wire = wire
        self._data: Any = data
        self._arrays: Mapping[str, Any] | None = None
        self._schema = schema
        self._layout = layout  # of some fields only; otherwise it is made when it is asked for
        self._acknowledge: Callable[[], bool] | None = acknowledge  # it keeps the ring: forgotten once called

    def __repr__(self) -> str:
        state = "released" if self._data is None else "acknowledged" if self.acknowledged else "not acknowledged"
        return f"<ReceivedPayload {self.ticket.name} rank {self.rank} {self.ticket.size} bytes by {self.wire}, {state}>"

    @property
    def acknowledged(self) -> bool:
        """Whether it was acknowledged through this object."""
        return self._acknowledge is None

    @property
    def metadata(self) -> dict[str, Any]:
        """The writer's own small values."""
        return self.ticket.users_metadata

    @property
    def nbytes(self) -> int:
        """Bytes of the payload, with the gaps between tensors."""
        return self.ticket.size

    @property
    def data(self) -> Any:
        """The payload's bytes. Raises ClosedError after release."""
        data = self._data
        if data is None:
            raise ClosedError(f"payload {self.ticket.name} was released")
        if type(data) is Block or type(data) is Loan:  # an array only where one is asked for
            data = self._data = np.frombuffer(memoryview(data), np.uint8)
        return data

    @property
    def arrays(self) -> Mapping[str, Any]:
        """Tensors by name, without a copy, read-only.

        Raises SchemaError when the ticket brings no description and the client was not given the ring's schema.
        """
        arrays = self._arrays
        if arrays is not None:
            return arrays
        layout = self.layout()
        if self._data is None:
            raise ClosedError(f"payload {self.ticket.name} was released")
        arrays = self._arrays = decoded_views(layout, self._data, self._schema.kinds if self._schema else {})
        return arrays

    @property
    def schema(self) -> Schema | None:
        """Of its tensors; None: the ticket brings none, and the client was not given the ring's."""
        return self._schema

    def layout(self) -> Layout:
        """Where each tensor stands in `data`. Raises SchemaError as `arrays` does."""
        if self._layout is not None:
            return self._layout
        if undescribed := self.undescribed:
            raise SchemaError(undescribed)
        return self.ticket.layout(self._schema)

    @property
    def undescribed(self) -> str:
        """Why `arrays` cannot be had; "": they can."""
        if self._schema is not None or self._layout is not None:
            return ""
        return (
            f"payload {self.ticket.name} has schema {self.ticket.schema_fingerprint}, which this client does not know; "
            "make the client with schemas=[schema]"
        )

    def __getitem__(self, name: str) -> Any:
        arrays = self.arrays
        if name not in arrays:
            raise no_field(name, self)
        return arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

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
        self._arrays = None

    def __reduce__(self) -> tuple[Callable[..., dict[str, Any]], tuple[dict[str, Any]]]:
        """For `copy` and `pickle`: a dict of arrays and values with memory of their own. The right to ack stays."""
        return dict, ({name: self._copied(array) for name, array in self.arrays.items()},)

    @staticmethod
    def _copied(array: Any) -> Any:
        return np.array(array) if isinstance(array, np.ndarray) else copy.deepcopy(array)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None:
            self.ack()
        self.release()


def no_field(name: str, fields: Iterable[str]) -> KeyError:
    """That a payload of these fields has none of this name."""
    return KeyError(f"{name}; the fields are {', '.join(fields)}")


class ReadOutcome(NamedTuple):
    """The result for one ticket of `read_many`: exactly one of payload and error is set.

    Attributes:
        index: where the ticket stands among those that were given; outcomes come as they complete.
    """

    index: int  # type: ignore[assignment]  # a tuple has a method of this name
    ticket: Ticket
    payload: ReceivedPayload | None
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
