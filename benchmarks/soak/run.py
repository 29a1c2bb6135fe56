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
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from accounts import Accounts
from clock import WallClock
from fault_injection import FaultInjector
from faults import Fault, amounts, schedule
from journal import Reader
from plan import Plan, TrainerPlan, WriterPlan, lapse_s
from process_tree import HERE, MARK, Child, Member, become_reaper, members, reap_orphans
from questions import Questions
from queues import RedisServer, open_queue
from report import End, allowed, perishes, report
from traps import Points

from transport import SharedRingBuffer
from transport._ring import FREE
from transport.errors import QueueError, TransportError
from transport.queue.base import QueueDepth

READERS = (1, 2)  # by writer
RANKS = (0, 0, 1)  # by trainer
WIRES: tuple[list[str], ...] = (
    [],
    ["tcp"],
    ["shm"],
    ["shm", "tcp"],
    ["tcp"],
    [],
)  # chosen anew in each life; []: auto, which maps
_DISK_BYTES = 256 << 20
_CLOCK_STEP_S = 30 * 86400  # half of it back, half of it forth
LAPSES = ("claim.taken", "settle.asked")  # steps of a trainer at which it is stopped until its claims are another's
_LOOK_S = 0.05
_ASK_EVERY_S = 0.5
_HARVEST_EVERY_S = 3.0
_QUEUE_PATIENCE_S = 0.3  # of this process, which must go on tending, the queue's server among others
_SAY_EVERY_S = 5.0
_TO_BEGIN = 4  # times the patience: until the first payload, all processes have to start
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
    queue: Literal["rings", "redis"] = "rings"
    lapses: int = 0
    plant: str = ""


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
        self._server = RedisServer(disk, folder / "redis.log") if options.queue == "redis" else None
        run = secrets.token_hex(4)
        place = f"rings:soak-{run}-"
        if self._server is not None:
            place = f"redis://127.0.0.1:{self._server.port}/0?run={run}"
        self._plan = Plan(folder=str(folder), queue=place, run=run, seed=options.seed)
        self._allowed = allowed(self._plan)
        self._lapse_s = lapse_s(self._plan)
        has_disk = options.isolated and self._server is not None
        self._injector = FaultInjector(disk if has_disk else None, options.isolated, self._server)
        self._accounts = Accounts(READERS, partial(perishes, self._plan))
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX")}
        root = str(HERE.parent.parent)
        self._environment |= {MARK: self._plan.run, "PYTHONPATH": f"{HERE / 'points'}{os.pathsep}{root}"}
        self._clock = WallClock(folder)
        self._environment |= self._clock.environment
        self._points = Points(folder)
        self._environment["SOAK_POINTS"] = json.dumps(
            {
                "folder": str(folder),
                "seed": options.seed,
                "share": 0.0 if options.build is None else _SHARE,
                "build": None if options.build is None else str(options.build),
                "plant": options.plant,
                "queue": options.queue,
            }
        )
        self._children = [self._writer(number) for number in range(len(READERS))]
        self._children += [self._trainer(number) for number in range(len(RANKS))]
        self._readers = {child.name: Reader(self._plan.journal(child.name)) for child in self._children}
        self._questions = Questions(self._plan, self._accounts, self._hear_all)
        self._idle_s = self._looked_at = self._said_at = self._asked_at = self._harvested_at = 0.0
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
            kind: count
            for kind, count in amounts(self._options.kills, self._options.lapses).items()
            if kind in self._injector.kinds or (kind == "clock" and self._clock.steps)
        }
        pending = schedule(self._options.seed, total, self._options.kills, others)[::-1]
        stuck = False
        try:
            while not self._all_consumed(pending):
                self._tend()
                while pending and self._settled() >= pending[-1].at and self._do(pending[-1]):
                    pending.pop()
                if self._idle_s > self._options.stuck_s * (1 if self._seen > 0 else _TO_BEGIN):
                    stuck = True
                    self._dump()
                    break
                time.sleep(_LOOK_S)
            seconds = time.monotonic() - began
            self._points.end()
            self._injector.end_all()
            left = self._dismiss(force=stuck)
            depth = self._look_last()
        finally:
            self._end_everybody()
        return report(
            self._plan,
            End(
                self._accounts.verdict(self._allowed),
                depth,
                [f"rank {rank} {ticket} {reason}" for (rank, ticket), reason in self._questions.failures.items()],
                self._injector.counts,
                self._injector.kills,
                len(pending),
                [crash for child in self._children for crash in child.crashes],
                left,
                stuck,
                seconds,
            ),
        ) | {"isolated": self._options.isolated, "planted": self._options.plant}

    def _settled(self) -> int:
        return self._accounts.settled(self._allowed)

    def _all_consumed(self, pending: list[Fault]) -> bool:
        accounts = self._accounts
        finished = all(accounts.finished(number) for number in range(len(READERS)))
        quiet = self._injector.quiet and not accounts.open_questions()
        if not finished or pending or not quiet or self._settled() < accounts.expected():
            return False
        # The last fault may have killed everybody who keeps a ring; whoever is started again takes it away in order.
        return all(child.lives_on() for child in self._children)

    def _tend(self) -> None:
        """What has to be looked at all the time."""
        self._injector.tend()
        for pid, point, number in self._points.closed():
            least_s = self._lapse_s if point in LAPSES else 0.1
            self._injector.closed(pid, point, number, least_s + 5.0 * self._rng.random())
        reap_orphans(self._own())
        for child in self._children:
            self._hear(child.name)
            if child.ended():
                self._hear(child.name)
                self._accounts.died(child.name)
                child.start(Path(self._plan.folder) / f"{child.name}.log")
        now = time.monotonic()
        if now - self._asked_at > _ASK_EVERY_S:
            self._asked_at = now
            self._questions.ask()
        if now - self._harvested_at > _HARVEST_EVERY_S:
            self._harvested_at = now
            with contextlib.suppress(QueueError):  # another time, then
                self._questions.harvest(_QUEUE_PATIENCE_S)
        self._idle_s += min(now - self._looked_at, 1.0)  # a machine that stood still says nothing about the run
        self._looked_at = now
        if self._settled() != self._seen:
            self._seen, self._idle_s = self._settled(), 0.0
        if now - self._said_at > _SAY_EVERY_S:
            self._said_at = now
            print(f"{self._seen} of {self._accounts.expected()}, {self._injector.kills} kills", flush=True)
            foreign = [each for each in self._members() if each.stopped and not self._injector.has_stopped(each.pid)]
            if foreign:
                print(f"stopped by somebody else: {foreign}", flush=True)

    def _hear(self, name: str) -> None:
        for words in self._readers[name].lines():
            self._accounts.hear(name, words)

    def _hear_all(self) -> None:
        for child in self._children:
            self._hear(child.name)

    def _own(self) -> set[int]:
        own = {child.process.pid for child in self._children if child.process is not None}
        return own if self._server is None or self._server.pid is None else own | {self._server.pid}

    def _look_last(self) -> QueueDepth:
        """At the queue, when nobody uses it any more; until the last leases have ended."""
        while True:
            self._injector.tend()
            self._questions.ask()
            with contextlib.suppress(QueueError):
                depth = self._questions.harvest(_QUEUE_PATIENCE_S)
                if not self._accounts.open_questions():
                    return depth
            time.sleep(_LOOK_S)

    # --- faults -----------------------------------------------------------------------------------------
    def _do(self, fault: Fault) -> bool:
        """Carry it out; False if there is no victim just now."""
        injector = self._injector
        if fault.kind == "kill" and self._ahead(fault):
            return True  # fault points have killed instead
        if fault.kind == "cut":
            injector.cut(fault)
        elif fault.kind == "clock":
            self._clock.step(int((fault.choice - 0.5) * _CLOCK_STEP_S))
            injector.counts["clock stepped"] += 1
        elif fault.kind == "stall":
            injector.stall(fault.seconds)
        elif fault.kind == "disk":
            injector.fill_disk(fault.seconds)
        elif fault.kind == "queue":
            injector.take_queue(fault)
        elif fault.kind == "lapse":
            self._points.stop_at(LAPSES[int(fault.choice * len(LAPSES))])
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
                injector.kill(victim)
            else:
                injector.stop(victim, fault.seconds)
        return True

    def _ahead(self, fault: Fault) -> bool:
        """Whether there have been as many kills as there should be by now."""
        planned = self._options.kills * fault.at / self._total
        return self._options.build is not None and self._injector.kills > planned

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
        self._injector.take_port(victim, ports[victim.pid], fault.seconds)
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
                self._injector.kill(everybody[pid])
        for each in listeners:
            self._injector.kill(each)
        return True

    # --- the end ----------------------------------------------------------------------------------------
    def _dismiss(self, force: bool) -> list[str]:
        """Tell everybody to end in order; what is left of processes and segments afterwards."""
        patience = time.monotonic() + (0.0 if force else 60.0)
        for child in self._children:
            child.dismiss()
        while time.monotonic() < patience and self._members():
            self._injector.tend()
            reap_orphans(self._own())
            time.sleep(_LOOK_S)
        late = self._members()
        if late:
            self._say_where(late)
        left = [f"{each.role} {each.pid}" for each in late]
        left += map(str, self._segments())
        for child in self._children:
            if not force and child.process is not None:
                child.ended()
            self._hear(child.name)
            self._accounts.died(child.name)
        return left

    def _segments(self) -> list[Path]:
        """Of this run, whoever made them."""
        return list(Path("/dev/shm").glob(f"transport-soak-{self._plan.run}-*"))

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
            reap_orphans(self._own())
            time.sleep(_LOOK_S)
        if self._server is not None:
            self._server.end()
        for segment in self._segments():
            segment.unlink(missing_ok=True)

    def _dump(self) -> None:
        """Where everybody is, into their logs; what the rings and the queue say."""
        self._say_where(self._members())
        for writer in range(len(READERS)):
            try:
                with SharedRingBuffer.attach(self._plan.ring(writer), role="observer") as ring:
                    print(repr(ring), ring.native.owners(), file=sys.stderr)
                    for slot in range(ring.slot_count):
                        info = ring.native.info(slot)
                        for rank in range(READERS[writer]) if info.state != FREE else ():
                            if not info.done >> rank & 1:
                                print(slot, info, rank, ring.native.claim_word(slot, rank), file=sys.stderr)
            except TransportError as error:
                print(error, file=sys.stderr)
        with contextlib.suppress(QueueError), open_queue(self._plan, _QUEUE_PATIENCE_S) as queue:
            print(queue.depth(), queue.failures(10), file=sys.stderr)

    def _say_where(self, them: list[Member]) -> None:
        for each in them:
            if each.role in ("writer", "trainer"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each.pid, signal.SIGUSR1)
        time.sleep(1.0)
