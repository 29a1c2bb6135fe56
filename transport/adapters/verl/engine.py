"""The engine in verl's checkpoint-engine registry; importing this module registers backend "payload_transport".

actor_rollout_ref.rollout.checkpoint_engine.backend=payload_transport
actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=transport.adapters.verl.engine
actor_rollout_ref.rollout.checkpoint_manager_class=transport.adapters.verl.manager.Manager
"""

from __future__ import annotations

import importlib.util
from typing import Any

from transport.adapters.engines.checkpoint import CheckpointAdapter
from transport.errors import MissingDependencyError
from transport.runtime.installing import install
from transport.runtime.releases import require_fitting

BACKEND = "payload_transport"


def register() -> type[Any]:
    """Register the engine with verl.

    Raises MissingDependencyError if verl is of a release that does not fit, or cannot be imported.
    """
    require_fitting("verl")
    try:
        from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
    except ImportError as error:
        raise MissingDependencyError(
            f"verl's checkpoint engines cannot be imported ({error}): {install('verl')}, with the engine that it serves"
        ) from error
    bases = (CheckpointAdapter, CheckpointEngine)
    made = type("PayloadTransportCheckpointEngine", bases, {"__doc__": CheckpointAdapter.__doc__})
    registered: type[Any] = CheckpointEngineRegistry.register(BACKEND)(made)
    return registered


if importlib.util.find_spec("verl") is not None:
    register()
