"""A rollout and a `Trainer` as writer and trainer of `benchmarks/job`.

`python benchmarks/job/ours.py writer|trainer` is one of them.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from transport import open_rings
from transport.errors import RingFullError
from transport.packer.options import ClientOptions, ServerOptions
from transport.packer.rollout import UCXXRolloutMixin
from transport.schema import Schema, UpTo
from transport.training.batch import Batch
from transport.training.trainer import Trainer
from transport.wire.addresses import LOOPBACK
from transport.wires import Wire

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.job.work import HEADER, Job, Training, Writing, main

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
            queue = stack.enter_context(open_rings(job.place))
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
        client = ClientOptions(name=f"trainer {job.index}")
        self._trainer = Trainer(schema_of(job.size_bytes), job.place, wire=frozenset({wire}), client=client, **shape)

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


def _make(job: Job) -> Writing | Training:
    return RingWriter(job) if sys.argv[1] == "writer" else BatchTrainer(job)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], _make))
