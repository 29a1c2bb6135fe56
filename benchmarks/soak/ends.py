"""What is left in /dev/shm when everybody ends in some order, some by signals: three writers, two trainers.

    python benchmarks/soak/ends.py --runs 20 --seed 1

Processes are killed, stopped and started again for some seconds; then each is told to end, gets SIGTERM or SIGKILL, or
is stopped first, in an order that follows from the seed. When nobody lives any more, segments that are left are
described, with all that was done, and `transport reclaim` must remove them. Exit status 1 if it does not.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
from plan import SETTINGS, Plan, TrainerPlan, WriterPlan
from process_tree import HERE, MARK, Child, Member, become_reaper, members, reap_orphans

from transport import SharedRingBuffer
from transport.errors import TransportError

WRITERS, TRAINERS = 3, 2
SHM = Path("/dev/shm")
_PATIENCE_S = 60.0  # a watchdog, not a measure
_ROLES = {"trainer": 4, "writer": 3, "listener": 2, "supervisor": 2}


class Run:
    """One life of everybody."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._choose = random.Random(seed)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.name = f"{os.getpid()}-{seed}"
        self.said: list[str] = []
        self._folder = folder
        self._began = time.monotonic()
        self._stopped: dict[int, float] = {}
        self._plan = Plan(
            folder=str(folder),
            queue=f"rings:soak-{self.name}-",
            deadlines=False,
            run=self.name,
            seed=seed,
            slots=64,
            settings=msgspec.structs.replace(SETTINGS, linger_s=self._choose.choice((0.5, 2.0))),
        )
        environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX")}
        environment |= {MARK: self.name, "PYTHONPATH": str(HERE.parent.parent)}
        self._children = [self._writer(number, environment) for number in range(WRITERS)]
        self._children += [self._trainer(number, environment) for number in range(TRAINERS)]

    def _writer(self, number: int, environment: dict[str, str]) -> Child:
        lives = iter(range(1000))

        def part() -> bytes:
            first = 100_000 * next(lives)
            left = self._choose.choice((64, 1000, 50_000))
            return msgspec.json.encode(WriterPlan(plan=self._plan, number=number, readers=1, first=first, left=left))

        return Child(f"writer-{number}", "writer.py", part, lambda: environment)

    def _trainer(self, number: int, environment: dict[str, str]) -> Child:
        def part() -> bytes:
            wire = self._choose.choice(([], [], ["tcp"]))
            return msgspec.json.encode(TrainerPlan(plan=self._plan, number=number, rank=0, wire=wire, batch=16))

        return Child(f"trainer-{number}", "trainer.py", part, lambda: environment)

    def _say(self, what: str) -> None:
        self.said.append(f"{time.monotonic() - self._began:6.2f} {what}")

    # --- who is there ---------------------------------------------------------------------------------
    def members(self) -> list[Member]:
        """Every living process of this run."""
        roles = {each.process.pid: each.name.partition("-")[0] for each in self._children if each.process}
        return members(self.name, roles)

    def segments(self) -> list[Path]:
        """What is in /dev/shm of this run."""
        return sorted(SHM.glob(f"transport-soak-{self.name}-*"))

    def _tend(self, again: bool) -> None:
        own = {each.process.pid for each in self._children if each.process is not None}
        reap_orphans(own)
        for pid in [pid for pid, until in self._stopped.items() if time.monotonic() >= until]:
            del self._stopped[pid]
            self._send(pid, signal.SIGCONT)
        for child in self._children:
            if child.process is not None and child.ended():
                self._say(f"{child.name} is gone")
            if again and child.process is None:
                child.start(self._folder / f"{child.name}.log")
                self._say(f"{child.name} starts")

    def _send(self, pid: int, number: signal.Signals) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        self._say(f"{number.name} to {pid}")

    def _wait(self, seconds: float, again: bool) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._tend(again)
            time.sleep(0.01)

    # --- what happens ---------------------------------------------------------------------------------
    def trouble(self) -> None:
        """Kill and stop for some seconds."""
        self._wait(self._choose.uniform(0.5, 3.0), again=True)
        for _ in range(self._choose.randrange(3, 15)):
            role = self._choose.choices(list(_ROLES), list(_ROLES.values()))[0]
            there = sorted(each for each in self.members() if each.role == role)
            if there:
                self._hit(self._choose.choice(there))
            self._wait(self._choose.uniform(0.0, 0.8), again=True)

    def _hit(self, victim: Member) -> None:
        self._say(f"{victim.role}:")
        if self._choose.random() < 0.6:
            self._send(victim.pid, signal.SIGKILL)
        else:
            self._send(victim.pid, signal.SIGSTOP)
            self._stopped[victim.pid] = time.monotonic() + self._choose.choice((0.3, 2.0, 6.0))

    def end(self) -> None:
        """Everybody, in some order and way; then until nobody lives."""
        self._choose.shuffle(self._children)
        for child in self._children:
            how = self._choose.choice(("told", "told", "SIGTERM", "SIGKILL", "stopped and killed"))
            self._say(f"{child.name} ends: {how}")
            pid = 0 if child.process is None else child.process.pid
            if how == "told" or not pid:
                child.dismiss()
            elif how == "stopped and killed":
                self._send(pid, signal.SIGSTOP)
            else:
                self._send(pid, signal.Signals[how])
            if self._choose.random() < 0.3:
                there = sorted(each for each in self.members() if each.role in ("listener", "supervisor"))
                if there:
                    self._hit(self._choose.choice(there))
            self._wait(self._choose.choice((0.0, 0.1, 1.0)), again=False)
            if how == "stopped and killed" and pid:
                self._send(pid, signal.SIGKILL)
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        give_up_at = time.monotonic() + _PATIENCE_S
        while there := self.members():
            self._tend(again=False)
            if time.monotonic() > give_up_at - _PATIENCE_S / 2:  # a ring is full that nobody reads, or tickets are dead
                for child in self._children:
                    if child.process is not None:
                        self._send(child.process.pid, signal.SIGKILL)
            if time.monotonic() > give_up_at:
                raise SystemExit(f"timeout: processes still run: {there}\n" + "\n".join(self.said))
            time.sleep(0.02)
        self._tend(again=False)

    def kill_all(self) -> None:
        """Whoever is left after a failure."""
        for each in self.members():
            os.kill(each.pid, signal.SIGKILL)


def described(segment: Path) -> str:
    """What can be told of a segment that is left."""
    try:
        ring = SharedRingBuffer.attach(f"/{segment.name}", role="observer")
    except TransportError as error:
        return f"{segment.name}: {error}"
    try:
        return f"{segment.name}: {ring!r}"
    finally:
        ring.native.close()  # ring.close() would remove it


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("build/ends"))
    parser.add_argument("--verbose", action="store_true")
    chosen = parser.parse_args()
    become_reaper()
    left = stayed = 0
    for seed in range(chosen.seed, chosen.seed + chosen.runs):
        run = Run(seed, chosen.folder.resolve())
        try:
            run.trouble()
            run.end()
        finally:
            run.kill_all()
        segments = run.segments()
        print(f"seed {seed}: {len(segments)} left", flush=True)
        if segments:
            left += len(segments)
            print(*run.said, *map(described, segments), sep="\n")
            names = [segment.name for segment in segments]
            subprocess.run([sys.executable, "-P", "-m", "transport", "reclaim", *names], check=True)
            stayed += len(run.segments())
    print(f"{chosen.runs} runs, {left} segments left, {stayed} that reclaim did not remove")
    return 1 if stayed else 0


if __name__ == "__main__":
    sys.exit(main())
