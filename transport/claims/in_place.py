"""Batches of payloads that came over the wire, or from the wire and from mapped rings together.

    parts = [TakenPart(await client.take(…)), mapped.native.claim_batch(…)]   # claims of one schema
    batch = in_place(parts, Shape(layout="packed"), schema)                   # raises: all of them were given back
    accepted = await batch.consume()

The lengths stand in the answer's tickets, so each tensor is copied once, from the answer's buffer to where it belongs,
while its checksum is taken. Payloads of a list stay in that buffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from transport import _ring
from transport.claims.batch import CONSUME, ClaimedRows, End, Positions, TakenBatch, Verdict
from transport.devices.landing import Landing, landing_for
from transport.errors import SchemaError
from transport.ring.batch import Gathered
from transport.ring.batch_shape import Shape, ShapeArguments
from transport.ring.batches import PayloadBatch
from transport.runtime.arguments import seconds
from transport.runtime.loop_thread import Job, LoopThread
from transport.schema import Schema
from transport.wires import Wire

B = TypeVar("B", bound=Gathered)

_IN_QUESTION, _CONSUMED = int(Verdict.IN_QUESTION), int(Verdict.CONSUMED)  # numpy looks for attributes in a member

_COLUMNS = tuple("sequence" if name == "offset" else name for name in _ring.BATCH_COLUMNS)  # offsets are the pieces'
Taker = Callable[[float, bool], Awaitable[TakenBatch]]  # (seconds to wait, whether checksums are compared)


class TakenPart:
    """The payloads of a `TakenBatch` as a part of a batch in place. Any thread; `consumed` in the connection's loop.

    What is neither consumed nor given back goes back with the object. So do payloads that cannot be used;
    ``most_attempts`` of a later TAKE ends them.

    Args:
        thread: whose loop is the connection's, for `finish` and `consumption`.
        verified: whether the checksums were compared on arrival.
    """

    def __init__(self, taken: TakenBatch, thread: LoopThread | None = None, *, verified: bool = False) -> None:
        self._thread = thread
        self._claims = taken.claims
        self._owned = taken.owned
        self._rows = taken.rows
        self._positions = np.arange(taken.first, taken.first + len(taken))
        self.dropped = taken.dropped  # before it was a part
        self._received = taken.received(verified=verified)

    def __repr__(self) -> str:
        return f"<TakenPart of {len(self)} payloads>"

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def ring(self) -> str:
        """Whose payloads they are."""
        return self._claims.connection.ring

    @property
    def wire(self) -> Wire:
        """Name of the wire that carried the payloads."""
        wire: Wire = self._claims.connection.link.wire
        return wire

    def schemas(self) -> list[str]:
        """Fingerprints that the tickets name, each once; "" for a ticket that cannot be read."""
        return self._received.schemas()

    # --- contents ---------------------------------------------------------------------------------
    def columns(self, out: npt.NDArray[np.int64]) -> None:
        """See `ClaimedPart`."""
        for row, name in zip(out, _COLUMNS, strict=True):
            row[:] = self._rows[name]

    def measure(self, fields: _ring.BatchFields, out: Any) -> list[int]:
        """See `ClaimedPart`."""
        return self._received.measure(fields, out)

    def gather(
        self, fields: _ring.BatchFields, targets: list[tuple[Any, int, int, bool, bytes] | None], verify: bool
    ) -> list[int]:
        """See `ClaimedPart`."""
        return self._counted(self._received.gather(fields, targets, verify))

    def verify(self) -> list[int]:
        """See `ClaimedPart`."""
        return self._counted(self._received.verify())

    def _counted(self, wrong: list[int]) -> list[int]:
        if wrong:
            self._claims.soon(self._claims.connection.changed, len(wrong))
        return wrong

    def note(self, index: int) -> bytes:
        """See `ClaimedPart`."""
        return self._received.note(index)

    def place(self, index: int) -> tuple[Any, int]:
        """The read-only memory that has the payload's bytes, and where they begin in it."""
        return self._received.place(index)

    # --- the ends of the claims -------------------------------------------------------------------
    def drop(self, index: int, reason: str, dead: bool, consumer: str = "", delay_s: float = 0.0) -> None:
        """See `ClaimedPart`."""
        if dead:
            self.leave_out(index, End(Verdict.DEAD, reason, consumer))
            return
        self._claims.soon(self._claims.return_soon, self._positions[index : index + 1], delay_s, True)
        self._forget(index)

    def _forget(self, index: int) -> None:
        self._received.drop(index)
        self._rows = np.delete(self._rows, index)
        self._positions = np.delete(self._positions, index)

    def ask_to_consume(self) -> None:
        """Ask the ring to consume the claims, without waiting for the answer."""
        self._claims.soon(self._claims.end, self._positions, CONSUME)

    @property
    def answered(self) -> bool:
        """Whether the ring has answered, or is out of reach."""
        return int(self._claims.verdicts[self._positions].min(initial=_IN_QUESTION)) >= _IN_QUESTION

    def consumption(self) -> npt.NDArray[np.bool_]:
        """Wait for the answer to `ask_to_consume`: which claims count as consumed. Asked again, it is the same."""
        if not self.answered:
            assert self._thread is not None, "consumption() waits for the loop of a thread"
            job: Job[npt.NDArray[np.bool_]] = Job(self._thread, partial(self._claims.end, self._positions, CONSUME))
            job.start()
            job.result()
        if self.answered:
            self._owned.settled()  # nothing goes back with the object
        consumed: npt.NDArray[np.bool_] = self._claims.verdicts[self._positions] == _CONSUMED
        return consumed

    def in_question(self) -> npt.NDArray[np.bool_]:
        """Tell for each whether its ring went out of reach before its answer."""
        found: npt.NDArray[np.bool_] = self._claims.verdicts[self._positions] == _IN_QUESTION
        return found

    def leave_out(self, index: int, end: End) -> None:
        """End the claim of the payload so, which leaves the part, without waiting for the answer."""
        self._claims.soon(_end_owned, self._claims, self._owned, self._positions[index : index + 1], end)
        self._forget(index)

    async def consumed(self) -> bytes:
        """Consume: 1 or 0 for each, and the same when it is called again, but for what was in question."""
        return (await self._claims.end(self._positions, CONSUME)).tobytes()

    def finish(self, keep: bool = False) -> bytes:
        """See `EndingPart`: `consumed`, for callers in another thread than the loop's."""
        del keep  # the memory is this process's own
        assert self._thread is not None, "finish() waits for the loop of a thread"
        return self._thread.run(self.consumed())

    def renew(self) -> int:
        """How many are held. The client's loop says that their holder is alive."""
        if self._claims.connection.lost:
            return 0
        return int((self._claims.verdicts[self._positions] == Verdict.OPEN).sum())

    def release(self, delay_s: float = 0.0, in_vain: bool = True) -> None:
        """See `ClaimedPart`."""
        self._claims.soon(self._claims.return_soon, self._positions, delay_s, in_vain)


