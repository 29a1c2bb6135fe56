"""Which processes have a ring of this host, for a person: what each is, and how to end those without a writer."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from transport import _ring
from transport.ring.attachment import Attachment
from transport.server.process import has_module
from transport.settings import DEFAULTS

_ROLES: Final = {_ring.ROLE_WRITER: "writer", _ring.ROLE_LISTENER: "listener", _ring.ROLE_READER: "reader"}
_SUPERVISOR: Final = b"transport.server.supervisor"  # as on the command line


def users_of(ring: Attachment) -> str:
    """The ring's living processes, and how to end what lingers without its writer; "": there are none."""
    native = ring.native
    owners = {(_ROLES.get(each.role, "process"), each.pid) for each in native.owners() if each.alive}
    said = [", ".join(f"{role} {pid}" for role, pid in sorted(owners))]
    listeners = sorted(pid for role, pid in owners if role == "listener")
    if not native.keeper_alive and (listeners or native.supervised):
        # A listener that ends alone is started again: its supervisor ends them all, and removes the ring.
        ends = [pid] if (pid := supervisor_of(ring)) else listeners
        said.append(
            f"its writer has ended, and what serves its unread payloads stays linger_s, {DEFAULTS.linger_s:.0f} s by "
            f"default: `kill {' '.join(map(str, ends)) or 'PID'}` ends it now"
        )
    return "; ".join(filter(None, said))


def supervisor_of(ring: Attachment) -> int:
    """The process that keeps the ring's listeners alive; 0: there is none, or none that this process sees."""
    with contextlib.suppress(OSError):
        segment = Path(f"/dev/shm{ring.name}").stat()
        for pid in (int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()):
            if has_module(pid, _SUPERVISOR) and any(_leads_to(each, segment) for each in _descriptors(pid)):
                return pid
    return 0


def _descriptors(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it has ended
        return []


def _leads_to(descriptor: Path, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(descriptor.stat(), file)
    except OSError:
        return False
