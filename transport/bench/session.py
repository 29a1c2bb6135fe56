"""A run: every case once in each repetition, so that what disturbs the machine meanwhile meets all alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from transport.bench.result import OURS
from transport.errors import MissingDependencyError, TransportError
from transport.runtime.progress import Progress


class AnyCase(Protocol):
    """A case to measure: whose it is, its size in bytes, and its name with the size."""

    @property
    def peer(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def label(self) -> str: ...


class AnySample(Protocol):
    """Sample of one repetition: of ``count`` payloads."""

    @property
    def count(self) -> int: ...


C = TypeVar("C", bound=AnyCase)
S = TypeVar("S", bound=AnySample)


class SessionOutcome(NamedTuple):
    """Rows; our own cases that failed; and peers, or cases of peers, that have no rows, each with the reason."""

    rows: list[Any]
    failed: list[str]
    skipped: dict[str, str]


def run(
    cases: Sequence[C],
    repetitions: int,
    progress: Progress,
    measure: Callable[[C], S],
    row_of: Callable[[C, Sequence[S]], Any],
) -> SessionOutcome:
    """Measure all cases; one that fails is left out from then on, a peer that is not installed as a whole."""
    samples: dict[C, list[S]] = {case: [] for case in cases}
    outcome = SessionOutcome([], [], {})
    size = 0
    progress(0, repetitions * len(cases), 0)
    for done, case in enumerate([*cases] * repetitions, 1):
        if case in samples and case.peer not in outcome.skipped:
            try:
                sample = measure(case)
            except TransportError as error:
                del samples[case]
                if case.peer == OURS:
                    outcome.failed.append(f"{case.label}: {error}")
                else:
                    name = case.peer if isinstance(error, MissingDependencyError) else f"{case.peer}, {case.label}"
                    outcome.skipped[name] = str(error)
            else:
                samples[case].append(sample)
                size += sample.count * case.size_bytes
        progress(done, repetitions * len(cases), size)
    outcome.rows.extend(row_of(case, found) for case, found in samples.items() if found)
    return outcome
