"""Weights from trainers to replicas: all of a version or none of it. Users read docs/WEIGHTS.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transport.weights.engine import EngineStatistics, WeightsEngine
    from transport.weights.manager import UpdateOutcome, WeightsStatistics, WeightUpdate
    from transport.weights.offers import Offer, Offers, Taker, offer
    from transport.weights.options import EngineOptions
    from transport.weights.plan.admission import Admission
    from transport.weights.plan.steps import Limits
    from transport.weights.versions.layout import weights_checksum
    from transport.weights.worker import ReferenceWorker, Replica, RolloutWorker, TensorSource, WeightsTrainer

_HOMES = {
    "Admission": "plan.admission",
    "EngineOptions": "options",
    "EngineStatistics": "engine",
    "Limits": "plan.steps",
    "Offer": "offers",
    "Offers": "offers",
    "UpdateOutcome": "manager",
    "ReferenceWorker": "worker",
    "Replica": "worker",
    "WeightsEngine": "engine",
    "RolloutWorker": "worker",
    "TensorSource": "worker",
    "Taker": "offers",
    "WeightsTrainer": "worker",
    "WeightUpdate": "manager",
    "WeightsStatistics": "manager",
    "offer": "offers",
    "weights_checksum": "versions.layout",
}

__all__ = [  # noqa: RUF022  # in the order in which a user meets them
    "WeightUpdate",
    "UpdateOutcome",
    "WeightsStatistics",
    "Limits",
    "WeightsTrainer",
    "TensorSource",
    "Replica",
    "RolloutWorker",
    "ReferenceWorker",
    "WeightsEngine",
    "EngineOptions",
    "EngineStatistics",
    "Admission",
    "Offers",
    "Taker",
    "Offer",
    "offer",
    "weights_checksum",
]


def __getattr__(name: str) -> Any:
    """Import on first use: a topology needs no engine, and a notice no client."""
    if name not in _HOMES:
        raise AttributeError(f"module 'transport.weights' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"transport.weights.{_HOMES[name]}"), name)
