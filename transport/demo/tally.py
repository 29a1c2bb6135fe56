"""What a rank of the demo has trained on, and what it reports of that. The same for processes and for Ray's actors."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from transport.client.payload import ReceivedPayload
from transport.demo.plan import BATCH, Plan
from transport.demo.worker import Progress, TrainerDone


class Tally(msgspec.Struct, kw_only=True):
    """Counts of one rank, of a run that it goes on from included where that was given."""

    episodes: list[int] = []  # in the order in which they were trained on
    returns: list[float] = []  # of these
    bytes_by_wire: dict[str, int] = {}
    staleness: int = 0  # sum over the episodes
    updates: int = 0

    def add(self, payloads: Sequence[ReceivedPayload], version: int) -> None:
        """Count a batch that is to improve this version of the policy."""
        for payload in payloads:
            self.episodes.append(episode_of(payload))
            self.returns.append(float(str(payload.metadata["return"])))
            self.bytes_by_wire[payload.wire] = self.bytes_by_wire.get(payload.wire, 0) + payload.ticket.size
            self.staleness += version - int(payload["policy_version"])

    def progress(self) -> Progress:
        """As of now."""
        return Progress(
            consumed=len(self.episodes),
            bytes=sum(self.bytes_by_wire.values()),
            wires=sorted(self.bytes_by_wire),
            mean_return=_mean(self.returns[-BATCH:]),
        )

    def done(self, plan: Plan, *, duplicates: int = 0, stale: int = 0, retries: int = 0) -> TrainerDone:
        """At the end, with what else its reads have counted."""
        consumed = len(self.episodes) - plan.trained_before
        return TrainerDone(
            consumed=consumed,
            duplicates=duplicates + len(self.episodes) - len(set(self.episodes)),
            stale=stale,
            retries=retries,
            bytes_by_wire=self.bytes_by_wire,
            mean_return_first=_mean(self.returns[: plan.tenth]),
            mean_return_last=_mean(self.returns[-plan.tenth :]),
            mean_staleness=self.staleness / max(1, consumed),
            updates=self.updates,
        )


def episode_of(payload: ReceivedPayload) -> int:
    """Its number in the run."""
    return int(str(payload.metadata["episode"]))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
