"""Tests over several workers: one that dies fails one test, and the run ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from scheduling import LONGEST, seconds

TESTS = Path(__file__).parent
SUPPORT = TESTS / "support"
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


@pytest.mark.parametrize("name", LONGEST)
def test_a_file_that_is_said_to_be_long_is_there(name: str) -> None:
    assert list(TESTS.parent.glob(f"{name}*")), "rename the entry of tests/support/scheduling.py as well"


def test_the_longest_name_counts_and_then_the_number_of_tests() -> None:
    assert seconds("tests/bench/test_job_runs.py", 1) == LONGEST["tests/bench/test_job_runs"]
    assert seconds("tests/bench/test_job.py", 1) == LONGEST["tests/bench/test_job"]
    assert seconds("tests/test_of_many.py", 500) > seconds("tests/test_of_few.py", 50) > 0


def test_files_that_take_long_come_first(tmp_path: Path) -> None:
    long = {"tests/weights/test_sharded_kills.py": 1, "tests/test_of_many.py": 30, "tests/test_of_few.py": 3}
    for name, count in long.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"def test_{at}(): pass\n" for at in range(count)))
    (tmp_path / "conftest.py").write_text(PLUGIN)
    command = [sys.executable, "-m", "pytest", "-v", "-n", "1", "--dist", "loadfile", "-p", "no:cacheprovider"]
    within = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(SUPPORT)}
    command += ["--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=within, capture_output=True, text=True, timeout=60)
    ended = [line.split()[-1].partition("::")[0] for line in done.stdout.splitlines() if " PASSED " in line]
    assert list(dict.fromkeys(ended)) == list(long), done.stdout
