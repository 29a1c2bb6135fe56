"""A /dev/shm of this process and its children alone, where the system lets it have one."""

from __future__ import annotations

import ctypes
import os

_NEW_MOUNTS = 0x0002_0000  # CLONE_NEWNS
_RECURSIVE, _PRIVATE = 0x4000, 1 << 18


def own_shared_memory() -> bool:
    """Mount an empty /dev/shm in a mount namespace of its own. False where that is not allowed; nothing changes then.

    Call it while the process has one thread.
    """
    size = os.statvfs("/dev/shm")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS) != 0:
        return False
    options = f"size={min(size.f_blocks * size.f_frsize, 4 << 30)},mode=1777".encode()
    separate = libc.mount(b"none", b"/", None, ctypes.c_ulong(_RECURSIVE | _PRIVATE), None) == 0
    return bool(separate and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(0), options) == 0)
