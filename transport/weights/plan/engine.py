"""The interface for sending weights from trainers to replicas, with the method names of verl's checkpoint engines.

A group lives for one update: `prepare` on every member, `build_topology` once, `init_process_group` on every member,
`send_weights` on the trainers while the replicas `receive_weights`, `finalize` on every member, in any state.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Iterable
from typing import Any

from transport.weights.plan.steps import Proof

Weights = Iterable[tuple[str, Any]] | AsyncIterator[tuple[str, Any]]
Metadata = dict[str, Any]


class WeightEngine(abc.ABC):
    """One member's end. All methods belong to one loop."""

    @abc.abstractmethod
    async def prepare(self) -> Metadata:
        """Prepare for an update; returns what others need to connect to this member, as plain values."""

    @classmethod
    @abc.abstractmethod
    def build_topology(
        cls, actor_n: int, rollout_n: int, metadata: list[Metadata]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Keyword arguments of `init_process_group`: of the trainers, of the replicas, a list entry for each.

        ``metadata`` are the answers of `prepare`, trainers first.
        """

    @abc.abstractmethod
    async def init_process_group(self, **arguments: Any) -> None:
        """Connect to the other members; returns when all members that this one depends on are connected."""

    @abc.abstractmethod
    async def send_weights(self, weights: Weights, global_steps: int) -> Proof | None:
        """Send all tensors as version ``global_steps``; returns when they were received.

        A trainer that only helps to produce the tensors does not send: it drains ``weights`` and returns None.
        """

    @abc.abstractmethod
    def receive_weights(self, global_steps: int) -> AsyncIterator[tuple[str, Any]]:
        """The tensors of version ``global_steps``, once all of them are received and proven."""

    @abc.abstractmethod
    def get_weights(self) -> AsyncIterator[tuple[str, Any]]:
        """The tensors of the complete version that this member holds; nothing if it holds none."""

    @abc.abstractmethod
    async def finalize(self) -> None:
        """Leave the group, keep the complete version. Valid in every state; idempotent."""
