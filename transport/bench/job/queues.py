"""Our queues as a writer and a trainer of `bench job` use them. A new kind is a pair of classes in `KINDS`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from transport.bench.job.work import HEADER, Job, Training, Writing
from transport.errors import RingFullError
from transport.packer.mixin import UCXXDataPackerMixin
from transport.packer.options import ServerOptions
from transport.packer.prefetch import FetchedBatch
from transport.packer.rollout import UCXXRolloutMixin
from transport.queue import open_queue
from transport.schema import Schema, UpTo
from transport.wire.addresses import LOOPBACK
from transport.wires import Wire

_LOOK_S = 0.5  # how often a writer that waits for a free slot looks whether it is to end
_LINGER_S = 5.0  # of the listeners, after a writer that was killed


def schema_of(size: int) -> Schema:
    """Header and body, which is ragged as a trajectory is."""
    return Schema.of(header=("uint8", HEADER.size), body=("uint8", UpTo(size - HEADER.size)))


class _Rollout(UCXXRolloutMixin): ...


class _Packer(UCXXDataPackerMixin): ...


class TicketWriter:
    """Payloads into the ring, their tickets into the queue of ``job.place``."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._rollout = _Rollout()
        with contextlib.ExitStack() as stack:
            queue = stack.enter_context(open_queue(job.place))
            stack.callback(self._rollout.cleanup_ucxx)
            ring = self._rollout.setup_ucxx(
                schema_of(job.size_bytes),
                slots=job.window,
                queue=queue,
                server=ServerOptions(addresses=(LOOPBACK,), linger_s=_LINGER_S),
            )
            self.address = ring.name
            self.helpers: Sequence[int] = [owner.pid for owner in ring.native.owners() if owner.alive and owner.port]
            self._open = stack.pop_all()

    def prepare(self, body: bytes) -> npt.NDArray[np.uint8]:
        """As a rollout has it: an array."""
        return np.frombuffer(body, np.uint8)

    def write_many(self, payloads: Sequence[tuple[bytes, Any]]) -> None:
        """One after the other; waits while the ring is full."""
        for header, body in payloads:
            values = {"header": np.frombuffer(header, np.uint8), "body": body}
            while True:
                self._job.check()
                with contextlib.suppress(RingFullError):
                    self._rollout.write_to_buffer(values, timeout_s=_LOOK_S)
                    break

    def close(self) -> None:
        """The ring goes, and its listeners."""
        self._open.close()


class TicketTrainer:
    """Batches of claimed tickets; the next one is fetched while one is consumed."""

    def __init__(self, job: Job) -> None:
        self._packer = _Packer()
        self._fetching = False
        wire: Wire = job.wire  # type: ignore[assignment]
        with contextlib.ExitStack() as stack:
            queue = stack.enter_context(open_queue(job.place))
            stack.callback(self._packer.cleanup_ucxx_packer)
            self._packer.setup_ucxx_packer(
                schemas=[schema_of(job.size_bytes)],
                queue=queue,
                consumer=f"trainer {job.index}",
                wire=frozenset({wire}),
            )
            self._open = stack.pop_all()

    def claim(self, n: int, timeout_s: float) -> FetchedBatch | None:
        """The batch that was being fetched, or the first one that comes."""
        packer = self._packer
        if not self._fetching:
            claims = packer.claim_tickets(n, timeout_s)
            if not claims:
                return None
            packer.start_prefetch(claims)
        following = packer.claim_tickets(n)
        if following:
            packer.defer_prefetch(following)
        self._fetching = bool(following)
        return packer.collect_prefetch()

    def consume(self, batch: FetchedBatch) -> Sequence[tuple[Any, Any]]:
        """What may be trained on."""
        return [(payload["header"], payload["body"]) for payload in self._packer.consume(batch)]

    def close(self) -> None:
        """Claims that are in hand go back."""
        self._open.close()


class Kind(NamedTuple):
    """How a queue is used; ``service`` is what runs beside: "redis", or "" for nothing."""

    writer: Callable[[Job], Writing]
    trainer: Callable[[Job], Training]
    service: str = ""


KINDS = {
    "sqlite": Kind(TicketWriter, TicketTrainer),
    "redis": Kind(TicketWriter, TicketTrainer, "redis"),
}
