"""One repetition of a case: a service where one is needed, writers and trainers as processes, and what they report."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.job import work
from benchmarks.job.plan import JobCase
from benchmarks.peers.registry import JOB_PEERS, interpreter
from transport.bench.processes import BenchProcess
from transport.bench.reads.content import percentile
from transport.bench.result import OURS
from transport.errors import LinkError
from transport.runtime.interruption import segment_prefix

_HERE = Path(__file__).resolve().parent
_LOOK_S = 0.004
_STALL_S = 30.0  # without a payload consumed
_OTHERS_S = 1.0  # the first to fail makes others fail, and may end after them
_MOST_PAYLOADS = 1_000_000
_IDLE_PAYLOADS = 300  # so that the 99th percentile is not the greatest
_WARM_S = 0.2
_IDLE_S = 0.004  # about what one takes, with the pause before it
_SHIFT = 48


class JobSample(msgspec.Struct, frozen=True, kw_only=True):
    """What one repetition gave. The times of payloads are from the call that wrote them to consumed.

    Attributes:
        cpu_s: of writers and trainers.
        helpers_cpu_s: of what works beside them: listeners, a server, a cluster.
    """

    payloads: int
    seconds: float
    ms_p50: float
    ms_p99: float
    cpu_s: float
    helpers_cpu_s: float
    lost: int
    duplicated: int

    @property
    def count(self) -> int:
        """Payloads."""
        return self.payloads


def measure(case: JobCase, seconds: float) -> JobSample:
    """About ``seconds`` of the job in fresh processes, after a warm-up.

    Raises:
        MissingDependencyError: the peer is not installed.
        LinkError: a process failed, or a payload was not what had been written; with the last line of what it said.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-job-")))
        run = _Run(case, folder, stack)
        run.warm(case.batch)  # the first batch connects
        if case.idle:
            run.warm(2 * case.batch)
            return run.measured(max(_IDLE_PAYLOADS, int(seconds / _IDLE_S)))
        warm, took = case.window, 0.0
        while took < min(_WARM_S, seconds):  # a few windows are over before processors and connections have their speed
            warm *= 2
            begun = time.monotonic()
            run.warm(warm)
            took = time.monotonic() - begun
        return run.measured(max(int(warm * seconds / took), 2 * case.window))


