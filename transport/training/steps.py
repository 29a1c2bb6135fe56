"""Steps: the training steps of a run, the same for every rank of a mesh, each read ahead of time.

for step in trainer.steps(groups=64, max_tokens=32768):
    for micro in step:                       # as many on every rank
        learn(micro["tokens"])
    step.consume()                           # of all ranks, or the step comes again

planned ──read by every rank──► go: yielded ──consume of every rank──► consumed at the rings
"""

from __future__ import annotations

import _thread
import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Literal

import numpy as np

from transport.errors import ClosedError, PayloadLostError, StoreError, UsageError
from transport.runtime.loop_thread import Job, LoopThread, gone
from transport.training.counts import StepCounts
from transport.training.layout import SampleSize
from transport.training.learned import Learned
from transport.training.mesh import Mesh
from transport.training.micro_batch import MicroBatch
from transport.training.planner import Planner
from transport.training.step_reader import ReadStep, StepReader, StoreAway
from transport.training.step_records import Identity, PlannedStep, StepRecords

_SLICE_S: Final = 0.5  # of a wait for a step, after which a close is seen
_FOLLOW_S: Final = 0.2  # until a rank that does not plan asks again whether it is to


class Step(Sequence[MicroBatch]):
    """A training step: this rank's micro-batches. Belongs to one thread at a time.

    Attributes:
        number: of the step, the same on every rank.
        groups: names of all its groups, those of other ranks included.
        short: names of groups that are trained with fewer samples than they should have.
        samples: of all ranks, by which a loss is divided that ranks sum up.
        tokens: of each micro-batch of this rank.
        most_tokens: of the heaviest replica over the mean of all.
    """

    def __init__(self, steps: Steps, planned: PlannedStep, replica: int, micro_batches: Sequence[MicroBatch]) -> None:
        self._steps = steps
        self._planned = planned
        self._micro_batches = micro_batches
        self._state: Literal["taken", "accepted", "consumed"] = "taken"
        self.number = planned.number
        self.groups = [group.name for group in planned.groups]
        self.short = [group.name for group in planned.groups if group.short]
        self.samples = sum(len(group.tokens) for group in planned.groups)
        loads = [[_tokens(planned, micro) for micro in planned.samples(each)] for each in range(len(planned.layout))]
        self.tokens = loads[replica]
        total = sum(map(sum, loads))
        self.most_tokens = max(map(sum, loads)) * len(loads) / total if total else 1.0

    def __repr__(self) -> str:
        return f"<Step {self.number}: {len(self.groups)} groups in {len(self)} micro-batches, {self._state}>"

    def __len__(self) -> int:
        return len(self._micro_batches)

    def __getitem__(self, at: Any) -> Any:
        """Return a micro-batch, or some."""
        return self._micro_batches[at]

    @property
    def lag(self) -> float:
        """Versions by which this rank's samples are older than the trainer's, on average of those that have one."""
        ages = np.concatenate([micro.ages for micro in self]) if len(self) else np.zeros(0)
        return float(ages[ages >= 0].mean()) if (ages >= 0).any() else 0.0

    @property
    def identities(self) -> list[Identity]:
        """Identities of all its samples, as a record has them."""
        return self._planned.identities()

    def accept(self) -> None:
        """Say that the model has learned from the step, which is consumed later: `Trainer.record` has it now.

        For checkpoints: learn, accept, store the weights and the record, and only then `Trainer.consume`. Killed before
        the checkpoint is stored, the ranks get the step again; killed behind it, they go on with the next one.
        """
        if self._state == "consumed":
            raise UsageError("accept() of a step that is consumed")
        self._steps.accepted(self)
        self._state = "accepted"

    def consume(self) -> None:
        """Say that this rank has trained on the step. It is consumed when every rank has said so.

        Called again it does nothing.

        Raises:
            StoreError: the store does not answer; call it again.
            UsageError: an earlier step is neither accepted nor consumed.
            PayloadLostError: a rank that was started again could not read the step any more, so that no rank is to have
                it: go back to the checkpoint.
            RankError: another process is this rank by now.
        """
        if self._state != "consumed":
            self._steps.learned(self)
            self._state = "consumed"

    @property
    def consumed(self) -> bool:
        """True if every rank has consumed the step."""
        return self._steps.is_consumed(self.number)

    def let_go(self) -> None:
        """Refer to no payload any more, where the step is learned from: the next one is taken."""
        if self._state != "taken":
            for each in self._micro_batches:
                each._let_go()


class Underway:
    """The part of a trainer's steps that runs on its loop: their planner, and the read of the next step.

    It refers neither to the trainer nor to its `Steps`: what nobody refers to is dropped, and this is closed.

    Args:
        store_away_s: for which the planner asks a store again that fails.
    """

    def __init__(
        self, thread: LoopThread, reader: StepReader, planner: Planner, learned: Learned, store_away_s: float
    ) -> None:
        self._thread = thread
        self._reader = reader
        self._learned = learned
        self._store_away = StoreAway(store_away_s)
        self._process = os.getpid()
        self._closed = False
        self._reading: Job[ReadStep | None] | None = None
        self._planning: Job[None] | None = None
        self.planner = planner

    def plan(self) -> None:
        """Begin to plan, where no other rank does."""
        self._planning = Job(self._thread, partial(_plan, self.planner, self._reader, self._store_away))
        self._planning.start()

    def read(self, number: int) -> None:
        """Begin to read the next step from this number on, unless that has begun."""
        if self._reading is None:
            self._reading = Job(self._thread, partial(self._reader.step_from, number))
            self._reading.start()

    def next(self) -> ReadStep | None:
        """Return the step that is read, once every rank has read it; None: the data has ended."""
        while True:
            if self._closed or self._reader.closing:
                raise ClosedError("these steps are over: ask the trainer for others")
            assert self._reading is not None and self._planning is not None
            try:
                step = self._reading.result(_SLICE_S)
                break
            except CancelledError:
                raise ClosedError("the trainer was closed meanwhile") from None
            except TimeoutError:
                pass
            if self._planning.outcome is not None:
                self._planning.result()  # raises why nothing is planned
        self._reading = None
        return step

    def close(self) -> None:
        """Stop reading and planning; what was not learned comes again. Idempotent; in a forked child nothing."""
        if self._closed or gone(self._process):
            return
        self._reader.closing = True
        if self._reading is not None:
            self._reading.end()
        if self._planning is not None:
            self._planning.wait()
        self.planner.close(self._learned.voted)
        self._closed = True  # last, so that a call that was interrupted can be repeated


