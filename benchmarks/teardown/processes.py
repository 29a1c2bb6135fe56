"""Whole processes started and stopped with reads in flight: a writer with its supervisor and listeners, and a client.

A cycle is a function of its seed: the wire, how many listeners, and how it ends (`ENDS`). Whatever was done, in the
end nothing may be there: no process, nothing in /dev/shm, no core of a process that nobody has killed. One exception is
the promise itself: where writer, supervisor and listeners were all killed at once nobody is left to remove the segment,
and `transport reclaim` has to.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec
from peer import PeerPlan
from process_tree import MARK, Member, become_reaper, members, reap_orphans

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WIRES = ("shm", "tcp", "mapped")
ENDS = (
    "client first",
    "writer first",
    "at once",
    *(
        f"{name} {victim}"
        for name in ("SIGTERM", "SIGKILL")
        for victim in ("client", "writer", "listener", "supervisor")
    ),
    "SIGTERM all",
    "SIGKILL all",
)
PATIENCE_S = 60.0  # a watchdog, not a measure
_IN_FLIGHT_S = 0.2
SIGNS_OF_A_CRASH = (b"Fatal Python error", b"Caught signal", b"ended with status -11", b"ended with status -6")
_NEW_MOUNTS, _RECURSIVE, _PRIVATE = 0x0002_0000, 1 << 14, 1 << 18  # CLONE_NEWNS, MS_REC, MS_PRIVATE


@dataclass
class Figures:
    """What all cycles came to."""

    cycles: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    reads: int = 0  # of clients that lived to say so
    killed: int = 0  # processes, by signal
    reclaimed: int = 0  # segments that `transport reclaim` had to remove
    wrong: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def bad(self) -> bool:
        """Whether anything happened that must not."""
        return bool(self.wrong or self.crashes or self.hangs or self.left)

    def as_json(self) -> dict[str, Any]:
        """For the report."""
        return {**vars(self), "ends": dict(self.ends), "bad": self.bad}


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


class Cycle:
    """One life of everybody."""

    def __init__(self, seed: int, run: str, log: IO[bytes]) -> None:
        self._choose = random.Random(seed)
        self._run = run
        self._log = log
        self.end = self._choose.choice(ENDS)
        self.plan = PeerPlan(
            segment=f"/transport-teardown-{run}-{seed}",
            wire=self._choose.choice(WIRES),
            seed=seed,
            ports=self._choose.choice((1, 2)),
        )
        self.name = f"seed {seed}, {self.plan.wire}, {self.end}"
        self.victims: set[int] = set()
        self._writer = self._start("writer")
        self._client = self._start("client")

    def _start(self, role: str) -> subprocess.Popen[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("UCX")}
        path = os.pathsep.join(
            filter(None, (str(ROOT), str(HERE), str(HERE.parent / "soak"), inherited.get("PYTHONPATH")))
        )
        return subprocess.Popen(
            [sys.executable, str(HERE / "peer.py"), role, msgspec.json.encode(self.plan).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**inherited, MARK: self._run, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1"},
        )

    # --- who is there ---------------------------------------------------------------------------------
    def members(self) -> list[Member]:
        """Every living process of this run."""
        return members(self._run, {self._writer.pid: "writer", self._client.pid: "client"})

    def run(self, figures: Figures) -> None:
        """Start, read, end as the seed says, and look at what is left."""
        assert self._client.stdin is not None
        assert self._writer.stdout is not None
        for line in iter(self._writer.stdout.readline, ""):
            self._client.stdin.write(line)
            if line == "\n":
                break
        self._client.stdin.flush()
        assert self._client.stdout is not None
        if self._client.stdout.readline() != "reading\n":
            figures.crashes.append(f"{self.name}: it did not begin")
        time.sleep(self._choose.uniform(0, _IN_FLIGHT_S))
        self._end()
        until(self._all_gone, "somebody is still there")
        self._judge(figures)

    def _end(self) -> None:
        what, _, whom = self.end.partition(" ")
        if what.startswith("SIG"):
            number = signal.Signals[what]
            there = [each for each in self.members() if whom in ("all", each.role)]
            self._choose.shuffle(there)
            for each in there:
                self.victims.add(each.pid)
                os.kill(each.pid, number)
            time.sleep(self._choose.uniform(0, _IN_FLIGHT_S))
        in_order = [self._writer, self._client] if self.end == "writer first" else [self._client, self._writer]
        for process in in_order:
            self._dismiss(process)
            if self.end != "at once":
                until(lambda process=process: process.poll() is not None, "writer or client does not end")  # type: ignore[misc]

    def _dismiss(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        try:
            process.stdin.close()
        except BrokenPipeError:
            return

    def _all_gone(self) -> bool:
        own = {self._writer.pid, self._client.pid}
        reap_orphans(own)
        ended = [each.poll() is not None for each in (self._writer, self._client)]
        return all(ended) and not self.members()

    # --- what is left ---------------------------------------------------------------------------------
    def _judge(self, figures: Figures) -> None:
        figures.cycles += 1
        figures.ends[self.end] += 1
        figures.killed += len(self.victims)
        for process, role in ((self._writer, "writer"), (self._client, "client")):
            expected = {0} | ({-signal.SIGTERM, -signal.SIGKILL} if process.pid in self.victims else set())
            if process.returncode not in expected:
                figures.crashes.append(f"{self.name}: {role} ended with {process.returncode}")
        assert self._client.stdout is not None
        said = self._client.stdout.read()
        if said:
            counts = json.loads(said)
            figures.reads += counts["reads"]
            if counts["wrong"]:
                figures.wrong.append(f"{self.name}: {counts['wrong']} of {counts['reads']} payloads")
        self._look_into_shared_memory(figures)

    def _look_into_shared_memory(self, figures: Figures) -> None:
        segment = Path(f"/dev/shm{self.plan.segment}")
        if segment.exists() and self.end in ("SIGKILL all", "SIGTERM all"):
            subprocess.run(
                [sys.executable, "-P", "-m", "transport", "reclaim", segment.name], cwd=ROOT, capture_output=True
            )
            figures.reclaimed += 1
        there = [path.name for path in Path("/dev/shm").glob(f"transport-teardown-{self._run}-*")]
        if there:
            figures.left.append(f"{self.name}: {there}")
            segment.unlink(missing_ok=True)

    def abandon(self) -> None:
        """After a hang: end everybody."""
        for each in self.members():
            os.kill(each.pid, signal.SIGKILL)
        for process in (self._writer, self._client):
            process.kill()
            process.wait()


def _give_up(*_: object) -> None:
    raise HangError("timeout: no output from the process")


def cycle(seed: int, run: str, folder: Path, figures: Figures) -> None:
    """One cycle, and its crashes and hangs."""
    log = folder / f"{seed}.log"
    with log.open("wb") as file:
        one = Cycle(seed, run, file)
        signal.signal(signal.SIGALRM, _give_up)
        signal.alarm(int(3 * PATIENCE_S))
        try:
            one.run(figures)
        except HangError as hang:
            figures.hangs.append(f"{one.name}: {hang}")
        finally:
            signal.alarm(0)
            one.abandon()
            reap_orphans(set())
    said = log.read_bytes()
    figures.crashes += [f"{one.name}: {sign.decode()}, see {log}" for sign in SIGNS_OF_A_CRASH if sign in said]


def measure(first: int, count: int, folder: Path) -> Figures:
    """``count`` cycles from the seed ``first`` on; each one's log stays in ``folder``."""
    become_reaper()
    alone = own_shared_memory()
    figures = Figures()
    run = f"{os.getpid():x}"
    folder.mkdir(parents=True, exist_ok=True)
    before = set(os.listdir("/dev/shm"))  # noqa: PTH208 - a snapshot
    for seed in range(first, first + count):
        cycle(seed, run, folder, figures)
    if alone:  # UCX's own segments, too
        figures.left += [f"/dev/shm/{name}" for name in sorted(set(os.listdir("/dev/shm")) - before)]  # noqa: PTH208
    return figures
