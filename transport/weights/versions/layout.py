"""A version of the weights as one row of bytes: which tensor stands where, and which bucket carries what.

    layout = VersionLayout.of(specs)     # every tensor at a multiple of 64 bytes, gaps zero
    layout.buckets(256 << 20)            # consecutive ranges of that row; the last one is as long as what is left

A bucket is a range, not a set of tensors: a tensor that crosses a boundary is split there, and on arrival all ranges
lie side by side again, so that every tensor is one contiguous array without a copy. The checksum of a version is XXH3
(64 bits) of the row; it does not depend on the size of buckets, nor on the way a version came (whole, or as a delta).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np

from transport import _ring
from transport.errors import SchemaError
from transport.schema import ALIGNMENT, DTYPES, MAX_BYTES, TensorSpec
from transport.weights.versions.tensors import Bytes, Tensor, Window, bytes_of, tensor_of

MAX_TENSORS = 1 << 17

_ZEROS = bytes(ALIGNMENT)


class Place(NamedTuple):
    """Where a tensor stands in the row. Bytes."""

    spec: TensorSpec
    offset: int
    nbytes: int


class VersionLayout(msgspec.Struct, frozen=True, dict=True):
    """The tensors of a model, in the order in which they are sent. SchemaError for names used twice, or too much."""

    specs: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.specs) <= MAX_TENSORS:
            raise SchemaError(f"a version has {len(self.specs)} tensors: give 1 to {MAX_TENSORS}")
        if len({spec.name for spec in self.specs}) != len(self.specs):
            raise SchemaError("two tensors of the version have the same name")
        if any(spec.ragged for spec in self.specs):
            raise SchemaError("tensors of weights have fixed shapes; none can be ragged")
        if self.total > MAX_BYTES:
            raise SchemaError(f"the version takes {self.total} bytes, more than {MAX_BYTES}")

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> VersionLayout:
        """The layout of these tensors in this order."""
        return cls(tuple(specs))

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """One for each tensor, in order."""
        places, end = [], 0
        for spec in self.specs:
            offset = -(-end // ALIGNMENT) * ALIGNMENT
            nbytes = math.prod(spec.shape) * DTYPES[spec.dtype].itemsize
            places.append(Place(spec, offset, nbytes))
            end = offset + nbytes
        return tuple(places)

    @cached_property
    def total(self) -> int:
        """Bytes of the row; nothing is padded behind the last tensor."""
        last = self.places[-1]
        return last.offset + last.nbytes

    def buckets(self, bucket_bytes: int) -> list[tuple[int, int]]:
        """(start, end) of every bucket. All are full but the last."""
        return [(start, min(start + bucket_bytes, self.total)) for start in range(0, self.total, bucket_bytes)]

    def groups(self, most_bytes: int) -> Iterator[list[Place]]:
        """Neighbouring tensors that take up to so many bytes together, in order; a larger one stands alone."""
        group: list[Place] = []
        for place in self.places:
            if group and place.offset + place.nbytes - group[0].offset > most_bytes:
                yield group
                group = []
            group.append(place)
        yield group

    def arrays(self, row: Any, *, writable: bool = False) -> dict[str, np.ndarray[Any, Any]]:
        """The tensors by name, in the row's own memory."""
        flat = np.frombuffer(row, np.uint8)
        found = {}
        for spec, offset, nbytes in self.places:
            array = flat[offset : offset + nbytes].view(DTYPES[spec.dtype]).reshape(spec.shape)
            if not writable:
                array.flags.writeable = False
            found[spec.name] = array
        return found


def specs_of(weights: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    """What describes these arrays. SchemaError for what cannot be a tensor of a payload."""
    return tuple(spec_of(name, tensor_of(value, name)) for name, value in weights.items())


def spec_of(name: str, array: Tensor) -> TensorSpec:
    """What describes one array."""
    return TensorSpec(name, array.dtype.name, array.shape)


class Cursor:
    """Follows a sender's tensors through the layout, and says which bytes each contributes to the row."""

    def __init__(self, layout: VersionLayout) -> None:
        self._places = iter(layout.places)
        self._end = 0

    def take(self, name: str, array: Tensor) -> Iterator[tuple[int, Bytes]]:
        """(offset, bytes) in order: the gap before the tensor, then the tensor. SchemaError for any other tensor."""
        place = next(self._places, None)
        if place is None:
            raise SchemaError(
                f"unexpected tensor {name}: the version's layout has no more tensors; give specs that list it"
            )
        if (name, array.dtype.name, array.shape) != (place.spec.name, place.spec.dtype, place.spec.shape):
            raise SchemaError(
                f"tensor mismatch: received {name} {array.dtype.name} {array.shape}, expected {place.spec}; "
                "send tensors in the layout's order"
            )
        if place.offset > self._end:
            yield self._end, np.frombuffer(_ZEROS, np.uint8)[: place.offset - self._end]
        self._end = place.offset + place.nbytes
        if place.nbytes:
            yield place.offset, bytes_of(array)

    def finish(self) -> None:
        """SchemaError when tensors are missing."""
        missing = next(self._places, None)
        if missing is not None:
            raise SchemaError(f"tensor {missing.spec.name} is missing: every tensor of the layout is needed")


def weights_checksum(weights: Mapping[str, Any]) -> int:
    """The checksum of the version that these arrays are, in their order: what proves which version is served.

    Hashes every byte: about 70 ms for each GiB. What is in device memory comes to the host for that, piece by piece, on
    the stream that is current.
    """
    tensors = {name: tensor_of(value, name) for name, value in weights.items()}
    cursor = Cursor(VersionLayout.of(spec_of(name, tensor) for name, tensor in tensors.items()))
    hasher, window = _ring.Checksum(), Window()
    for name, tensor in tensors.items():
        for _, part in cursor.take(name, tensor):
            window.hash(hasher, part)
    return hasher.digest()
