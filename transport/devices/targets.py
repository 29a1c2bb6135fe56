"""Device memory that bytes arrive in, and the streams that may look at it."""

from __future__ import annotations

import threading
from typing import Any

from transport.devices.libraries import Library
from transport.devices.streams import PER_THREAD, Mark, address_of, copy_to_device, own_stream, settled_on_failure


class Target:
    """The destination of one payload, or of one batch: bytes at ``address`` of a device, and the stream of their copy.

    Made in the thread whose current stream is to be used.
    """

    def __init__(self, array: Any, library: Library, size: int, stream: int, *, own: bool) -> None:
        described = library.describe(array)
        self.array = array
        self.size = size
        self.address = described.address
        self.device = described.device
        self.stream = stream
        self.library = library
        self._own = own  # allocated here, on a stream that the caller does not know
        self._mark: Mark | None = None
        self._used_on: set[int] = set()

    @classmethod
    def new(cls, library: Library, device: int, size: int) -> Target:
        """New memory, whose bytes arrive on the stream of `own_stream`."""
        return cls(library.empty(size, device, own=True), library, size, own_stream(device), own=True)

    def copy_from(self, source: Any) -> Mark:
        """Queue the copy of host memory, and the mark behind it. If that fails, the memory is no longer read."""
        with settled_on_failure(self.stream, self.device):
            if self.size:
                copy_to_device(self.address, address_of(source), self.size, self.device, self.stream)
            self._mark = Mark(self.stream, self.device)
        return self._mark

    def make_stream_wait(self) -> None:
        """The array is used now: work of another stream than ``stream`` is made to run after the arrival."""
        current = self.library.stream(self.device)
        name = current if current != PER_THREAD else -threading.get_ident()
        if current == self.stream or name in self._used_on:
            return
        if self._mark is not None:
            self._mark.hold(current, self.device)
        if self._own:
            self.library.keep(self.array, self.device, self.stream)
        self._used_on.add(name)  # last: another thread of the same stream passes only where the wait is queued
