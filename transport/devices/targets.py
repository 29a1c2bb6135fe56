"""Device memory that bytes arrive in, and the streams that may look at it."""

from __future__ import annotations

from typing import Any

from transport.devices.libraries import Library
from transport.devices.streams import Mark, Stream, address_of, copy_to_device, own_stream, settled_on_failure


class Target:
    """The destination of one payload, or of one batch: bytes at ``address`` of a device, and the stream of their copy.

    Made in the thread whose current stream is to be used.
    """

    def __init__(self, array: Any, library: Library, size: int, stream: Stream, *, own: bool) -> None:
        described = library.describe(array)
        self.array = array
        self.size = size
        self.address = described.address
        self.device = described.device
        self.stream = stream
        self.library = library
        self._own = own  # allocated here, on a stream that the caller does not know
        self._mark: Mark | None = None
        self._kept_for: set[Stream] = set()  # alive, so that no later stream has the handle of one of them

    @classmethod
    def new(cls, library: Library, device: int, size: int) -> Target:
        """Make new memory, whose bytes arrive on the stream of `own_stream`."""
        return cls(library.empty(size, device, own=True), library, size, own_stream(device), own=True)

    def copy_from(self, source: Any) -> Mark:
        """Queue the copy of host memory, and the mark behind it. If that fails, the memory is no longer read."""
        handle = self.stream.handle
        with settled_on_failure(handle, self.device):
            if self.size:
                copy_to_device(self.address, address_of(source), self.size, self.device, handle)
            self._mark = Mark(handle, self.device)
        return self._mark

    def make_stream_wait(self) -> None:
        """Make what the current stream does from now on run after the arrival: the array is used now."""
        current = self.library.stream(self.device)
        mark = self._mark
        if mark is not None and mark.passed:
            mark = self._mark = None  # a graph that is captured later may not wait for what was queued before it
        if mark is not None:  # each time: no handle tells whether the stream waits already
            mark.hold(current.handle, self.device)
        if self._own and current not in self._kept_for:
            self.library.keep(self.array, self.device, current, self.stream)
            self._kept_for.add(current)
