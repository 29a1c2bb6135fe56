"""A process of tests that is forked (tests/support/prepared.py) is as one that starts an interpreter of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import is_running
from prepared import PreparedPython

TELLS = """
import json, os, random, sys
print(json.dumps([sys.argv, __name__, sys.path[0], sorted(os.environ), os.getcwd(), sys.stdin.readline(), os.getpid(),
                  os.getpgid(0), sorted(map(int, os.listdir("/proc/self/fd")))[:3]]))
print("told", file=sys.stderr)
class Seen: pass
sys.exit(0 if Seen.__module__ == "__main__" else 1)
"""
ENDS = {
    "pass": 0,
    "import sys; sys.exit(7)": 7,
    "raise RuntimeError('for its reader')": 1,
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": -signal.SIGKILL,
    "import atexit, os; atexit.register(os._exit, 9)": 9,
}


def own_interpreter(code: str, *arguments: str, env: dict[str, str], **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], text=True, env=env, **options)


both = pytest.mark.parametrize("start", [own_interpreter, PreparedPython])
Start = Callable[..., subprocess.Popen[str]]


@both
def test_it_has_the_words_files_and_environment_that_it_was_given(start: Start, tmp_path: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    given = {"PYTHONPATH": "/there", "ONLY": "this", "LC_CTYPE": "C.UTF-8"}
    with start(TELLS, "one", "two words", env=given, cwd=tmp_path, **pipes) as child:
        out, errors = child.communicate("heard\n")
        *told, pid, group, files = json.loads(out)
        assert told == [["-c", "one", "two words"], "__main__", "", sorted(given), str(tmp_path), "heard\n"]
        assert (pid, group, files) == (child.pid, os.getpgid(0), [0, 1, 2])
        assert errors == "told\n"
        assert child.returncode == 0


@both
@pytest.mark.parametrize("code", ENDS)
def test_it_is_heard_how_it_ended(start: Start, code: str) -> None:
    with start(code, env=dict(os.environ), stderr=subprocess.DEVNULL) as child:
        assert child.wait() == ENDS[code]
        assert child.poll() == ENDS[code]


@both
def test_it_is_killed_by_its_pid_and_its_files_are_closed_then(start: Start) -> None:
    with start(
        "print('runs', flush=True); input()", env=dict(os.environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "runs\n"
        assert child.poll() is None and is_running(child.pid)
        child.kill()
        assert child.stdout.read() == ""
        assert child.wait() == -signal.SIGKILL and not is_running(child.pid)


def test_two_of_them_do_not_draw_the_same_numbers() -> None:
    drawn = set()
    for _ in range(2):
        with PreparedPython(
            "import random; print(random.random())", env=dict(os.environ), stdout=subprocess.PIPE
        ) as child:
            drawn.add(child.communicate()[0])
    assert len(drawn) == 2
