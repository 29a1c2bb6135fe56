"""What the kernel says of other processes: memory, processor time, wake-ups."""

from __future__ import annotations

import os
from pathlib import Path

_RINGS = "/dev/shm/transport-"


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, shared pages included, but for those of rings."""
    total = 0
    counted = True
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Rss":
            total += counted * int(value.split()[0]) * 1024
        elif "-" in name:  # the line that begins a mapping: its addresses, and at its end its file
            counted = _RINGS not in line
    return total


def processor_s(pid: int) -> float:
    """User and system time of a process so far, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wake_ups(pid: int) -> int:
    """Voluntary context switches of a process so far, all of its threads."""
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        for line in status.read_text().splitlines():
            if line.startswith("voluntary_ctxt"):
                total += int(line.split()[1])
    return total
