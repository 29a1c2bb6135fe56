"""benchmarks/gpu, as far as it goes without a device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "benchmarks" / "gpu"
WITHOUT_A_DEVICE = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"}


def test_without_a_device_it_says_so_and_measures_nothing() -> None:
    done = subprocess.run([sys.executable, PROGRAM], env=WITHOUT_A_DEVICE, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert done.stderr.startswith("nothing to do here: ")
    assert done.stdout == ""


@pytest.mark.nightly
def test_it_checks_with_every_test_of_device_memory() -> None:
    """Without a device each of them is skipped, which pytest says in its last line."""
    code = "import environment, os; print(*environment.check(dict(os.environ)))"
    within = {**WITHOUT_A_DEVICE, "PYTHONPATH": str(PROGRAM), "PYTEST_ADDOPTS": "--collect-only"}
    done = subprocess.run([sys.executable, "-c", code], env=within, capture_output=True, text=True, timeout=100)
    files = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert files == {f"tests/gpu/{file.name}" for file in (ROOT / "tests" / "gpu").glob("test_*.py")}, done
