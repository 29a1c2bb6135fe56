"""The host's conditions for the wire rdma: ports that are up, and memory that this process may lock.

An RDMA device reads and writes memory that the kernel has locked for it. UCX reserves its own buffers in the middle of
its progress, and where the kernel refuses them it tries again for ever. So the limit is looked at before UCX may use a
device at all. The roots can be other folders, so that all of it is tested on machines without a device.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

SYSFS: Final = Path("/sys/class/infiniband")
OWN: Final = Path("/proc/self")
UCX_BYTES: Final = (
    160 << 20
)  # what UCX 1.23 locks for itself in a process with two workers on one port, and a fifth more
_CAP_IPC_LOCK: Final = 14
_ALL_USERS: Final = "0 0 4294967295"


def refusal(locked_bytes: int = 0, *, root: Path = SYSFS, own: Path = OWN) -> str:
    """Return why this process cannot use the wire rdma; empty where the host has what it takes.

    Args:
        locked_bytes: memory that is to be registered, beside UCX's own buffers.
    """
    return no_port(root) or no_memory(locked_bytes, own)


def no_port(root: Path = SYSFS) -> str:
    """Return why no port can be used; empty where one is ACTIVE."""
    states = ports(root)
    if not states:
        return "this host has no InfiniBand or RoCE device"
    if "ACTIVE" not in states.values():
        return f"no port is ACTIVE: {', '.join(f'{name} is {state}' for name, state in states.items())}"
    return ""


def ports(root: Path = SYSFS) -> dict[str, str]:
    """Return the state of each port by its name, as UCX has it: mlx5_0:1."""
    return {f"{path.parts[-3]}:{path.name}": _state(path) for path in sorted(root.glob("*/ports/*"))}


def no_memory(locked_bytes: int, own: Path = OWN) -> str:
    """Return why so much memory cannot be registered beside UCX's own; empty where it can."""
    left = lockable_bytes(own)
    needed = UCX_BYTES + locked_bytes
    if left is None or left >= needed:
        return ""
    return (
        f"this process may lock {left >> 10} KiB of memory and needs {needed >> 10}: ulimit -l unlimited; "
        "systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1"
    )


def lockable_bytes(own: Path = OWN) -> int | None:
    """Return how much more memory this process may lock for a device; None where there is no limit."""
    limit = re.search(r"^Max locked memory +(\d+)", _text(own / "limits"), re.MULTILINE)
    status = _text(own / "status")
    if limit is None or (_number(status, "CapEff", 16) >> _CAP_IPC_LOCK & 1 and _of_all_users(own)):
        return None
    return max(0, int(limit[1]) - (_number(status, "VmPin", 10) << 10))


def _of_all_users(own: Path) -> bool:
    """Return whether this process's capabilities are the host's, and not those of a user namespace."""
    return " ".join(_text(own / "uid_map").split()) == _ALL_USERS


def _number(status: str, name: str, base: int) -> int:
    found = re.search(rf"^{name}:\s*(\w+)", status, re.MULTILINE)
    return int(found[1], base) if found else 0


def _state(port: Path) -> str:
    return _text(port / "state").strip().rpartition(": ")[2] or "unknown"


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # a driver may leave a file out, or refuse to read it
        return ""
