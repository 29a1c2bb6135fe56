"""The programs in benchmarks/, as processes and as modules: they are no part of the package."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run_benchmark(name: str, *arguments: str, timeout_s: float = 100.0) -> subprocess.CompletedProcess[str]:
    """The program with these arguments, ended."""
    command = [sys.executable, "-P", "-W", "error", str(BENCHMARKS / f"{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


def measured_rows(name: str, *arguments: str) -> list[dict[str, Any]]:
    """The rows of its JSON."""
    done = run_benchmark(name, *arguments, "--json", "-")
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return rows


def benchmark_module(name: str) -> ModuleType:
    """The program as a module, for parts that a run has no device for."""
    specification = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = sys.modules[specification.name] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
