"""Cancels an upload from another thread."""

from __future__ import annotations

from transport.errors import UploadCancelledError


class Stop:
    """The cancellation of one upload, which removes what it has written when it finds it. Thread-safe.

    Args:
        whole: what this is a part of; it is cancelled with it.
    """

    def __init__(self, whole: Stop | None = None) -> None:
        self._whole = whole
        self._called_off = False

    def set(self) -> None:
        """Cancel the upload. Idempotent."""
        self._called_off = True

    def check(self) -> None:
        """Raise UploadCancelledError if cancelled. Called between files, and between the pieces of a file."""
        if self._whole is not None:
            self._whole.check()
        if self._called_off:
            raise UploadCancelledError("the upload was cancelled before it was complete")
