"""A rollout and a trainer in one process, which SIGINT interrupts at any time; each interrupted call is repeated.

python interrupted_job.py RUN WIRE INTERRUPTS SEED PLANT

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
from collections.abc import Callable
from typing import Any, TypeVar

from interrupted_plants import plant

from transport import RingOptions, Rollout
from transport.errors import UsageError
from transport.packer.mixin import TicketTrainer
from transport.queue import Claim, open_queue
from transport.wires import Wire

T = TypeVar("T")

WATCHDOG_S = 120.0
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
        self.rollout_queue, self.queue = open_queue(f"rings:{run}-"), open_queue(f"rings:{run}-")
        self.rings = 0
        self.rollout = self.a_rollout()
        self.trainer = TicketTrainer(queue=self.queue, wire={wire})

    def a_rollout(self) -> Rollout:
        self.rings += 1  # what an interrupted start has made ends by itself, and its name is not used again
        ring = RingOptions(slot_bytes=10_000)
        return Rollout(slots=SLOTS, name=f"{self.run}-{self.rings}", rings=self.rollout_queue, ring=ring)

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
    def claim(self) -> list[Claim]:
        return self.interrupts.repeated(lambda: self.trainer.claim_tickets(5, timeout_s=0.05))

    def step(self) -> None:
        """One batch, consumed in most cases."""
        claims = self.claim()
        if not claims:
            return
        how = self.chance.choice(["consume"] * 6 + ["input", "abandon", "cancel", "drop", "close", "defer"])
        if how == "input":
            for claim in claims:
                given = self.interrupts.repeated(lambda claim=claim: self.trainer.get_policy_input(claim))
                self.trained.append(int(given["number"]))
            return
        if how == "drop":
            return
        self.start(self.trainer.start_prefetch, claims)
        if how == "defer":
            self.start(self.trainer.defer_prefetch, self.claim())
        if how == "cancel":
            self.interrupts.repeated(self.trainer.cancel_prefetch)
        elif how == "close":
            self.interrupts.repeated(self.trainer.close)
            self.trainer = self.interrupts.repeated(lambda: TicketTrainer(queue=self.queue, wire={self.wire}))
        else:
            self.collect(how)
            if how == "defer":
                self.collect(how)

    def start(self, call: Callable[[list[Claim]], None], claims: list[Claim]) -> None:
        with contextlib.suppress(UsageError):  # the interrupted call had done it
            self.interrupts.repeated(lambda: call(claims))

    def collect(self, how: str) -> None:
        self.interrupts.once(lambda: self.trainer.wait_prefetch(10.0))
        batch = self.interrupts.repeated(lambda: self.trainer.collect_prefetch(10.0))
        if batch is None:
            return
        if how == "abandon":
            self.interrupts.repeated(lambda: self.trainer.abandon(batch))
        else:
            with contextlib.suppress(UsageError):  # the interrupted call had consumed it
                self.interrupts.repeated(lambda: self.trainer.consume(batch))
            self.trained += [int(payload["number"]) for payload in batch.trainable]
            batch.release()

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
        give_up = time.monotonic() + QUIET_S
        while self.queue.depth().unfinished and time.monotonic() < give_up:
            claims = self.trainer.claim_tickets(8, timeout_s=0.2)
            if claims:
                self.trainer.start_prefetch(claims)
                self.collect("consume")
                give_up = time.monotonic() + QUIET_S
        depth, ring = self.queue.depth(), self.rollout.ring_statistics()
        report = {"written": self.written, "perhaps": self.perhaps, "trained": self.trained}
        held = {"claimed": depth.claimed, "ready": depth.ready, "writing": ring.writing, "free": ring.free}
        print(json.dumps({**report, **held, "interrupts": self.interrupts.count}), flush=True)
        self.trainer.close()
        self.queue.close()
        self.rollout.close()
        self.rollout_queue.close()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
    run, wire, interrupts, seed, planted = sys.argv[1:]
    plant(planted)
    Job(run, wire, int(interrupts), int(seed)).play()  # type: ignore[arg-type]
