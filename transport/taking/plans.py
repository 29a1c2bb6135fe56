"""Batches that are to be taken: their arguments, checked; and the loop that takes until there is one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from transport import _ring
from transport.devices.landing import Landing, landing_for
from transport.errors import BatchTooLargeError, SchemaError
from transport.ring.batch_shape import Shape, ShapeArguments
from transport.ring.batches import PayloadBatch
from transport.runtime.loop_thread import LoopThread
from transport.schema import Schema
from transport.taking.batch import TakenBatch
from transport.taking.batches import TakenPayloads, in_place, of_one_schema
from transport.taking.parts import TakenPart

Taker = Callable[[float, bool], Awaitable[TakenBatch]]  # (seconds to wait, whether checksums are compared)


class Plan:
    """A batch that is to be taken: its arguments, checked before anything is asked.

    Raises:
        SchemaError: no schema was given, and the client has none or several; or the shape does not fit it.
        UsageError, MissingDependencyError: an argument makes no sense, or there is no such memory here.
    """

    def __init__(self, schema: Schema | None, known: Sequence[Schema], verify: bool, shape: ShapeArguments) -> None:
        if schema is None and len(known) != 1:
            raise SchemaError(
                f"a batch has the tensors of one schema, and this client was given {len(known)}; pass "
                "take_batch(schema=...)"
            )
        self.schema = known[0] if schema is None else schema
        wanted = Shape(**shape)
        wanted.fills(self.schema)
        self._verify = verify if wanted.verify is None else wanted.verify
        # The bytes of a list, and of some fields, were compared as they came; those of other layouts are as they are
        # copied.
        self.whole, self.fields = self.schema, wanted.fields
        on_arrival = wanted.layout == "list" or self.fields is not None
        self.joined_verify = self._verify and on_arrival
        self.shape = msgspec.structs.replace(wanted, verify=self._verify and not on_arrival, fields=None)
        self.schema = wanted.part(self.schema)  # what arrives has these fields only
        self.landing: Landing = landing_for(wanted.memory, wanted.out, wanted.most_memory)

    async def part(self, take: Taker, wait_s: float) -> TakenPart:
        """Claims. BatchTooLargeError: there is no memory for the answer; nothing was asked."""
        try:
            return TakenPart(await take(wait_s, self.joined_verify))
        except MemoryError as error:
            raise BatchTooLargeError("there is no memory for the answer; ask for fewer most_bytes") from error


async def taken_in_place(plan: Plan, take: Taker, wait_s: float) -> TakenPayloads:
    """Take until there is a payload in the batch, or the time is over."""
    deadline = _ring.Deadline(wait_s)
    dropped = 0
    while True:
        part = await plan.part(take, deadline.left_s)
        batch = in_place([part], plan.shape, plan.schema, landing=plan.landing)
        dropped += part.dropped + batch.dropped
        if len(batch) or not deadline.left_s:
            batch.dropped = dropped
            return batch


def taken_and_waited_for(plan: Plan, take: Taker, wait_s: float, thread: LoopThread) -> PayloadBatch:
    """The same for a client whose loop runs in a thread. The payloads are copied in the caller's thread."""
    deadline = _ring.Deadline(wait_s)
    dropped = 0
    while True:
        taken = thread.run(plan.part(take, deadline.left_s))
        part = _Waiting(taken, thread)
        batch = of_one_schema(PayloadBatch, [part], plan.shape, plan.schema, landing=plan.landing)
        dropped += part.dropped + batch.dropped
        if len(batch) or not deadline.left_s:
            batch.dropped = dropped
            return batch


class _Waiting:
    """A `TakenPart` whose claims end in another thread's loop."""

    def __init__(self, part: TakenPart, thread: LoopThread) -> None:
        self._part = part
        self._thread = thread

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __len__(self) -> int:
        return len(self._part)

    def finish(self, keep: bool = False) -> bytes:
        """See `EndingPart`."""
        return self._thread.run(self._part.finish(keep))

    def renew(self) -> int:
        """See `EndingPart`."""
        return self._thread.run(_renew(self._part))


async def _renew(part: TakenPart) -> int:
    return part.renew()
