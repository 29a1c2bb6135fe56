"""The values of a get, gathered from slots as they arrive: each is copied once, to where it stands in the result.

A field of tensors becomes what TransferQueue's own backends return: a jagged nested tensor, a dense one for scalars,
and otherwise a strided one or a NonTensorStack. TensorDicts are stacked. Where each value goes follows from the shapes
that the controller knows; where the slots have others, the field is put together again from single tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase

from transport.adapters.transferqueue.packing import Unpacked, copy_to
from transport.devices.buffers import BufferPool
from transport.errors import PayloadLostError

Shape = tuple[int, ...]

_POOL: Final = BufferPool()
_POOLED_BYTES: Final = 64 << 10


class _ResultField:
    """One field of the result."""

    def __init__(self, name: str, size: int, dtype: Any, shapes: Sequence[Any]) -> None:
        self.name = name
        self._size = size
        self._values: list[Any] = [None] * size  # those that have no place in `_flat`
        self._flat: torch.Tensor | None = None
        self._placed = [False] * size
        self._shapes: list[Shape] = []
        self._offsets: list[int] = []
        if isinstance(dtype, torch.dtype) and all(shape is not None for shape in shapes):
            self._plan(dtype, [tuple(shape) for shape in shapes])

    def _plan(self, dtype: torch.dtype, shapes: list[Shape]) -> None:
        """Memory for all values one after the other, if they differ in their first dimension only."""
        if len({(len(shape), shape[1:]) for shape in shapes}) != 1:
            return
        self._shapes = shapes
        each = [shape[0] if shape else 1 for shape in shapes]
        self._offsets = [0, *itertools.accumulate(each)]
        self._flat = self._memory((self._offsets[-1], *shapes[0][1:]), dtype)

    @staticmethod
    def _memory(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Large ones in memory whose pages are there already, which comes back when the tensor is gone."""
        size = math.prod(shape) * dtype.itemsize
        if size < _POOLED_BYTES:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(_POOL.take(size), dtype=dtype).view(shape)

    def add(self, slot: Unpacked, at: list[int], rows: list[int]) -> None:
        """Values of one slot: its ``rows``, which are the samples ``at`` of the result."""
        column = slot.columns.get(self.name)
        if column is None:
            raise PayloadLostError(f"field {self.name!r} is not in the slot that the controller names for it")
        if not column.dtype:
            for place, row in zip(at, rows, strict=True):
                self._values[place] = slot.value(column, row)
            return
        dtype = getattr(torch, column.dtype)
        if column.shape(rows[0]) == () and set(self._shapes) == {(1,)} and not any(self._placed):
            self._plan(dtype, [()] * self._size)  # the controller keeps a scalar's shape as (1,)
        begin = 0
        while begin < len(at):
            end = begin + 1
            while end < len(at) and at[end] == at[end - 1] + 1 and rows[end] == rows[end - 1] + 1:
                end += 1
            self._copy(slot, column, dtype, at[begin], rows[begin], end - begin)
            begin = end

    def _copy(self, slot: Unpacked, column: Any, dtype: torch.dtype, at: int, row: int, count: int) -> None:
        fits = self._flat is not None and self._flat.dtype == dtype
        if fits and all(column.shape(row + each) == self._shapes[at + each] for each in range(count)):
            assert self._flat is not None
            copy_to(self._flat[self._offsets[at] : self._offsets[at + count]], slot.bytes_of(column, row, count))
            self._placed[at : at + count] = [True] * count
            return
        for each in range(count):
            self._values[at + each] = slot.tensor(column, row + each)

    def result(self) -> Any:
        """Return what stands in the TensorDict."""
        if self._flat is not None and all(self._placed):
            if not self._shapes[0]:
                return self._flat
            lengths = [shape[0] for shape in self._shapes]
            return torch.nested.nested_tensor_from_jagged(
                self._flat, torch.tensor(self._offsets), min_seqlen=min(lengths), max_seqlen=max(lengths)
            )
        return self._assembled([self._value(at) for at in range(self._size)])

    def _value(self, at: int) -> Any:
        if not self._placed[at]:
            return self._values[at]
        assert self._flat is not None
        return self._flat[self._offsets[at] : self._offsets[at + 1]].reshape(self._shapes[at])

    @staticmethod
    def _assembled(values: list[Any]) -> Any:
        if all(isinstance(value, TensorDictBase) for value in values):
            return TensorDict.maybe_dense_stack(values)
        if not all(isinstance(value, torch.Tensor) for value in values):
            return NonTensorStack(*values)
        if all(value.dim() == 0 for value in values):
            return torch.stack(values)
        for layout in (torch.jagged, torch.strided):
            try:
                return torch.nested.as_nested_tensor(values, layout=layout)
            except (RuntimeError, TypeError):
                continue
        return NonTensorStack(*values)


class Gathering:
    """The result of one get.

    Args:
        hints: of each field, the dtype and the shapes that the controller knows; (None, ()) where it knows none.
    """

    def __init__(self, size: int, hints: dict[str, tuple[Any, Sequence[Any]]]) -> None:
        self._fields = {name: _ResultField(name, size, dtype, shapes) for name, (dtype, shapes) in hints.items()}

    def add(self, data: Any, wanted: dict[str, tuple[list[int], list[int]]]) -> None:
        """One slot's payload. ``wanted``: for each field, samples of the result and their rows of the slot."""
        slot = Unpacked(data)
        for name, (at, rows) in wanted.items():
            self._fields[name].add(slot, at, rows)

    def result(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {name: field.result() for name, field in self._fields.items()}
