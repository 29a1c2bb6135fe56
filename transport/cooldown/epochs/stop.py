"""Calling off an upload from another thread, up to the moment when its manifest is written."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from transport.errors import UploadCancelledError


class Stop:
    """One upload's. Either it is called off, or its manifest's writing begins: never both. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._called_off = False
        self._committing = False

    def set(self) -> bool:
        """Call it off; False: too late, the manifest is being written or is there. Idempotent."""
        with self._lock:
            self._called_off |= not self._committing
            return self._called_off

    def check(self) -> None:
        """Raise UploadCancelledError if it was called off. Between files, and between the pieces of one."""
        if self._called_off:
            raise UploadCancelledError("the upload was cancelled before it was complete")

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """Around the writing of the manifest. Raises UploadCancelledError if it was called off before."""
        with self._lock:
            self.check()
            self._committing = True
        yield
