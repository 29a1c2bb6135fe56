"""Tests over several workers: one that dies fails one test, and the run ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent / "support"
PLUGIN = """
def pytest_xdist_make_scheduler(config, log):
    from scheduling import Files
    return Files(config, log)
"""
DIES = "import os, pathlib\ndef test_dies():\n    with open('died', 'a') as log: log.write('x')\n    os._exit(3)\n"


@pytest.mark.parametrize("dies_in", [0, 3, 7], ids=["the first file", "the middle", "the last file"])
@pytest.mark.parametrize("after", [0, 1, 3], ids=lambda after: f"{after} tests after it")
def test_a_worker_that_dies_fails_its_test_and_the_others_run(tmp_path: Path, dies_in: int, after: int) -> None:
    (tmp_path / "conftest.py").write_text(PLUGIN)
    for number in range(8):
        text = "".join(f"def test_{at}(): pass\n" for at in range(1 + number % 2))
        if number == dies_in:
            text += DIES + "".join(f"def test_after_{at}(): pass\n" for at in range(after))
        (tmp_path / f"test_{number}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    within = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(SUPPORT)}
    done = subprocess.run([*command, tmp_path], cwd=tmp_path, env=within, capture_output=True, text=True, timeout=60)
    assert f"1 failed, {12 + after} passed" in done.stdout, done.stdout
    assert (tmp_path / "died").read_text() == "x", "the test that ends its worker runs once"
