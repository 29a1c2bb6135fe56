"""Processes that have a ring of this host: what each is, and the end of those that serve it without a writer."""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path
from typing import Final

from transport import _ring
from transport.ring.attachment import Attachment
from transport.server.ending import LISTENER, LOOK_S, SUPERVISOR, Ending, has_module, listeners_of
from transport.settings import DEFAULTS

_ROLES: Final = {_ring.ROLE_WRITER: "writer", _ring.ROLE_LISTENER: "listener", _ring.ROLE_READER: "reader"}
_END_S: Final = 10.0  # of a supervisor, which kills listeners that do not end


def users_of(ring: Attachment) -> str:
    """Return the ring's living processes, and how to end what lingers without its writer; "": there are none."""
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


def end_lingering(ring: Attachment) -> bool:
    """End what serves the ring of a killed writer, so that it has no process. Blocks, as a rule for less than 3 s.

    False: its writer lives, a process has it mapped, a trainer takes from it, or what serves it does not end.
    """
    native = ring.native
    others = any(each.alive and each.role != _ring.ROLE_LISTENER for each in native.owners())
    if others or native.keeper_alive or native.takers:
        return False
    if native.supervised:
        supervisor = supervisor_of(ring)
        if not supervisor:  # in another container
            return False
        pids, module = {supervisor}, SUPERVISOR
    else:
        (pids, _), module = listeners_of(native), LISTENER
    ending = Ending(f"what serves {ring.name}", math.inf, _END_S, module)
    while native.supervised or any(each.alive for each in native.owners()):
        if not ending.goes_on(pids):
            return False
        time.sleep(LOOK_S)
    return True


def supervisor_of(ring: Attachment) -> int:
    """Return the process that keeps the ring's listeners alive; 0: none but this one, or none that is seen here."""
    with contextlib.suppress(OSError):
        segment = Path(f"/dev/shm{ring.name}").stat()
        for pid in (int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()):
            if (
                pid != os.getpid()
                and has_module(pid, SUPERVISOR)
                and any(_leads_to(each, segment) for each in _descriptors(pid))
            ):
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
