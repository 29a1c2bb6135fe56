"""Device tensors into a slot: queued on the caller's stream, awaited part by part while the slot is hashed.

Large tensors go straight from their memory into the slot. A run of small neighbours is gathered on the device and
copied as one, since a copy costs 3 µs to queue, whatever its size. Only the copies themselves are waited for: no
device, and no stream beyond them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from transport.devices import DeviceTensor, require_cupy
from transport.libraries import library_of
from transport.schema import ALIGNMENT, Layout
from transport.streams import Mark, copy_to_host

log = logging.getLogger(__name__)

# Measured (docs/GPU.md): bytes between two marks, so that hashing runs beside copying; what counts as small; and from
# how many small ones a gathering kernel is cheaper than copies of their own.
_STEP_BYTES = 8 << 20
_SMALL_BYTES = 128 << 10
_RUN = 24


class _Copy:
    """A copy that has been queued; done once its mark has passed, which it gets with the copies queued beside it."""

    __slots__ = ("kept", "mark", "size")

    def __init__(self, size: int, kept: object) -> None:
        self.size = size
        self.kept = kept  # the memory that it reads
        self.mark: Mark | None = None

    def wait(self) -> None:
        if self.mark is not None:
            self.mark.wait()


class DeviceCopies:
    """The copies of one payload into the slot at ``address``. Whatever happens after `start`, end with `finish`."""

    def __init__(self, layout: Layout, address: int) -> None:
        self._layout = layout
        self._address = address
        self._copies: list[_Copy] = []
        self._parts: dict[int, list[tuple[int, int, _Copy]]] = {}  # start and end in the slot, by tensor number
        self._unmarked: dict[tuple[int, int], list[_Copy]] = {}  # by device and stream

    def start(self, arrays: Sequence[object]) -> None:
        """Queue a copy of every `DeviceTensor` among ``arrays``, which stand in the layout's order."""
        run: list[int] = []
        home = (-1, -1)
        for number, array in enumerate(arrays):
            stream = home
            if isinstance(array, DeviceTensor):
                stream = (array.device, library_of(array.value).stream(array.device))
                if array.nbytes <= _SMALL_BYTES:
                    if stream != home:
                        self._copy_run(run, arrays, home)
                        run = []
                    run.append(number)
                    home = stream
                    continue
            self._copy_run(run, arrays, home)
            run = []
            if isinstance(array, DeviceTensor):
                self._copy(number, array, stream)
        self._copy_run(run, arrays, home)
        self._mark_all()

    def arrived(self, number: int) -> Iterator[tuple[int, int]]:
        """(start, end) of each part of a tensor, each once it is in the slot."""
        for start, end, copy in self._parts.get(number, ()):
            copy.wait()
            yield start, end

    def finish(self) -> None:
        """Wait for every copy: the slot's memory, and the tensors', are others' afterwards. Idempotent."""
        self._mark_all()  # of a start that failed half-way
        while self._copies:
            self._copies.pop().wait()

    def _copy(self, number: int, tensor: DeviceTensor, stream: tuple[int, int]) -> None:
        placement = self._layout.placements[number]
        for done in range(0, placement.nbytes, _STEP_BYTES):
            start, size = placement.offset + done, min(_STEP_BYTES, placement.nbytes - done)
            copy = self._queue(start, size, tensor.address + done, tensor, stream)
            self._parts.setdefault(number, []).append((start, start + size, copy))

    def _copy_run(self, run: list[int], arrays: Sequence[Any], stream: tuple[int, int]) -> None:
        gathered = self._gathered(run, arrays, stream) if len(run) >= _RUN else None
        if gathered is None:
            for number in run:
                self._copy(number, arrays[number], stream)
            return
        placements = [self._layout.placements[number] for number in run]
        copy = self._queue(placements[0].offset, gathered.nbytes, int(gathered.data.ptr), gathered, stream)
        for number, placement in zip(run, placements, strict=True):
            self._parts[number] = [(placement.offset, placement.offset + placement.nbytes, copy)]

    def _gathered(self, run: list[int], arrays: Sequence[Any], stream: tuple[int, int]) -> Any:
        """The run's tensors, and zeros for the gaps, as one array on the device, by one kernel; None: not so."""
        cupy = require_cupy()
        device, handle = stream
        end = self._layout.placements[run[0]].offset
        try:
            with cupy.cuda.Device(device), cupy.cuda.ExternalStream(handle, device):
                gap = cupy.zeros(ALIGNMENT, dtype=np.uint8)
                parts = []
                for number in run:
                    placement = self._layout.placements[number]
                    parts += [gap[: placement.offset - end], _bytes_of(cupy, arrays[number])]
                    end = placement.offset + placement.nbytes
                return cupy.concatenate([part for part in parts if part.size])
        except Exception as error:  # no compiler for kernels, no memory: copies of their own do the same
            log.debug("%d small tensors are copied one by one: %s", len(run), error)
            return None

    def _queue(self, start: int, size: int, source: int, kept: object, stream: tuple[int, int]) -> _Copy:
        copy = _Copy(size, kept)
        self._copies.append(copy)  # before it is queued: what was queued is waited for, whatever comes next
        beside = self._unmarked.setdefault(stream, [])
        beside.append(copy)
        copy_to_host(self._address + start, source, size, *stream)
        if sum(each.size for each in beside) >= _STEP_BYTES:
            self._mark(stream)
        return copy

    def _mark(self, stream: tuple[int, int]) -> None:
        device, handle = stream
        mark = Mark(handle, device)
        for copy in self._unmarked.pop(stream):
            copy.mark = mark

    def _mark_all(self) -> None:
        for stream in list(self._unmarked):
            self._mark(stream)


def _bytes_of(cupy: Any, tensor: DeviceTensor) -> Any:
    """A tensor's memory as a uint8 array of CuPy's, whatever library it belongs to."""
    owner = cupy.cuda.UnownedMemory(tensor.address, tensor.nbytes, tensor.value, tensor.device)
    return cupy.ndarray((tensor.nbytes,), dtype=np.uint8, memptr=cupy.cuda.MemoryPointer(owner, 0))
