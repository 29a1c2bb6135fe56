"""A whole job is told to end, and the time until nothing of it is left: 4 rollouts, 2 trainers, Redis that names them.

As schedulers do it: SIGTERM to every process of the job, its supervisors and listeners too, and SIGKILL after `KILL_S`
to what is still there, whose stacks are in the log. By the cycle's seed Redis is killed or stopped just before
(SIGSTOP), and so is one member: a rollout, a trainer, a supervisor, a listener, or none. Nobody but a member that was
stopped may need the SIGKILL. A segment whose writer, supervisor and listeners were all killed is removed by
`transport reclaim`: no process of the job is left to do it.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from member import JobPlan
from processes import (
    MARK,
    ROOT,
    Member,
    become_reaper,
    die_with_parent,
    environment,
    members,
    reap_orphans,
    signal_all,
)
from redis_server import RedisServer

HERE = Path(__file__).resolve().parent
ROLLOUTS, TRAINERS = 4, 2
VICTIMS = ("rollout", "trainer", "supervisor", "listener", "")
REDIS_ENDS = (signal.SIGKILL, signal.SIGSTOP)
ASK_S, KILL_S = 14.5, 15.0  # docs/OPERATIONS.md asks schedulers for so much
LIMIT_S = 16.0
_RUNNING_S = 0.5
_PATIENCE_S = 60.0  # a watchdog, not a measure
SIGNS_OF_A_CRASH = (b"Fatal Python error", b"Caught signal", b"ended with status -11", b"ended with status -6")


@dataclass
class JobFigures:
    """What all cycles came to."""

    cycles: int = 0
    seconds: list[float] = field(default_factory=list)
    killed: Counter[str] = field(default_factory=Counter)  # members that had been stopped, by role
    reclaimed: int = 0
    late: list[str] = field(default_factory=list)  # longer than `LIMIT_S`
    stuck: list[str] = field(default_factory=list)  # SIGKILL was needed, and it had not been stopped
    crashes: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def bad(self) -> bool:
        """Whether anything happened that must not."""
        return bool(self.late or self.stuck or self.crashes or self.hangs or self.left)

    def as_json(self) -> dict[str, Any]:
        """For the report."""
        in_order = sorted(self.seconds) or [0.0]
        return {**vars(self), "median_s": in_order[len(in_order) // 2], "most_s": in_order[-1], "bad": self.bad}


class HangError(Exception):
    """Something did not happen in time."""


class Job:
    """One job, from its start to the last process of it."""

    def __init__(self, seed: int, run: str, folder: Path) -> None:
        self._choose = random.Random(seed)
        self._run = run
        self.victim = VICTIMS[seed % len(VICTIMS)]
        self._redis_end = self._choose.choice(REDIS_ENDS)
        self._prefix = f"job-{run}-{seed}"
        self.name = f"seed {seed}, Redis {self._redis_end.name}, stopped {self.victim or 'nobody'}"
        self.log = folder / f"job-{seed}.log"
        self._stopped = 0
        self._roles: dict[int, str] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self.log.touch()
        files = folder / f"redis-{seed}"
        files.mkdir()
        self._redis_log = files / "log"
        self._redis = RedisServer(files, self._redis_log)  # of this job alone: it names no other rings

    def start(self) -> None:
        """Redis, then all processes."""
        give_up = time.monotonic() + _PATIENCE_S
        self._redis.tend()
        while not self._redis_log.exists() or b"Ready to accept" not in self._redis_log.read_bytes():
            if time.monotonic() > give_up:
                raise HangError("Redis does not start")
            time.sleep(0.005)
        queue = f"rings+redis://127.0.0.1:{self._redis.port}/0?run=teardown"
        given = environment(**{MARK: self._run, "PYTHONFAULTHANDLER": "1"})
        for role, number in [
            *(("rollout", at) for at in range(ROLLOUTS)),
            *(("trainer", at) for at in range(TRAINERS)),
        ]:
            part = msgspec.json.encode(JobPlan(queue=queue, prefix=self._prefix, number=number)).decode()
            with self.log.open("ab") as errors:
                command = [sys.executable, str(HERE / "member.py"), role, part]
                process = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=errors, env=given, preexec_fn=die_with_parent
                )
            self._roles[process.pid] = role
            self._processes.append(process)

    def _members(self) -> list[Member]:
        """Every living process of the job, those of the package included."""
        return members(self._run, self._roles)

    def run(self, figures: JobFigures) -> None:
        """Wait until everybody works, end it, and look at what is left."""
        for process in self._processes:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                figures.crashes.append(f"{self.name}: a member did not begin, see {self.log}")
                return
        time.sleep(self._choose.uniform(0, _RUNNING_S))
        assert self._redis.pid is not None
        os.kill(self._redis.pid, self._redis_end)
        if chosen := [each for each in self._members() if each.role == self.victim]:
            self._stopped = self._choose.choice(chosen).pid
            os.kill(self._stopped, signal.SIGSTOP)
        took = self._end(figures)
        figures.cycles += 1
        figures.seconds.append(round(took, 3))
        if took > LIMIT_S:
            figures.late.append(f"{self.name}: {took:.1f} s, see {self.log}")
        there = self._segments()
        if there and self.victim == "rollout":
            for name in there:
                reclaim = [sys.executable, "-P", "-m", "transport", "reclaim", name]
                subprocess.run(reclaim, cwd=ROOT, capture_output=True)
            figures.reclaimed += len(there)
            there = self._segments()
        if there:
            figures.left.append(f"{self.name}: {there}")

    def _end(self, figures: JobFigures) -> float:
        """Tell all to end; the seconds until the last one has gone."""
        everybody = self._members()
        self._choose.shuffle(everybody)
        begun = time.monotonic()
        signal_all(signal.SIGTERM, everybody)
        asked = killed = False
        while not self._all_gone():
            passed = time.monotonic() - begun
            if passed > ASK_S and not asked:
                asked = True
                signal_all(signal.SIGUSR1, [each for each in self._members() if each.pid in self._roles])
            if passed > KILL_S:
                there = self._members()
                for each in () if killed else there:
                    if each.pid == self._stopped:
                        figures.killed[each.role] += 1
                    else:
                        figures.stuck.append(f"{self.name}: {each.role} {each.pid}, see {self.log}")
                signal_all(signal.SIGKILL, there)
                killed = True
            if passed > 4 * LIMIT_S:
                raise HangError(f"still there: {self._members()}")
            time.sleep(0.005)
        return time.monotonic() - begun

    def _all_gone(self) -> bool:
        own = {process.pid for process in self._processes}
        reap_orphans(own if self._redis.pid is None else own | {self._redis.pid})
        ended = [process.poll() is not None for process in self._processes]
        return all(ended) and not self._members()

    def _segments(self) -> list[str]:
        # Behind "transport-" stands the name that the directory gave the run.
        return [path.name for path in Path("/dev/shm").glob(f"transport-*{self._prefix}-*")]

    def abandon(self) -> None:
        """End whatever is there."""
        signal_all(signal.SIGKILL, self._members())
        for process in self._processes:
            process.kill()
            process.communicate()
        self._redis.end()
        reap_orphans(set())


def measure(first: int, count: int, folder: Path, alone: bool) -> JobFigures:
    """``count`` jobs from the seed ``first`` on; ``alone``: in a /dev/shm of their own."""
    become_reaper()
    figures = JobFigures()
    for seed in range(first, first + count):
        job = Job(seed, f"{os.getpid():x}", folder)
        try:
            job.start()
            job.run(figures)
        except HangError as hang:
            figures.hangs.append(f"{job.name}: {hang}, see {job.log}")
        finally:
            job.abandon()
        said = job.log.read_bytes()
        figures.crashes += [f"{job.name}: {sign.decode()}, see {job.log}" for sign in SIGNS_OF_A_CRASH if sign in said]
        print(json.dumps({"job": job.name, "seconds": figures.seconds[-1:], "stuck": len(figures.stuck)}), flush=True)
    figures.left += [str(path) for path in Path("/dev/shm").iterdir()] if alone else []
    return figures
