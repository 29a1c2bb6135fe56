"""Batches of payloads that came over the wire, or from the wire and from mapped rings together.

    parts = [TakenPart(await link.take(…)), mapped.native.claim_batch(…)]    # claims of one schema
    batch = in_place(parts, Shape(layout="packed"), schema)                   # raises: all of them were given back
    accepted = await batch.consume()

The lengths stand in the answer's tickets, so each tensor is copied once, from the answer's buffer to where it belongs,
while its checksum is taken. Payloads of a list stay in that buffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from transport import _ring
from transport.devices.landing import Landing
from transport.errors import SchemaError
from transport.ring.batch import Batch
from transport.ring.batch_shape import Shape
from transport.ring.gathering import B, gathered
from transport.schema import Schema
from transport.taking.parts import TakenPart


class TakenPayloads(Batch):
    """A batch whose claims connections hold. `consume` is awaited, and belongs to the client's loop."""

    _parts: Sequence[TakenPart | _ring.ClaimedBatch]

    async def consume(self) -> npt.NDArray[np.bool_]:
        """Say that the payloads were used, once: which were still held by this consumer, and only those count.

        As `TakenBatch.consume`: what is False may still count where the ring went out of reach before its answer came;
        asked again, the ring says so.
        """
        keep = self.layout == "list"
        answers = await asyncio.gather(*(self._finish(part, keep) for part in self._parts))
        return np.frombuffer(b"".join(answers), np.bool_)

    async def _finish(self, part: TakenPart | _ring.ClaimedBatch, keep: bool) -> bytes:
        return await part.finish(keep) if isinstance(part, TakenPart) else self._call(part.finish, keep)

    def renew(self) -> int:
        """As if they had just been taken, for listeners with an ``ack_timeout_s``; how many are still held.

        Of a connection, as far as this side knows.
        """
        return sum(self._call(part.renew) for part in self._parts)

    def __enter__(self) -> TakenPayloads:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    async def __aenter__(self) -> TakenPayloads:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()


def in_place(
    parts: Sequence[TakenPart | _ring.ClaimedBatch],
    shape: Shape,
    schema: Schema,
    *,
    landing: Landing | None = None,
    max_deliveries: int = 0,
    consumer: str = "",
) -> TakenPayloads:
    """One batch of these claims. Whatever is raised: all of them have been given back.

    Raises SchemaError where a payload has another schema, and otherwise as `SharedRingBuffer.claim_batch`.
    """
    return of_one_schema(
        TakenPayloads, parts, shape, schema, landing=landing, max_deliveries=max_deliveries, consumer=consumer
    )


def of_one_schema(kind: type[B], parts: Sequence[Any], shape: Shape, schema: Schema, **rest: Any) -> B:
    """`gathered`, after a look at the schemas that the tickets name."""
    try:
        for part in parts:
            if not isinstance(part, _ring.ClaimedBatch):
                _check_schemas(part, schema)
    except BaseException:
        for part in parts:
            part.release(in_vain=False)
        raise
    return gathered(kind, parts, schema, shape, **rest)


def _check_schemas(part: Any, schema: Schema) -> None:
    strange = [each for each in part.schemas() if each not in ("", schema.fingerprint)]
    if strange:
        raise SchemaError(
            f"ring {part.ring[:4]}… has payloads of schema {', '.join(strange)}, and the batch is of schema "
            f"{schema.fingerprint}; its payloads were given back: `take` gives payloads of any schema, and a ring "
            "that is made with a schema has no others"
        )
