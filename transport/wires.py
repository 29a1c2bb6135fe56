"""The wires, and the UCX settings for each.

UCX settings such as the rendezvous threshold belong to a context, so they are chosen for the set of wires that the
context may use.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from transport import rdma
from transport.errors import UsageError, WireNotAllowedError

Wire = Literal["mapped", "shm", "tcp", "rdma", "cuda"]
WIRES: tuple[Wire, ...] = get_args(Wire)
MAX_ADDRESSES = 16  # of a server, in its tickets

# Chosen by measurement for endpoints with error handling on.
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
_RDMA = {
    "RNDV_THRESH": "8192",
    # To soft-RoCE UCX's default of 7 retries means that it never gives up.
    "RC_RETRY_COUNT": "6",
    # UCX keeps a connection by TCP beside RC's, which tells that a host is gone: 5 s and three times 2 s after its last
    # packet. An adapter says nothing to a listener, whose memory its peer reads.
    "TCP_KEEPIDLE": "5s",
    "TCP_KEEPINTVL": "2s",
    "TCP_KEEPCNT": "3",
    "WARN_INVALID_CONFIG": "n",  # of names of transports of which this host has none
}
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
# UCX has one address of each interface, by default that of IPv4, and writes the address of a peer that came by IPv6
# behind the memory that is for it (seen in 1.21: the process aborts). So an interface without IPv6 is left out.
_IPV6 = {"TCP_AF_PRIO": "inet6"}
_TRANSPORTS: dict[Wire, tuple[str, ...]] = {
    "shm": ("sm", "tcp"),  # tcp makes the connection, shared memory carries the bytes
    "tcp": ("tcp", "self"),
    "rdma": ("rc_verbs", "rc_mlx5", "tcp"),
    "cuda": ("cuda", "tcp"),
}
# Where UCX has UD it tells by it that a host is gone, after 30 s, and ends the process when the device is gone.
_NOT_UD = "^ud,dc"


def named_wires(wanted: Wire | Iterable[Wire]) -> frozenset[Wire]:
    """Return the wires that a caller names. Raises UsageError for an unknown name, and for no name."""
    try:
        names = {str(wanted)} if isinstance(wanted, str) else set(wanted)
    except TypeError as error:
        kind = "None" if wanted is None else f"a {type(wanted).__name__}"
        raise UsageError(f"wire got {kind}: give 'auto' or some of {', '.join(WIRES)}, in a set") from error
    if not names or not names <= set(WIRES):
        raise UsageError(f"wire={sorted(names)}; choose 'auto' or some of {', '.join(WIRES)}")
    return frozenset(wire for wire in WIRES if wire in names)


# As UCX_TLS may name them.
_SHARED_MEMORY = ("sm", "shm", "mm", "posix", "sysv", "cma", "knem", "xpmem")
_RDMA_NAMES = (
    *("ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "rc_gda", "dc", "dc_x", "dc_mlx5"),
    *("ud", "ud_v", "ud_x", "ud_verbs", "ud_mlx5", "gga", "gga_mlx5", "srd"),
)


def _without(transports: str, unwanted: Iterable[str]) -> str:
    """Return a value of UCX_TLS without ``unwanted``, the first of which stands for all; "": none is left."""
    names = [name.strip() for name in transports.split(",")]
    family, *_ = unwanted
    if names[0].startswith("^"):
        return ",".join([*names, family])
    kept = [name for name in names if _name(name) not in unwanted]
    return f"^{family}" if "all" in kept else ",".join(kept)


def _name(transport: str) -> str:
    return transport.split(":")[0].lstrip("\\")


def _chosen_by_user() -> str | None:
    return os.environ.get("UCX_TLS") if "TLS" in user_settings() else None


def admits_rdma(settings: Mapping[str, str]) -> bool:
    """Return whether a UCX context with ``settings`` may use an RDMA device."""
    names = [name.strip() for name in settings.get("TLS", os.environ.get("UCX_TLS", "all")).split(",")]
    if names[0].startswith("^"):
        return not {"^ib", "ib"} & set(names)
    return any(_name(name) in ("all", *_RDMA_NAMES) for name in names)


def settings_for(
    wires: frozenset[Wire] | None = None,
    *,
    shared_memory: bool = True,
    refused: str | None = None,
    ipv6: bool = False,
    interface: str | None = None,
) -> dict[str, str]:
    """Return UCX settings (names without UCX_) for a context that may use ``wires``; None: whatever UCX finds best.

    The user's UCX_ variables take precedence: UCX reads them itself, and they are left out here, but for transports
    that this host refuses.

    Args:
        shared_memory: False for peers whose memory cannot be mapped: shared memory is excluded in any case.
        refused: why no RDMA device can be used; "": one can; None: what `rdma.refusal` says.
        ipv6: for connections by IPv6 addresses.
        interface: the only one that TCP may use; None: any.

    Raises:
        WireNotAllowedError: no wire is left.
    """
    if refused is None:
        refused = rdma.refusal()
    if wires is not None:
        wires = _usable(wires, shared_memory, refused)
    chosen = {**_CHOSEN, **_IPV6} if ipv6 else dict(_CHOSEN)
    if wires is not None:
        chosen["TLS"] = ",".join(dict.fromkeys(name for wire in WIRES if wire in wires for name in _TRANSPORTS[wire]))
    by_rdma = not refused and (wires is None or "rdma" in wires)
    if interface is not None:
        chosen["NET_DEVICES"] = ",".join([interface, *(rdma.ports() if by_rdma else ())])
    if by_rdma:
        chosen.update(_RDMA)
        chosen.setdefault("TLS", _NOT_UD)
    elif not (wires & {"shm", "cuda"} if wires is not None else Path("/dev/nvidiactl").exists()):
        chosen.update(_TCP)
    settings = {name: value for name, value in chosen.items() if name not in user_settings()}
    theirs = _chosen_by_user()
    if theirs is not None or wires is None:
        allowed = theirs or chosen.get("TLS", "all")
        narrowed = _narrowed(allowed, shared_memory, refused)
        if narrowed != allowed:
            settings["TLS"] = narrowed
    return settings


def _usable(wires: frozenset[Wire], shared_memory: bool, refused: str) -> frozenset[Wire]:
    """Return those of ``wires`` that UCX can carry here. Raises WireNotAllowedError if that leaves none."""
    left = wires - {"mapped"}
    if not left:
        raise WireNotAllowedError("wire={'mapped'} allows no UCX transport: allow shm, tcp, rdma or cuda as well")
    if not shared_memory:
        left -= {"shm"}
        if not left:
            raise WireNotAllowedError(f"wire={sorted(wires)} allows shared memory only, but {_APART}: allow tcp")
    if refused and "rdma" in left:
        left -= {"rdma"}
        if not left - {"cuda"}:
            raise WireNotAllowedError(f"wire={sorted(wires)}: {refused}; or allow tcp")
    return left


_APART = "the ring's processes run on another host or in another container, or belong to another user of this host"


def _narrowed(transports: str, shared_memory: bool, refused: str) -> str:
    """Return a value of UCX_TLS without what cannot be used. Raises WireNotAllowedError if nothing is left."""
    kept = transports
    if not shared_memory:
        kept = _without(kept, _SHARED_MEMORY)
        if not kept:
            raise WireNotAllowedError(f"UCX_TLS={transports} allows shared memory only, but {_APART}: add tcp")
    if refused and admits_rdma({"TLS": kept}):
        kept = _without(kept, _RDMA_NAMES)
        if not kept:
            raise WireNotAllowedError(f"UCX_TLS={transports}: {refused}; or add tcp")
    return kept


@cache
def user_settings() -> frozenset[str]:
    """Return the names of the user's own UCX_ variables, read before ucxx adds its own to the environment."""
    return frozenset(name[4:] for name in os.environ if name.startswith("UCX_"))


def settings_to_load() -> dict[str, str]:
    """Return UCX settings (names without UCX_) of the process, read when the library is loaded."""
    return dict(_TO_LOAD)
