"""One run: makes the hosts, starts everybody, lets the faults happen, keeps the books, and ends everybody."""

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import audit
import msgspec
from books import Books, Payload
from clock import WallClock
from faults import FAULTS, Fault, order
from hosts import REDIS_ADDRESS, Host, make_bridge
from journal import Reader
from parts import (
    DIRECTORY_LEASE_S,
    FIRST_PORT,
    LOST_AFTER_S,
    REDIS_PORT,
    SETTINGS,
    Part,
    RolloutPart,
    TrainerPart,
    opened,
)
from records import Episode, Options, Process
from redis_pair import RedisPair

from transport.errors import QueueError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
_LOOK_S = 0.05
_ASK_EVERY_S = 1.0
_SAY_EVERY_S = 10.0
_REDIS_PATIENCE_S = 0.5
_CALM_S = 1.5  # between two faults
_AROUND_S = 5.0  # of a fault, beside its length, as a rule
_SETTLE_S = 60.0  # after that a fault counts as stuck
_START_S = 120.0
_END_S = 30.0
_DUMP_S = 2.0  # for stacks to be in the logs; a process that is stuck in the kernel writes none
_CLOCKS_APART_S = 420
_LAST_WORDS = 2000
_HARVESTED = 5000


class Run:
    """One way of finding payloads, on one cluster."""

    def __init__(self, options: Options, say: Callable[[str], None]) -> None:
        self.options = options
        self.choose = random.Random(options.seed)
        self.books = Books()
        self._say = say
        self._folder = options.folder
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self.hosts = [Host(number, self._folder, self.choose) for number in range(options.hosts)]
        of_redis = [] if options.finding == "addresses" else self.hosts[:2]
        others = self.hosts[len(of_redis) :]
        half = len(others) // 2
        self.rollout_hosts = others[: half + 1]  # the last of them has a trainer, too
        self.trainer_hosts = others[half:]
        self._clocks: dict[Host, WallClock] = {}
        self.redis = RedisPair((of_redis[0], of_redis[1]), self._folder, self._clock_of) if of_redis else None
        self._processes: list[Process] = []
        self._writers = 0
        self._run = secrets.token_hex(4)
        self._crashes: list[str] = []
        self._asked_at = self._said_at = self._began = 0.0
        self._watched: dict[str, float] = {}  # trainer → longest pause since the fault began
        self._pause_s = 0.0
        self._last_delivery = 0.0
        self._episodes: list[Episode] = []
        self._left: list[str] = []
        self._overdue: set[Payload] = set()  # a fault was not settled within its bound because of them
        self._url = f"redis://{REDIS_ADDRESS}:{REDIS_PORT}/0?run={self._run}"

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
        return self._url if self.options.finding == "redis" else f"rings+{self._url}"

    def populate(self, host: Host) -> None:
        """Make the host and start what belongs to it."""
        host.start()
        few = {"folder": str(self._folder), "finding": self.options.finding, "queue": self._place(), "store": self._url}
        if host in self.rollout_hosts:
            part = RolloutPart(
                name=f"rollout-{host.number}.{host.lives}",
                writer=self._writers,
                address=host.address,
                ports=(FIRST_PORT,),
                per_s=self.options.per_s / len(self.rollout_hosts),
                **few,  # type: ignore[arg-type]
            )
            self._writers += 1
            self._begin(host, part, "rollout.py")
        if host in self.trainer_hosts:
            name = f"trainer-{host.number}.{host.lives}"
            self._begin(host, TrainerPart(name=name, **few), "trainer.py")  # type: ignore[arg-type]

    def _begin(self, host: Host, part: Part, script: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX")}
        soak = HERE.parent / "soak"
        environment |= {"PYTHONPATH": os.pathsep.join(map(str, (soak, ROOT)))} | self._clock_of(host)
        log = self._folder / f"{part.name}.log"
        command = [sys.executable, str(HERE / script), msgspec.json.encode(part).decode()]
        process = host.popen(command, log, environment)
        self._processes.append(Process(host, part, process, Reader(part.journal), log))

    def remove(self, host: Host) -> None:
        """The host is gone without a word, and with it all it has."""
        host.remove()
        for each in [each for each in self._processes if each.host is host]:
            each.process.wait()
            self._processes.remove(each)
            self._hear(each)
            self.books.removed(each.part.name, each.part.writer if isinstance(each.part, RolloutPart) else None)
            if each.process.stdin is not None:
                each.process.stdin.close()

    def forgets(self) -> None:
        """Redis may have forgotten what was just answered."""
        self.books.forgot_at = time.monotonic()

    # --- all the time ---------------------------------------------------------------------------------
    def _hear(self, each: Process) -> None:
        for words in each.reader.lines():
            self.books.hear(each.part.name, words, time.monotonic())

    def _tend(self) -> None:
        now = time.monotonic()
        before = self.books.delivered
        for each in list(self._processes):
            self._hear(each)
            status = each.process.poll()
            if status is not None:
                self._hear(each)
                self._processes.remove(each)
                self.books.removed(each.part.name)
                words = each.log.read_bytes()[-_LAST_WORDS:].decode(errors="replace")
                self._crashes.append(f"{each.part.name} ended with status {status}; its log:\n{words}")
        if self.books.delivered != before:
            self._pause_s = max(self._pause_s, now - self._last_delivery)
            self._last_delivery = now
        for each in self._processes:
            name = each.part.name
            if isinstance(each.part, TrainerPart) and name in self.books.last:
                self._watched[name] = max(self._watched.get(name, 0.0), now - self.books.last[name])
        if now - self._asked_at > _ASK_EVERY_S:
            self._asked_at = now
            self._ask()
        if now - self._said_at > _SAY_EVERY_S:
            self._said_at = now
            self._say(f"{self.books.delivered} delivered, {len(self.books.outstanding)} under way")

    def _ask(self) -> None:
        """What became of what removed trainers asked for; what the queue reports."""
        questions = self.books.questions()
        if self.options.finding != "redis":
            self.books.answer_emptied(time.monotonic())
            return
        asked = [(0, token.replace("|", " ")) for token in questions]
        for (_, token), accepted in audit.fates(self._url, asked).items() if asked else ():
            self.books.answer(token.replace(" ", "|"), accepted, time.monotonic())
        part = Part(folder="", name="", finding="redis", queue=self._url, store=self._url)
        with contextlib.suppress(QueueError), opened(part, _REDIS_PATIENCE_S) as queue:
            for failure in queue.failures(_HARVESTED):
                payload = self.books.ticket(failure.ticket_id)
                if payload is not None:
                    self.books.report(payload, f"{failure.state}: {failure.reason}", time.monotonic())

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
            number = 0
            for turn in range(1000):
                if not names or (turn and time.monotonic() > ends_at):
                    break
                todo = order(self.options.seed + turn, names)
                for at, name in enumerate(todo):
                    if turn and time.monotonic() > ends_at:
                        break
                    number += 1
                    round_s = sum(FAULTS[each].hold_s + _AROUND_S for each in todo[at:])
                    left_s = max(round_s if not turn else 0.0, ends_at - time.monotonic())
                    self._say(f"fault {number}: {name}; about {left_s:.0f} s left")
                    self._episodes.append(self._suffer(number, name, FAULTS[name]))
            stuck = self._finish()
        finally:
            for host in self.hosts:
                host.close()
            subprocess.run(["ip", "link", "delete", "br0"], capture_output=True)
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
        self._say(f"{len(self.hosts)} hosts, {len(self._processes)} processes and their servers, after {began:.0f} s")
        self._wait(_CALM_S)

    def _all_on(self, hosts: list[Host], since: float) -> bool:
        """Whether each of their trainers has consumed, and a payload of each of their writers was, since then."""
        for each in self._processes:
            if each.host not in hosts:
                continue
            if isinstance(each.part, RolloutPart):
                if not self.books.written_since(each.part.writer, since):
                    return False
            elif self.books.last.get(each.part.name, -1.0) < since or each.part.name not in self.books.last:
                return False
        return True

    def _suffer(self, number: int, name: str, fault: Fault) -> Episode:
        self.books.fault = number
        self._watched.clear()
        self._pause_s = 0.0
        now = began = self._last_delivery = time.monotonic()
        for who in self.books.last:
            self.books.last[who] = max(self.books.last[who], began)  # pauses count from here
        hosts = fault.begin(self)
        if fault.hold_s >= LOST_AFTER_S:
            for each in self._processes:
                if each.host in hosts and isinstance(each.part, RolloutPart):
                    self.books.cut_off(each.part.writer)
        self._wait(fault.hold_s)
        fault.mend(self, hosts)
        now = time.monotonic()
        back_s = self._until(lambda: self._all_on(hosts or self.hosts, now), _SETTLE_S)
        settled = self._until(lambda: not self._waited_for(now), _SETTLE_S)
        settled_s = None if settled is None else time.monotonic() - now
        if back_s is None or settled is None:
            self._dump()
            self._overdue.update(self._waited_for(now))  # the next fault is not to wait for them
        concerned = {each.part.name for each in self._processes if each.host in hosts}
        others = [pause for who, pause in self._watched.items() if who not in concerned]
        episode = Episode(
            number,
            name,
            [host.name for host in hosts],
            now - began,
            max(self._pause_s, time.monotonic() - self._last_delivery),
            max(others, default=0.0),
            back_s,
            settled_s,
        )
        self._wait(_CALM_S)
        return episode

    def _waited_for(self, before: float) -> set[Payload]:
        return set(self.books.waited_for(before, gone_counts=self._reports)) - self._overdue

    @property
    def _reports(self) -> bool:
        """Whether the queue has to report what went with a host."""
        return self.options.finding == "redis"

    def _finish(self) -> bool:
        """End the writing, wait for every payload, end everybody; whether that did not come to an end."""
        for each in self._processes:
            if isinstance(each.part, RolloutPart) and each.process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    each.process.stdin.write(b"stop\n")
                    each.process.stdin.flush()
        writers = [each.part.writer for each in self._processes if isinstance(each.part, RolloutPart)]

        def drained() -> bool:
            written = all(self.books.finished(writer) for writer in writers)
            return written and not self.books.answerable(self._reports) and not self._waited_for(time.monotonic())

        stuck = self._until(drained, _SETTLE_S) is None
        if stuck:
            self._dump()
        self._until(lambda: not any(map(self.books.used, writers)), _END_S)
        self._left += [f"writer {each}: {self.books.used(each)} slots" for each in writers if self.books.used(each)]
        for script in (TrainerPart, RolloutPart):
            for each in self._processes:
                if isinstance(each.part, script) and each.process.stdin is not None:
                    each.process.stdin.close()
            theirs = [each for each in self._processes if isinstance(each.part, script)]
            give_up = time.monotonic() + _END_S
            for each in theirs:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    each.process.wait(max(0.0, give_up - time.monotonic()))
                if each.process.poll() != 0:
                    self._left.append(f"{each.part.name}: status {each.process.poll()} at its end")
                self._hear(each)
        for host in self.rollout_hosts + self.trainer_hosts:
            there = host.processes()
            if there:
                self._left.append(f"{host.name}: processes {[_command(pid) for pid in there]}")
            self._left += [f"{host.name}: /dev/shm/{name}" for name in host.segments()]
        self.books.close(self._reports)
        return stuck

    def _dump(self) -> None:
        """Where everybody is, into their logs."""
        sizes = {each.log: each.log.stat().st_size for each in self._processes}
        for each in self._processes:
            for pid in each.host.processes():
                if "cluster" in (command := _command(pid)) and ".py" in command:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGUSR1)
        self._until(lambda: all(log.stat().st_size > size for log, size in sizes.items()), _DUMP_S)
        (self._folder / "waited_for").write_text(json.dumps(self.books.waited_for(time.monotonic(), True)))

    def _report(self, stuck: bool) -> dict[str, Any]:
        books = self.books
        total = books.total()
        slow = [each.number for each in self._episodes if each.back_s is None or each.settled_s is None]
        bad = stuck or slow or self._crashes or self._left or not total.good
        return {
            "passed": not bad,
            "finding": self.options.finding,
            "hosts": self.options.hosts,
            "seed": self.options.seed,
            "payloads": books.due(),
            "seconds": round(time.monotonic() - self._began, 1),
            "total": total._asdict(),
            "episodes": [
                each._asdict() | {"about": FAULTS[each.name].about} | books.tally(each.number)._asdict()
                for each in self._episodes
            ],
            "reasons": books.reasons(),
            "stuck": stuck,
            "not_settled": slow,
            "crashes": self._crashes,
            "left_behind": self._left,
            "named": books.named[:20],
            "times": {"claim_lease_s": SETTINGS.claim_lease_s, "ack_timeout_s": SETTINGS.ack_timeout_s}
            | {"directory_lease_s": DIRECTORY_LEASE_S},
        }


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    return "gone"
