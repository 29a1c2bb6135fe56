"""A version of the weights as one row of bytes, packed as a payload is: which tensor stands where, and its checksum.

Every tensor stands at a multiple of 64 bytes and is one contiguous array, without a copy; the gaps are zero. The
checksum of a version is XXH3 (64 bits) of the row; it does not depend on the size of buckets, nor on the way a version
came (whole, or as a delta).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from transport import _ring
from transport.devices.streams import pinned_memory
from transport.errors import SchemaError
from transport.schema import ALIGNMENT, DTYPES, MAX_BYTES, PayloadLayout, Placement, TensorSpec
from transport.weights.versions.tensors import OnDevice, Tensor, tensor_of

MAX_TENSORS = 1 << 17

_ZEROS = bytes(ALIGNMENT)
_WINDOW_BYTES = 2 << 20  # of a device's tensor that is hashed on the host at a time


def row_of(specs: Iterable[TensorSpec]) -> PayloadLayout:
    """Lay tensors out in a row, in this order. SchemaError for none, too many, or too many bytes."""
    placements: list[Placement] = []
    end = 0
    for spec in specs:
        dtype = DTYPES[spec.dtype]
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        nbytes = math.prod(spec.shape) * dtype.itemsize
        placements.append(Placement(spec.name, dtype, spec.shape, offset, nbytes))
        end = offset + nbytes
    if not 1 <= len(placements) <= MAX_TENSORS:
        raise SchemaError(f"a version has {len(placements)} tensors: give 1 to {MAX_TENSORS}")
    if end > MAX_BYTES:
        raise SchemaError(f"the version takes {end} bytes, more than {MAX_BYTES}")
    return PayloadLayout(tuple(placements), end)


def specs_of(weights: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    """Return what describes these arrays. SchemaError for what cannot be a tensor of a payload."""
    return tuple(_spec_of(name, tensor_of(value, name)) for name, value in weights.items())


def _spec_of(name: str, tensor: Tensor) -> TensorSpec:
    return TensorSpec(name, tensor.dtype.name, tensor.shape)


def weights_checksum(weights: Mapping[str, Any]) -> int:
    """Return the checksum of the version that these arrays are, in their order: what proves which version is served.

    Hashes every byte: about 70 ms for each GiB. What is in device memory comes to the host for that, piece by piece, on
    the stream that is current.
    """
    tensors = {name: tensor_of(value, name) for name, value in weights.items()}
    row = row_of(_spec_of(name, tensor) for name, tensor in tensors.items())
    hasher, window, end = _ring.Checksum(), None, 0
    for place, tensor in zip(row.placements, tensors.values(), strict=True):
        hasher.update(_ZEROS[: place.offset - end])
        end = place.offset + place.nbytes
        if not isinstance(tensor, OnDevice):
            hasher.update(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
            continue
        if window is None:
            window = pinned_memory(_WINDOW_BYTES, tensor.tensor.device)
        for start in range(0, place.nbytes, len(window)):
            piece = window[: place.nbytes - start]
            tensor.copy_to(piece, start)
            hasher.update(piece.data)
    return hasher.digest()
