"""Steps: the training steps of a run, the same for every rank of a mesh, each read ahead of time.

for step in trainer.steps(groups=64, max_tokens=32768):
    for micro in step:                       # as many on every rank
        learn(micro["tokens"])
    step.consume()                           # of all ranks, or the step comes again

planned ──read by every rank──► go: yielded ──consume of every rank──► consumed at the rings
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import aclosing
from functools import partial
from typing import Any, Final, Literal, TypeVar

import numpy as np

from transport.client.client import UCXXClient
from transport.client.payload import ReceivedPayload
from transport.client.retry import backoff
from transport.errors import (
    OWN_FAULTS,
    ClosedError,
    PayloadLostError,
    SchemaError,
    StoreError,
    TransportError,
    UsageError,
    WireNotAllowedError,
)
from transport.ring.batch import Gathered
from transport.ring.batch_shape import Shape
from transport.runtime.error_text import error_text
from transport.runtime.logs import LOOK_S, LogLimit
from transport.runtime.loop_thread import Job, LoopThread, gone
from transport.schema import Schema
from transport.settings import Settings
from transport.ticket import Ticket
from transport.training.counts import StepCounts
from transport.training.holding import Delivery
from transport.training.layout import SampleSize
from transport.training.learned import Learned
from transport.training.mesh import Mesh
from transport.training.micro_batch import MicroBatch
from transport.training.planner import Planner
from transport.training.read_part import read_parts
from transport.training.step_records import READ, Identity, PlannedPart, PlannedStep, State, StepRecords

log = logging.getLogger(__name__)

T = TypeVar("T")

_SLICE_S: Final = 0.5  # of a wait for a record, after which a close is seen
_FOLLOW_S: Final = 0.2  # until a rank that does not plan asks again whether it is to
_SLOW_S: Final = 1.0  # of a read, after which its step's state is looked at
_AGAIN_S: Final = 1.0  # until a store that failed is asked again


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
        """What a record has of all its samples."""
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
        """Whether every rank has consumed the step."""
        return self._steps.is_consumed(self.number)

    def let_go(self) -> None:
        """Refer to no payload any more, where the step is learned from: the next one is taken."""
        if self._state != "taken":
            for each in self._micro_batches:
                each._let_go()


class Steps:
    """The steps of a trainer, until its data has ended. Made by `Trainer.steps`; iterate over it once.

    Args:
        planner: of this rank; it plans where no other rank does.
        rank: of the readers that the mesh is.
        schema: of the payloads.
        version: gives the trainer's version at the moment.
        ahead: whether the next step is read while one is learned from.
    """

    def __init__(
        self,
        thread: LoopThread,
        client: UCXXClient,
        records: StepRecords,
        planner: Planner,
        *,
        mesh: Mesh,
        rank: int,
        schema: Schema | None,
        schemas: Mapping[str, Schema],
        shape: Shape,
        settings: Settings,
        version: Callable[[], int | None],
        learned: Learned,
        counts: StepCounts,
        ahead: bool,
    ) -> None:
        self._thread = thread
        self._client = client
        self._records = records
        self._planner = planner
        self._mesh = mesh
        self._rank = rank
        self._schema = schema
        self._schemas = schemas
        self._shape = shape
        self._settings = settings
        self._version = version
        self._learned = learned
        self._counts = counts
        self._ahead = ahead
        self._closing = self._closed = False
        self._process = os.getpid()
        self._reading: Job[Step | None] | None = None
        self._waits = LogLimit()
        self._number = self._first()
        self._planning: Job[None] = Job(thread, self._plan)
        self._planning.start()

    def __repr__(self) -> str:
        return f"<Steps at {self._number}, {self._planner!r}>"

    @property
    def planner(self) -> Planner:
        """The planner of this rank."""
        return self._planner

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
        if self._closing:
            raise ClosedError("these steps are over: ask the trainer for others")
        reading = self._reading or self._read(self._number)
        self._reading = reading
        begun = time.monotonic()
        while True:
            try:
                step = reading.result(_SLICE_S)
                break
            except CancelledError:
                raise ClosedError("the trainer was closed meanwhile") from None
            except TimeoutError:
                pass
            if self._planning.outcome is not None:
                self._planning.result()  # raises why nothing is planned
        self._reading = None
        self._counts.waited_s += time.monotonic() - begun
        if step is not None:
            self._learned.given_out.add(step.number)
            self._number = step.number + 1
            for micro in step:
                micro.training_version = self._version()  # not the one that was trained while it was read
            self._counts.steps += 1
            self._counts.lag = step.lag
            if self._ahead:
                self._reading = self._read(self._number)
        return step

    def _read(self, number: int) -> Job[Step | None]:
        job: Job[Step | None] = Job(self._thread, lambda: self._step_from(number))
        job.start()
        return job

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

    # --- reading, on the loop -------------------------------------------------------------------------
    async def _step_from(self, number: int) -> Step | None:
        """Return the next step from this number on, once every rank has read it; None: the data has ended."""
        while True:
            plans = await self._wait(partial(self._plans_of, number))
            if not plans:
                number += 1
                continue
            [planned] = plans
            if planned.ends and planned.said == self._records.end_before:
                await asyncio.sleep(_FOLLOW_S)  # until the planner of now says it, or takes it back
            elif planned.ends:
                await self._do(self._records.has_seen_the_end, number)
                return None
            elif (step := await self._one(planned)) is not None:
                return step
            else:
                number += 1

    def _plans_of(self, number: int) -> list[PlannedStep] | None:
        """Return a plan; none where the step was void, and is forgotten. None: there is no plan yet."""
        planned = self._records.wait(number, _SLICE_S)
        if planned is None and self._records.next_number() > number:
            planned = self._records.wait(number, 0.0)
            return [] if planned is None else [planned]
        return None if planned is None else [planned]

    async def _one(self, planned: PlannedStep) -> Step | None:
        """Return the step; None: it is void."""
        number = planned.number
        if planned.shape != (self._mesh.dp, self._mesh.tp):
            return await self._wait(partial(self._over, number)) or None
        part = await self._wait(partial(self._records.part, number, self._mesh.replica))
        unread: list[Delivery] = []
        try:
            micro_batches = await self._unless_void(
                number, self._micro_batches(part, planned.samples(self._mesh.replica), unread)
            )
        except TransportError as error:
            why = f"rank {self._mesh.rank} cannot read its part: {error_text(error)}"
            own = isinstance(error, OWN_FAULTS)  # the payloads are not at fault
            gone = isinstance(error, WireNotAllowedError)  # perhaps: no ring of this host, after all rings began anew
            if not await self._made_void(number, why, [] if own else unread, wait=gone or not own) or (
                own and not gone
            ):
                raise  # or other ranks train on it, and this one cannot
            return None
        if micro_batches is None:
            return None
        await self._do(self._records.has_read, number)
        state = await self._decided(number)
        return None if state == "void" else Step(self, planned, self._mesh.replica, micro_batches)

    async def _unless_void(self, number: int, reading: Coroutine[Any, Any, T]) -> T | None:
        """Read. None: the step was void before that was done."""
        task = asyncio.ensure_future(reading)
        try:
            while not (await asyncio.wait({task}, timeout=_SLOW_S))[0]:
                if await self._wait(partial(self._is_void, number)) == "void":
                    return None
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})

    def _is_void(self, number: int) -> State:
        [state] = self._records.states([number])
        return "void" if state == "planned" and self._records.wait(number, 0.0) is None else state  # it is forgotten

    async def _made_void(self, number: int, why: str, unread: Sequence[Delivery], *, wait: bool) -> bool:
        """Say that this rank cannot read a step. False: the others train on it.

        Where every rank has begun anew, the others take back what they have voted on it: that is waited for.
        """
        give_up = time.monotonic() + self._settings.claim_lease_s * wait
        while True:
            await self._do(self._records.cannot_read, number, why, unread)
            if (state := await self._wait(partial(self._is_void, number))) == "void":
                return True
            if state == "consumed" or time.monotonic() >= give_up:
                return False
            await asyncio.sleep(_AGAIN_S)

    def _over(self, number: int) -> Literal[False] | None:
        """Return False when a step of a mesh of another shape is void or forgotten."""
        state = self._records.wait_state(number, self._records.states([number])[0], _SLICE_S)
        return False if state == "void" or self._records.wait(number, 0.0) is None else None

    async def _decided(self, number: int) -> State:
        begun = time.monotonic()

        def look() -> State | None:
            state = self._records.wait_state(number, "planned", _SLICE_S)
            if state != "planned":
                return state
            return "void" if self._records.wait(number, 0.0) is None else None  # it is forgotten

        async def waited() -> None:
            if time.monotonic() > begun + LOOK_S and self._waits.due() is not None:
                silent = await asyncio.to_thread(self._records.silent, number, READ)
                log.warning(
                    "step %d waits for ranks %s, which have not read it for %.0f s",
                    number,
                    ", ".join(map(str, silent)),
                    time.monotonic() - begun,
                )

        return await self._wait(look, waited)

    async def _do(self, change: Callable[..., object], *arguments: object) -> None:
        """Make a change in a thread, again while the store fails."""

        def changed() -> bool:
            change(*arguments)
            return True

        await self._wait(changed)

    async def _wait(self, look: Callable[[], T | None], between: Callable[[], Awaitable[None]] | None = None) -> T:
        """Return what a look in a thread finds; it is repeated while it finds nothing, and while the store fails."""
        while True:
            if self._closing:
                raise ClosedError("the trainer is closed")
            try:
                found = await asyncio.to_thread(look)
                if found is not None:
                    return found
                if between is not None:
                    await between()
            except StoreError as error:
                if self._waits.due() is not None:
                    log.warning("the records of the steps cannot be read, and are again: %s", error_text(error))
                await asyncio.sleep(_AGAIN_S)

    async def _micro_batches(
        self, part: PlannedPart, samples: Sequence[Sequence[SampleSize]], unread: list[Delivery]
    ) -> list[MicroBatch]:
        """Read and lay out what this rank trains on; ``unread`` grows by what cannot be."""
        notes = [note for micro in part.tickets for note in micro]
        payloads = iter(await self._payloads(notes, unread))
        made = []
        for tickets, versions, planned in zip(part.tickets, part.versions, samples, strict=False):  # forgotten: none
            mine = [next(payloads) for _ in tickets]
            made.append(await asyncio.to_thread(self._laid_out, mine, tickets, versions))
            made[-1].groups = np.array([each.group for each in planned], np.int64)
        return made

    def _laid_out(
        self,
        payloads: list[ReceivedPayload],
        notes: Sequence[bytes],
        versions: Sequence[int | None],
    ) -> MicroBatch:
        parts = read_parts(payloads, notes, versions)
        gathered = None if self._schema is None else Gathered.gathered(parts, self._schema, self._shape)
        if gathered is not None and gathered.dropped:
            raise SchemaError(f"{gathered.dropped} payloads do not fit the schema of this trainer")
        return MicroBatch(parts, gathered, self._shape, self._schemas)

    async def _payloads(self, notes: Sequence[bytes], unread: list[Delivery]) -> list[ReceivedPayload]:
        """Read them all; those that fail are read again, until the time for a batch is over."""
        begun = time.monotonic()
        give_up = begun + self._settings.batch_deadline_s
        found: dict[int, ReceivedPayload] = {}
        left, rounds = list(range(len(notes))), 0
        while left:
            failed: list[tuple[int, TransportError]] = []
            asked = [notes[at] for at in left]
            remaining = max(0.0, give_up - time.monotonic())
            async with aclosing(self._client.read_many(asked, rank=self._rank, timeout=remaining)) as outcomes:
                async for outcome in outcomes:
                    if outcome.payload is not None:
                        found[left[outcome.index]] = outcome.payload
                    elif outcome.error is not None:
                        failed.append((left[outcome.index], outcome.error))
            rounds += 1
            pause = backoff(rounds, self._settings, random.random)
            late = time.monotonic() + pause >= give_up
            lost = [(at, error) for at, error in failed if late or not error.retryable]
            if lost:
                unread += [Ticket.decode(notes[at]).identity for at, _ in lost]
                raise lost[0][1]
            left = sorted(at for at, _ in failed)
            if left:
                if time.monotonic() > begun + LOOK_S and self._waits.due() is not None:
                    log.warning(
                        "%d payloads of a step that was planned cannot be read, and are tried for %.0f s more "
                        "(batch_deadline_s) before its groups are given up: %s",
                        len(left),
                        give_up - time.monotonic(),
                        error_text(failed[0][1]),
                    )
                await asyncio.sleep(pause)
        return [found[at] for at in range(len(notes))]

    # --- planning, on the loop ------------------------------------------------------------------------
    async def _plan(self) -> None:
        while not self._closing:
            try:
                led = await asyncio.to_thread(self._planner.turn)
            except StoreError as error:
                if self._waits.due() is not None:
                    log.warning("the store of the steps does not answer, and is asked again: %s", error_text(error))
                await asyncio.sleep(_AGAIN_S)
            else:
                if not led:
                    await asyncio.sleep(_FOLLOW_S)

    # --- what becomes of steps ------------------------------------------------------------------------
    def accepted(self, step: Step) -> None:
        """Note that the model has learned from a step."""
        self._learned.check_order(step.number, "accept")
        self._learned.given_out.discard(step.number)
        self._learned.accepted[step.number] = step

    def learned(self, step: Step) -> None:
        """Vote that this rank has learned from a step."""
        if gone(self._process):
            raise ClosedError("a forked child does not have its parent's steps")
        if self._learned.closed and not self._learned.mesh:
            raise ClosedError(f"this trainer is closed, and has given step {step.number} back")
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

    def close(self) -> None:
        """Stop reading and planning; what was not learned comes again. Idempotent."""
        if self._closed:
            return
        self._closing = True
        if self._reading is not None:
            self._reading.end()
        self._planning.wait()
        self._planner.close(self._learned.voted)
        self._closed = True  # last, so that a call that was interrupted can be repeated


def _tokens(planned: PlannedStep, micro: Sequence[SampleSize]) -> int:
    return sum(planned.groups[each.group].tokens[each.number] for each in micro)
