"""A rollout and a trainer in one process, which SIGINT interrupts at any time; each interrupted call is repeated.

python interrupted_job.py RUN WIRE INTERRUPTS SEED PLANT batches|steps

It says on standard output: "ready", when signals may come; "enough", when INTERRUPTS calls were interrupted; then, as
JSON, what it wrote and what it trained on. The signal raises in the package and in what that calls, not in this file: a
program that keeps accounts has to know what a call returned.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from interrupted_plants import plant

from transport import RingOptions, Rollout, Trainer
from transport.errors import UsageError
from transport.training.batch import Batch
from transport.training.steps import Step
from transport.wires import Wire

T = TypeVar("T")

WATCHDOG_S, EACH_S = 60.0, 0.5  # in all, and for each interrupt
QUIET_S = 5.0  # without a payload: what is claimed then is held by nobody
SLOTS = 24
REOPENED = 0.02  # of the steps


class Interrupts:
    """SIGINT raises KeyboardInterrupt in the calls that are to be interrupted."""

    def __init__(self, wanted: int, chance: random.Random) -> None:
        self.armed = False
        self._chance = chance
        self.count = 0
        self.wanted = wanted
        signal.signal(signal.SIGINT, self._came)

    def _came(self, _: int, frame: Any) -> None:
        if self.armed and frame is not None and frame.f_code.co_filename != __file__:
            self.armed = False
            self.count += 1
            raise KeyboardInterrupt

    def once(self, call: Callable[[], T]) -> tuple[T | None, bool]:
        """What the call returned, and whether it was interrupted instead."""
        try:
            self.armed = self.count < self.wanted and self._chance.random() < 0.5
            result = call()
            self.armed = False
            return result, False
        except KeyboardInterrupt:
            return None, True
        finally:
            self.armed = False

    def repeated(self, call: Callable[[], T]) -> T:
        """What the call returns that is not interrupted."""
        while True:
            result, interrupted = self.once(call)
            if not interrupted:
                return result  # type: ignore[return-value]


class Job:
    def __init__(self, run: str, wire: Wire, interrupts: int, seed: int) -> None:
        self.chance = random.Random(seed)
        self.interrupts = Interrupts(interrupts, self.chance)
        self.written: list[int] = []
        self.perhaps: list[int] = []  # an interrupted write says nothing
        self.trained: list[int] = []
        self.next = 0
        self.wire = wire
        self.run = run
        self.rings = 0
        self.rollout = self.a_rollout()
        self.trainer = self.a_trainer()

    def a_rollout(self) -> Rollout:
        self.rings += 1  # what an interrupted start has made ends by itself, and its name is not used again
        ring = RingOptions(slot_bytes=10_000)
        return Rollout(slots=SLOTS, name=f"{self.run}-{self.rings}", rings=f"rings:{self.run}-", ring=ring)

    # --- the rollout ------------------------------------------------------------------------------------
    def write(self) -> None:
        numbers = range(self.next, self.next + self.chance.choice([1, 1, 3]))
        self.next = numbers.stop
        if self.rollout.ring_statistics().free < 8:
            return
        if len(numbers) == 1:
            _, interrupted = self.interrupts.once(lambda: self.rollout.write_to_buffer({"number": numbers[0]}))
        else:
            batch = [{"number": number} for number in numbers]
            _, interrupted = self.interrupts.once(lambda: self.rollout.write_many_to_buffer(batch))
        (self.perhaps if interrupted else self.written).extend(numbers)

    def reopen(self) -> None:
        """End the rollout when nothing is left in its ring, and start another one."""
        if self.rollout.ring_statistics().free == SLOTS:
            self.interrupts.repeated(self.rollout.close)
            self.rollout = self.interrupts.repeated(self.a_rollout)

    # --- the trainer ------------------------------------------------------------------------------------
    def a_trainer(self) -> Trainer:
        return Trainer(None, f"rings:{self.run}-", wire={self.wire})

    def step(self) -> None:
        """One batch, consumed in most cases."""
        batch = self.interrupts.repeated(lambda: self.trainer.take(5, 0.05))
        if batch is None:
            return
        how = self.chance.choice(["consume"] * 6 + ["accept", "give back", "drop", "close"])
        if how == "close":
            self.interrupts.repeated(self.trainer.close)
            self.trainer = self.interrupts.repeated(self.a_trainer)
        elif how == "give back":
            with contextlib.suppress(UsageError):  # the interrupted call had done it
                self.interrupts.repeated(batch.give_back)
        elif how != "drop":
            if how == "accept":
                self.interrupts.repeated(batch.accept)
            self.consume(batch)

    def consume(self, batch: Batch) -> None:
        numbers = [int(payload["number"]) for payload in batch]
        self.interrupts.repeated(batch.consume)
        accepted = self.interrupts.repeated(lambda: batch.accepted.tolist())
        self.trained += [number for number, ours in zip(numbers, accepted, strict=True) if ours]

    def drain(self) -> None:
        """Train on what is left."""
        give_up = time.monotonic() + QUIET_S
        while self.trainer.rings.depth().unfinished and time.monotonic() < give_up:
            if (batch := self.trainer.take(8, 0.2)) is not None:
                self.consume(batch)
                give_up = time.monotonic() + QUIET_S

    # --- from beginning to end --------------------------------------------------------------------------
    def play(self) -> None:
        print("ready", flush=True)
        while self.interrupts.count < self.interrupts.wanted:
            self.write()
            self.step()
            if self.chance.random() < REOPENED:
                self.reopen()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("enough", flush=True)
        self.drain()
        depth, ring = self.trainer.rings.depth(), self.rollout.ring_statistics()
        report = {"written": self.written, "perhaps": self.perhaps, "trained": self.trained}
        held = {"claimed": depth.claimed, "ready": depth.ready, "writing": ring.writing, "free": ring.free}
        print(json.dumps({**report, **held, "interrupts": self.interrupts.count}), flush=True)
        self.trainer.close()
        self.rollout.close()


class StepsJob(Job):
    """A job whose trainer gives out steps."""

    loop: Iterator[Step] | None = None

    def reopen(self) -> None:
        """Keep the rollout: its end is the end of the steps."""

    def step(self) -> None:
        """One step, learned in most cases, where one is sure to come."""
        while set(self.written) - set(self.trained):
            if self.loop is None:
                self.steps = self.interrupts.repeated(lambda: self.trainer.steps(1))
                self.loop = iter(self.steps)
            step = self.interrupts.repeated(lambda: next(self.loop))  # type: ignore[arg-type]
            how = self.chance.choice(["consume"] * 6 + ["accept", "loop anew", "ask anew", "close"])
            if how == "loop anew":
                self.loop = iter(self.steps)
            elif how == "ask anew":
                self.loop = None
            elif how == "close":
                self.loop = None
                self.interrupts.repeated(self.trainer.close)
                self.trainer = self.interrupts.repeated(self.a_trainer)
            else:
                if how == "accept":
                    self.interrupts.repeated(step.accept)
                self.learn(step)

    def learn(self, step: Step) -> None:
        numbers = [int(payload["number"]) for micro in step for payload in micro]
        self.interrupts.repeated(step.consume)
        self.trained += numbers

    def drain(self) -> None:
        """Train on what is left."""
        self.rollout.ring.end_data()
        for step in self.trainer.steps(1) if self.loop is None else self.steps:
            self.learn(step)
        give_up = time.monotonic() + QUIET_S
        while self.trainer.rings.depth().unfinished and time.monotonic() < give_up:
            time.sleep(0.01)  # until the planner has consumed what was learned


if __name__ == "__main__":
    run, wire, interrupts, seed, planted, how = sys.argv[1:]
    faulthandler.dump_traceback_later(WATCHDOG_S + EACH_S * int(interrupts), exit=True)
    plant(planted)
    job = StepsJob if how == "steps" else Job
    job(run, wire, int(interrupts), int(seed)).play()  # type: ignore[arg-type]
