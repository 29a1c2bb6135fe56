"""The wires, and the UCX settings for each.

UCX settings such as the rendezvous threshold belong to a context, so they are chosen for the set of wires that the
context may use.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from transport.errors import UsageError, WireNotAllowedError

Wire = Literal["mapped", "shm", "tcp", "rdma", "cuda"]
WIRES: tuple[Wire, ...] = get_args(Wire)

# Chosen by measurement for endpoints with error handling on (docs/UCXX.md, "UCX settings").
_CHOSEN = {
    "TCP_TX_SEG_SIZE": "256k",
    "TCP_RX_SEG_SIZE": "512k",
    "TCP_MAX_IOV": "16",  # pieces of a message in one call of the kernel; UCX has no use for more
    # With blocking connects UCX frees a connection whose peer disconnects during the call and then uses it (a crash).
    "TCP_CONN_NB": "y",
    "TCP_CM_REUSEADDR": "y",  # a restarted listener gets its port at once, not after a minute
    "MM_ERROR_HANDLING": "y",  # allows shared memory together with error handling
    "RNDV_THRESH": "1m",  # receives are posted before the request is sent, so eager saves a round trip
    "MEMTYPE_CACHE": "n",
}
_RDMA = {"RNDV_THRESH": "8192"}
# Where TCP alone carries payloads. An answer to TAKE (up to 8 MiB and its tickets) is sent in pieces, large payloads
# from their slots. UCX would copy the pieces of a rendezvous before it sends them, and by default those of a long eager
# message as well.
_TCP = {"RNDV_THRESH": "9m", "ZCOPY_THRESH": "1"}
# While it is loaded, UCX writes hooks into mmap, munmap and others, to learn which memory is unmapped. For each it
# would wait 50 ms, in which other threads that call the function spin, and it waits by the wall clock: a process that
# starts while that is set back by a day hangs for a day. Without the hooks (MEM_MMAP_HOOK_MODE=none) UCX has no
# registration cache, and crashes when a transfer with a rendezvous is given up (seen in 1.21, ucp_memh_invalidate).
# By default UCX writes its warnings to standard output, which belongs to the program.
_TO_LOAD = {"MEM_BISTRO_GRACE_DURATION": "0", "LOG_FILE": "stderr"}
_TRANSPORTS: dict[Wire, tuple[str, ...]] = {
    "shm": ("sm", "tcp"),  # tcp makes the connection, shared memory carries the bytes
    "tcp": ("tcp", "self"),
    "rdma": ("rc", "dc", "ud", "tcp"),
    "cuda": ("cuda", "tcp"),
}


def named_wires(wanted: Wire | Iterable[Wire]) -> frozenset[Wire]:
    """The wires that a caller names. Raises UsageError for an unknown name, and for no name."""
    try:
        names = {str(wanted)} if isinstance(wanted, str) else set(wanted)
    except TypeError as error:
        kind = "None" if wanted is None else f"a {type(wanted).__name__}"
        raise UsageError(f"wire got {kind}: give 'auto' or some of {', '.join(WIRES)}, in a set") from error
    if not names or not names <= set(WIRES):
        raise UsageError(f"wire={sorted(names)}; choose 'auto' or some of {', '.join(WIRES)}")
    return frozenset(wire for wire in WIRES if wire in names)


@cache
def user_settings() -> frozenset[str]:
    """Names of the user's own UCX_ variables, read before ucxx adds its own to the environment."""
    return frozenset(name[4:] for name in os.environ if name.startswith("UCX_"))


def settings_to_load() -> dict[str, str]:
    """UCX settings (names without UCX_) of the process, read when the library is loaded."""
    return dict(_TO_LOAD)


_SHARED_MEMORY = ("sm", "shm", "mm", "posix", "sysv", "cma", "knem", "xpmem")  # as UCX_TLS may name it


def _without_shared_memory(transports: str) -> str:
    """A value of UCX_TLS without shared-memory transports. Raises WireNotAllowedError if none is left."""
    names = [name.strip() for name in transports.split(",")]
    if names[0].startswith("^"):
        return ",".join([*names, *_SHARED_MEMORY[:1]])
    kept = [name for name in names if name.split(":")[0].lstrip("\\") not in _SHARED_MEMORY]
    if not kept:
        raise WireNotAllowedError(
            f"UCX_TLS={transports} allows shared memory only, but the ring's processes belong to another user of this "
            "host, or run in another container: add tcp"
        )
    return "^sm" if "all" in kept else ",".join(kept)


def settings_for(wires: frozenset[Wire] | None = None, *, shared_memory: bool = True) -> dict[str, str]:
    """UCX settings (names without UCX_) for a context that may use ``wires``; None: whatever UCX finds best.

    The user's UCX_ variables take precedence: UCX reads them itself, and they are left out here. On
    InfiniBand the rendezvous threshold stays low.

    Args:
        shared_memory: False for peers whose memory cannot be mapped: shared memory is excluded in any case.
    """
    if not shared_memory:
        return _settings_apart(wires)
    chosen = dict(_CHOSEN)
    if wires is not None:
        remote = [wire for wire in WIRES if wire in wires and wire != "mapped"]
        if not remote:
            raise WireNotAllowedError("wire={'mapped'} allows no UCX transport: allow shm, tcp, rdma or cuda as well")
        chosen["TLS"] = ",".join(dict.fromkeys(name for wire in remote for name in _TRANSPORTS[wire]))
        if "rdma" in wires:
            chosen.update(_RDMA)
        elif not wires & {"shm", "cuda"}:
            chosen.update(_TCP)
    elif Path("/sys/class/infiniband").is_dir():
        chosen.update(_RDMA)
    elif not Path("/dev/nvidiactl").exists():
        chosen.update(_TCP)
    return {name: value for name, value in chosen.items() if name not in user_settings()}


def _settings_apart(wires: frozenset[Wire] | None) -> dict[str, str]:
    if wires is not None:
        left = wires - {"shm"}
        if not left - {"mapped"}:
            raise WireNotAllowedError(
                f"wire={sorted(wires)} allows shared memory only, but the ring's processes belong to another user of "
                "this host, or run in another container: allow tcp"
            )
        wires = left
    settings = settings_for(wires)
    theirs = os.environ.get("UCX_TLS") if "TLS" in user_settings() else None
    if theirs is not None or wires is None:
        settings["TLS"] = _without_shared_memory(theirs or "all")
    return settings
