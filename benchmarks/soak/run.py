"""The run: starts everybody, does what the schedule says, keeps the account, and ends when all is consumed."""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import payloads
from clock import WallClock
from fault_injection import FaultInjector, Points
from faults import Fault, amounts, schedule
from ledger import VANISHED, Delivery, Ledger, Lines
from plan import SETTINGS, Part, RolloutPart, TrainerPart, opened
from processes import MARK, Child, Member, become_reaper, environment, members, reap_orphans, say_where, signal_all

from transport import SharedRingBuffer
from transport._ring import FREE
from transport.errors import TransportError

HERE = Path(__file__).resolve().parent
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
_CLOCK_STEP_S = 30 * 86400  # half of it back, half of it forth
LAPSES = ("claim.taken", "settle.asked")  # steps of a trainer at which it is stopped until its claims are another's
_LOOK_S = 0.05
_SAY_EVERY_S = 5.0
_DISMISS_S = 60.0
_TO_BEGIN = 4  # times the patience: until the first payload, all processes have to start
_SHARE = 0.5  # of processes that have a trap
# Of a trainer, and of a ring.
_LATE = ("discarded: StaleSlotError", "discarded: its deadline has passed")


class Options(NamedTuple):
    """Of the command line."""

    folder: Path  # empty
    seed: int
    isolated: bool
    stuck_s: float
    plant: str
    payloads: int
    kills: int = 0
    lapses: int = 0
    build: Path | None = None  # of native modules with fault points


def excused(delivery: Delivery, how: str) -> str:
    """See `Ledger`: a payload with a deadline may be discarded when it has passed; a ring does so without a word."""
    if payloads.deadline_s(*delivery[1:]) is None:
        return ""
    return "expired" if how.startswith(_LATE) or how == VANISHED else ""


