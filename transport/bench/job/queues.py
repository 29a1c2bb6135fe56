"""Our queues as a writer and a trainer of `bench job` use them. A new kind is a pair of classes in `KINDS`.

`python -m transport.bench.job.queues writer|trainer` is one of them.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from transport.bench.job.work import HEADER, Job, Training, Writing, main
from transport.claims.batch import TakenBatch, Verdicts
from transport.claims.in_place import TakenPart, TakenPayloads, in_place
from transport.client.client import UCXXClient
from transport.errors import RingFullError
from transport.packer.options import ServerOptions
from transport.packer.rollout import UCXXRolloutMixin
from transport.queue import open_queue
from transport.ring.batch_shape import Shape
from transport.ring.batches import BatchLayout, PayloadBatch, claim_batch
from transport.ring.buffer import SharedRingBuffer
from transport.runtime.loop_thread import Job as LoopJob
from transport.runtime.loop_thread import LoopThread
from transport.schema import Layout, Schema, UpTo
from transport.training.batch import Batch
from transport.training.trainer import Trainer
from transport.wire.addresses import LOOPBACK
from transport.wires import Wire

_LOOK_S = 0.5  # how often a writer that waits for a free slot looks whether it is to end
_ANSWERS = 2  # to `consume` that are waited for while batches are taken
_LINGER_S = 5.0  # of the listeners, after a writer that was killed


def schema_of(size: int) -> Schema:
    """Header and body, which is ragged as a trajectory is."""
    return Schema.of(header=("uint8", HEADER.size), body=("uint8", UpTo(size - HEADER.size)))


class _Rollout(UCXXRolloutMixin): ...


class RingWriter:
    """Payloads into the ring, which hands them out itself: many with one call."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rollout = _Rollout()
        with contextlib.ExitStack() as stack:
            queue = stack.enter_context(open_queue(job.place))
            stack.callback(self._rollout.cleanup_ucxx)
            ring = self._rollout.setup_ucxx(
                schema_of(job.size_bytes),
                slots=job.window,
                name=f"{job.rings}{job.index}",
                rings=queue,
                server=ServerOptions(addresses=(LOOPBACK,), linger_s=_LINGER_S),
            )
            self.address = ring.name
            self.helpers: Sequence[int] = [owner.pid for owner in ring.native.owners() if owner.alive and owner.port]
            self._open = stack.pop_all()

    def prepare(self, body: bytes) -> npt.NDArray[np.uint8]:
        """As a rollout has it: an array."""
        return np.frombuffer(body, np.uint8)

    def write_many(self, payloads: Sequence[tuple[bytes, Any]]) -> None:
        """In one call; waits while the ring is full."""
        values = [{"header": np.frombuffer(header, np.uint8), "body": body} for header, body in payloads]
        while values:
            self._job.check()
            try:
                self._rollout.ring.write_many(values, timeout_s=_LOOK_S)
                return
            except RingFullError as error:
                del values[: len(error.written)]

    def close(self) -> None:
        """The ring goes, and its listeners."""
        self._open.close()


class BatchTrainer:
    """As `Trainer` is used: batches, each consumed when it was learned from."""

    def __init__(self, job: Job) -> None:
        wire: Wire = job.wire  # type: ignore[assignment]
        shape: dict[str, Any] = {} if job.layout == "list" else {"layout": job.layout}
        self._asked: deque[Batch] = deque()
        self._trainer = Trainer(
            schema_of(job.size_bytes), job.place, name=f"trainer {job.index}", wire=frozenset({wire}), **shape
        )

    def claim(self, n: int, timeout_s: float) -> Batch | Literal["answers"] | None:
        """What comes first; where nothing has come, the answers that are due."""
        return self._trainer.take(n, 0.0 if self._asked else timeout_s) or ("answers" if self._asked else None)

    def consume(self, batch: Batch | Literal["answers"]) -> Sequence[tuple[Any, Any]]:
        """Header and body of what was still held, of the batches whose answers have come."""
        if batch != "answers":
            batch.consume()
            self._asked.append(batch)
        payloads: list[tuple[Any, Any]] = []
        while self._asked and (batch == "answers" or len(self._asked) > _ANSWERS or self._asked[0].answered):
            taken = self._asked.popleft()
            payloads += [(each["header"], each["body"]) for each in itertools.compress(taken, taken.accepted)]
        return payloads

    def close(self) -> None:
        """Claims that are in hand go back."""
        self._trainer.close()