def _end_owned(claims: ClaimedRows, owned: _ring.OwnedClaims, positions: Positions, end: End) -> None:
    """End claims whose owner may be dropped meanwhile, which would give back what has no end yet. On the loop."""
    claims.end(positions, end)
    del owned


class TakenPayloads(Gathered):
    """A batch whose claims connections hold. `consume` is awaited, and belongs to the client's loop."""

    _parts: Sequence[TakenPart | _ring.ClaimedBatch]

    async def consume(self) -> npt.NDArray[np.bool_]:
        """Say that the payloads were used: which were still held by this consumer, and only those count.

        As `TakenBatch.consume`: what is False may still count where the ring went out of reach before its answer came;
        asked again, the ring says so.
        """
        keep = self.layout == "list"
        answers = await asyncio.gather(*(self._finish(part, keep) for part in self._parts))
        return np.frombuffer(b"".join(answers), np.bool_)

    async def _finish(self, part: TakenPart | _ring.ClaimedBatch, keep: bool) -> bytes:
        return await part.consumed() if isinstance(part, TakenPart) else part.finish(keep)

    def renew(self) -> int:
        """How many are still held; of a connection, as far as this side knows."""
        return sum(part.renew() for part in self._parts)

    async def __aenter__(self) -> TakenPayloads:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()


