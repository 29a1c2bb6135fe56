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
from functools import partial
from typing import Any, Final, Literal

import numpy as np

from transport.errors import ClosedError, PayloadLostError, StoreError, TransportError, UsageError
from transport.runtime.loop_thread import Job, LoopThread, gone
from transport.ticket import Delivery
from transport.training.counts import StepCounts
from transport.training.layout import SampleSize
from transport.training.learned import Learned
from transport.training.mesh import Mesh
from transport.training.micro_batch import MicroBatch
from transport.training.planner import Planner
from transport.training.step_reader import ReadStep, StepReader, StoreAway
from transport.training.step_records import PlannedStep, StepRecords

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
    def deliveries(self) -> list[Delivery]:
        """Deliveries of all its samples, as a record has them."""
        return self._planned.deliveries()

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
        self._reading: tuple[int, Job[ReadStep | None]] | None = None  # from this number on
        self._planning: Job[None] | None = None
        self.planner = planner

    def plan(self) -> None:
        """Begin to plan, where no other rank does."""
        self._planning = Job(self._thread, partial(_plan, self.planner, self._reader, self._store_away))
        self._planning.start()

    def read(self, number: int) -> None:
        """Begin to read the next step from this number on, unless that has begun."""
        if self._reading is None or self._reading[0] != number:
            self.stop_reading()
            self._reading = number, Job(self._thread, partial(self._reader.step_from, number))
        self._reading[1].start()

    def stop_reading(self) -> None:
        """Drop what is read, or was."""
        if self._reading is not None:
            self._reading[1].end()
            self._reading = None

    def next(self) -> ReadStep | None:
        """Return the step that is read, once every rank has read it; None: the data has ended."""
        while True:
            if self._closed or self._reader.closing:
                raise ClosedError("these steps are over: ask the trainer for others")
            assert self._reading is not None and self._planning is not None
            job = self._reading[1]
            if job.wait(_SLICE_S):
                try:
                    return job.result()
                except CancelledError:
                    raise ClosedError("the trainer was closed meanwhile") from None
                except TransportError:
                    self._reading = None  # the next call reads again
                    raise
            if self._planning.outcome is not None:
                self._planning.result()  # raises why nothing is planned

    def close(self) -> None:
        """Stop reading and planning; what was not learned comes again. Idempotent; in a forked child nothing."""
        if self._closed or gone(self._process):
            return
        self._reader.closing = True
        self.stop_reading()
        if self._planning is not None:
            self._planning.start()  # an interrupt may have left it undone, and nobody would end it
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
    """The steps of a trainer, until its data has ended. Made by `Trainer.steps`.

    One call at a time, of it and of its steps, from any thread. A loop begins with the first step that this rank has
    neither accepted nor consumed: so does one that follows a loop which was interrupted.

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
        self._fresh = True  # no loop has begun
        following = records.next_number()  # first: what is planned meanwhile is standing
        self._number = self._unlearned(max(following, learned.last + 1))
        underway.plan()

    def __repr__(self) -> str:
        return f"<Steps at {self._number}, {self.planner!r}>"

    @property
    def planner(self) -> Planner:
        """The planner of this rank."""
        return self._underway.planner

    def _alone(self) -> _thread.LockType:
        """Return the lock of a call; itself the block's, so that an interrupt finds no moment between."""
        if self._calls.locked():
            raise UsageError("another thread takes or ends a step of this trainer at the moment: one call at a time")
        return self._calls

    # --- taking -------------------------------------------------------------------------------------
    def __iter__(self) -> StepLoop:
        return StepLoop(self)

    def next_step(self, anew: bool) -> Step | None:
        """Return the step that follows, once every rank has read it; None: the data has ended. For `StepLoop`.

        Args:
            anew: begin with the first one that is not learned.
        """
        with self._alone():
            if anew and not self._fresh:
                self._underway.stop_reading()
                self._number = self._unlearned(self._number)
            self._fresh = False
            begun = time.monotonic()
            self._underway.read(self._number)
            found = self._underway.next()
            self._counts.waited_s += time.monotonic() - begun
            if found is None:
                return None
            step = Step(self, found.planned, self._mesh.replica, found.micro_batches)
            for micro in step:
                micro.training_version = self._learned.version  # not the one that was trained while it was read
            self._counts.lag = step.lag
            return step

    def gave_out(self, step: Step) -> None:
        """Note that a step is the caller's: another one follows it. For `StepLoop`, which may repeat it."""
        if self._number != step.number + 1:
            self._learned.given_out.add(step.number)
            self._counts.steps += 1
            self._number = step.number + 1
        if self._ahead:
            self._underway.read(self._number)

    def _unlearned(self, otherwise: int) -> int:
        """Find the first step that this rank has not learned; its votes on it are no more."""
        records = self._records
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
        return min((step.number for step in standing if step.number > learned), default=otherwise)

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


class StepLoop(Iterator[Step]):
    """A loop over steps. A call of `next` that was interrupted may be called again: no step is left out."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._anew = True
        self._given: Step | None = None  # the caller has it
        self._found: Step | None = None  # the caller is to have it

    def __next__(self) -> Step:
        if self._given is not None:
            self._given.let_go()
            self._given = None
        if self._found is None:
            self._found = self._steps.next_step(self._anew)
            self._anew = False
        if self._found is None:
            raise StopIteration
        self._steps.gave_out(self._found)
        self._given, self._found = self._found, None
        return self._given


def _tokens(planned: PlannedStep, micro: Sequence[SampleSize]) -> int:
    return sum(planned.groups[each.group].tokens[each.number] for each in micro)
