"""StepReader: reads a rank's part of one step after the other, and lays its micro-batches out; on the loop.

planned ──read by this rank──► its vote ──(of every rank)──► go
   └──cannot be read, or is lost──► void: the next one
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypeVar

from transport.client.client import UCXXClient
from transport.client.payload import Payload
from transport.client.retry import backoff
from transport.errors import OWN_FAULTS, ClosedError, SchemaError, StoreError, TransportError, WireNotAllowedError
from transport.ring.batch import Gathered
from transport.ring.batch_shape import Shape
from transport.runtime.amounts import count
from transport.runtime.error_text import error_text
from transport.runtime.logs import LOOK_S, LogLimit
from transport.schema import Schema
from transport.settings import Settings
from transport.ticket import Identity, Ticket
from transport.training.layout import SampleSize
from transport.training.mesh import Mesh
from transport.training.micro_batch import MicroBatch
from transport.training.read_part import read_parts
from transport.training.step_records import READ, PlannedPart, PlannedStep, State, StepRecords

log = logging.getLogger(__name__)

T = TypeVar("T")

_SLICE_S: Final = 0.5  # of a wait for a record, after which a close is seen
_FOLLOW_S: Final = 0.2  # until an end that does not hold is looked at again
_SLOW_S: Final = 1.0  # of a read, after which its step's state is looked at
_AGAIN_S: Final = 1.0  # until a store that failed is asked again


class StoreAway:
    """Time for which a store has failed, and its limit.

    Args:
        most_s: after which the error is raised.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._since: float | None = None
        self._said = LogLimit()

    def answered(self) -> None:
        """Note that it does not fail any more."""
        self._since = None

    async def failed(self, error: StoreError) -> None:
        """Wait a moment, after which the store is asked again; or raise the error."""
        now = time.monotonic()
        self._since = self._since or now
        left_s = self._since + self._most_s - now
        if left_s <= 0.0:
            raise error
        if self._said.due() is not None:
            log.warning(
                "the store of the steps does not answer, and is asked again for %.0f s: %s", left_s, error_text(error)
            )
        await asyncio.sleep(_AGAIN_S)


class ReadStep(NamedTuple):
    """A step, and what this rank trains on."""

    planned: PlannedStep
    micro_batches: list[MicroBatch]


class StepReader:
    """Reader of a mesh's steps for one rank.

    Args:
        client: reads by ticket.
        rank: of the readers that the mesh is.
        schema: of the payloads; None: each ticket has its own, or one of ``schemas``.
        shape: of micro-batches.

    Attributes:
        closing: whether whatever it does is to end.
    """

    def __init__(
        self,
        client: UCXXClient,
        records: StepRecords,
        mesh: Mesh,
        rank: int,
        *,
        schema: Schema | None,
        schemas: Mapping[str, Schema],
        shape: Shape,
        settings: Settings,
    ) -> None:
        self._client = client
        self._records = records
        self._mesh = mesh
        self._rank = rank
        self._schema = schema
        self._schemas = schemas
        self._shape = shape
        self._settings = settings
        self._waits = LogLimit()
        self.closing = False

    def __repr__(self) -> str:
        return f"<StepReader of rank {self._mesh.rank}{' closing' if self.closing else ''}>"

    async def step_from(self, number: int) -> ReadStep | None:
        """Return the next step from this number on, once every rank has read it; None: the data has ended."""
        while True:
            plans = await self._wait(partial(self._plans_of, number))
            if not plans:
                number += 1
                continue
            [planned] = plans
            if planned.ends and not await self._wait(partial(self._records.is_the_end, planned)):
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

    async def _one(self, planned: PlannedStep) -> ReadStep | None:
        """Return the step; None: it is void."""
        number = planned.number
        if planned.shape != (self._mesh.dp, self._mesh.tp):
            return await self._wait(partial(self._over, number)) or None
        part = await self._wait(partial(self._records.part, number, self._mesh.replica))
        unread: list[Identity] = []
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
        return None if state == "void" else ReadStep(planned, micro_batches)

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

    async def _made_void(self, number: int, why: str, unread: Sequence[Identity], *, wait: bool) -> bool:
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
        away = StoreAway(self._settings.batch_deadline_s)
        while True:
            if self.closing:
                raise ClosedError("the trainer is closed")
            try:
                found = await asyncio.to_thread(look)
                away.answered()
                if found is not None:
                    return found
                if between is not None:
                    await between()
            except StoreError as error:
                await away.failed(error)

    async def _micro_batches(
        self, part: PlannedPart, samples: Sequence[Sequence[SampleSize]], unread: list[Identity]
    ) -> list[MicroBatch]:
        """Read and lay out what this rank trains on; ``unread`` grows by what cannot be."""
        notes = [note for micro in part.tickets for note in micro]
        payloads = iter(await self._payloads(notes, unread))
        made = []
        for tickets, versions, planned in zip(part.tickets, part.versions, samples, strict=False):  # forgotten: none
            mine = [next(payloads) for _ in tickets]
            groups = [each.group for each in planned]
            made.append(await asyncio.to_thread(self._laid_out, mine, tickets, versions, groups))
        return made

    def _laid_out(
        self,
        payloads: list[Payload],
        notes: Sequence[bytes],
        versions: Sequence[int | None],
        groups: Sequence[int],
    ) -> MicroBatch:
        parts = read_parts(payloads, notes, versions)
        gathered = None if self._schema is None else Gathered.gathered(parts, self._schema, self._shape)
        if gathered is not None and gathered.dropped:
            raise SchemaError(f"the schema of this trainer does not fit {count(gathered.dropped, 'payload')}")
        return MicroBatch(parts, gathered, self._shape, self._schemas, groups)

    async def _payloads(self, notes: Sequence[bytes], unread: list[Identity]) -> list[Payload]:
        """Read them all; those that fail are read again, until the time for a batch is over."""
        begun = time.monotonic()
        give_up = begun + self._settings.batch_deadline_s
        found: dict[int, Payload] = {}
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
                        "cannot read %s of a step that was planned, and tries for %.0f s more (batch_deadline_s) "
                        "before its groups are given up: %s",
                        count(len(left), "payload"),
                        give_up - time.monotonic(),
                        error_text(failed[0][1]),
                    )
                await asyncio.sleep(pause)
        return [found[at] for at in range(len(notes))]
