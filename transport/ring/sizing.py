"""Size of a ring: pure arithmetic from a schema and a rate, for `transport size`.

A slot is in use from the first byte written until the last rank's acknowledgement. By Little's law the slots in use are
the payloads per second times the seconds that each stays; a pause of the trainers adds the payloads that arrive in it.
A group is trained when its last sample has come: until then its other samples stay in their slots, for however long.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from transport.errors import UsageError

PAGE: Final = 4096
_CONTROL_BYTES: Final = 64 + 256 + 2048 + 1  # of a slot: its word, its claims, its ticket, its hints
_FIXED_BYTES: Final = 24 * PAGE + 128 * (64 + 8 * 256)  # header, owner rows, counts by rank, failures; finishes
MAX_SLOTS: Final = 1 << 24


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """The resources that one rollout host needs. Bytes are those of /dev/shm.

    Attributes:
        slot_bytes: the largest payload.
        slots: that a ring needs.
        ring_bytes: of one ring, as it lies in /dev/shm.
        host_bytes: of all rings of the host, with a fifth in reserve.
        bytes_per_s: that leave the host.
        in_use: slots in use on average.
        steps: of the trainer that wait where every slot is full: what is written then is trained on so many versions
            later, where each step makes a version.
        explanation: how the number of slots comes about.
    """

    slot_bytes: int
    slots: int
    ring_bytes: int
    host_bytes: int
    bytes_per_s: float
    in_use: float
    steps: float
    explanation: str


def sized(
    slot_bytes: int,
    *,
    rate: float,
    held_s: float,
    batch: int,
    stall_s: float,
    rings: int = 1,
    mean_bytes: int = 0,
    samples: int = 1,
    unfinished: int = 0,
    ahead: int | None = None,
) -> Sizing:
    """Return the ring for payloads of at most ``slot_bytes``.

    Args:
        rate: payloads per second that are written to one ring.
        held_s: seconds from publishing to the last acknowledgement in normal operation.
        batch: payloads of this ring that a trainer holds at a time; twice that with prefetch.
        stall_s: longest pause of the trainers, such as a checkpoint, during which the writer must not block.
        rings: on this host.
        mean_bytes: of a payload; 0: the largest.
        samples: of a group.
        unfinished: groups whose samples one ring has before they are complete, at a time.
        ahead: steps that may wait, of `Rollout`: more are not written, in a stall of the trainers either.

    Raises:
        UsageError: a number is out of range, or the ring exceeds the maximum size.
    """
    if min(slot_bytes, rings, samples) < 1 or min(batch, unfinished, rate, held_s, stall_s) < 0:
        raise UsageError("sizes and counts are at least 1, rates and times at least 0")
    if ahead is not None and ahead < 0:
        raise UsageError(f"ahead={ahead}; give 0 or more")
    under_way, stalled = rate * held_s, rate * stall_s if ahead is None else 0.0
    # a mapped reader may hold views of half of a ring before it copies
    batches = 2 if ahead is None else max(2, ahead + 1)
    slots = max(2, math.ceil(under_way + stalled) + batches * max(batch, 1) + unfinished * samples)
    if slots > MAX_SLOTS:
        raise UsageError(f"{slots} slots are more than {MAX_SLOTS}, the most a ring has; use more rings")
    ring = ring_bytes(slots, slot_bytes)
    return Sizing(
        slot_bytes=slot_bytes,
        slots=slots,
        ring_bytes=ring,
        host_bytes=math.ceil(ring * rings * 1.2),
        bytes_per_s=rate * rings * (mean_bytes or slot_bytes),
        steps=slots / max(batch, 1),
        in_use=under_way + batch + unfinished * samples,
        explanation=(
            f"{under_way:.1f} on the way ({rate:g}/s × {held_s:g} s) "
            + (
                f"+ {stalled:.1f} during a stall of {stall_s:g} s + 2 × {max(batch, 1)} of a batch and its prefetch"
                if ahead is None
                else f"+ {batches} × {max(batch, 1)} of the steps that may wait ({ahead}) and one that is written"
            )
            + (f" + {unfinished} × {samples} of groups that are not complete" if unfinished else "")
        ),
    )


def ring_bytes(slots: int, slot_bytes: int) -> int:
    """Return the bytes of such a ring's segment, within a few pages."""
    payload = -(-slot_bytes // PAGE) * PAGE
    control = _FIXED_BYTES + slots * _CONTROL_BYTES
    return slots * payload + -(-control // PAGE) * PAGE
