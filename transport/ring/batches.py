"""Batches of payloads claimed from the mapped rings of this host.

    with ring.claim_batch(32, timeout_s=1.0, layout="packed") as batch:
        accepted = batch.consume()
        train(batch["tokens"], batch.cu_seqlens["tokens"], accepted)

Each tensor is copied once, from its slot to where it belongs, while its checksum is taken. Payloads of a list stay in
their slots until the batch is released or gone. `transport.ring.batch` says what a batch is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol, Unpack

import numpy as np
import numpy.typing as npt

from transport import _ring
from transport.devices.landing import landing_for
from transport.errors import ClosedError, RankError, SchemaError, UsageError
from transport.ring.batch import ClaimedPart, Gathered
from transport.ring.batch_shape import BatchLayout, Shape, ShapeArguments

if TYPE_CHECKING:
    from transport.ring.writes import Slots

__all__ = [
    "MAX_DELIVERIES",
    "BatchLayout",
    "EndingPart",
    "PayloadBatch",
    "check_claim",
    "claim_batch",
    "wait_for_payloads",
]

MAX_DELIVERIES: Final = 5
_SLICE_S: Final = 0.1  # between looks for events without a wake-up, such as dead claimers


class EndingPart(ClaimedPart, Protocol):
    """Claims whose ends are told by calls that wait for the answer."""

    def finish(self, keep: bool = False) -> bytes:
        """Consume what was not consumed before: 1 or 0 for each. With ``keep`` its memory stays until `release`."""

    def renew(self) -> int:
        """How many are still held."""


class PayloadBatch(Gathered):
    """A batch whose `consume` and `renew` wait for the answer; of mapped rings, or of a `BlockingClient`."""

    _parts: Sequence[EndingPart]

    def consume(self) -> npt.NDArray[np.bool_]:
        """Say that the payloads were used, once: which were still held by this consumer, and only those count.

        Slots of padded and packed batches are free then; those of a mapped list when the batch is released or gone.
        Of payloads that came over the network, what is False may still count where the ring went out of reach before
        its answer came; asked again, the ring says so.
        """
        accepted = b"".join(part.finish(self.layout == "list") for part in self._parts)
        return np.frombuffer(accepted, np.bool_)

    def renew(self) -> int:
        """Say that their holder lives, for its lease; how many are still held."""
        return sum(part.renew() for part in self._parts)


def check_claim(n: int, rank: int | str) -> None:
    """Raises UsageError, RankError: no claim is of so many payloads, or no payload of such a rank.

    Whether a name is one, each ring says.
    """
    if n < 1:
        raise UsageError(f"n={n}; claim at least one payload")
    if not isinstance(rank, str) and not 0 <= rank < _ring.MAX_READERS:
        raise RankError(f"rank {rank}; a payload is written for ranks 0..{_ring.MAX_READERS - 1}")


def claim_batch(
    rings: Sequence[Slots],
    n: int,
    timeout_s: float = 0.0,
    *,
    first: int = 0,
    rank: int = 0,
    most_bytes: int | None = None,
    oldest_version: int | None = None,
    max_deliveries: int = MAX_DELIVERIES,
    consumer: str = "",
    **shape: Unpack[ShapeArguments],
) -> PayloadBatch:
    """Up to ``n`` payloads of these rings, of one schema, as a batch; see `SharedRingBuffer.claim_batch`.

    Args:
        rings: of each the oldest payloads come first; those that are closed are left out.
        first: which ring is asked first; count it up with every call.
        most_bytes: of each ring.
        shape: of `Shape`: layout, fill, pad_to, out, memory, most_memory, verify, fields.

    Raises:
        ClosedError: all of the rings are closed.
        UsageError: no rings, more than can be waited for, or another argument that makes no sense.
    """
    if len({ring.schema for ring in rings}) > 1:
        raise SchemaError("the rings of one batch have the same schema; claim batches of each kind apart")
    check_claim(n, rank)
    wanted = Shape(**shape)
    schema = rings[0].schema if rings else None
    wanted.fills(schema)
    landing = landing_for(wanted.memory, wanted.out, wanted.most_memory)
    assert schema is not None
    if not 1 <= len(rings) <= _ring.MAX_WAITED:
        raise UsageError(f"{len(rings)} rings; 1 to {_ring.MAX_WAITED} can be waited for")
    deadline = _ring.Deadline(timeout_s)
    dropped = 0
    while True:
        seen: list[Seen] = []
        parts: list[_ring.ClaimedBatch] = []
        left = n
        opened = [ring for ring in rings if not ring.native.closed]
        if not opened:
            raise ClosedError("the rings are closed")
        for at in range(len(opened)):
            native = opened[(first + at) % len(opened)].native
            try:
                seen.append((native, native.published_event(), rank))
                part = native.claim_batch(
                    left,
                    deadline.left_s if len(opened) == 1 else 0.0,
                    rank=rank,
                    most_bytes=most_bytes,
                    oldest_version=oldest_version,
                    most_attempts=min(max_deliveries, _ring.MAX_ATTEMPTS),
                    consumer=consumer,
                )
            except ClosedError:  # meanwhile, by another thread
                continue
            if part:
                parts.append(part)
                left -= len(part)
                if not left:
                    break
        if not parts and deadline.left_s > 0:
            if seen:  # else all were closed meanwhile, too
                wait_for_payloads(seen, deadline.left_s)
            continue
        batch = PayloadBatch.gathered(
            parts, schema, wanted, landing=landing, max_deliveries=max_deliveries, consumer=consumer
        )
        dropped += batch.dropped
        if len(batch) or not deadline.left_s:
            batch.dropped = dropped
            return batch


Seen = tuple[_ring.Ring, int, int]
"""A ring, its `published_event` before it was found empty, and the rank that claims."""


def wait_for_payloads(seen: Sequence[Seen], left_s: float, bell: _ring.Bell | None = None, rung: int = 0) -> None:
    """Sleep until one of the rings may have a payload, until ``bell`` has rung since, or for ``left_s`` or a moment."""
    with contextlib.suppress(ClosedError):  # one was closed meanwhile, by another thread: look again
        due_s = min((native.due_s(rank) for native, _, rank in seen), default=0.0)
        events = [event for _, event, _ in seen]
        _ring.Ring.wait_any([native for native, *_ in seen], events, min(left_s, due_s, _SLICE_S), bell, rung)
