"""Gathering claimed payloads into one batch: measured, copied to their places, verified; wrong ones are left out."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import numpy as np

from transport.devices.landing import Landing, landing_for
from transport.ring.batch import Batch, ClaimedPart
from transport.ring.batch_shape import Shape, fields_of
from transport.schema import Schema

log = logging.getLogger(__name__)

_UNFIT: Final = "its ticket or its length does not fit the schema of its ring"
_WRONG: Final = "its bytes are not those that were written"

B = TypeVar("B", bound=Batch)


def gathered(
    kind: type[B],
    parts: Sequence[ClaimedPart],
    schema: Schema,
    shape: Shape,
    *,
    landing: Landing | None = None,
    max_deliveries: int = 0,
    consumer: str = "",
) -> B:
    """Make a batch of these claims. Whatever is raised: all of them have been given back, uncounted.

    Payloads that do not fit the schema, or whose bytes are wrong, leave their part, and are counted as dropped.

    Args:
        kind: of the batch.
        parts: claims of one or several rings. The batch owns them from here on.
        landing: what `landing_for` gave for the shape, where it was made before the payloads were claimed.
        max_deliveries: wrong bytes that were delivered so often are dead; 0: never.
    """
    try:
        fills = shape.fills(schema)
        if landing is None:
            landing = landing_for(shape.memory, shape.out, shape.most_memory)
        return _gathered(kind, parts, schema, shape, fills, landing, max_deliveries, consumer)
    except BaseException:
        for part in parts:
            part.release(in_vain=False)
        raise


def _gathered(
    kind: type[B],
    parts: Sequence[ClaimedPart],
    schema: Schema,
    shape: Shape,
    fills: Mapping[str, bytes],
    landing: Landing,
    max_deliveries: int,
    consumer: str,
) -> B:
    fields = fields_of(schema)
    names = [spec.name for spec in schema.ragged]
    dropped = 0
    measured = []
    for part in parts:
        rows = np.empty((len(names), len(part)), np.int64)
        unfit = part.measure(fields, rows)
        for at in reversed(unfit):  # the next claimer would find the same
            part.drop(at, _UNFIT, True, consumer)
        dropped += len(unfit)
        measured.append(np.delete(rows, unfit, axis=1) if unfit else rows)
    while True:
        batch = kind(parts, schema, shape, landing, dropped)
        joined = measured[0] if len(measured) == 1 else np.hstack([np.empty((len(names), 0), np.int64), *measured])
        batch.place(dict(zip(names, joined, strict=True)))
        wrong = batch.fetch(fields, fills)
        if not any(wrong):
            batch.arrive()
            return batch
        for number, (part, indices) in enumerate(zip(parts, wrong, strict=True)):
            before = batch.in_vain_of(number).tolist()
            for at in reversed(indices):
                last = 0 < max_deliveries <= before[at] + 1
                part.drop(at, _WRONG, last, consumer)
                log.warning("a payload was left out of a batch: %s (delivery %d)", _WRONG, before[at] + 1)
            measured[number] = np.delete(measured[number], indices, axis=1)
            dropped += len(indices)
