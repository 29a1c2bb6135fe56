"""A tracer provider for one test, and the spans that it has exported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, Sampler


def configured(monkeypatch: pytest.MonkeyPatch, sampler: Sampler) -> InMemorySpanExporter:
    """Give this program a provider; a real one can be set only once for each process."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    found = configured(monkeypatch, ALWAYS_ON)
    yield found
    found.shutdown()


def named(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """The last span of each name, without the prefix of all."""
    return {each.name.removeprefix("transport."): each for each in exporter.get_finished_spans()}


def linked(span: ReadableSpan) -> list[int]:
    return [link.context.span_id for link in span.links]


def id_of(span: ReadableSpan) -> int:
    return span.get_span_context().span_id
