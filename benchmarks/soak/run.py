"""The run: starts everybody, does what the schedule says, keeps the accounts, and ends when all is consumed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import audit
import msgspec
from accounts import Accounts
from clock import WallClock
from closed import Points
from crew import HERE, MARK, Child, Member, become_reaper, members, reap_orphans
from faults import Fault, schedule
from hardship import Hardship
from journal import Reader
from plan import MAX_DELIVERIES, Plan, TrainerPlan, WriterPlan

from transport import SharedRingBuffer
from transport.errors import TransportError
from transport.queue import SQLiteQueue

READERS = (1, 2)  # by writer
RANKS = (0, 0, 1)  # by trainer
WIRES = ([], ["tcp"], ["shm"], ["shm", "tcp"], ["tcp"], [])  # chosen anew in each life; []: auto, which maps
_DISK_BYTES = 256 << 20
_CLOCK_STEP_S = 30 * 86400  # half of it back, half of it forth
_LOOK_S = 0.05
_SAY_EVERY_S = 5.0
_SHARE = 0.5  # of processes that have a trap


class Options(NamedTuple):
    """Of the command line."""

    payloads: int
    kills: int
    seed: int
    folder: Path
    stuck_s: float
    isolated: bool
    build: Path | None  # of native modules with fault points


class Soak:
    """One run."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._rng = random.Random(options.seed + 1)
        folder = options.folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        disk = folder / "disk"
        disk.mkdir()
        if options.isolated:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(disk)], check=True)
        self._plan = Plan(
            folder=str(folder), queue=str(disk / "queue.sqlite3"), run=secrets.token_hex(4), seed=options.seed
        )
        self._hardship = Hardship(disk if options.isolated else None, options.isolated)
        self._accounts = Accounts(READERS)
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX")}
        root = str(HERE.parent.parent)
        self._environment |= {MARK: self._plan.run, "PYTHONPATH": root}
        self._clock = WallClock(folder)
        self._environment |= self._clock.environment
        self._points = Points(folder)
        if options.build is not None:
            self._environment |= {
                "PYTHONPATH": f"{HERE / 'points'}{os.pathsep}{root}",
                "SOAK_POINTS": json.dumps(
                    {"folder": str(folder), "seed": options.seed, "share": _SHARE, "build": str(options.build)}
                ),
            }
        self._children = [self._writer(number) for number in range(len(READERS))]
        self._children += [self._trainer(number) for number in range(len(RANKS))]
        self._readers = {child.name: Reader(self._plan.journal(child.name)) for child in self._children}
        self._idle_s = self._looked_at = self._said_at = 0.0
        self._seen = -1

    def _share(self, number: int) -> int:
        whole, rest = divmod(self._options.payloads, len(READERS))
        return whole + (number < rest)

    def _writer(self, number: int) -> Child:
        def part() -> bytes:
            left = self._share(number) - self._accounts.published_by(number)
            first = self._accounts.intended_by(number)
            return msgspec.json.encode(
                WriterPlan(plan=self._plan, number=number, readers=READERS[number], first=first, left=max(left, 0))
            )

        return Child(f"writer-{number}", "writer.py", part, lambda: self._environment)

    def _trainer(self, number: int) -> Child:
        def part() -> bytes:
            wire = self._rng.choice(WIRES)
            return msgspec.json.encode(TrainerPlan(plan=self._plan, number=number, rank=RANKS[number], wire=wire))

        return Child(f"trainer-{number}", "trainer.py", part, lambda: self._environment)

    # --- the run --------------------------------------------------------------------------------------
    def run(self) -> dict[str, Any]:
        """Everything, to the report."""
        become_reaper()
        began = time.monotonic()
        self._looked_at = began
        total = self._total = sum(self._share(number) * readers for number, readers in enumerate(READERS))
        others = {
            "stop": self._options.kills // 5,
            "cut": self._options.kills // 10,
            "stall": self._options.kills // 50,
            "port": self._options.kills // 50,
            "disk": self._options.kills // 100,
            "clock": self._options.kills // 20,
        }
        others = {
            kind: count
            for kind, count in others.items()
            if kind in self._hardship.kinds or (kind == "clock" and self._clock.steps)
        }
        pending = schedule(self._options.seed, total, self._options.kills, others)[::-1]
        stuck = False
        try:
            while not self._all_consumed(total, pending):
                self._tend()
                while pending and self._accounts.consumed_total >= pending[-1].at and self._do(pending[-1]):
                    pending.pop()
                if self._idle_s > self._options.stuck_s:
                    stuck = True
                    self._dump()
                    break
                time.sleep(_LOOK_S)
            seconds = time.monotonic() - began
            self._points.end()
            self._hardship.end_all()
            left = self._dismiss(force=stuck)
        finally:
            self._end_everybody()
        return self._report(seconds, stuck, left, len(pending))

    def _all_consumed(self, total: int, pending: list[Fault]) -> bool:
        accounts = self._accounts
        finished = all(accounts.finished(number) for number in range(len(READERS)))
        if not finished or pending or not self._hardship.quiet or accounts.consumed_total < accounts.expected():
            return False
        # The last fault may have killed everybody who keeps a ring; whoever is started again takes it away in order.
        return all(child.lives_on() for child in self._children)

    def _tend(self) -> None:
        """What has to be looked at all the time."""
        self._hardship.tend()
        for pid, point, number in self._points.closed():
            self._hardship.closed(pid, point, number, 0.1 + 6.0 * self._rng.random())
        own = {child.process.pid for child in self._children if child.process is not None}
        reap_orphans(own)
        for child in self._children:
            self._hear(child.name)
            if child.ended():
                self._hear(child.name)
                self._ask(child.name)
                child.start(Path(self._plan.folder) / f"{child.name}.log")
        now = time.monotonic()
        self._idle_s += min(now - self._looked_at, 1.0)  # a machine that stood still says nothing about the run
        self._looked_at = now
        if self._accounts.consumed_total != self._seen:
            self._seen, self._idle_s = self._accounts.consumed_total, 0.0
        if now - self._said_at > _SAY_EVERY_S:
            self._said_at = now
            print(f"{self._seen} of {self._accounts.expected()}, {self._hardship.kills} kills", flush=True)
            foreign = [each for each in self._members() if each.stopped and not self._hardship.has_stopped(each.pid)]
            if foreign:
                print(f"stopped by somebody else: {foreign}", flush=True)

    def _hear(self, name: str) -> None:
        for words in self._readers[name].lines():
            self._accounts.hear(name, words)

    def _ask(self, name: str) -> None:
        """What became of the claims that a trainer was about to have accepted when it was killed."""
        tokens = self._accounts.open_questions(name)
        if tokens:
            rank = RANKS[int(name.partition("-")[2])]
            self._accounts.answer(name, audit.accepted(Path(self._plan.queue), rank, tokens))

    # --- faults -----------------------------------------------------------------------------------------
    def _do(self, fault: Fault) -> bool:
        """Carry it out; False if there is no victim just now."""
        hardship = self._hardship
        if fault.kind == "kill" and self._ahead(fault):
            return True  # fault points have killed instead
        if fault.kind == "cut":
            hardship.cut(fault)
        elif fault.kind == "clock":
            self._clock.step(int((fault.choice - 0.5) * _CLOCK_STEP_S))
            hardship.counts["clock stepped"] += 1
        elif fault.kind == "stall":
            hardship.stall(fault.seconds)
        elif fault.kind == "disk":
            hardship.fill_disk(fault.seconds)
        elif fault.kind == "port":
            return self._steal(fault)
        elif fault.role == "ring":
            return self._kill_ring(fault)
        else:
            living = [each for each in self._members() if each.role == fault.role]
            if not living:
                return False
            victim = sorted(living)[int(fault.choice * len(living))]
            if fault.kind == "kill":
                hardship.kill(victim)
            else:
                hardship.stop(victim, fault.seconds)
        return True

    def _ahead(self, fault: Fault) -> bool:
        """Whether there have been as many kills as there should be by now."""
        planned = self._options.kills * fault.at / self._total
        return self._options.build is not None and self._hardship.kills > planned

    def _members(self) -> list[Member]:
        roles = {child.process.pid: child.name.partition("-")[0] for child in self._children if child.process}
        return members(self._plan.run, roles)

    def _owners(self, writer: int) -> dict[int, int]:
        """Port of each listener of a ring, by process."""
        try:
            with SharedRingBuffer.attach(self._plan.ring(writer), role="observer") as ring:
                return {owner.pid: owner.port for owner in ring.native.owners() if owner.alive and owner.port}
        except TransportError:  # not there, or not yet all there
            return {}

    def _steal(self, fault: Fault) -> bool:
        ports = self._owners(0) | self._owners(1)
        victims = sorted(each for each in self._members() if each.pid in ports)
        if not victims:
            return False
        victim = victims[int(fault.choice * len(victims))]
        self._hardship.steal_port(victim, ports[victim.pid], fault.seconds)
        return True

    def _kill_ring(self, fault: Fault) -> bool:
        """A writer and everything that serves its ring, at once: the ring is all that is left."""
        writer = int(fault.choice * len(READERS))
        process = self._children[writer].process
        everybody = {each.pid: each for each in self._members()}
        listeners = [everybody[pid] for pid in self._owners(writer) if pid in everybody]
        if process is None or process.pid not in everybody or not listeners:
            return False
        parents = {each.parent for each in listeners} - {os.getpid()}
        for pid in {process.pid} | parents:
            if pid in everybody:
                self._hardship.kill(everybody[pid])
        for each in listeners:
            self._hardship.kill(each)
        return True

    # --- the end ----------------------------------------------------------------------------------------
    def _dismiss(self, force: bool) -> list[str]:
        """Tell everybody to end in order; what is left of processes and segments afterwards."""
        patience = time.monotonic() + (0.0 if force else 60.0)
        for child in self._children:
            child.dismiss()
        while time.monotonic() < patience and self._members():
            self._hardship.tend()
            reap_orphans({child.process.pid for child in self._children if child.process is not None})
            time.sleep(_LOOK_S)
        late = self._members()
        if late:
            self._say_where(late)
        left = [f"{each.role} {each.pid}" for each in late]
        left += [str(path) for path in Path("/dev/shm").glob(f"transport-soak-{self._plan.run}-*")]
        for child in self._children:
            if not force and child.process is not None:
                child.ended()
            self._hear(child.name)
            self._ask(child.name)
        return left

    def _end_everybody(self) -> None:
        for _ in range(100):
            there = self._members()
            if not there:
                break
            for each in there:
                try:
                    os.kill(each.pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            for child in self._children:
                child.ended()
            reap_orphans(set())
            time.sleep(_LOOK_S)
        for writer in range(len(READERS)):
            Path(f"/dev/shm{self._plan.ring(writer)}").unlink(missing_ok=True)

    def _dump(self) -> None:
        """Where everybody is, into their logs; what the rings and the queue say."""
        self._say_where(self._members())
        for writer in range(len(READERS)):
            try:
                with SharedRingBuffer.attach(self._plan.ring(writer), role="observer") as ring:
                    print(repr(ring), ring.native.owners(), file=sys.stderr)
            except TransportError as error:
                print(error, file=sys.stderr)
        with self._queue() as queue:
            print(queue.depth(), queue.failures(10), file=sys.stderr)

    def _say_where(self, them: list[Member]) -> None:
        for each in them:
            if each.role in ("writer", "trainer"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each.pid, signal.SIGUSR1)
        time.sleep(1.0)

    def _queue(self) -> SQLiteQueue:
        return SQLiteQueue(self._plan.queue, max_deliveries=MAX_DELIVERIES)

    def _report(self, seconds: float, stuck: bool, left: list[str], undone: int) -> dict[str, Any]:
        with self._queue() as queue:
            depth = queue.depth()
            failures = audit.reports(queue)
        named = self._named({ticket for _, ticket, _ in failures})
        for rank, ticket, reason in failures:
            if ticket in named:
                self._accounts.report(rank, *named[ticket], reason)
        verdict = self._accounts.verdict()
        points = {name[6:]: count for name, count in sorted(self._hardship.counts.items()) if name[:6] == "point "}
        kills = {name[5:]: count for name, count in self._hardship.counts.items() if name.startswith("kill ")}
        others = {name: count for name, count in self._hardship.counts.items() if name[:5] not in ("kill ", "point")}
        crashes = [crash for child in self._children for crash in child.crashes]
        bad = verdict.lost + verdict.wrong + verdict.duplicated + len(crashes) + len(left) + depth.unfinished + stuck
        return {
            "passed": not bad,
            "payloads": verdict.payloads,
            "deliveries": verdict.deliveries,
            "kills": self._hardship.kills,
            "kills_by_role": kills,
            "kills_and_stops_at_points": points,
            "other_faults": others,
            "not_done": undone,
            "lost": verdict.lost,
            "wrong": verdict.wrong,
            "duplicated": verdict.duplicated,
            "reported": verdict.reported,
            "queue_failures": [list(each) for each in failures[:20]],
            "never_published": verdict.never_published,
            "acked_silently": verdict.silent,
            "claims_expired": depth.expired,
            "unfinished": depth.unfinished,
            "crashes": crashes,
            "left_behind": left,
            "stuck": stuck,
            "named": verdict.named,
            "seconds": round(seconds, 1),
            "per_second": round(verdict.payloads / seconds, 1),
            "isolated": self._options.isolated,
            "seed": self._options.seed,
        }

    def _named(self, wanted: set[str]) -> dict[str, tuple[int, int]]:
        """Writer and number of tickets, from the journals."""
        found = {}
        if wanted:
            for number in range(len(READERS)):
                for words in Reader(self._plan.journal(f"writer-{number}")).lines():
                    for each in words[2:] if words[0] == "P" else ():
                        payload, _, ticket = each.partition("=")
                        if ticket in wanted:
                            found[ticket] = (number, int(payload))
        return found