async def _plan(planner: Planner, reader: StepReader, store_away: StoreAway) -> None:
    while not reader.closing:
        try:
            led = await asyncio.to_thread(planner.turn)
        except StoreError as error:
            await store_away.failed(error)
        else:
            store_away.answered()
            if not led:
                await asyncio.sleep(_FOLLOW_S)


class Steps:
    """The steps of a trainer, until its data has ended. Made by `Trainer.steps`; iterate over it once.

    One call at a time, of it and of its steps, from any thread.

    Args:
        trainer: whose steps these are; it lasts as long as they.
        ahead: whether the next step is read while one is learned from.
    """

    def __init__(
        self,
        trainer: object,
        underway: Underway,
        records: StepRecords,
        mesh: Mesh,
        learned: Learned,
        counts: StepCounts,
        *,
        ahead: bool,
    ) -> None:
        self._trainer = trainer
        self._underway = underway
        self._records = records
        self._mesh = mesh
        self._learned = learned
        self._counts = counts
        self._ahead = ahead
        self._process = os.getpid()
        self._calls = _thread.allocate_lock()
        self._number = self._first()
        underway.plan()

    def __repr__(self) -> str:
        return f"<Steps at {self._number}, {self.planner!r}>"

    @property
    def planner(self) -> Planner:
        """The planner of this rank."""
        return self._underway.planner

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._calls.acquire(blocking=False):
            raise UsageError("another thread takes or ends a step of this trainer at the moment: one call at a time")
        try:
            yield
        finally:
            self._calls.release()

    # --- taking -------------------------------------------------------------------------------------
    def __iter__(self) -> Iterator[Step]:
        step: Step | None = None
        while True:
            if step is not None:
                step.let_go()
            step = self._next()
            if step is None:
                return
            yield step

    def _next(self) -> Step | None:
        with self._alone():
            begun = time.monotonic()
            self._underway.read(self._number)
            found = self._underway.next()
            self._counts.waited_s += time.monotonic() - begun
            if found is None:
                return None
            step = Step(self, found.planned, self._mesh.replica, found.micro_batches)
            self._learned.given_out.add(step.number)
            self._number = step.number + 1
            for micro in step:
                micro.training_version = self._learned.version  # not the one that was trained while it was read
            self._counts.steps += 1
            self._counts.lag = step.lag
            if self._ahead:
                self._underway.read(self._number)
            return step

    def _first(self) -> int:
        """Find the first step that this rank has not learned; votes of an earlier start of it are no more."""
        records = self._records
        following = records.next_number()  # first: what is planned meanwhile is standing
        learned = self._learned.last
        standing = [step for step, state in records.standing() if state in ("planned", "go") and not step.ends]
        for step in standing:
            if step.shape != (self._mesh.dp, self._mesh.tp) or step.number in self._learned.accepted:
                continue
            if step.number <= learned:
                records.has_learned(step.number)
            else:
                records.take_back_vote(step.number)
        self._learned.given_out.clear()
        return min((step.number for step in standing if step.number > learned), default=max(following, learned + 1))

    # --- what becomes of steps ------------------------------------------------------------------------
    def accepted(self, step: Step) -> None:
        """Note that the model has learned from a step."""
        with self._alone():
            self._learned.check_order(step.number, "accept")
            self._learned.accepted[step.number] = step
            self._learned.given_out.discard(step.number)

    def learned(self, step: Step) -> None:
        """Vote that this rank has learned from a step."""
        if gone(self._process):
            raise ClosedError("a forked child does not have its parent's steps")
        if self._learned.closed and not self._learned.mesh:
            raise ClosedError(f"this trainer is closed, and has given step {step.number} back")
        with self._alone():
            self._learned.check_order(step.number, "consume")
            if self._records.has_learned(step.number) == "void":
                why, _ = self._records.void(step.number)
                raise PayloadLostError(f"step {step.number} is void by now, go back to the checkpoint: {why}")
            self._learned.note(step, sum(map(len, step)))

    def consume(self) -> None:
        """Consume every step that was accepted."""
        for _, step in sorted(self._learned.accepted.items()):
            step.consume()

    def is_consumed(self, number: int) -> bool:
        """Tell whether every rank has consumed a step that was taken here."""
        return self._records.states([number])[0] == "consumed" or number < self._oldest_standing()

    def _oldest_standing(self) -> int:
        standing = self._records.standing()
        return standing[0].step.number if standing else self._records.next_number()


def _tokens(planned: PlannedStep, micro: Sequence[SampleSize]) -> int:
    return sum(planned.groups[each.group].tokens[each.number] for each in micro)
