"""A whole job is told to end, and the time until nothing of it is left: 4 rollouts, 2 trainers, Redis between them.

As schedulers do it: SIGTERM to every process of the job, its supervisors and listeners too, and SIGKILL after `KILL_S`
to what is still there, whose stacks are in the log. By the cycle's seed Redis is killed or stopped just before
(SIGSTOP), and so is one member: a rollout, a trainer, a supervisor, a listener, or none. Nobody but a member that was
stopped may need the SIGKILL. A segment whose writer, supervisor and listeners were all killed is removed by
`transport reclaim`: no process of the job is left to do it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from member import JobPlan
from process_tree import MARK, Member, become_reaper, members, reap_orphans
from queues import RedisServer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ROLLOUTS, TRAINERS = 4, 2
VICTIMS = ("rollout", "trainer", "supervisor", "listener", "")
REDIS_ENDS = (signal.SIGKILL, signal.SIGSTOP)
ASK_S, KILL_S = 3.5, 4.0
LIMIT_S = 5.0
_RUNNING_S = 0.5
PATIENCE_S = 60.0  # a watchdog, not a measure
SIGNS_OF_A_CRASH = (b"Fatal Python error", b"Caught signal", b"ended with status -11", b"ended with status -6")
_PR_SET_PDEATHSIG = 1
_NEW_MOUNTS, _RECURSIVE, _PRIVATE = 0x0002_0000, 1 << 14, 1 << 18  # CLONE_NEWNS, MS_REC, MS_PRIVATE
_libc = ctypes.CDLL(None)  # looked up before any fork


@dataclass
class JobFigures:
    """What all cycles came to."""

    cycles: int = 0
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)  # of all processes of the job, from SIGTERM on
    load: list[float] = field(default_factory=list)  # of the machine, by the last minute's average
    by_victim: dict[str, list[float]] = field(default_factory=dict)
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
        summary = {"median_s": in_order[len(in_order) // 2], "most_s": in_order[-1], "bad": self.bad}
        most = {victim: max(times) for victim, times in self.by_victim.items()}
        used, load = sorted(self.cpu_seconds) or [0.0], sorted(self.load) or [0.0]
        summary |= {"median_cpu_s": used[len(used) // 2], "median_load": load[len(load) // 2]}
        return {**vars(self), "killed": dict(self.killed), "by_victim": most, **summary}


class HangError(Exception):
    """Something did not happen in `PATIENCE_S`."""


def own_shared_memory() -> bool:
    """A /dev/shm of this process and its children, so that whatever is left there is theirs. False: not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS) != 0:
        return False
    private = libc.mount(b"none", b"/", None, ctypes.c_ulong(_RECURSIVE | _PRIVATE), None) == 0
    return bool(private and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(0), b"size=2g,mode=1777") == 0)


