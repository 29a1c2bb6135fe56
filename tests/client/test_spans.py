"""Spans of OpenTelemetry: what a write, a claim, a read and a consume record, and what a ticket carries of it."""

from __future__ import annotations

import os

import numpy as np
import pytest
from exported_spans import configured, exporter, id_of, linked, named
from helpers import NETWORK, NETWORK_WIRE, dead_port
from loopback import LOOPBACK
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON
from opentelemetry.trace import StatusCode

from transport import BlockingClient, Rollout, Schema, Settings, SharedRingBuffer, StaleSlotError, Trainer, UCXXServer
from transport.errors import RetriesExhaustedError
from transport.runtime import spans

SCHEMA = Schema.of(tokens=("int32", 4))
__all__ = ["exporter"]  # a fixture
VALUES = {"tokens": np.arange(4, dtype=np.int32)}


# --- from a write to a consume ------------------------------------------------------------------------
@pytest.mark.ucx
@pytest.mark.parametrize("wire", [NETWORK_WIRE, "mapped"])
def test_a_claim_links_to_the_writes_and_a_consume_to_its_claim(exporter: InMemorySpanExporter, wire: str) -> None:
    rings = f"rings:spans-{os.getpid()}-"
    with (
        Rollout(SCHEMA, rings, mode="thread") as rollout,
        Trainer(SCHEMA, rings, wire={wire}) as trainer,  # type: ignore[arg-type]
        trace.get_tracer("test").start_as_current_span("step") as of_step,
    ):
        rollout.write(VALUES, metadata={"prompt": 3})
        first = named(exporter)["write"]
        rollout.write_many_to_buffer([VALUES, VALUES])
        second = named(exporter)["write"]
        batch = trainer.take(3, timeout_s=20, fill_s=20)
        assert batch is not None and len(batch) == 3
        assert batch.metadata == [{"prompt": 3}, {}, {}]
        batch.consume()
        assert batch.accepted.all()
    found = named(exporter)
    assert (first.attributes or {})["payloads"] == 1 and (second.attributes or {})["payloads"] == 2
    assert set(linked(found["claim"])) == {id_of(first), id_of(second)}
    assert linked(found["consume"]) == [id_of(found["claim"])]
    assert (found["claim"].attributes or {})["payloads"] == (found["consume"].attributes or {})["payloads"] == 3
    for name in ("write", "claim", "consume"):
        assert found[name].parent is not None and found[name].parent.span_id == of_step.get_span_context().span_id


def test_a_take_that_gets_nothing_is_no_span(exporter: InMemorySpanExporter) -> None:
    with Trainer(SCHEMA, f"rings:spans-{os.getpid()}-") as trainer:
        assert trainer.take(1) is None
    assert exporter.get_finished_spans() == ()


# --- what a ticket carries ------------------------------------------------------------------------------
def test_only_sampled_writes_are_in_their_tickets(monkeypatch: pytest.MonkeyPatch) -> None:
    rings = f"rings:spans-{os.getpid()}-"
    with Rollout(SCHEMA, rings, mode="thread", drain_s=0) as rollout:
        assert spans.CONTEXT not in rollout.write(VALUES).metadata  # without a provider
        exporter = configured(monkeypatch, ALWAYS_OFF)
        assert spans.CONTEXT not in rollout.write(VALUES).metadata
        assert exporter.get_finished_spans() == ()
        exporter = configured(monkeypatch, ALWAYS_ON)
        ticket = rollout.write(VALUES)
        context = named(exporter)["write"].get_span_context()
    assert ticket.metadata == {
        spans.CONTEXT: f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    }
    assert ticket.users_metadata == {}


def test_a_ticket_without_room_for_the_context_goes_without(exporter: InMemorySpanExporter) -> None:
    full = {"text": "x" * 1000}
    with Rollout(SCHEMA, f"rings:spans-{os.getpid()}-", mode="thread", drain_s=0) as rollout:
        assert rollout.write(VALUES, metadata=full).metadata == full
        (ticket,) = rollout.write_many_to_buffer([VALUES], metadata=full)
    assert ticket.metadata == full
    assert [each.name for each in exporter.get_finished_spans()] == ["transport.write"] * 2


def test_a_context_that_is_none_links_to_nothing(exporter: InMemorySpanExporter) -> None:
    assert spans.links_of([{spans.CONTEXT: "00-else-01"}, {spans.CONTEXT: 7}, {}]) == []


# --- reads by ticket --------------------------------------------------------------------------------------
@pytest.mark.ucx
def test_a_read_over_a_wire_has_its_phases_and_links_to_the_write(exporter: InMemorySpanExporter) -> None:
    schema = Schema.of(data=("uint8", 16 << 20))
    with (
        Rollout(schema, f"rings:spans-{os.getpid()}-", slots=2, mode="thread", drain_s=0) as rollout,
        BlockingClient(schemas=[schema], wire=NETWORK) as client,
    ):
        ticket = rollout.write({"data": np.zeros(16 << 20, np.uint8)})
        client.read(ticket).release()
    found = named(exporter)
    assert set(found) == {"write", "connect", "transfer", "verify", "read"}
    assert dict(found["read"].attributes or {}) == {
        "payload": ticket.id, "rank": 0, "bytes": 16 << 20, "wire": NETWORK_WIRE
    }  # fmt: skip
    assert linked(found["read"]) == [id_of(found["write"])]
    phases = [found[name] for name in ("connect", "transfer", "verify")]
    assert {each.parent.span_id if each.parent else None for each in phases} == {id_of(found["read"])}
    times = [time for each in phases for time in (each.start_time or 0, each.end_time or 0)]
    assert times[1::2] == sorted(times[1::2])  # a begin is reckoned from a monotonic clock


@pytest.mark.ucx
def test_failures_and_pauses_are_shown(exporter: InMemorySpanExporter) -> None:
    settings = Settings(backoff_first_s=0.01, backoff_most_s=0.02)
    with dead_port() as port, SharedRingBuffer.create(slots=1, slot_bytes=64) as ring:
        ring.native.addresses = LOOPBACK
        ring.native.set_ports((port,))
        ticket = ring.write({"a": 1})
        with BlockingClient(wire=NETWORK, settings=settings) as client, pytest.raises(RetriesExhaustedError):
            client.read(ticket)
    found = named(exporter)
    assert found["read"].status.status_code is StatusCode.ERROR
    assert [event.attributes["exception.type"] for event in found["read"].events if event.attributes] == [
        "transport.errors.RetriesExhaustedError"
    ]
    assert "back_off" in found


def test_a_refused_read_of_a_mapped_ring_is_an_error(exporter: InMemorySpanExporter) -> None:
    with SharedRingBuffer.create(slots=2, slot_bytes=64) as ring, BlockingClient() as client:
        ticket = ring.write({"a": 1})
        client.read(ticket).release()
        with pytest.raises(StaleSlotError):
            client.read(ticket)
    codes = [each.status.status_code for each in exporter.get_finished_spans()]
    assert codes == [StatusCode.UNSET, StatusCode.ERROR]


@pytest.mark.ucx
def test_small_payloads_of_one_message_are_one_read(exporter: InMemorySpanExporter) -> None:
    with (
        SharedRingBuffer.create(SCHEMA, slots=4) as ring,
        UCXXServer(ring, mode="thread"),
        BlockingClient(schemas=[SCHEMA], wire=NETWORK) as client,
    ):
        tickets = [ring.write(VALUES) for _ in range(4)]
        for outcome in client.read_many(tickets):
            outcome.payload.release()  # type: ignore[union-attr]
    assert (named(exporter)["read"].attributes or {})["payloads"] == 4
