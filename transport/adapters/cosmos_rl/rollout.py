"""The rollout's side of the adapter for cosmos-rl: the producer of a PayloadContext. Use `cosmos_rl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from cosmos_rl.utils.payload_transport import PayloadContext, TensorLayout, WritablePayload
from cosmos_rl.utils.payload_transport.pack import normalize_trajectory
from cosmos_rl.utils.trajectory import EPISODE_LENGTH, REWARDS, VARLEN_FIELDS, episode_length
from cosmos_rl.utils.trajectory import TensorSpec as CosmosSpec

from transport.adapters.cosmos_rl.policy import NAME, PREFIX
from transport.packer.rollout import UCXXRolloutMixin
from transport.schema import Schema, TensorSpec
from transport.ticket import Ticket


def ring_schema(specs: Sequence[Any]) -> Schema:
    """cosmos-rl's TensorSpecs as the schema of a ring: its sequence fields (`VARLEN_FIELDS`) are ragged."""
    return Schema(
        tuple(
            TensorSpec(each.name, np.dtype(each.dtype).name, tuple(map(int, each.shape)), each.name in VARLEN_FIELDS)
            for each in specs
        )
    )


def payload_context(schema: Sequence[Any], *, timeout_s: float | None = None, **options: Any) -> Any:
    """Return a cosmos-rl PayloadContext over a new ring of this process. Close it at the end.

    Args:
        schema: cosmos-rl's TensorSpecs; its sequence fields (`VARLEN_FIELDS`) go with their used rows only.
        timeout_s: how long `publish_tensors` waits while the ring is full; None: until there is room.
        options: of `UCXXRolloutMixin.setup_ucxx`: slots, readers, server and so on.
    """
    producer = TicketProducer(schema, timeout_s, options)
    return PayloadContext(NAME, producer, producer.default_layout)


def end_publishing(engine: Any, timeout: float) -> None:
    """Close the producer of a rollout engine's context, before the context itself is closed.

    A context has its lock while it publishes. Behind a full ring its close would wait until a trainer reads; the end of
    the ring ends that publishing instead, with ClosedError.
    """
    producer = getattr(context_of(engine), "_producer", None)
    if isinstance(producer, TicketProducer):
        producer.close(timeout=timeout)


def context_of(engine: Any) -> Any:
    """Return what a rollout engine keeps as its ``payload_context``, as cosmos-rl looks for it; None: nothing."""
    return getattr(engine, "payload_context", None) or getattr(engine, "_payload_context", None)


class TicketProducer(UCXXRolloutMixin):
    """The producer of a PayloadContext: writes trajectories to the ring and returns references with their tickets."""

    def __init__(self, schema: Sequence[Any], timeout_s: float | None, options: Mapping[str, Any]) -> None:
        self._specs = list(schema)
        self._timeout_s = timeout_s
        self.default_layout = TensorLayout.compile(self._specs)
        self._published = 0
        self.setup_ucxx(ring_schema(self._specs), **options)

    def register_layout(self, layout: Any) -> None:
        """ValueError for another layout: the ring has one schema."""
        if layout != self.default_layout:
            raise ValueError(
                "layout mismatch: this producer's ring has another layout; make a payload_context for this one"
            )

    def publish(
        self, trajectory: Mapping[str, Any], *, layout: Any = None, copy_policy: str = "batched"
    ) -> dict[str, Any]:
        """Write one trajectory: normalised as cosmos-rl does it, its sequences without padding.

        copy_policy: ignored; a payload is one copy.
        Raises ValueError if the trajectory does not fit the schema, and the errors of `write_to_buffer`, such as
        RingFullError.
        """
        length = episode_length(trajectory, self._specs)
        used = [
            CosmosSpec((length, *each.shape[1:]), each.dtype, each.name) if each.name in VARLEN_FIELDS else each
            for each in self._specs
        ]
        given = {
            name: value[:length] if name in VARLEN_FIELDS and value is not None else value
            for name, value in trajectory.items()
        }
        ticket = self.write_to_buffer(normalize_trajectory(given, used, length), timeout_s=self._timeout_s)
        return self._reference(ticket, given.get(REWARDS), length)

    def acquire(self, *, layout: Any = None) -> Any:
        """Return the slot's own memory as tensors to fill, each of its full length. Raises what `reserve` raises."""
        full = {each.name: each.shape[0] for each in self._specs if each.name in VARLEN_FIELDS}
        lease = self.ring.reserve(full, timeout_s=self._timeout_s)
        try:
            storage = torch.from_numpy(np.asarray(lease.memory))
            views = {name: torch.from_numpy(array) for name, array in lease.arrays.items()}
            return WritablePayload(
                owner=self,
                layout=self.default_layout,
                storage=storage,
                tensors=views,
                opaque=lease,
                on_abandon=lease.abort,
            )
        except BaseException:  # an interrupt, too: the slot would stay taken
            lease.abort()
            raise

    def publish_storage(self, payload: Any, *, ready_event: Any = None) -> dict[str, Any]:
        """Publish a payload from `acquire`, after ``ready_event``."""
        with payload._submit(self) as lease:
            if ready_event is not None:
                ready_event.synchronize()
            length = episode_length(payload.tensors, self._specs)
            rewards = payload.tensors.get(REWARDS)
            rewards = None if rewards is None else rewards[:length].clone()
        return self._reference(lease.ticket, rewards, length)

    def _reference(self, ticket: Ticket, rewards: Any, length: int) -> dict[str, Any]:
        self._published += 1
        rewards = [] if rewards is None else rewards
        return {
            "completion": PREFIX + ticket.to_text(),
            REWARDS: rewards.tolist() if hasattr(rewards, "tolist") else list(rewards),
            EPISODE_LENGTH: length,
        }

    def metrics(self) -> dict[str, int]:
        """Counters of the ring, by the names that cosmos-rl logs; none after `close`."""
        if self._ucxx_ring is None:
            return {}
        look = self.ring_statistics()
        return {
            "writes_total": self._published,
            "reads_total": look.consumes,
            "drops_total": look.overwrites,
            "ready_slots": look.ready,
            "max_slots": self.ring.slot_count,
        }

    def close(self, timeout: float = 5.0) -> None:
        """Stop serving, after waiting at most ``timeout`` seconds for unread payloads. Idempotent."""
        self.cleanup_ucxx(drain_s=timeout)