def until(condition: Callable[[], object], what: str) -> None:
    """Look again and again; HangError names what did not come true."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > give_up_at:
            raise HangError(what)
        time.sleep(0.005)


class Job:
    """One job, from its start to the last process of it."""

    def __init__(self, seed: int, run: str, folder: Path, nice: int | None = None) -> None:
        self._choose = random.Random(seed)
        self._nice = nice
        self._run = run
        self._children_s = _children_s()
        self.victim = VICTIMS[seed % len(VICTIMS)]
        self._redis_end = self._choose.choice(REDIS_ENDS)
        self.prefix = f"/transport-job-{run}-{seed}"
        self.name = f"seed {seed}, Redis {self._redis_end.name}, stopped {self.victim or 'nobody'}"
        self.log = folder / f"job-{seed}.log"
        self._stopped: set[int] = set()
        self._roles: dict[int, str] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="teardown-redis-")
        log = Path(self._folder.name) / "log"
        log.touch()
        self._redis = RedisServer(Path(self._folder.name), log)  # of this job alone: it has no tickets of other rings
        self._redis.tend()
        until(lambda: b"Ready to accept" in log.read_bytes(), "Redis does not start")
        queue = f"redis://127.0.0.1:{self._redis.port}/0?run=teardown"
        with self.log.open("wb") as errors:
            self.processes = [
                self._start(role, JobPlan(queue=queue, prefix=self.prefix, number=number), errors.fileno())
                for role, count in (("rollout", ROLLOUTS), ("trainer", TRAINERS))
                for number in range(count)
            ]

    def _start(self, role: str, plan: JobPlan, errors: int) -> subprocess.Popen[bytes]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("UCX")}
        path = os.pathsep.join(filter(None, (str(ROOT), inherited.get("PYTHONPATH"))))
        process = subprocess.Popen(
            [sys.executable, str(HERE / "member.py"), role, msgspec.json.encode(plan).decode()],
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**inherited, MARK: self._run, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1"},
            preexec_fn=_die_with_parent,
        )
        self._roles[process.pid] = role
        return process

    def members(self) -> list[Member]:
        """Every living process of the job, those of the package included."""
        return members(self._run, self._roles)

    def run(self, figures: JobFigures) -> None:
        """Wait until everybody works, end it, and look at what is left."""
        for process in self.processes:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                figures.crashes.append(f"{self.name}: a member did not begin, see {self.log}")
                return
        time.sleep(self._choose.uniform(0, _RUNNING_S))
        assert self._redis.pid is not None
        os.kill(self._redis.pid, self._redis_end)
        if chosen := [each for each in self.members() if each.role == self.victim]:
            self._stopped.add(self._choose.choice(chosen).pid)
            for pid in self._stopped:
                os.kill(pid, signal.SIGSTOP)
        everybody = self.members()
        used = sum(_cpu_s(each.pid) for each in everybody)
        self._choose.shuffle(everybody)
        with _prioritised([each.pid for each in everybody], self._nice):
            took = self._end(everybody, figures)
        figures.cycles += 1
        figures.seconds.append(round(took, 3))
        figures.cpu_seconds.append(round(_children_s() - self._children_s - used, 2))
        figures.load.append(round(os.getloadavg()[0], 1))
        figures.by_victim.setdefault(self.victim or "nobody", []).append(round(took, 3))
        if took > LIMIT_S:
            figures.late.append(f"{self.name}: {took:.1f} s, see {self.log}")
        self._look(figures)

    def _end(self, everybody: list[Member], figures: JobFigures) -> float:
        """Tell all to end; the seconds until the last one has gone."""
        begun = time.monotonic()
        _signal(signal.SIGTERM, everybody)
        asked = killed = False
        while not self._all_gone():
            passed = time.monotonic() - begun
            if passed > ASK_S and not asked:
                asked = True
                _signal(signal.SIGUSR1, [each for each in self.members() if each.pid in self._roles])
            if passed > KILL_S:
                self._kill(figures, first=not killed)
                killed = True
            if passed > 10 * LIMIT_S:
                raise HangError(f"still there: {self.members()}")
            time.sleep(0.005)
        return time.monotonic() - begun

    def _kill(self, figures: JobFigures, *, first: bool) -> None:
        there = self.members()
        for each in there if first else ():
            if each.pid in self._stopped:
                figures.killed[each.role] += 1
            else:
                figures.stuck.append(f"{self.name}: {each.role} {each.pid}, see {self.log}")
        _signal(signal.SIGKILL, there)

    def _all_gone(self) -> bool:
        own = {process.pid for process in self.processes}
        reap_orphans(own if self._redis.pid is None else own | {self._redis.pid})
        ended = [process.poll() is not None for process in self.processes]
        return all(ended) and not self.members()

    def _look(self, figures: JobFigures) -> None:
        there = self._segments()
        if there and self.victim == "rollout":
            for name in there:
                subprocess.run(
                    [sys.executable, "-P", "-m", "transport", "reclaim", name], cwd=ROOT, capture_output=True
                )
            figures.reclaimed += len(there)
            there = self._segments()
        if there:
            figures.left.append(f"{self.name}: {there}")

    def _segments(self) -> list[str]:
        return [path.name for path in Path("/dev/shm").glob(f"{self.prefix.lstrip('/')}-*")]

    def abandon(self) -> None:
        """End whatever is there."""
        _signal(signal.SIGKILL, self.members())
        for process in self.processes:
            process.kill()
            process.wait()
        self._redis.end()
        reap_orphans(set())
        self._folder.cleanup()


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a measurement that is ended leaves none


@contextlib.contextmanager
def _prioritised(pids: list[int], nice: int | None) -> Iterator[None]:
    """Give these and this process a priority; what they start inherits it.

    Where the kernel groups processes by session a process's own priority counts within its session only.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0)
    if nice is not None:
        for pid in (os.getpid(), *pids):
            _give(pid, nice)
    try:
        yield
    finally:
        if nice is not None:
            _give(os.getpid(), before)


def _give(pid: int, nice: int) -> None:
    with contextlib.suppress(OSError):  # it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(task.name), nice)
    with contextlib.suppress(OSError):  # or the kernel does not group
        Path(f"/proc/{pid}/autogroup").write_text(f"{nice}\n")


def _children_s() -> float:
    """CPU seconds of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process; 0 if it has just gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _signal(number: signal.Signals, whom: list[Member]) -> None:
    for each in whom:
        try:
            os.kill(each.pid, number)
        except ProcessLookupError:
            continue


def measure(first: int, count: int, folder: Path, nice: int | None = None) -> JobFigures:
    """``count`` jobs from the seed ``first`` on. ``nice``: of their processes from SIGTERM on."""
    become_reaper()
    alone = own_shared_memory()
    figures = JobFigures()
    folder.mkdir(parents=True, exist_ok=True)
    before = set(os.listdir("/dev/shm"))  # noqa: PTH208 - a snapshot
    for seed in range(first, first + count):
        job = Job(seed, f"{os.getpid():x}", folder, nice)
        try:
            job.run(figures)
        except HangError as hang:
            figures.hangs.append(f"{job.name}: {hang}, see {job.log}")
        finally:
            job.abandon()
        said = job.log.read_bytes()
        figures.crashes += [f"{job.name}: {sign.decode()}, see {job.log}" for sign in SIGNS_OF_A_CRASH if sign in said]
        last = {"seconds": figures.seconds[-1:], "cpu_s": figures.cpu_seconds[-1:], "load": figures.load[-1:]}
        print(json.dumps({"job": job.name, **last, "stuck": len(figures.stuck)}), flush=True)
    if alone:
        figures.left += [f"/dev/shm/{name}" for name in sorted(set(os.listdir("/dev/shm")) - before)]  # noqa: PTH208
    return figures
