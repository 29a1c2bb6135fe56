"""Cancels an upload from another thread, until its manifest is being written."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from transport.errors import UploadCancelledError


class Stop:
    """The cancellation of one upload. Either it is cancelled, or its manifest is written: never both. Thread-safe.

    Args:
        whole: what this is a part of; it is cancelled with it.
    """

    def __init__(self, whole: Stop | None = None) -> None:
        self._lock = threading.Lock()
        self._whole = whole
        self._called_off = False
        self._committing = False

    def set(self) -> bool:
        """Cancel the upload; False: too late, the manifest is being written or is written. Idempotent."""
        with self._lock:
            self._called_off |= not self._committing
            return self._called_off

    def check(self) -> None:
        """Raise UploadCancelledError if cancelled. Called between files, and between the pieces of a file."""
        if self._whole is not None:
            self._whole.check()
        if self._called_off:
            raise UploadCancelledError("the upload was cancelled before it was complete")

    @contextlib.contextmanager
    def committing(self) -> Iterator[None]:
        """Context of writing the manifest. Raises UploadCancelledError if the upload was cancelled before."""
        with self._lock:
            self.check()
            self._committing = True
        yield
