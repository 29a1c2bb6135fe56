"""The layout that a rank has, or wants: its local tensors, and which box of which global tensor stands where in each.

    rows = Piece("model.up", (5632, 2048), start=(0, 0), size=(1408, 2048), at=(0, 0))
    Layout.of([LocalTensor("model.up", "bfloat16", (1408, 2048), (rows,))])

A global tensor has a name, a dtype and a shape that all ranks agree on; no process needs to hold one. A local tensor is
one array of a rank. It consists of pieces, one for most and several for a fused one (shards.py makes the usual ones).
A piece and its place in the local tensor have the same size but for leading ones: a stack of experts is of boxes with a
dimension less.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property, lru_cache
from typing import NamedTuple

import msgspec

from transport.errors import SchemaError
from transport.schema import DTYPES, TensorSpec
from transport.weights.sharding.boxes import Box, BoxIndex, Numbers, left_over


class Piece(NamedTuple):
    """A box of a global tensor at a place in a local one. Numbers of elements.

    tensor, of: name and shape of the global tensor.
    start, size: of the box in it.
    at: where the box begins in the local tensor.
    """

    tensor: str
    of: Numbers
    start: Numbers
    size: Numbers
    at: Numbers

    @property
    def box(self) -> Box:
        """Box in the global tensor."""
        return Box(self.start, self.size)


class LocalTensor(NamedTuple):
    """One array of a rank: its own name, dtype and shape, and what it consists of."""

    name: str
    dtype: str
    shape: Numbers
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def box_of(self, piece: Piece) -> Box:
        """Return where a piece stands in the array."""
        return Box(piece.at, fitted(piece.size, len(self.shape), f"{self.name}: {piece.tensor}"))

    def check(self) -> None:
        """SchemaError unless the pieces fill the array, each byte once."""
        _valid(self.name, self.dtype, self.shape)
        boxes = []
        for piece in self.pieces:
            _valid(piece.tensor, self.dtype, piece.of)
            if not piece.box.within(piece.of):
                raise SchemaError(
                    f"{self.name}: box {piece.box} is not inside {piece.tensor}, whose shape is {piece.of}"
                )
            box = self.box_of(piece)
            if not box.within(self.shape):
                raise SchemaError(f"{self.name}: {piece.tensor} at {box} is outside its shape {self.shape}")
            if box.volume:
                boxes.append(box)
        if len(boxes) == 1 and boxes[0].size == self.shape:
            return
        whole = Box((0,) * len(self.shape), self.shape)
        if BoxIndex(boxes).disjoint and sum(box.volume for box in boxes) == whole.volume:
            return
        for number, box in enumerate(boxes):
            for other in boxes[:number]:
                common = box.intersection(other)
                if common is not None:
                    raise SchemaError(f"{self.name}: overlap: two pieces fill {common}")
        gaps = left_over(whole, boxes)
        if gaps:
            raise SchemaError(f"{self.name}: gap: no piece fills {gaps[0]}")


@lru_cache(1 << 16)
def _valid(name: str, dtype: str, shape: Numbers) -> None:
    TensorSpec(name, dtype, shape)  # raises SchemaError; ranks have the same tensors, so most are checked once


def fitted(size: Numbers, dims: int, what: str) -> Numbers:
    """Return a size with so many dimensions, leading ones added or removed. SchemaError: others would have to go."""
    if len(size) <= dims:
        return (1,) * (dims - len(size)) + size
    if any(each != 1 for each in size[: len(size) - dims]):
        raise SchemaError(f"{what}: a box of size {size} does not fit {dims} dimensions")
    return size[len(size) - dims :]


class Layout(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """All local tensors of one rank, in its order. Tensors with an empty dimension may be left out or not.

    SchemaError, when it is made, for names used twice, and for pieces that do not fill their tensor exactly once.
    """

    tensors: tuple[LocalTensor, ...]

    def __post_init__(self) -> None:
        names: set[str] = set()
        for tensor in self.tensors:
            if tensor.name in names:
                raise SchemaError(f"{tensor.name}: two local tensors have this name")
            names.add(tensor.name)
            tensor.check()

    @classmethod
    def of(cls, tensors: Iterable[LocalTensor]) -> Layout:
        """Return the layout of these tensors in this order."""
        return cls(tuple(tensors))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)
