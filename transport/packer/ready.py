"""Rollout and Trainer: the two mixins as classes to use as they are, and the ``with`` of both.

with Rollout(schema, queue=queue) as rollout:
    rollout.write_to_buffer(trajectory)
with Trainer(schemas=[schema], queue=queue) as trainer:
    trainer.start_prefetch(trainer.claim_tickets(32, timeout_s=5))
    payloads = trainer.consume(trainer.collect_prefetch())
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Literal

from transport.client.client import WirePolicy
from transport.packer.consumed_record import ConsumedRecord
from transport.packer.mixin import UCXXDataPackerMixin
from transport.packer.options import ClientOptions, RingOptions, ServerOptions
from transport.packer.publisher import PublishMode
from transport.packer.rollout import UCXXRolloutMixin
from transport.packer.with_block import ends_normally
from transport.queue.base import TicketQueue
from transport.runtime import hurry
from transport.runtime.arguments import seconds
from transport.runtime.progress import Progress
from transport.schema import Schema
from transport.settings import Settings

_RING, _SERVER, _CLIENT = RingOptions(), ServerOptions(), ClientOptions()
_DRAIN_S, _DRAIN_TOLD_S = 30.0, 2.0


def _drain_s() -> float:
    return min(_DRAIN_S, max(0.0, hurry.signalled_at() + _DRAIN_TOLD_S - time.monotonic()))


class Rollout(UCXXRolloutMixin):
    """A rollout worker that is set up as it is made; `UCXXRolloutMixin` has its methods.

    Args:
        drain_s: at the end of its ``with``, wait this long for payloads that are not consumed yet: they are lost
            with the ring, unless it lies in a ``file``. Not where an exception other than StopRequestedError ends it.
            `close` waits for its own ``drain_s``. Default: 30 s, but until 2 s after the signal where one ends the
            program, also during this wait: the trainers may be ending, too. That is for a ``with`` inside
            `until_stopped`, whose end forgets the signal.

    The other arguments, and the errors, are those of `UCXXRolloutMixin.setup_ucxx`.
    """

    def __init__(
        self,
        schema: Schema | None = None,
        *,
        slots: int = 64,
        name: str | None = None,
        file: str | os.PathLike[str] | None = None,
        queue: TicketQueue | None = None,
        readers: int = 1,
        grouped: bool = False,
        publish: PublishMode | None = None,
        mode: Literal["process", "thread"] = "process",
        ring: RingOptions = _RING,
        server: ServerOptions = _SERVER,
        settings: Settings | None = None,
        drain_s: float | None = None,
    ) -> None:
        seconds(drain_s, "drain_s")
        self._drain_s = drain_s
        self.setup_ucxx(
            schema,
            slots=slots,
            name=name,
            file=file,
            queue=queue,
            readers=readers,
            grouped=grouped,
            publish=publish,
            mode=mode,
            ring=ring,
            server=server,
            settings=settings,
        )

    def __repr__(self) -> str:
        return "<Rollout closed>" if self._ucxx_ring is None else f"<Rollout {self._ucxx_ring!r}>"

    def close(self, drain_s: float = 0.0, *, ends: bool = True) -> None:
        """The same as `cleanup_ucxx`."""
        if ends:
            self.cleanup_ucxx(drain_s)
        else:
            self.cleanup_ucxx(drain_s, ends=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if ends_normally(kind) and self._drain_s is not None:
                self.close(self._drain_s)
            elif ends_normally(kind):
                self._ucxx_told_s = _DRAIN_TOLD_S  # the signal may also come during the drain
                self.close(_drain_s())
        finally:
            self._ucxx_told_s = None
            super().__exit__(kind, error, trace)


class Trainer(UCXXDataPackerMixin):
    """A trainer's data packer that is set up as it is made; `UCXXDataPackerMixin` has its methods.

    Arguments and errors are those of `UCXXDataPackerMixin.setup_ucxx_packer`.
    """

    def __init__(
        self,
        *,
        schemas: Sequence[Schema] = (),
        queue: TicketQueue | None = None,
        rank: int | str = 0,
        consumer: str | None = None,
        max_policy_age: int | None = None,
        consumed: ConsumedRecord | None = None,
        progress: Progress | Literal["bar"] | None = None,
        joined: bool = False,
        parents: Sequence[Schema] = (),
        expected_rollouts: int | None = None,
        wire: WirePolicy | None = None,
        client: ClientOptions = _CLIENT,
        settings: Settings | None = None,
    ) -> None:
        self.setup_ucxx_packer(
            schemas=schemas,
            queue=queue,
            rank=rank,
            consumer=consumer,
            max_policy_age=max_policy_age,
            consumed=consumed,
            progress=progress,
            joined=joined,
            parents=parents,
            expected_rollouts=expected_rollouts,
            wire=wire,
            client=client,
            settings=settings,
        )

    def __repr__(self) -> str:
        return "<Trainer closed>" if self._ucxx is None else f"<Trainer {self._ucxx.claims!r}>"

    def close(self) -> None:
        """The same as `cleanup_ucxx_packer`."""
        self.cleanup_ucxx_packer()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:  # None: type checkers know that this `with` lets exceptions through
        super().__exit__(kind, error, trace)
