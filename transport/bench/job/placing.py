"""Padded and packed batches of what a demand brought from a ring elsewhere."""

from __future__ import annotations

from collections.abc import Collection

from transport.queue.demands import Brought
from transport.ring.batch_shape import Shape
from transport.schema import Schema
from transport.taking.batch import Rows, Verdicts
from transport.taking.batches import TakenPayloads, in_place
from transport.taking.parts import TakenPart


class _Holder:
    """Ends claims through the demands that brought them, which count what is in hand."""

    def __init__(self, brought: Brought) -> None:
        self._brought = brought
        self.ring = brought.link.ring

    @property
    def lost(self) -> bool:
        return self._brought.link.lost

    @property
    def in_question(self) -> Collection[bytes]:
        return self._brought.link.in_question

    def renew(self) -> None:
        self._brought.link.renew()

    def changed(self, count: int) -> None:
        self._brought.link.changed(count)

    async def finish(self, rows: Rows) -> Verdicts:
        return await self._brought.demands.finish(self._brought, rows)

    async def give_back(self, rows: Rows, delay_s: float = 0.0) -> Verdicts:
        return await self._brought.demands.give_back(self._brought, rows, delay_s)

    def let_go(self, rows: Rows, delay_s: float = 0.0, in_vain: bool = True) -> None:
        self._brought.demands.let_go(self._brought, rows, delay_s)


def placed(brought: Brought, shape: Shape, schema: Schema) -> TakenPayloads:
    """The payloads in one batch of that shape; consume it with `FoundRings.consume_soon`. Raises as `in_place`.

    Checksums were compared as the payloads arrived.
    """
    return in_place([TakenPart(brought.batch, _Holder(brought))], shape, schema)
