"""Memory that batches are made in: of this process, pinned, or of a device.

host, pinned   gathered where they stay; memory from a pool, or the caller's
device         gathered in one pinned block ──one copy on the caller's stream──► one block of device memory
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from transport import _ring
from transport.devices.buffers import is_short_of_memory
from transport.devices.libraries import Library, parse_device
from transport.devices.streams import QueuedCopies, current_device, pooled_pinned_memory
from transport.devices.targets import Target
from transport.errors import BatchTooLargeError, BufferUnsuitableError
from transport.schema import ALIGNMENT, Placement

Array = np.ndarray[Any, Any]

_LARGEST: Final = 1 << 62  # bytes; no machine has it, and numpy counts with 63 bits
_POOL: Final = _ring.BufferPool()
_UNDERWAY: Final = QueuedCopies()


class Wanted(NamedTuple):
    """One array of a batch. With a name of a tensor, memory of the caller's may be used for it."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, in whole numbers of any size."""
        return math.prod(self.shape) * self.dtype.itemsize


class Landing(Protocol):
    """Memory in which the arrays of a batch are made."""

    plain: bool  # any numpy array is as good as one of `take`

    def take(self, wanted: Sequence[Wanted]) -> list[Array]:
        """Return an array in host memory for each, to gather into. BatchTooLargeError, BufferUnsuitableError."""

    def arrive(self) -> list[Any]:
        """Return what was gathered, where it is to be. After the last `take`."""

    def make_stream_wait(self) -> None:
        """Make the caller's stream wait for the arrays, which are used now."""


class HostLanding:
    """Pooled memory of this process, or the caller's arrays."""

    plain = True

    def __init__(self, out: Mapping[str, Any], most: int | None) -> None:
        self._out = out
        self._most = most
        self._arrays: list[Array] = []

    def take(self, wanted: Sequence[Wanted]) -> list[Array]:
        """See `Landing`."""
        self._arrays, out = [], self._out
        sizes = [0 if each.name in out else each.nbytes for each in wanted]
        _check_size(sum(sizes), self._most)
        self._arrays = [
            _fitting(out[each.name], each)
            if each.name in out
            else np.ndarray(each.shape, each.dtype, self._memory(size) if size else None)
            for each, size in zip(wanted, sizes, strict=True)
        ]
        return self._arrays

    def _memory(self, size: int) -> Any:
        try:
            return _POOL.take(size)
        except MemoryError as error:
            raise _short(size) from error

    def arrive(self) -> list[Any]:
        """See `Landing`."""
        return self._arrays

    def make_stream_wait(self) -> None:
        """See `Landing`."""


class PinnedLanding(HostLanding):
    """Page-locked memory from CuPy's pool."""

    plain = False

    def __init__(self, device: int, most: int | None) -> None:
        super().__init__({}, most)
        self._device = device

    def _memory(self, size: int) -> Any:
        return _pinned(size, self._device)


class DeviceLanding:
    """One block of device memory for all arrays of a batch, filled by one copy."""

    plain = False

    def __init__(self, library: Library, device: int, most: int | None) -> None:
        self._library = library
        self._device = device
        self._most = most
        self._places: list[Placement] = []
        self._block: Array = np.empty(0, np.uint8)
        self._target: Target | None = None

    def take(self, wanted: Sequence[Wanted]) -> list[Array]:
        """See `Landing`."""
        self._places, end = [], 0
        for each in wanted:
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            self._places.append(Placement(each.name, each.dtype, each.shape, begin, each.nbytes))
            end = begin + each.nbytes
        _check_size(end, self._most)
        self._block = _pinned(end, self._device)
        return [np.ndarray(each.shape, each.dtype, self._block, each.offset) for each in self._places]

    def arrive(self) -> list[Any]:
        """See `Landing`. BufferUnsuitableError: the library lacks a dtype."""
        library, block = self._library, self._block
        self._block = np.empty(0, np.uint8)
        try:
            target = Target.new(library, self._device, len(block))
        except Exception as error:
            if not is_short_of_memory(error):
                raise
            raise BatchTooLargeError(f"a batch of {len(block)} bytes, and device memory is short: {error}") from error
        found = [library.view(target.array, each) for each in self._places]
        self._target = target
        if len(block):
            _UNDERWAY.keep(target.copy_from(block), block)
        return found

    def make_stream_wait(self) -> None:
        """See `Landing`."""
        if self._target is not None:
            self._target.make_stream_wait()


def landing_for(memory: str, out: Mapping[str, Any] | None, most: int | None) -> Landing:
    """Return a landing in this memory. UsageError, MissingDependencyError: there is no such memory here."""
    if memory == "host":
        return HostLanding(out or {}, most)
    if memory == "pinned":
        return PinnedLanding(current_device(), most)
    return DeviceLanding(*parse_device(memory), most)


def _check_size(size: int, most: int | None) -> None:
    if most is not None and size > most:
        raise BatchTooLargeError(
            f"the arrays of this batch need {size} bytes, more than the {most} of most_memory; its payloads were given "
            "back: ask for fewer, or pack them"
        )
    if size > _LARGEST:
        raise _short(size)


def _pinned(size: int, device: int) -> Array:
    try:
        return pooled_pinned_memory(size, device)
    except Exception as error:
        if not is_short_of_memory(error):
            raise
        raise _short(size) from error


def _short(size: int) -> BatchTooLargeError:
    return BatchTooLargeError(
        f"this batch needs an array of {size} bytes, and there is no memory for it; its payloads were given back: ask "
        "for fewer, or pack them"
    )


def room_of(given: Any) -> int | None:
    """Return the second dimension of a caller's array, which bounds what a payload may have; None: it has none."""
    shape = tuple(getattr(given, "shape", ()))
    return int(shape[1]) if len(shape) > 1 else None


def _fitting(given: Any, wanted: Wanted) -> Array:
    """Return the caller's memory as an array of the shape that is wanted, never a copy of it."""
    name, dtype = wanted.name, wanted.dtype
    try:
        array = given if isinstance(given, np.ndarray) else np.from_dlpack(given)
    except (TypeError, ValueError, RuntimeError, BufferError, AttributeError) as error:
        raise BufferUnsuitableError(
            f"out[{name!r}]: this {type(given).__name__} cannot be written into as an array: {error}"
        ) from error
    if array.dtype != dtype or not array.flags.c_contiguous or not array.flags.writeable:
        raise BufferUnsuitableError(
            f"out[{name!r}] is {array.dtype.str if array.dtype.byteorder == '>' else array.dtype}"
            f"{'' if array.flags.c_contiguous else ', strided'}{'' if array.flags.writeable else ', read-only'}; "
            f"give contiguous writable memory of {dtype.name}"
        )
    if array.ndim != len(wanted.shape) or array.shape[1:] != wanted.shape[1:] or array.shape[0] < wanted.shape[0]:
        raise BufferUnsuitableError(
            f"out[{name!r}] has the shape {array.shape}, and the batch needs {wanted.shape}; its payloads were given "
            "back"
        )
    return array[: wanted.shape[0]]
