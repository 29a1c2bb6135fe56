"""A version of the weights as one row of bytes: which tensor stands where.

    layout = VersionLayout.of(specs)     # every tensor at a multiple of 64 bytes, gaps zero

Every tensor is one contiguous array, without a copy. The checksum of a version is XXH3 (64 bits) of the row; it does
not depend on the size of buckets, nor on the way a version came (whole, or as a delta).
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
from transport.weights.versions.tensors import Tensor, Window, bytes_of, tensor_of

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


def weights_checksum(weights: Mapping[str, Any]) -> int:
    """The checksum of the version that these arrays are, in their order: what proves which version is served.

    Hashes every byte: about 70 ms for each GiB. What is in device memory comes to the host for that, piece by piece, on
    the stream that is current.
    """
    tensors = {name: tensor_of(value, name) for name, value in weights.items()}
    layout = VersionLayout.of(spec_of(name, tensor) for name, tensor in tensors.items())
    hasher, window, end = _ring.Checksum(), Window(), 0
    for place, tensor in zip(layout.places, tensors.values(), strict=True):
        hasher.update(_ZEROS[: place.offset - end])
        end = place.offset + place.nbytes
        window.hash(hasher, bytes_of(tensor))
    return hasher.digest()