def in_place(parts: Sequence[TakenPart | _ring.ClaimedBatch], shape: Shape, schema: Schema) -> TakenPayloads:
    """One batch of these claims. Whatever is raised: all of them have been given back.

    Raises SchemaError where a payload has another schema, and otherwise as `SharedRingBuffer.claim_batch`.
    """
    return _of_one_schema(TakenPayloads, parts, shape, schema)


def _of_one_schema(kind: type[B], parts: Sequence[Any], shape: Shape, schema: Schema, **rest: Any) -> B:
    """`Gathered.gathered`, after a look at the schemas that the tickets name."""
    for part in parts:
        if isinstance(part, _ring.ClaimedBatch):
            continue
        strange = [each for each in part.schemas() if each not in ("", schema.fingerprint)]
        if strange:
            for each in parts:
                each.release(in_vain=False)
            raise SchemaError(
                f"ring {part.ring[:4]}… has payloads of schema {', '.join(strange)}, and the batch is of schema "
                f"{schema.fingerprint}; its payloads were given back: `take` gives payloads of any schema, and a ring "
                "that is made with a schema has no others"
            )
    return kind.gathered(parts, schema, shape, **rest)


class TakeBatchArguments(ShapeArguments, total=False):
    """What a `take_batch` may be given beside how long it waits, none of it required; see `UCXXClient.take_batch`."""

    schema: Schema | None
    most_bytes: int
    rank: int | str
    oldest_version: int | None
    max_deliveries: int


class Plan:
    """A batch that is to be taken: its arguments, checked before anything is asked.

    Raises:
        SchemaError: no schema was given, and the client has none or several; or the shape does not fit it.
        UsageError, MissingDependencyError: an argument makes no sense, or there is no such memory here.
    """

    def __init__(
        self, schema: Schema | None, known: Sequence[Schema], verify: bool, shape: ShapeArguments, wait_s: float
    ) -> None:
        seconds(wait_s, "wait_s of take_batch()")
        if schema is None and len(known) != 1:
            raise SchemaError(
                f"a batch has the tensors of one schema, and this client was given {len(known)}; pass "
                "take_batch(schema=...)"
            )
        self.whole = known[0] if schema is None else schema
        wanted = Shape(**shape)
        wanted.fills(self.whole)
        verified = verify if wanted.verify is None else wanted.verify
        self.fields = wanted.fields
        # The bytes of a list, and of some fields, are compared as they come; those of other layouts as they are copied.
        as_they_come = wanted.layout == "list" or self.fields is not None
        self.joined_verify = verified and as_they_come
        self.shape = msgspec.structs.replace(wanted, verify=verified and not as_they_come, fields=None)
        self.schema = wanted.part(self.whole)  # what arrives has these fields only
        self.landing: Landing = landing_for(wanted.memory, wanted.out, wanted.most_memory)
        self._deadline = _ring.Deadline(wait_s)
        self._dropped = 0

    async def part(self, take: Taker, thread: LoopThread | None = None) -> TakenPart:
        """The next claims; ``thread``: of the loop, where their ends are waited for in another one."""
        return TakenPart(await take(self._deadline.left_s, self.joined_verify), thread)

    def batch(self, kind: type[B], part: Any) -> B | None:
        """The batch of a part; None: it is empty, and there is time left to take another."""
        batch = _of_one_schema(kind, [part], self.shape, self.schema, landing=self.landing)
        self._dropped += part.dropped + batch.dropped
        if not len(batch) and self._deadline.left_s:
            return None
        batch.dropped = self._dropped
        return batch


async def taken_in_place(plan: Plan, take: Taker) -> TakenPayloads:
    """Take until there is a payload in the batch, or the time is over."""
    while (batch := plan.batch(TakenPayloads, await plan.part(take))) is None:
        pass
    return batch


def taken_and_waited_for(plan: Plan, take: Taker, thread: LoopThread) -> PayloadBatch:
    """The same for a client whose loop runs in a thread. The payloads are copied in the caller's thread."""
    while (batch := plan.batch(PayloadBatch, thread.run(plan.part(take, thread)))) is None:
        pass
    return batch
