"""`--passed FILE` runs what the runs before it have not passed, and nothing else (tests/support/passed.py)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parents[1] / "support"
TESTS = """
import os, pytest
there = os.environ["THERE"] == "1"

@pytest.fixture
def ends_badly():
    yield
    assert there

@pytest.mark.parametrize("each", range(3))
def test_passes(each): pass

@pytest.mark.skipif(not there, reason="a package is missing")
def test_needs_a_package(): pass

def test_fails_without_it(): assert there

def test_ends_badly_without_it(ends_badly): pass
"""


@pytest.mark.nightly
@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_what_passed_is_left_out_and_nothing_else(tmp_path: Path, workers: str) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)

    def run(there: str) -> tuple[int, str]:
        options = ["-p", "xdist", "-p", "passed", "--passed", "there/passed", "-p", "no:cacheprovider", workers]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        alone = {"PYTHONPATH": str(SUPPORT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        environment = {**inherited, **alone, "THERE": there}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        )
        return done.returncode, re.sub(r" in [\d.]+s.*| warnings?|=", "", done.stdout.splitlines()[-1]).strip()

    assert run("0") == (1, "1 failed, 4 passed, 1 skipped, 1 error")
    status, counts = run("1")
    assert status == 0
    assert counts.startswith("3 passed")
    names = (tmp_path / "there" / "passed").read_text().splitlines()
    assert len(names) == len(set(names)) == 6
    assert run("1")[0] == 0, "where nothing is left, nothing is wrong"