class RingTrainer:
    """Batches claimed from the writers' rings, mapped. Bodies of a list stay in their slots until the next claim."""

    def __init__(self, job: Job) -> None:
        self._turn = job.index
        self._layout: BatchLayout = job.layout  # type: ignore[assignment]
        self._batch: PayloadBatch | None = None
        with contextlib.ExitStack() as stack:
            self._rings = [
                stack.enter_context(SharedRingBuffer.attach(name, schema_of(job.size_bytes), role="reader"))
                for name in job.addresses
            ]
            self._open = stack.pop_all()

    def claim(self, n: int, timeout_s: float) -> PayloadBatch | None:
        """What comes first; the memory of the batch before is let go."""
        self._let_go()
        self._turn += 1
        self._batch = claim_batch(self._rings, n, timeout_s, layout=self._layout, first=self._turn)
        return self._batch or None

    def consume(self, batch: PayloadBatch) -> Sequence[tuple[Any, Any]]:
        """Header and body of what was still held."""
        return [(each["header"], each["body"]) for each in itertools.compress(batch, batch.consume())]

    def _let_go(self) -> None:
        if self._batch is not None:
            self._batch.release()

    def close(self) -> None:
        """Claims that are in hand go back."""
        self._let_go()
        self._open.close()


class TakingTrainer:
    """Batches taken from the writers' rings over a wire, each with one answer.

    While the answer to one `consume` is on its way the next batch is taken: what was accepted comes a little later.
    """

    def __init__(self, job: Job) -> None:
        wire: Wire = job.wire  # type: ignore[assignment]
        schema = schema_of(job.size_bytes)

        async def make() -> UCXXClient:
            client = UCXXClient(schemas=[schema], wire={wire})
            thread.closes(client.close)
            return client

        with contextlib.ExitStack() as stack:
            thread = LoopThread("bench")
            stack.callback(thread.close)
            client = thread.run(make())
            queue = stack.enter_context(open_queue(job.place))
            self._queue = queue.connect(thread, client, [schema])
            self._schema = schema
            layout: BatchLayout = job.layout  # type: ignore[assignment]
            self._shape = Shape(layout=layout, verify=False)  # checksums were compared on arrival
            self._asked: deque[tuple[TakenBatch | TakenPayloads, LoopJob[Verdicts]]] = deque()
            self._layouts: dict[int, Layout] = {}
            self._open = stack.pop_all()

    def claim(self, n: int, timeout_s: float) -> TakenBatch | Literal["answers"] | None:
        """What came first; where nothing has come, the answers that are due."""
        return self._queue.take(n, 0.0 if self._asked else timeout_s) or ("answers" if self._asked else None)

    def consume(self, taken: TakenBatch | Literal["answers"]) -> Sequence[tuple[Any, Any]]:
        """Header and body of what was still held, of the batches whose answers have come."""
        if taken != "answers":
            self._asked.append(self._asked_for(taken))
        payloads: list[tuple[Any, Any]] = []
        while self._asked and (taken == "answers" or len(self._asked) > _ANSWERS or self._asked[0][1].done()):
            batch, accepted = self._asked.popleft()
            held = itertools.compress(range(len(batch)), accepted.result().tolist())
            if isinstance(batch, TakenBatch):
                payloads += [self._arrays(batch, at) for at in held]
            else:
                payloads += [(each["header"], each["body"]) for each in map(batch.__getitem__, held)]
        return payloads

    def _asked_for(self, taken: TakenBatch) -> tuple[TakenBatch | TakenPayloads, LoopJob[Verdicts]]:
        if self._shape.layout == "list":
            return taken, self._queue.consume_soon(taken)
        batch = in_place([TakenPart(taken)], self._shape, self._schema)
        return batch, self._queue.consume_soon(taken, batch)

    def _arrays(self, batch: TakenBatch, at: int) -> tuple[Any, Any]:
        """Views of the answer. One tensor is ragged, so the size says where each stands."""
        data = batch.data(at)
        layout = self._layouts.get(len(data))
        if layout is None:
            layout = self._layouts[len(data)] = batch[at].layout()
        header, body = layout.placements
        return (
            data[header.offset : header.offset + header.nbytes],
            data[body.offset : body.offset + body.nbytes],
        )

    def close(self) -> None:
        """Claims that are in hand go back."""
        self._open.close()


def _ring_trainer(job: Job) -> Training:
    return RingTrainer(job) if job.wire == "mapped" else TakingTrainer(job)


class Kind(NamedTuple):
    """How payloads are written and claimed."""

    writer: Callable[[Job], Writing]
    trainer: Callable[[Job], Training]


KINDS = {"rings": Kind(RingWriter, _ring_trainer), "trainer": Kind(RingWriter, BatchTrainer)}


def _make(job: Job) -> Writing | Training:
    kind = KINDS[job.queue]
    return kind.writer(job) if sys.argv[1] == "writer" else kind.trainer(job)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], _make))