class _Run:
    """The processes of a repetition."""

    def __init__(self, case: JobCase, folder: Path, stack: contextlib.ExitStack) -> None:
        self._case = case
        self._folder = folder
        self._written = 0  # by each writer
        cells = str(folder / "cells")
        work.Cells.make(cells, case.trainers)
        self._cells = work.Cells(cells, case.trainers)
        stack.callback(self._cells.close)
        common = {
            **{name: getattr(case, name) for name in ("size_bytes", "batch", "window")},
            **{name: getattr(case, name) for name in ("writers", "trainers", "idle", "wire", "layout")},
            "cells": cells,
            "rings": segment_prefix("bench-job"),  # whatever becomes of the writers, their rings end with the command
        }
        self._helpers: list[int] = []
        # All begin at once, since importing what they need takes longest; each waits for its configuration. The service
        # ends last.
        service = self._service(common, stack)
        self._writers = [self._process("writer", stack) for _ in range(case.writers)]
        self._trainers = [self._process("trainer", stack) for _ in range(case.trainers)]
        place = self._place(service, common["rings"])
        self._configure(self._writers, {**common, "place": place, "addresses": []})
        ready = [writer.answer() for writer in self._writers]
        self._helpers += [pid for each in ready for pid in each["helpers"]]
        addresses = [each["address"] for each in ready]
        self._configure(self._trainers, {**common, "place": place, "addresses": addresses})
        for trainer in self._trainers:
            trainer.answer()

    def _process(self, role: str, stack: contextlib.ExitStack) -> BenchProcess:
        return stack.enter_context(BenchProcess(f"{self._who} {role}", None, _command(self._case, role)))

    def _configure(self, processes: list[BenchProcess], job: dict[str, Any]) -> None:
        for index, process in enumerate(processes):
            process.tell({**job, "index": index, "result": str(self._folder / f"trainer-{index}")})

    @property
    def _who(self) -> str:
        return "transport" if self._case.peer == OURS else self._case.peer

    def _service(self, common: dict[str, Any], stack: contextlib.ExitStack) -> BenchProcess | None:
        """The process beside the others, where there is one."""
        service = "" if self._case.peer == OURS else JOB_PEERS[self._case.peer].service
        if not service:
            return None
        command = [sys.executable, "-P", str(_HERE / "redis_service.py")]
        if service == "own":
            command = _command(self._case, "service")
        # It serves no writer or trainer in particular; the fields are there for all.
        job = {**common, "index": 0, "place": "", "addresses": [], "result": ""}
        return stack.enter_context(BenchProcess(f"{self._who} service", job, command))

    def _place(self, service: BenchProcess | None, rings: str) -> str:
        """Where the payloads go."""
        if service is None:
            return f"rings:{rings}" if self._case.peer == OURS else ""
        place: str = service.answer()["place"]
        self._helpers.append(service.pid)
        return place

    def flow(self, count: int) -> bool:
        """Have ``count`` payloads of each writer written and consumed; False when no more come before all are there."""
        for writer in self._writers:
            writer.tell({"write": count})
        self._written += count
        target = self._written * self._case.writers
        before, since = -1, time.monotonic()
        while (total := self._cells.total()) < target:
            now = time.monotonic()
            if total != before:
                before, since = total, now
            self._check()
            if now - since > _STALL_S:
                return False
            time.sleep(_LOOK_S)
        self._began_ns = min(writer.answer()["began_ns"] for writer in self._writers)
        return True

    def warm(self, count: int) -> None:
        """`flow`, whose payloads are not measured. LinkError: not all came."""
        if not self.flow(count):
            raise LinkError(f"payloads were lost before the measurement: none came for {_STALL_S:.0f} s")

    def _check(self) -> None:
        """Raise LinkError when a process has ended, with what it said, and what others said that ended with it."""
        processes = (*self._trainers, *self._writers)
        if not any(process.ended() for process in processes):
            return
        said = []
        for process in processes:
            if process.ended(within_s=_OTHERS_S):
                try:
                    process.answer()
                except LinkError as error:
                    said.append(str(error))
        raise LinkError("; ".join(said) or "a process ended before all payloads were consumed")

    def measured(self, count: int) -> JobSample:
        """The figures of ``count`` payloads of each writer, after which the trainers have stopped."""
        # whole batches: a peer that hands out nothing else would wait at the end
        count = -(-min(count, _MOST_PAYLOADS) // self._case.batch) * self._case.batch
        first = self._written
        cpu_s = self._cpu_s("mark")
        helpers_s = tree_cpu_s(self._helpers)
        complete = self.flow(count)
        if not complete and not self._cells.total() > first * self._case.writers:
            raise LinkError(f"no payload was consumed within {_STALL_S:.0f} s")
        helpers_s = tree_cpu_s(self._helpers) - helpers_s
        # a writer that still waits for room answers nothing
        cpu_s = self._cpu_s("cpu") - cpu_s if complete else float("nan")
        for trainer in self._trainers:
            trainer.tell({"stop": True})
        ended_ns = max(trainer.answer()["ended_ns"] for trainer in self._trainers)
        records = [work.load_records(str(self._folder / f"trainer-{at}")) for at in range(self._case.trainers)]
        names = np.concatenate([np.frombuffer(each, np.uint64) for each, _ in records])
        taken = np.concatenate([np.frombuffer(each, np.int64) for _, each in records])
        lost, duplicated = account(names, first, count, self._case.writers)
        times = sorted((taken / 1e6).tolist())
        return JobSample(
            payloads=count * self._case.writers,
            seconds=(ended_ns - self._began_ns) / 1e9 if complete else _STALL_S,
            ms_p50=percentile(times, 0.5),
            ms_p99=percentile(times, 0.99),
            cpu_s=cpu_s if complete else 0.0,
            helpers_cpu_s=helpers_s,
            lost=lost,
            duplicated=duplicated,
        )

    def _cpu_s(self, message: str) -> float:
        processes = (*self._writers, *self._trainers)
        return float(sum(process.ask({message: True})["cpu_s"] for process in processes))


def _command(case: JobCase, role: str) -> list[str]:
    if case.peer == OURS:
        return [sys.executable, "-P", str(_HERE / "ours.py"), role]
    peer = JOB_PEERS[case.peer]
    return [interpreter(peer), str(peer.folder / "harness.py"), work.__file__, peer.script, role]


def account(names: np.ndarray, first: int, count: int, writers: int) -> tuple[int, int]:
    """How many of the payloads first..first+count-1 of each writer are lost, and how many others came besides."""
    expected = np.concatenate(
        [np.arange(first, first + count, dtype=np.uint64) | np.uint64(writer << _SHIFT) for writer in range(writers)]
    )
    came = np.unique(names)
    once = int(np.isin(expected, came, assume_unique=True).sum())
    return len(expected) - once, len(names) - once


def tree_cpu_s(roots: Iterable[int]) -> float:
    """Processor time of these processes and all of their descendants, ended children included."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry.name))
            ticks[int(entry.name)] = sum(map(int, fields[11:15]))
    todo = list(roots)
    found: set[int] = set()
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.add(pid)
            todo += children.get(pid, ())
    return sum(ticks.get(pid, 0) for pid in found) / float(os.sysconf("SC_CLK_TCK"))
