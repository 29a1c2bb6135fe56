"""The two programs of docs/TUTORIAL.md run as a reader would run them, and one of two trainers is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "TUTORIAL.md"
PAYLOADS = 100


def numbers(lines: list[str], begin: str) -> list[int]:
    return [int(word) for line in lines if line.startswith(begin) for word in line.removeprefix(begin).split()]


@pytest.mark.ucx
@pytest.mark.slow
def test_what_a_killed_trainer_was_learning_from_is_trained_on_by_the_other_one(tmp_path: Path) -> None:
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[:2]
    for name, program in zip(("rollout", "trainer"), programs, strict=True):
        (tmp_path / f"{name}.py").write_text(program, encoding="utf-8")
    environment = {**os.environ, "TRANSPORT_RUN": f"tutorial-{os.getpid()}"}

    def start(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(tmp_path / f"{name}.py")]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    with start("rollout") as rollout, start("trainer") as killed:
        assert killed.stdout
        before = [next(killed.stdout) for _ in range(3)]  # a batch, and the next one is being learned from
        with start("trainer") as other:
            killed.send_signal(signal.SIGKILL)
            before += killed.communicate()[0].splitlines()
            after = other.communicate()[0].splitlines()
        assert (rollout.wait(), other.returncode) == (0, 0)

    trained = numbers(before, "trained on ") + numbers(after, "trained on ")
    assert len(set(trained)) == len(trained)
    assert set(trained) == set(range(PAYLOADS))  # also what the killed one was learning from
    assert numbers(after, "trained on ")
