"""examples/grpo.py learns, while its processes are killed: each group is in the weights once, on ranks in step."""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed: pip install torch", allow_module_level=True)

with warnings.catch_warnings():  # of what torch imports
    warnings.simplefilter("ignore")
    import torch

pytestmark = [pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(900)]
EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "grpo.py"
STEPS = 100


class Job:
    """The example as a process, with all that it starts, and what its ranks have printed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._output = folder / "output"
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *role: str) -> None:
        with self._output.open("ab") as out:
            command = [sys.executable, str(EXAMPLE), str(self._folder), *role]
            self._started.append(subprocess.Popen(command, stdout=out, stderr=out))

    def processes(self, role: str = "") -> list[int]:
        """Ids of its processes; with a role those alone that have it, without torchrun's agent."""
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (place / "cmdline").read_text().split("\0")
                if str(self._folder) in words and (
                    not role or (role in words and "torch.distributed.run" not in words)
                ):
                    found.append(int(place.name))
        return found

    def kill(self, pids: list[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def steps(self) -> list[tuple[int, int]]:
        """Rank and number of each step, in the order in which they were learned."""
        found = re.findall(r"rank (\d), step (\d+):", self._output.read_text())  # two ranks may share a line
        return [(int(rank), int(number)) for rank, number in found]

    def until(self, step: int) -> None:
        """Wait until a rank has printed this step."""
        self._until(lambda: any(number >= step for _, number in self.steps()), f"step {step}")

    def end(self) -> None:
        """Wait for the end of the example that was started last."""
        last = self._started[-1]
        self._until(lambda: last.poll() is not None, "its end")
        assert last.returncode == 0, self._output.read_text()[-4000:]

    def _until(self, reached: Callable[[], bool], what: str) -> None:
        give_up = time.monotonic() + 300
        while not reached():
            assert time.monotonic() < give_up, f"{what} was not reached: {self._output.read_text()[-4000:]}"
            time.sleep(0.05)

    def stop(self) -> None:
        self.kill(self.processes())
        for each in self._started:
            each.wait()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    folder = tmp_path / f"grpo-{secrets.token_hex(4)}"
    folder.mkdir()
    job = Job(folder)
    yield job
    job.stop()


def test_a_rollout_a_rank_and_everything_are_killed(job: Job, tmp_path: Path) -> None:
    job.start()
    job.until(10)
    job.kill(job.processes("rollout-0"))
    job.start("rollout-0")
    job.until(30)
    job.kill(job.processes("train")[:1])  # both start again
    job.until(50)
    job.kill(job.processes())
    job.start()
    job.end()

    assert dict(job.steps()) == {0: STEPS, 1: STEPS}  # the last one of each
    [checkpoint] = tmp_path.glob("*/checkpoint.pt")
    *_, history = torch.load(checkpoint)
    assert len(history) == STEPS
    groups = Counter(name for _, names in history for name in names)
    assert set(groups.values()) == {1} and len(groups) == 8 * STEPS
    rewards = [reward for reward, _ in history]
    assert sum(rewards[-20:]) / 20 > sum(rewards[:10]) / 10 + 0.2