class Soak:
    """One run."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._rng = random.Random(options.seed + 1)
        self._id = secrets.token_hex(4)
        folder = options.folder
        self._place = f"rings:soak-{self._id}-"
        network = options.isolated and all(map(shutil.which, ("ss", "tc")))
        self._injector = FaultInjector(network)
        self._ledger = Ledger(READERS.__getitem__, excused)
        self._clock = WallClock(folder)
        self._points = Points(folder)
        told = {
            "folder": str(folder),
            "seed": options.seed,
            "share": 0.0 if options.build is None else _SHARE,
            "build": None if options.build is None else str(options.build),
            "plant": options.plant,
        }
        self._environment = environment(HERE / "points", **{MARK: self._id, "SOAK_POINTS": json.dumps(told)})
        self._environment |= self._clock.environment
        self._children: dict[str, Child] = {}
        names = [f"writer-{number}" for number in range(len(READERS))]
        names += [f"trainer-{number}" for number in range(len(RANKS))]
        self._lines = {name: Lines(folder / f"{name}.journal") for name in names}
        self._crashes: list[str] = []
        self._idle_s = self._looked_at = self._said_at = 0.0
        self._seen = -1

    # --- its processes --------------------------------------------------------------------------------
    def _part(self, name: str, **more: Any) -> Part:
        """Of the next life of this process."""
        role, _, text = name.partition("-")
        number = int(text)
        common: dict[str, Any] = {"folder": str(self._options.folder), "name": name, "queue": self._place, **more}
        if role == "trainer":
            own: dict[str, Any] = {"rank": RANKS[number], "wire": self._rng.choice(WIRES)}
            return TrainerPart(**{**own, **common})
        left = max(0, self._share(number) - self._ledger.published(number))
        own = {"writer": number, "readers": READERS[number], "ring": self._ring(number), "left": left}
        return RolloutPart(**{**own, "first": self._ledger.intended(number), **common})

    def _share(self, number: int) -> int:
        whole, rest = divmod(self._options.payloads, len(READERS))
        return whole + (number < rest)

    def _ring(self, writer: int) -> str:
        return f"/transport-soak-{self._id}-{writer}"

    def _members(self) -> list[Member]:
        return members(self._id, {child.process.pid: child.part.role for child in self._children.values()})

    def _own(self) -> set[int]:
        return {child.process.pid for child in self._children.values()}

    def _hear(self, name: str) -> None:
        for words in self._lines[name].new():
            self._ledger.hear(name, words)

    def _gone(self, name: str) -> None:
        """The process has ended: what it said last, and how it ended."""
        child = self._children.pop(name)
        self._hear(name)
        self._ledger.died(name, child.part.writer if isinstance(child.part, RolloutPart) else None)
        child.dismiss()
        if crash := child.crash():
            self._crashes.append(crash)

    # --- the run --------------------------------------------------------------------------------------
    def run(self) -> dict[str, Any]:
        """Everything, to the report."""
        become_reaper()
        began = self._looked_at = time.monotonic()
        total = self._total = sum(self._share(number) * readers for number, readers in enumerate(READERS))
        others = {
            kind: count
            for kind, count in amounts(self._options.kills, self._options.lapses).items()
            if kind in self._injector.kinds or (kind == "clock" and self._clock.steps)
        }
        pending = schedule(self._options.seed, total, self._options.kills, others)[::-1]
        stuck = False
        try:
            while not stuck and not self._is_over(pending):
                self._tend()
                while pending and self._ledger.settled >= pending[-1].at and self._do(pending[-1]):
                    pending.pop()
                stuck = self._idle_s > self._options.stuck_s * (1 if self._seen > 0 else _TO_BEGIN)
                time.sleep(_LOOK_S)
            seconds = time.monotonic() - began
            if stuck:
                self._dump()
            self._points.end()
            self._injector.end_all()
            unfinished = self._unfinished(0.0 if stuck else self._options.stuck_s)
            left = self._dismiss(0.0 if stuck else _DISMISS_S)
        finally:
            self._end_everybody()
        return self._report(left, stuck, unfinished, len(pending), seconds)

    def _is_over(self, pending: list[Fault]) -> bool:
        """Everything is written and every ring is empty. The last fault may have killed everybody who keeps a ring:
        whoever is started again takes it away in order."""
        ledger, everybody = self._ledger, len(self._lines)
        if pending or not self._injector.quiet or not all(map(ledger.emptied, range(len(READERS)))):
            return False
        living = [child for child in self._children.values() if child.process.poll() is None]
        return len(living) == everybody and not ledger.waited_for()

    def _tend(self) -> None:
        """What has to be looked at all the time."""
        self._injector.tend()
        for pid, point, number in self._points.closed():
            least_s = self._lapse_s if point in LAPSES else 0.1
            self._injector.closed(pid, point, number, least_s + 5.0 * self._rng.random())
        reap_orphans(self._own())
        for name in self._lines:
            self._hear(name)
            if name in self._children and self._children[name].process.poll() is not None:
                self._gone(name)
            if name not in self._children:
                self._children[name] = Child(self._part(name), self._environment)
        now = time.monotonic()
        self._idle_s += min(now - self._looked_at, 1.0)  # a machine that stood still says nothing about the run
        self._looked_at = now
        if self._ledger.settled != self._seen:
            self._seen, self._idle_s = self._ledger.settled, 0.0
        if now - self._said_at > _SAY_EVERY_S:
            self._said_at = now
            print(f"{self._seen} of {self._ledger.due}, {self._injector.kills} kills", flush=True)
            foreign = [each for each in self._members() if each.stopped and not self._injector.has_stopped(each.pid)]
            if foreign:
                print(f"stopped by somebody else: {foreign}", flush=True)

    @property
    def _lapse_s(self) -> float:
        """So long has a trainer to be stopped until its claims are another's, however they were made."""
        return max(SETTINGS.claim_lease_s, SETTINGS.ack_timeout_s) + 0.5

    def _unfinished(self, patience_s: float) -> int:
        """Deliveries that the rings have not ended, when every ring is empty; the last leases may have to end."""
        give_up = time.monotonic() + patience_s
        part = Part(folder="", name="", queue=self._place)
        while True:
            self._tend()
            with opened(part) as queue:
                found = queue.depth().unfinished
            if not found or time.monotonic() > give_up:
                return found
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

    def _owners(self, writer: int) -> dict[int, int]:
        """Port of each listener of a ring, by process."""
        try:
            with SharedRingBuffer.attach(self._ring(writer), role="observer") as ring:
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
        everybody = {each.pid: each for each in self._members()}
        child = self._children.get(f"writer-{writer}")
        listeners = [everybody[pid] for pid in self._owners(writer) if pid in everybody]
        if child is None or child.process.pid not in everybody or not listeners:
            return False
        parents = {each.parent for each in listeners} - {os.getpid()}
        for pid in {child.process.pid} | parents:
            if pid in everybody:
                self._injector.kill(everybody[pid])
        for each in listeners:
            self._injector.kill(each)
        return True

    # --- the end ----------------------------------------------------------------------------------------
    def _dismiss(self, patience_s: float) -> list[str]:
        """Tell everybody to end in order; what is left of processes and segments afterwards."""
        give_up = time.monotonic() + patience_s
        for child in self._children.values():
            child.dismiss()
        while time.monotonic() < give_up and self._members():
            self._injector.tend()
            reap_orphans(self._own())
            time.sleep(_LOOK_S)
        late = self._members()
        if late:
            say_where(late)
        left = [f"{each.role} {each.pid}" for each in late] + [str(path) for path in self._segments()]
        for name in list(self._children):
            if self._children[name].process.poll() is not None:
                self._gone(name)
        return left

    def _segments(self) -> list[Path]:
        """Of this run, whoever made them; in a /dev/shm of its own everything there is."""
        return list(Path("/dev/shm").glob("*" if self._options.isolated else f"transport-soak-{self._id}-*"))

    def _end_everybody(self) -> None:
        while there := self._members():
            signal_all(signal.SIGKILL, there)
            for name in [name for name, child in self._children.items() if child.process.poll() is not None]:
                self._gone(name)
            reap_orphans(self._own())
            time.sleep(_LOOK_S)
        for name in list(self._children):
            self._children[name].process.wait()
            self._gone(name)
        for segment in self._segments():
            segment.unlink(missing_ok=True)

    def _dump(self) -> None:
        """Where everybody is, into their logs; what the rings say."""
        say_where(self._members())
        for writer in range(len(READERS)):
            try:
                with SharedRingBuffer.attach(self._ring(writer), role="observer") as ring:
                    print(repr(ring), ring.native.owners(), file=sys.stderr)
                    for slot in range(ring.slot_count):
                        info = ring.native.info(slot)
                        for rank in range(READERS[writer]) if info.state != FREE else ():
                            if not info.done >> rank & 1:
                                print(slot, info, rank, ring.native.claim_word(slot, rank), file=sys.stderr)
            except TransportError as error:
                print(error, file=sys.stderr)
        part = Part(folder="", name="", queue=self._place)
        with opened(part) as queue:
            print(queue.depth(), queue.failures(10), file=sys.stderr)

    def _report(self, left: list[str], stuck: bool, unfinished: int, not_done: int, seconds: float) -> dict[str, Any]:
        tally, counts = self._ledger.close(), self._injector.counts
        bad = tally.lost + tally.wrong + tally.duplicated + unfinished + len(self._crashes) + len(left) + stuck
        return {
            "passed": not bad,
            "kills": self._injector.kills,
            "kills_by_role": {name[5:]: count for name, count in counts.items() if name.startswith("kill ")},
            "kills_and_stops_at_points": {
                name[6:]: count for name, count in sorted(counts.items()) if name.startswith("point ")
            },
            "other_faults": {name: count for name, count in counts.items() if name[:5] not in ("kill ", "point")},
            "not_done": not_done,
            **vars(tally),
            "unfinished": unfinished,
            "crashes": self._crashes,
            "left_behind": left,
            "stuck": stuck,
            "seconds": round(seconds, 1),
            "per_second": round(tally.payloads / seconds, 1),
            "seed": self._options.seed,
            "isolated": self._options.isolated,
            "planted": self._options.plant,
        }
