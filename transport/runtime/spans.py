"""Spans of OpenTelemetry, for programs that have configured it: writes, claims, reads, consumes, updates of weights.

    opentelemetry.trace.set_tracer_provider(TracerProvider(sampler=TraceIdRatioBased(0.01)))

The provider decides what is sampled. The context of a sampled write travels in the metadata of its ticket; claims and
reads of the payload link to it. A program without a provider pays a look-up in a dict for each call.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from transport.group import OWN

if TYPE_CHECKING:
    from opentelemetry.trace import Link, Span, Tracer

CONTEXT: Final = f"{OWN}trace"  # in metadata: the write's context, as the header traceparent has it
API: Final = "opentelemetry.trace"

_known: tuple[object, Tracer] | None = None  # the provider that was asked last, and its tracer


def tracer() -> Tracer | None:
    """Return the tracer of the program's provider; None where it has set none."""
    global _known
    trace = sys.modules.get(API)
    if trace is None:
        return None
    provider = trace.get_tracer_provider()
    if _known is None or _known[0] is not provider:
        if isinstance(provider, trace.ProxyTracerProvider):
            return None
        _known = provider, provider.get_tracer("transport")
    return _known[1]


@contextmanager
def span(name: str, kind: str = "INTERNAL", links: Iterable[Link] = (), **about: Any) -> Iterator[Span | None]:
    """Have the block be a span, and parent of the spans begun in it. Yields None without a provider."""
    found = tracer()
    if found is None:
        yield None
        return
    from opentelemetry.trace import SpanKind

    with found.start_as_current_span(name, kind=SpanKind[kind], links=list(links), attributes=about) as begun:
        yield begun


def ended(name: str, begun: float, *, kind: str = "INTERNAL", links: Iterable[Link] = (), **about: Any) -> Span | None:
    """Record a span that began at ``begun`` by ``time.monotonic()`` and ends now."""
    found = tracer()
    if found is None:
        return None
    from opentelemetry.trace import SpanKind

    now = time.time_ns()
    start = now - int((time.monotonic() - begun) * 1e9)
    done = found.start_span(name, kind=SpanKind[kind], links=list(links), attributes=about, start_time=start)
    done.end(now)
    return done


def with_context(metadata: Mapping[str, Any] | None, of: Span) -> Mapping[str, Any] | None:
    """Return metadata that carries the context of a span, where that is sampled."""
    if not of.get_span_context().trace_flags.sampled:
        return metadata
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, set_span_in_context(of))
    return {**(metadata or {}), CONTEXT: carrier["traceparent"]}


def links_of(metadata: Iterable[Mapping[str, Any]]) -> list[Link]:
    """Return a link to each write whose context the metadata of these tickets carries."""
    if tracer() is None:
        return []
    from opentelemetry.trace import get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    found = {text for each in metadata if isinstance(text := each.get(CONTEXT), str)}
    extract = TraceContextTextMapPropagator().extract
    return [link for text in sorted(found) for link in links_to(get_current_span(extract({"traceparent": text})))]


def links_to(of: Span | None) -> list[Link]:
    """Return a link to a span; empty for None and for a span without an id."""
    if of is None or not of.get_span_context().is_valid:
        return []
    from opentelemetry.trace import Link

    return [Link(of.get_span_context())]
