"""The UCX library that is loaded: version, how it was built, its plug-ins, and what it sees on this host."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from transport.doctor.finding import Check, fail, ok, warn
from transport.errors import MissingDependencyError, TransportError
from transport.runtime.installing import install
from transport.wire import library as ucx

_OLDEST: Final = (1, 19)
_INFO_S: Final = 20.0
PLUGINS: Final = {"libuct_ib": "verbs", "libuct_rdmacm": "rdmacm", "libuct_cuda": "cuda", "libuct_cma": "cma"}


def plugins(library: Path | None) -> set[str]:
    """Return those of `PLUGINS`' values whose file stands beside the library."""
    if library is None:
        return set()
    files = {path.name.partition(".")[0] for path in (library.parent / "ucx").glob("*.so*")}
    return {name for file, name in PLUGINS.items() if file in files}


def build_flags(library: Path | None) -> str:
    """Return what it was configured with, as its own ucx_info says; empty where that is not installed."""
    if library is None:
        return ""
    program = library.parent.parent / "bin" / "ucx_info"
    try:
        done = subprocess.run(
            [program, "-v"],
            capture_output=True,
            text=True,
            timeout=_INFO_S,
            check=False,
            env={**os.environ, "LD_LIBRARY_PATH": str(library.parent)},  # a wheel's has no path to its own library
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"[Cc]onfigured with: *(.*)", done.stdout)
    return found[1].strip() if found else ""


def checks(*, gpu: bool) -> Iterator[Check]:
    """Library, build, plug-ins, transports. The first that fails is the last.

    gpu: whether this host has CUDA devices.
    """
    try:
        version = ucx.version()
        library = ucx.library_path()
    except MissingDependencyError as error:
        installed = importlib.util.find_spec("ucxx") is not None
        unset = "unset RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY, which takes the wheel's UCX again"
        yield fail("ucx", str(error), unset if installed else install("cu12"))
        return
    yield _version(version, library)
    flags = build_flags(library)
    yield ok("ucx build", flags or "unknown: ucx_info not found")
    yield _plugins(plugins(library), gpu=gpu)
    try:
        yield transports(ucx.all_transports())
    except TransportError as error:
        yield fail("ucx transports", str(error), "env | grep ^UCX_; unset the variable named in the error")


def _version(version: str, library: Path | None) -> Check:
    detail = f"{version}, {library or 'place unknown'}"
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        return fail("ucx", detail, f"{install('cu12')}, or a system UCX 1.19 or newer")
    return ok("ucx", detail)


def _plugins(found: set[str], *, gpu: bool) -> Check:
    detail = ", ".join(f"{name} {'yes' if name in found else 'no'}" for name in PLUGINS.values())
    if gpu and "cuda" not in found:
        return warn(
            "ucx plug-ins",
            f"{detail}; this UCX cannot send from the memory of this host's CUDA devices",
            f"{install('cu12')}, or a UCX built --with-cuda",
        )
    return ok("ucx plug-ins", detail)


def transports(seen: list[tuple[str, str]]) -> Check:
    """List what UCX can use, by device."""
    by_name: dict[str, list[str]] = {}
    for name, device in seen:
        by_name.setdefault(name, []).append(device)
    detail = "; ".join(f"{name}: {', '.join(devices)}" for name, devices in by_name.items())
    if "tcp" not in by_name:
        return fail(
            "ucx transports",
            f"{detail or 'none'}; without tcp no connection can be made",
            "unset UCX_TLS UCX_NET_DEVICES; ip link set dev lo up",
        )
    if not by_name.keys() & {"posix", "sysv"}:
        return warn("ucx transports", f"{detail}; no shared memory", "unset UCX_TLS; ls -ld /dev/shm")
    return ok("ucx transports", detail)
