"""A look at the kernel for another process of this host that a signal has stopped."""

from __future__ import annotations

from pathlib import Path


def suspended(pid: int) -> bool:
    """Return True if the process is stopped; False also for one of another container, and one that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] in (b"T", b"t")
    except OSError:
        return False
