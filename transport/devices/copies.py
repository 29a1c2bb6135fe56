"""Copies of device tensors into a slot: queued on the caller's stream, and hashed step by step as they arrive.

Large tensors are copied one step ahead of the hashing, so that the hash reads bytes that are still in the processor's
cache. The copies of small neighbouring tensors are waited for together. The host waits only for these copies, not for
the device or for later work of the stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from transport.devices.arrays import DeviceTensor
from transport.devices.libraries import library_of
from transport.devices.streams import Mark, Stream, copy_to_host, settled_on_failure
from transport.schema import PayloadLayout

# Bytes of one step, and of the steps that are copied while one is hashed; up to which size tensors share a step.
_STEP_BYTES = 2 << 20
_AHEAD_BYTES = 2 << 20
_SMALL_BYTES = 16 << 10


class _Step:
    """Copies on one stream that are waited for together."""

    __slots__ = ("device", "end", "mark", "parts", "start", "stream")

    def __init__(self, stream: tuple[int, Stream]) -> None:
        self.device, self.stream = stream
        self.parts: list[tuple[int, int, int]] = []  # start in the slot, bytes, address
        self.start = self.end = 0  # of all parts
        self.mark: Mark | None = None

    def add(self, start: int, size: int, address: int) -> None:
        if not self.parts:
            self.start = start
        self.parts.append((start, size, address))
        self.end = start + size

    def queue(self, slot: int) -> None:
        """Queue the copies into the slot at address ``slot``, and the mark behind them."""
        handle = self.stream.handle
        with settled_on_failure(handle, self.device):
            copy_to_host([(slot + start, address, size) for start, size, address in self.parts], self.device, handle)
            self.mark = Mark(handle, self.device)


class Source(NamedTuple):
    """``size`` device bytes at ``address``, made by ``stream``, to be copied to offset ``start`` of a slot."""

    start: int
    size: int
    address: int
    device: int
    stream: Stream


def sources_of(layout: PayloadLayout, arrays: Sequence[object]) -> list[Source | None]:
    """Return the device tensors of a payload, on the current streams of this thread; None for tensors in host memory.

    arrays: in the layout's order; the `DeviceTensor`s are contiguous and of the layout's dtypes.
    """
    streams: dict[tuple[str, int], Stream] = {}
    found: list[Source | None] = []
    for array, placement in zip(arrays, layout.placements, strict=True):
        if not isinstance(array, DeviceTensor):
            found.append(None)
            continue
        library = library_of(array.value)
        key = (library.name, array.device)
        if key not in streams:
            streams[key] = library.stream(array.device)
        found.append(Source(placement.offset, placement.nbytes, array.address, array.device, streams[key]))
    return found


class DeviceCopies:
    """The copies of one payload into the slot at ``address``. Always call `finish` at the end.

    sources: in the order of their offsets; None stands for a tensor that the CPU packs.
    """

    def __init__(self, sources: Sequence[Source | None], address: int) -> None:
        self._address = address
        self._steps: list[_Step] = []
        self._parts: dict[int, list[tuple[int, int, int]]] = {}  # start and end in the slot, step; by tensor number
        self._queued = 0  # steps
        self._ahead = 0  # bytes queued beyond what was waited for
        run: _Step | None = None
        for number, source in enumerate(sources):
            if source is None:
                continue
            stream = (source.device, source.stream)
            small = source.size <= _SMALL_BYTES
            for done in range(0, source.size, _STEP_BYTES):
                size = min(_STEP_BYTES, source.size - done)
                full = run is None or run.end - run.start >= _STEP_BYTES or (run.device, run.stream) != stream
                if run is None or full or not small:
                    run = _Step(stream)
                    self._steps.append(run)
                start = source.start + done
                run.add(start, size, source.address + done)
                self._parts.setdefault(number, []).append((start, start + size, len(self._steps) - 1))
            if not small:
                run = None

    def start(self) -> None:
        """Queue the first steps."""
        while self._queued < len(self._steps) and self._ahead < _AHEAD_BYTES:
            self._queue_next()

    def arrived(self, number: int) -> Iterator[tuple[int, int]]:
        """(start, end) of each part of a tensor, each once it is in the slot. Tensors in their order."""
        for start, end, at in self._parts.get(number, ()):
            while self._queued <= at:
                self._queue_next()
            step = self._steps[at]
            if step.mark is not None:
                step.mark.wait()
                step.mark = None
                self._ahead -= step.end - step.start
                self.start()
            yield start, end

    def finish(self) -> None:
        """Wait for all queued copies: afterwards the memory of slot and tensors may be reused."""
        for step in self._steps[: self._queued]:
            if step.mark is not None:
                step.mark.wait()

    def _queue_next(self) -> None:
        step = self._steps[self._queued]
        self._queued += 1
        self._ahead += step.end - step.start
        step.queue(self._address)
