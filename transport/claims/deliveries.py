"""Deliveries: a payload for n readers is n independent deliveries, one for each rank.

                  ┌────────── give_back, or the claim ends ──────────────┐
                  ▼                                                      │
    write ──►  ready ──claim──►  claimed ──consume──────────────────►  done
                 └──too old, or unusable──► discarded, dead

* Deliveries of a ring come out in the order of writing; one that was given back keeps its position.
* A claim belongs to its claimant until it is ended, or its lease is over. What a claim that is over asks for is refused
  and has no effect. An unfinished delivery whose claim is over is claimed again, with ``attempts`` + 1.
* A claim has one end. A call that asks for the end that it had has the same answer as the first one, so a call that was
  interrupted is repeated.
* A delivery that was claimed ``max_deliveries`` times without success is ``dead``, with its reason: a payload that
  kills its trainers must not kill them all.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MAX_DELIVERIES = 20


class QueueDepth(msgspec.Struct, frozen=True, kw_only=True):
    """Deliveries by state, of one rank or of all. The finished ones are counted from the rings' beginning."""

    ready: int = 0  # includes those waiting for the delay of a `Batch.give_back`
    claimed: int = 0
    done: int = 0
    discarded: int = 0
    dead: int = 0
    retried: int = 0  # how often a claim was given back
    expired: int = 0  # how often a lease ended before its claim did
    aged: int = 0  # of the discarded: those whose policy was older than the claimant's ``oldest_version``

    @property
    def unfinished(self) -> int:
        """Deliveries that are still to be trained on."""
        return self.ready + self.claimed


class Failure(msgspec.Struct, frozen=True):
    """A delivery that ended without being trained on, and why."""

    ticket_id: str
    rank: int
    state: Literal["discarded", "dead"]
    attempts: int
    consumer: str
    reason: str


def too_old(version: int, oldest_version: int) -> str:
    """Return the reason of a delivery that was discarded for its age."""
    return f"policy version {version} is older than {oldest_version}"
