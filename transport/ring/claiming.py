"""The common part of all claims of mapped rings: the arguments that make sense, and the wait for a payload."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final

from transport import _ring
from transport.errors import ClosedError, RankError, UsageError

_SLICE_S: Final = 0.1  # between looks for events without a wake-up, such as dead claimers


def check_claim(n: int, rank: int | str) -> None:
    """Raise UsageError, RankError: no claim is of so many payloads, or no payload of such a rank.

    Whether a name is one, each ring says.
    """
    if n < 1:
        raise UsageError(f"n={n}; claim at least one payload")
    if not isinstance(rank, str) and not 0 <= rank < _ring.MAX_READERS:
        raise RankError(f"rank {rank}; a payload is written for ranks 0..{_ring.MAX_READERS - 1}")


Seen = tuple[_ring.Ring, int, int]
"""A ring, its `published_event` before it was found empty, and the rank that claims."""


def wait_for_payloads(seen: Sequence[Seen], left_s: float, bell: _ring.Bell | None = None, rung: int = 0) -> None:
    """Sleep until one of the rings may have a payload, until ``bell`` has rung since, or for ``left_s`` or a moment."""
    with contextlib.suppress(ClosedError):  # one was closed meanwhile, by another thread: look again
        due_s = min((native.due_s(rank) for native, _, rank in seen), default=0.0)
        events = [event for _, event, _ in seen]
        _ring.Ring.wait_any([native for native, *_ in seen], events, min(left_s, due_s, _SLICE_S), bell, rung)
