"""Claims over several rings of this host: each ring is asked first in turn, so that none waits for the others."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from transport import _ring
from transport.errors import ClosedError, UsageError
from transport.ring.states import named

if TYPE_CHECKING:
    from transport.ring.leases import Slots

_ANY_SIZE: Final = (1 << 64) - 1
_SLICE_S: Final = 0.1  # between looks for events without a wake-up, such as dead claimers


def claim_any(
    rings: Sequence[Slots],
    n: int,
    timeout_s: float = 0.0,
    *,
    first: int = 0,
    rank: int = 0,
    most_bytes: int | None = None,
    oldest_version: int | None = None,
    max_deliveries: int = 0,
    consumer: str = "",
) -> list[_ring.ClaimedBatch]:
    """Up to ``n`` payloads of these rings, of each the oldest first; waits for the first one, wherever it comes.

    The arguments are those of `SharedRingBuffer.claim`. Rings that are closed are left out.

    Args:
        first: which ring is asked first; count it up with every call.

    Raises:
        ClosedError: all of the rings are closed.
        UsageError: no rings, or more than can be waited for.
    """
    if not 1 <= len(rings) <= _ring.MAX_WAITED:
        raise UsageError(f"{len(rings)} rings; 1 to {_ring.MAX_WAITED} can be waited for")
    version = _ring.NO_VERSION if oldest_version is None else oldest_version
    attempts = min(max_deliveries, _ring.MAX_ATTEMPTS)
    deadline = _ring.Deadline(timeout_s)
    while True:
        opened = [ring for ring in rings if not ring.native.closed]
        if not opened:
            raise ClosedError("the rings are closed")
        alone = len(opened) == 1
        seen = []
        parts: list[_ring.ClaimedBatch] = []
        left = n
        for at in range(len(opened)):
            native = opened[(first + at) % len(opened)].native
            try:
                seen.append((native, native.published_event()))
                part = native.claim_batch(
                    left,
                    deadline.left_s if alone else 0.0,
                    rank=rank,
                    most_bytes=_ANY_SIZE if most_bytes is None else most_bytes,
                    oldest_version=version,
                    most_attempts=attempts,
                    consumer=consumer,
                )
            except _ring.RingFault as fault:
                if fault.code != _ring.FAULT_DETACHED:  # closed meanwhile, by another thread
                    raise named(fault) from None
                continue
            if part:
                parts.append(part)
                left -= len(part)
                if not left:
                    break
        left_s = deadline.left_s
        if parts or left_s <= 0:
            return parts
        _wait(seen, rank, left_s)


def _wait(seen: Sequence[tuple[_ring.Ring, int]], rank: int, left_s: float) -> None:
    with contextlib.suppress(_ring.RingFault):  # one was closed meanwhile, by another thread: look again
        due_s = min(native.due_s(rank) for native, _ in seen)
        _ring.Ring.wait_any([native for native, _ in seen], [event for _, event in seen], min(left_s, due_s, _SLICE_S))
