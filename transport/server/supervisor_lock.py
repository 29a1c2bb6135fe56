"""One supervisor per ring: a kernel lock on a byte of the segment's file, released when its holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterator

from transport.errors import RingBusyError

_BYTE = (1 << 61) + 4096  # far beyond the payload, and beyond the bytes of keeper and owners (native/ring/owners.hpp)
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux, with its native padding


def _path(segment: str) -> str:
    return f"/dev/shm{segment}"


def _request(kind: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, _BYTE, 1, 0)


@contextlib.contextmanager
def holding(segment: str) -> Iterator[None]:
    """Hold the supervisor lock of ``segment``. Raises RingBusyError when another process holds it."""
    descriptor = os.open(_path(segment), os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _request(fcntl.F_WRLCK))
        except OSError as error:
            raise RingBusyError(f"another supervisor serves {segment}") from error
        yield
    finally:
        os.close(descriptor)


def supervised(segment: str) -> bool:
    """True while a living process holds the lock."""
    try:
        descriptor = os.open(_path(segment), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _request(fcntl.F_WRLCK))
    finally:
        os.close(descriptor)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
