"""Modules of a checkout's benchmarks/, for the options of `transport bench` that need them; the wheel has none."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from transport.errors import MissingDependencyError

_ROOT = Path(__file__).resolve().parents[2]


def beside(option: str, name: str) -> ModuleType:
    """Import a module of benchmarks/peers, which ``option`` needs. MissingDependencyError outside a checkout."""
    if not (_ROOT / "benchmarks" / "peers" / f"{name}.py").exists():
        raise MissingDependencyError(f"{option} needs the project's sources; run it in a checkout (pip install -e .)")
    if str(_ROOT) not in sys.path:
        sys.path.insert(0, str(_ROOT))
    return importlib.import_module(f"benchmarks.peers.{name}")
