"""Spans of an update of the weights: one of the whole, and in it one for each step."""

from __future__ import annotations

import pytest
from exported_spans import exporter, id_of, named
from helpers import asynchronous
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from weights_engines import engines
from weights_members import Source

from transport.weights import WeightsTrainer
from transport.weights.manager import WeightUpdate
from transport.weights.plan.steps import UpdateStep
from transport.weights.worker import ReferenceWorker, Replica

__all__ = ["exporter"]  # a fixture

pytestmark = pytest.mark.ucx


@asynchronous
async def test_an_update_is_a_span_with_one_for_each_step(exporter: InMemorySpanExporter) -> None:
    async with engines("a", shape="star") as made:
        manager = WeightUpdate([WeightsTrainer(made[0], Source())], [Replica(made[1], ReferenceWorker())])  # type: ignore[list-item]
        await manager.update(1)
    found = named(exporter)
    update = found.pop("weights.update")
    steps = [each for name, each in found.items() if name.startswith("weights.")]
    expected = {
        f"transport.weights.{each}"
        for each in (UpdateStep.TRANSFER, UpdateStep.PAUSE, UpdateStep.LOAD, UpdateStep.RESUME)
    }
    assert expected <= {each.name for each in steps}
    assert {each.parent.span_id for each in steps if each.parent} == {id_of(update)}
    assert (found["weights.load"].attributes or {})["members"] == ("replica 0",)
