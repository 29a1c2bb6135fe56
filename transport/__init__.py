"""Payload transport for reinforcement-learning post-training: from rollout memory to trainer memory, over UCX.

    with Rollout(SCHEMA) as rollout:                  # rollout worker
        rollout.write({"obs": obs, "reward": reward}, version=7)

    with Trainer(SCHEMA) as trainer:                  # trainer
        for batch in trainer.batches(64):
            learn(batch["obs"], batch["reward"])
            batch.consume()

Nothing below imports ucxx before an endpoint is needed, so that schemas, tickets, rings and same-host reads work
without it. docs/developers/DESIGN.md has the order in which to read the files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transport.claims.open import open_rings
    from transport.claims.rings import FoundRings
    from transport.client.blocking import BlockingClient
    from transport.client.client import UCXXClient
    from transport.client.payload import Payload, ReadOutcome
    from transport.errors import StaleSlotError, TransportError
    from transport.packer.mixin import UCXXDataPackerMixin
    from transport.packer.options import ClientOptions, RingOptions, ServerOptions
    from transport.packer.rollout import Rollout, UCXXRolloutMixin
    from transport.ring.buffer import SharedRingBuffer
    from transport.ring.states import SlotState
    from transport.schema import Optional, Schema, TensorSpec, UpTo
    from transport.server.server import UCXXServer
    from transport.settings import Settings
    from transport.ticket import Ticket
    from transport.training.batch import Batch
    from transport.training.mesh import Mesh
    from transport.training.trainer import Trainer

_HOMES = {
    "Batch": "training.batch",
    "BlockingClient": "client.blocking",
    "ClientOptions": "packer.options",
    "FoundRings": "claims.rings",
    "Mesh": "training.mesh",
    "Optional": "schema",
    "Payload": "client.payload",
    "ReadOutcome": "client.payload",
    "RingOptions": "packer.options",
    "Rollout": "packer.rollout",
    "Schema": "schema",
    "ServerOptions": "packer.options",
    "Settings": "settings",
    "SharedRingBuffer": "ring.buffer",
    "SlotState": "ring.states",
    "StaleSlotError": "errors",
    "TensorSpec": "schema",
    "Ticket": "ticket",
    "Trainer": "training.trainer",
    "TransportError": "errors",
    "UCXXClient": "client.client",
    "UCXXDataPackerMixin": "packer.mixin",
    "UCXXRolloutMixin": "packer.rollout",
    "UCXXServer": "server.server",
    "UpTo": "schema",
    "open_rings": "claims.open",
}

__all__ = [  # noqa: RUF022  # in the order in which a user meets them
    "Schema",
    "TensorSpec",
    "UpTo",
    "Optional",
    "SharedRingBuffer",
    "SlotState",
    "Ticket",
    "UCXXServer",
    "UCXXClient",
    "BlockingClient",
    "ReadOutcome",
    "Rollout",
    "Trainer",
    "Batch",
    "Payload",
    "Mesh",
    "open_rings",
    "FoundRings",
    "UCXXRolloutMixin",
    "UCXXDataPackerMixin",
    "RingOptions",
    "ServerOptions",
    "ClientOptions",
    "Settings",
    "TransportError",
    "StaleSlotError",
]


def __getattr__(name: str) -> Any:
    """Import on first use: a listener process must not pay for the packer, nor a schema for uvloop."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'transport' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"transport.{home}"), name)
