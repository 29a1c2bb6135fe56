"""Real `torchrun` agents on this host, with gloo workers that all-reduce ones and check the sum.

Every worker writes a line into a log when it starts and when the first sum of its round is right; the scenarios of the
tests and of benchmarks/torchrun_faults.py wait for these lines.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

WHY_NOT = "" if importlib.util.find_spec("torch") else "torch is missing (make adapters; or pip install torch)"

# Ends when the file `stop` exists, which rank 0 tells the others; fails by exit code when told to.
WORKER = """
import json, os, sys, time
from pathlib import Path

folder, node = Path(sys.argv[1]), sys.argv[2]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def say(what):
    line = dict(what=what, at=time.time(), node=node, rank=rank, world=world, pid=os.getpid(), agent=os.getppid())
    line["restarts"] = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with open(folder / "log", "a") as log:
        log.write(json.dumps(line) + "\\n")


say("start")
from datetime import timedelta
import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
first = True
while True:
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == world, (ones, world)
    if first:
        say("sum")
        first = False
    stop = torch.tensor([float(rank == 0 and (folder / "stop").exists())])
    dist.all_reduce(stop)
    if stop.item():
        break
    fail = folder / f"fail-{node}"
    if fail.exists():
        code = int(fail.read_text())
        fail.unlink()
        os._exit(code)
    if not folder.exists():
        break
    time.sleep(0.05)
dist.destroy_process_group()
while (folder / f"hold-{node}").exists():
    time.sleep(0.05)
say("end")
"""


_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a test run that is aborted leaves no agent


class Line(NamedTuple):
    """A worker's line in the log."""

    what: str
    at: float
    node: str
    rank: int
    world: int
    pid: int
    agent: int
    restarts: int


class Agents:
    """The agents of one run. ``arguments`` are those of torchrun that all of them have."""

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self.folder = folder
        self.arguments = list(arguments)
        self.store = ""  # the URL of its store, if it is ours
        self.server: Any = None  # the Redis server, if it is one of the test
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.script = folder / "train.py"
        self.script.write_text(WORKER)

    def start(self, node: str, *more: str, **environ: str) -> subprocess.Popen[bytes]:
        """Start the agent of a node; its output goes into a file."""
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--local-addr=127.0.0.1"]
        command += [*self.arguments, *more, str(self.script), str(self.folder), node]
        with (self.folder / f"{node}.out").open("ab") as out:
            self.running[node] = subprocess.Popen(
                command,
                stdout=out,
                stderr=out,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environ},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        return self.running[node]

    def lines(self) -> list[Line]:
        """What the workers have written."""
        path = self.folder / "log"
        text = path.read_text() if path.exists() else ""
        return [Line(**json.loads(line)) for line in text.splitlines() if line.endswith("}")]

    def wait(self, reached: Callable[[list[Line]], bool], within_s: float = 100.0) -> list[Line]:
        """Wait until the log has what it should have."""
        end = time.monotonic() + within_s
        while not reached(lines := self.lines()):
            assert time.monotonic() < end, f"the workers wrote {lines}\n{self.everything()}"
            time.sleep(0.02)
        return lines

    def until(self, condition: Callable[[], object], what: str, within_s: float = 100.0) -> None:
        """Wait for something else than a line."""
        end = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < end, f"this never came true: {what}\n{self.everything()}"
            time.sleep(0.02)

    def wait_round(self, nodes: str, after: float = 0.0, within_s: float = 100.0) -> list[Line]:
        """Wait until workers of these nodes (a letter each) all had the right sum in a round of that size."""

        def complete(lines: list[Line]) -> bool:
            sums = {line.node for line in lines if line.what == "sum" and line.at > after and line.world == len(nodes)}
            return set(nodes) <= sums

        lines = self.wait(complete, within_s)
        return [line for line in lines if line.at > after and line.world == len(nodes)]

    def stop(self) -> None:
        """Tell the workers that their work is done."""
        (self.folder / "stop").touch()

    def worker(self, node: str) -> int:
        """The process of a node's latest worker."""
        return [line.pid for line in self.lines() if line.node == node][-1]

    def kill_node(self, node: str) -> None:
        """SIGKILL to the agent and its worker."""
        worker = self.worker(node)
        os.kill(self.running[node].pid, signal.SIGKILL)
        os.kill(worker, signal.SIGKILL)

    def code(self, node: str, within_s: float = 100.0) -> int:
        """The agent's exit code, when it has ended."""
        try:
            return self.running[node].wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"agent {node} has not ended\n{self.everything()}") from None

    def output(self, node: str) -> str:
        """What the agent and its workers have printed."""
        return (self.folder / f"{node}.out").read_text()

    def everything(self) -> str:
        """For an assertion."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in sorted(self.folder.glob("*.out")))

    def end(self) -> None:
        """Kill what is left, orphans included."""
        for process in self.running.values():
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGCONT)
                    process.kill()
            process.wait()
        for line in self.lines():
            with contextlib.suppress(OSError):
                if str(self.folder) in Path(f"/proc/{line.pid}/cmdline").read_text():
                    os.kill(line.pid, signal.SIGKILL)


@contextlib.contextmanager
def torchrun_agents(folder: Path, *arguments: str) -> Iterator[Agents]:
    """Agents that are all gone afterwards."""
    agents = Agents(folder, arguments)
    try:
        yield agents
    finally:
        agents.end()
