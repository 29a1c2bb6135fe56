"""One run: makes the hosts, starts everybody, lets the faults happen, keeps the account, and ends everybody."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import plan
from clock import WallClock
from faults import FAULTS, Fault, order
from hosts import BRIDGE, REDIS_ADDRESS, REDIS_PORT, Host, make_bridge
from ledger import TWICE, VANISHED, Delivery, Ledger, Lines
from plan import DIRECTORY_LEASE_S, RolloutPart, TrainerPart
from processes import HERE as HARNESS
from processes import Child, environment
from redis_pair import RedisPair
from rich.console import Console
from rich.table import Table

Finding = Literal["addresses", "directory"]
# A third of the defaults or less, so that faults of seconds outlast them, in the same order as the defaults.
SETTINGS = msgspec.structs.replace(
    plan.SETTINGS,
    batch_deadline_s=30.0,
    port_quarantine_s=1.0,
    port_quarantine_most_s=4.0,
    ack_timeout_s=10.0,
    watchdog_s=3.5,
    heartbeat_s=1.0,
    linger_s=60.0,
    claim_lease_s=5.0,
)
LOST_AFTER_S = DIRECTORY_LEASE_S * 5 / 3  # the lease and its grace: payloads of who is out of reach for longer are lost
FIRST_PORT = 7001
_SLOTS = 256
_CLAIMS = 32
_LOOK_S = 0.05
_SAY_EVERY_S = 10.0
_CALM_S = 1.5  # between two faults
_AROUND_S = 5.0  # of a fault, beside its length, as a rule
_SETTLE_S = 60.0  # after that a fault counts as stuck
_START_S = 120.0
_END_S = 30.0
_DUMP_S = 2.0  # for stacks to be in the logs; a process that is stuck in the kernel writes none
_CLOCKS_APART_S = 420
_WIDTH = 150  # of the table, where the output is no terminal


class Options(NamedTuple):
    """Of the command line."""

    hosts: int
    minutes: float
    faults: list[str]
    seed: int
    finding: Finding
    folder: Path  # empty
    per_s: float  # payloads, of all rollouts together


class Episode(NamedTuple):
    """One fault. Times in seconds; None: not within the bound."""

    number: int
    name: str
    hosts: list[str]
    delivered: int  # until the next one
    lasted_s: float
    pause_s: float  # longest time without any delivery to anybody, from its beginning until all got on
    others_s: float  # longest time that a trainer which the fault does not concern was without a delivery
    back_s: float | None  # from its end until all concerned hosts had written and had consumed again
    settled_s: float | None  # from its end until all that was published before had come to its end


class Run:
    """One way of finding payloads, on one cluster."""

    def __init__(self, options: Options, say: Callable[[str], None]) -> None:
        self.options = options
        self.choose = random.Random(options.seed)
        self._say = say
        self._folder = options.folder
        self.hosts = [Host(number, self._folder, self.choose) for number in range(options.hosts)]
        of_redis = [] if options.finding == "addresses" else self.hosts[:2]
        others = self.hosts[len(of_redis) :]
        half = len(others) // 2
        self.rollout_hosts = others[: half + 1]  # the last of them has a trainer, too
        self.trainer_hosts = others[half:]
        self._clocks: dict[Host, WallClock] = {}
        self.redis = RedisPair((of_redis[0], of_redis[1]), self._folder, self._clock_of) if of_redis else None
        self._children: dict[Child, tuple[Host, Lines]] = {}
        self._writers = 0
        self._ledger = Ledger(excused=self._excused)
        self._removed = set[int]()  # writers, with their hosts
        self._cut_off = set[int]()  # writers whose hosts were out of reach for longer than their record lasts
        self._crashes: list[str] = []
        self._said_at = self._began = 0.0
        self._watched: dict[str, float] = {}  # trainer → longest pause since the fault began
        self._pause_s = self._last_delivery = 0.0
        self._episodes: list[Episode] = []
        self._left: list[str] = []
        self._overdue = set[Delivery]()  # a fault was not settled within its bound because of them
        self._url = f"redis://{REDIS_ADDRESS}:{REDIS_PORT}/0?run={secrets.token_hex(4)}"

    def _excused(self, delivery: Delivery, how: str) -> str:
        """See `Ledger`."""
        _, writer, _ = delivery
        if how == VANISHED:
            return "with host" if writer in self._removed else ""
        if how != TWICE and (writer in self._removed or (writer in self._cut_off and "PayloadLostError" in how)):
            return "reported"
        return ""

    # --- hosts and processes --------------------------------------------------------------------------
    def _clock_of(self, host: Host) -> dict[str, str]:
        if host not in self._clocks:
            folder = self._folder / f"clock-{host.name}"
            folder.mkdir()
            self._clocks[host] = WallClock(folder)
            self.set_clock(host, self.choose.randint(-_CLOCKS_APART_S, _CLOCKS_APART_S))
        return self._clocks[host].environment

    def set_clock(self, host: Host, offset_s: int) -> None:
        """From now on its wall clock is off by so much."""
        self._clock_of(host)
        self._clocks[host].step(offset_s)

    def _place(self) -> str:
        if self.options.finding == "addresses":
            return "rings://" + ",".join(f"{host.address}:{FIRST_PORT}" for host in self.rollout_hosts)
        return f"rings+{self._url}"

    def populate(self, host: Host) -> None:
        """Make the host and start what belongs to it. A rollout is another writer in each life of its host."""
        host.start()
        common: dict[str, Any] = {"folder": str(self._folder), "queue": self._place(), "settings": SETTINGS}
        parts: list[plan.Part] = []
        if host in self.rollout_hosts:
            parts.append(
                RolloutPart(
                    name=f"writer-{host.number}.{host.lives}",
                    writer=self._writers,
                    slots=_SLOTS,
                    address=host.address,
                    ports=(FIRST_PORT,),
                    per_s=self.options.per_s / len(self.rollout_hosts),
                    deadlines=False,
                    **common,
                )
            )
            self._writers += 1
        if host in self.trainer_hosts:
            parts.append(TrainerPart(name=f"trainer-{host.number}.{host.lives}", batch=_CLAIMS, **common))
        for part in parts:
            child = Child(part, environment(HARNESS, **self._clock_of(host)), host.popen)
            self._children[child] = host, Lines(part.journal)

    def remove(self, host: Host) -> None:
        """The host is gone without a word, and with it all it has."""
        host.remove()
        for child in [child for child, (there, _) in self._children.items() if there is host]:
            child.process.wait()
            if isinstance(child.part, RolloutPart):
                self._removed.add(child.part.writer)
            self._gone(child)

    def _gone(self, child: Child) -> None:
        self._hear(child)
        del self._children[child]
        self._ledger.died(child.part.name)
        child.dismiss()

    def _of(self, kind: type[plan.Part]) -> list[Child]:
        return [child for child in self._children if isinstance(child.part, kind)]

    # --- all the time ---------------------------------------------------------------------------------
    def _hear(self, child: Child) -> None:
        for words in self._children[child][1].new():
            self._ledger.hear(child.part.name, words, time.monotonic())

    def _tend(self) -> None:
        now = time.monotonic()
        before = self._ledger.consumed
        for child in list(self._children):
            self._hear(child)
            if child.process.poll() is not None:
                self._crashes.append(child.crash() or f"{child.part.name} ended by itself")
                self._gone(child)
        if self._ledger.consumed != before:
            self._pause_s = max(self._pause_s, now - self._last_delivery)
            self._last_delivery = now
        for name in (child.part.name for child in self._of(TrainerPart)):
            if name in self._ledger.last:
                self._watched[name] = max(self._watched.get(name, 0.0), now - self._ledger.last[name])
        if now - self._said_at > _SAY_EVERY_S:
            self._said_at = now
            self._say(f"{self._ledger.consumed} of {self._ledger.due} delivered")

    def _until(self, holds: Callable[[], bool], bound_s: float) -> float | None:
        """Seconds until it holds; None if it does not within the bound."""
        began = time.monotonic()
        while not holds():
            if time.monotonic() - began > bound_s:
                return None
            self._tend()
            time.sleep(_LOOK_S)  # the pace at which the journals of all processes are read: the table's resolution
        return time.monotonic() - began

    def _wait(self, seconds: float) -> None:
        self._until(lambda: False, seconds)

    # --- the run --------------------------------------------------------------------------------------
    def run(self) -> dict[str, Any]:
        """Everything, to the report."""
        self._began = time.monotonic()
        make_bridge()
        try:
            self._start()
            ends_at = time.monotonic() + 60.0 * self.options.minutes
            names = [name for name in self.options.faults if self.redis is not None or not FAULTS[name].needs_redis]
            turn = 0
            while names and (not turn or time.monotonic() < ends_at):
                todo = order(self.options.seed + turn, names)
                for at, name in enumerate(todo):
                    if turn and time.monotonic() > ends_at:
                        break
                    round_s = sum(FAULTS[each].hold_s + _AROUND_S for each in todo[at:])
                    left_s = max(round_s if not turn else 0.0, ends_at - time.monotonic())
                    number = len(self._episodes) + 1
                    self._say(f"fault {number}: {name}; about {left_s:.0f} s left")
                    self._episodes.append(self._suffer(number, name, FAULTS[name]))
                turn += 1
            stuck = self._finish()
        finally:
            for host in self.hosts:
                host.close()
            subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True)
        return self._report(stuck)

    def _start(self) -> None:
        if self.redis is not None:
            for host in self.hosts[:2]:
                host.start()
            self.redis.start()
        for host in self.hosts[0 if self.redis is None else 2 :]:
            self.populate(host)
        began = self._until(lambda: bool(self._crashes) or self._all_on(self.hosts, 0.0), _START_S)
        if self._crashes:
            raise SystemExit("\n".join(self._crashes))
        if began is None:
            self._dump()
            raise SystemExit(
                f"not everybody gets on within {_START_S:g} s of the start; the logs are in {self._folder}"
            )
        self._say(f"{len(self.hosts)} hosts, {len(self._children)} processes and their servers, after {began:.0f} s")
        self._wait(_CALM_S)

    def _all_on(self, hosts: list[Host], since: float) -> bool:
        """Whether each of their trainers has consumed, and a payload of each of their writers was, since then."""
        return all(
            self._ledger.carried.get(child.part.writer, -1.0) >= since
            if isinstance(child.part, RolloutPart)
            else self._ledger.last.get(child.part.name, -1.0) >= since
            for child, (host, _) in self._children.items()
            if host in hosts
        )

    def _suffer(self, number: int, name: str, fault: Fault) -> Episode:
        self._watched.clear()
        self._pause_s = 0.0
        before = self._ledger.consumed
        now = began = self._last_delivery = time.monotonic()
        for who in self._ledger.last:
            self._ledger.last[who] = max(self._ledger.last[who], began)  # pauses count from here
        hosts = fault.begin(self)
        if fault.hold_s >= LOST_AFTER_S:
            of = [child.part for child, (host, _) in self._children.items() if host in hosts]
            self._cut_off |= {part.writer for part in of if isinstance(part, RolloutPart)}
        self._wait(fault.hold_s)
        fault.mend(self, hosts)
        now = time.monotonic()
        back_s = self._until(lambda: self._all_on(hosts or self.hosts, now), _SETTLE_S)
        settled = self._until(lambda: not self._waited_for(now), _SETTLE_S)
        settled_s = None if settled is None else time.monotonic() - now
        if back_s is None or settled is None:
            self._dump()
            self._overdue |= self._waited_for(now)  # the next fault is not to wait for them
        concerned = {child.part.name for child, (host, _) in self._children.items() if host in hosts}
        others = [pause for who, pause in self._watched.items() if who not in concerned]
        pause_s = max(self._pause_s, time.monotonic() - self._last_delivery)
        self._wait(_CALM_S)
        delivered = self._ledger.consumed - before
        names = [host.name for host in hosts]
        return Episode(
            number, name, names, delivered, now - began, pause_s, max(others, default=0.0), back_s, settled_s
        )

    def _waited_for(self, before: float) -> set[Delivery]:
        return {*self._ledger.waited_for(before)} - self._overdue

    def _finish(self) -> bool:
        """End the writing, wait for every payload, end everybody; whether that did not come to an end."""
        for child in self._of(RolloutPart):
            child.stop_writing()
        writers = [child.part.writer for child in self._of(RolloutPart)]  # type: ignore[attr-defined]

        def drained() -> bool:
            return all(map(self._ledger.emptied, writers)) and not self._waited_for(time.monotonic())

        stuck = self._until(drained, _SETTLE_S) is None
        if stuck:
            self._dump()
            self._left += [
                f"writer {each}: its ring is not empty" for each in writers if not self._ledger.emptied(each)
            ]
        for kind in (TrainerPart, RolloutPart):
            for child in self._of(kind):
                child.dismiss()
            give_up = time.monotonic() + _END_S
            for child in self._of(kind):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.0, give_up - time.monotonic()))
                if child.process.poll() != 0:
                    self._left.append(f"{child.part.name}: status {child.process.poll()} at its end")
                self._hear(child)
        for host in self.rollout_hosts + self.trainer_hosts:
            if there := host.processes():
                self._left.append(f"{host.name}: processes {[_command(pid) for pid in there]}")
            self._left += [f"{host.name}: /dev/shm/{name}" for name in host.segments()]
        return stuck

    def _dump(self) -> None:
        """Where everybody is, into their logs."""
        sizes = {child.log: child.log.stat().st_size for child in self._children}
        for pid in (pid for host in self.hosts for pid in host.processes()):
            if str(HARNESS) in _command(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
        self._until(lambda: all(log.stat().st_size > size for log, size in sizes.items()), _DUMP_S)
        (self._folder / "waited_for").write_text(json.dumps(self._ledger.waited_for()))

    def _report(self, stuck: bool) -> dict[str, Any]:
        tally = self._ledger.close()
        slow = [each.number for each in self._episodes if each.back_s is None or each.settled_s is None]
        wrong = tally.lost or tally.duplicated or tally.wrong
        return {
            "passed": not (stuck or slow or self._crashes or self._left or wrong),
            "finding": self.options.finding,
            "hosts": self.options.hosts,
            "seed": self.options.seed,
            "seconds": round(time.monotonic() - self._began, 1),
            "episodes": [each._asdict() | {"about": FAULTS[each.name].about} for each in self._episodes],
            **vars(tally),
            "stuck": stuck,
            "not_settled": slow,
            "crashes": self._crashes,
            "left_behind": self._left,
        }


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    return "gone"


def show(report: dict[str, Any]) -> None:
    """The table of faults, and the account."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    title = f"{report['finding']}: {report['hosts']} hosts, seed {report['seed']}, {report['payloads']} payloads"
    table = Table("fault", title=f"{title}, {report['seconds']:.0f} s")
    columns = ("lasted_s", "pause_s", "others_s", "back_s", "settled_s")
    for column in ("delivered", *columns):
        table.add_column(column.removesuffix("_s"), justify="right")
    for each in report["episodes"]:
        times = ("never" if each[name] is None else f"{each[name]:.1f} s" for name in columns)
        table.add_row(each["name"], str(each["delivered"]), *times)
    console.print(table)
    account = ("consumed", "silent", "excused", "lost", "duplicated", "wrong")
    for name in (*account, "stuck", "not_settled", "crashes", "left_behind", "named"):
        if report[name] or name in account:
            console.print(f"{name}: {report[name]}", highlight=False, markup=False)
    console.print("passed" if report["passed"] else "FAILED", style="green" if report["passed"] else "red")
