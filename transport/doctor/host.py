"""Limits of the kernel here: shared memory, locked memory, open files, looking into other processes, huge pages.

Each check takes the numbers it judges, so that a test can give it any host; `checks` reads them from this one.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from transport.doctor.finding import Check, fail, ok, warn

_FEWEST_FILES: Final = 4096
_FILES_OF_A_CONNECTION: Final = 3
_REGISTERED_AT_LEAST: Final = 64 << 20  # what UCX registers before a ring's own memory
_UNLIMITED: Final = resource.RLIM_INFINITY


def checks(ring_bytes: int, connections: int, *, rdma: bool) -> Iterator[Check]:
    """All of this host.

    Args:
        ring_bytes: of the rings that are to be made here.
        connections: of one listener, or one client.
        rdma: whether InfiniBand or RoCE is to be used.
    """
    room = os.statvfs("/dev/shm")
    yield shared_memory(room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize, ring_bytes)
    yield open_files(*resource.getrlimit(resource.RLIMIT_NOFILE), connections)
    yield locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], ring_bytes, rdma=rdma)
    yield memory_of_others(_number(Path("/proc/sys/kernel/yama/ptrace_scope")), privileged=_may_trace())
    yield namespaces(_namespaces())
    yield cores(len(os.sched_getaffinity(0)), _numa_nodes())
    yield huge_pages(_text(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")))


def shared_memory(free: int, size: int, needed: int) -> Check:
    """Check whether /dev/shm holds the rings."""
    detail = f"/dev/shm has {_mib(free)} MiB free of {_mib(size)} MiB; rings of {_mib(needed)} MiB are planned"
    if free < needed:
        wanted = _mib(needed) * 5 // 4 + 64
        return fail(
            "shared memory",
            detail,
            f"mount -o remount,size={wanted}M /dev/shm; in a container start it with --shm-size={wanted}m "
            "(Kubernetes: an emptyDir of medium Memory at /dev/shm); old rings: transport reclaim",
        )
    if free < 2 * needed:
        return warn("shared memory", detail, f"mount -o remount,size={_mib(needed) * 2 + 64}M /dev/shm")
    return ok("shared memory", detail)


def open_files(soft: int, hard: int, connections: int) -> Check:
    """Check whether the descriptors suffice; a connection takes three at either end."""
    needed = max(_FEWEST_FILES, _FILES_OF_A_CONNECTION * connections + 256)
    detail = f"{_limit(soft)} open files (hard limit {_limit(hard)}); {connections} connections take up to {needed}"
    if soft != _UNLIMITED and soft < needed:
        more = hard == _UNLIMITED or hard >= needed
        raising = f"ulimit -n {needed}" if more else f"as root: ulimit -Hn {needed} && ulimit -n {needed}"
        return warn("open files", detail, f"{raising}; systemd: LimitNOFILE={needed}; docker: --ulimit nofile={needed}")
    return ok("open files", detail)


def locked_memory(limit: int, ring_bytes: int, *, rdma: bool) -> Check:
    """Check whether memory can be registered with an InfiniBand device, which locks it."""
    detail = f"{'unlimited' if limit == _UNLIMITED else f'{_mib(limit)} MiB'} can be locked"
    needed = ring_bytes + _REGISTERED_AT_LEAST
    if limit == _UNLIMITED or limit >= needed:
        return ok("locked memory", detail)
    remedy = "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1"
    if rdma:
        return fail("locked memory", f"{detail}; registering the rings for RDMA takes {_mib(needed)} MiB", remedy)
    return ok("locked memory", f"{detail}; needed with InfiniBand only")


def memory_of_others(scope: int | None, *, privileged: bool) -> Check:
    """Check whether UCX's cma could read another process's memory."""
    if scope in (None, 0) or privileged:
        return ok("ptrace scope", f"{'not restricted' if scope is None else scope}: cma may read other processes")
    return warn(
        "ptrace scope",
        f"{scope}: cma cannot read other processes; UCX copies through shared memory instead, which endpoints with "
        "error handling do anyway",
        "sysctl kernel.yama.ptrace_scope=0 (docker: --cap-add SYS_PTRACE)",
    )


def namespaces(found: dict[str, str]) -> Check:
    """Check what both ends must share for a mapping or for shared memory."""
    listed = ", ".join(f"{name} {number}" for name, number in sorted(found.items()))
    return ok(
        "namespaces",
        f"{listed}; mapped and shm need the same /dev/shm at both ends "
        "(containers: --ipc=host, or --ipc=container:NAME)",
    )


def cores(allowed: int, nodes: int) -> Check:
    """Check whether a listener has a core beside the writer."""
    detail = f"{allowed} cores on {nodes} memory node{'s' if nodes != 1 else ''}"
    if allowed < 2:
        return warn("cores", detail, "give the process 2 cores or more (taskset -c, docker --cpus): one per listener")
    if nodes > 1:
        detail += "; start writer and listeners on the node of the network card: numactl --cpunodebind=N --membind=N"
    return ok("cores", detail)


def huge_pages(setting: str | None) -> Check:
    """Check whether segments get huge pages, which saves page faults when a ring is first written."""
    chosen = "" if setting is None else setting.partition("[")[2].partition("]")[0]
    if chosen in ("always", "advise", "within_size", "force"):
        return ok("huge pages", f"shared memory: {chosen}")
    return ok(
        "huge pages",
        f"shared memory: {chosen or 'unknown'}; for rings of many GiB: mount -o remount,huge=within_size /dev/shm",
    )


def _mib(size: int) -> int:
    """Return a size in MiB, rounded up."""
    return (size + (1 << 20) - 1) >> 20


def _limit(number: int) -> str:
    return "unlimited" if number == _UNLIMITED else str(number)


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.isdecimal() else None


def _may_trace() -> bool:
    """Return whether this process has CAP_SYS_PTRACE."""
    status = _text(Path("/proc/self/status")) or ""
    mask = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(mask, 16) >> 19 & 1)


def _namespaces() -> dict[str, str]:
    found = {}
    for name in ("ipc", "pid", "mnt", "net", "user"):
        try:
            found[name] = str(Path(f"/proc/self/ns/{name}").readlink()).partition("[")[2].rstrip("]")
        except OSError:
            continue
    return found


def _numa_nodes() -> int:
    return max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))))
