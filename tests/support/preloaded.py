"""Libraries that are preloaded into a child: what the system does to it there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")

needs_compiler = pytest.mark.skipif(_COMPILER is None, reason="no C compiler to build what is preloaded")


def preloaded(name: str, folder: Path) -> dict[str, str]:
    """The environment of a child that runs with tests/``name``.c, built in ``folder``."""
    library = folder / f"{name}.so"
    source = Path(__file__).with_name(f"{name}.c")
    command = [str(_COMPILER), "-shared", "-fPIC", "-O1", "-x", "c", source, "-o", library, "-ldl"]
    subprocess.run(command, check=True)
    return {"LD_PRELOAD": str(library)}
