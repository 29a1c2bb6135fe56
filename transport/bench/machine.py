"""Place where figures were measured: machine, versions, and the UCX settings in force."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from transport.errors import MissingDependencyError
from transport.wire import library as ucx
from transport.wires import Wire, settings_for, user_settings

_PACKAGES = ("payload-transport", "ucxx-cu12", "ucxx-cu13", "numpy", "uvloop")


def machine() -> dict[str, Any]:
    """Processor, cores, memory, kernel, Python, versions, and how busy the machine was before."""
    return {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": _versions(),
        "load": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d"),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    with contextlib.suppress(MissingDependencyError):  # the rows over UCX say so
        found["ucx"] = ucx.version()
    return found


def settings_of(wire: str) -> dict[str, str]:
    """UCX settings of a client for this wire, the user's own UCX_ variables included; names without UCX_."""
    if wire == "mapped":
        return {}
    name: Wire = wire  # type: ignore[assignment]
    users = {key: os.environ[f"UCX_{key}"] for key in user_settings() if f"UCX_{key}" in os.environ}
    return {**users, **settings_for(frozenset({name}))}
