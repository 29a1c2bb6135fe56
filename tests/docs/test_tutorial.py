"""The programs of docs/TUTORIAL.md as a reader would run them: on one host, on two, with checkpoints; with kills."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import pytest
from two_hosts import Host, two_hosts, why_not

PAGE = Path(__file__).resolve().parents[2] / "docs" / "TUTORIAL.md"
PAYLOADS = 100
PORT = 7450

pytestmark = [pytest.mark.ucx, pytest.mark.slow]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The programs, each saved under the name that the page gives it."""
    text = PAGE.read_text(encoding="utf-8")
    for name, program in re.findall(r"Save this as (\w+)\.py.*?```python\n(.*?)```", text, re.DOTALL):
        (tmp_path / f"{name}.py").write_text(program, encoding="utf-8")
    return tmp_path


def start(folder: Path, name: str, *arguments: str, host: Host | None = None) -> subprocess.Popen[str]:
    words = [sys.executable, f"{name}.py", *arguments]
    path = os.pathsep.join(filter(None, [str(PAGE.parents[1]), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        words if host is None else host.command(*words),
        cwd=folder,
        env={**os.environ, "TRANSPORT_RUN": f"tutorial-{os.getpid()}", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    )


def killed_while_it_learns(trainer: subprocess.Popen[str]) -> list[str]:
    """What it said: it has trained on a batch, and learns from another one."""
    assert trainer.stdout is not None
    said = []
    while not (said and said[-1].startswith("learning") and any(line.startswith("trained on") for line in said)):
        said.append(next(trainer.stdout))
    trainer.send_signal(signal.SIGKILL)
    return said + trainer.communicate()[0].splitlines()


def trained(lines: list[str]) -> list[int]:
    begin = "trained on "
    return [int(word) for line in lines if line.startswith(begin) for word in line.removeprefix(begin).split()]


@pytest.mark.nightly
def test_what_a_killed_trainer_was_learning_from_is_trained_on_by_the_other_one(folder: Path) -> None:
    with start(folder, "rollout") as rollout, start(folder, "trainer") as killed, start(folder, "trainer") as other:
        before = killed_while_it_learns(killed)
        after = other.communicate()[0].splitlines()
        assert (rollout.wait(), other.returncode) == (0, 0)
    assert sorted(trained(before) + trained(after)) == list(range(PAYLOADS))  # once each
    assert trained(after)


@pytest.mark.nightly
def test_two_hosts_train_once_on_each_trajectory_though_two_trainers_are_killed(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if reason := why_not():
        pytest.skip(f"two hosts are not tested: {reason}")
    with two_hosts(tmp_path_factory.mktemp("hosts")) as (here, there):
        rings = f"rings://{here.address}:{PORT}"
        with (
            start(folder, "rollout", str(PORT), host=here) as rollout,
            start(folder, "trainer", rings, host=there) as first,
            start(folder, "trainer", rings, host=there) as second,
        ):
            with ThreadPoolExecutor(2) as both:  # each is killed when it says so, not behind what it said before
                said = list(chain(*both.map(killed_while_it_learns, (first, second))))
            with start(folder, "trainer", rings, host=there) as last:
                said += last.communicate()[0].splitlines()
                assert (rollout.wait(), last.returncode) == (0, 0)
    assert sorted(trained(said)) == list(range(PAYLOADS)), said


@pytest.mark.nightly
def test_with_checkpoints_every_trajectory_is_in_the_weights_once_however_often_the_trainer_is_killed(
    folder: Path,
) -> None:
    with start(folder, "rollout") as rollout:
        for lines in (2, 4, 5):  # killed before its first checkpoint, behind it, and at whatever follows
            with start(folder, "learner") as killed:
                assert killed.stdout is not None
                said = [next(killed.stdout) for _ in range(lines)]
                killed.send_signal(signal.SIGKILL)
            assert all(line.startswith("learned") for line in said)
        with start(folder, "learner") as last:
            end = last.communicate()[0].splitlines()[-1]
        assert (rollout.wait(), last.returncode) == (0, 0)
    assert end == f"weights {float(sum(100 + number for number in range(PAYLOADS)))}"
