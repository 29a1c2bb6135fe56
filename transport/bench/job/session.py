"""A run: every case once in each repetition, so that what disturbs the machine meanwhile meets all alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from transport.bench.job import driver
from transport.bench.job.driver import JobSample
from transport.bench.job.plan import JobCase
from transport.bench.job.rows import JobRow
from transport.bench.result import OURS
from transport.bench.units import show_size
from transport.errors import LinkError, TransportError
from transport.runtime.progress import Progress


class JobOutcome(NamedTuple):
    """Rows; our own cases that failed, and peers that have no rows, each with the reason."""

    rows: list[JobRow]
    failed: list[str]
    skipped: dict[str, str]


def run(cases: Sequence[JobCase], seconds: float, repetitions: int, progress: Progress) -> JobOutcome:
    """Measure all cases; one that fails is left out from then on, a peer that is not installed as a whole."""
    samples: dict[JobCase, list[JobSample]] = {case: [] for case in cases}
    outcome = JobOutcome([], [], {})
    size = 0
    progress(0, repetitions * len(cases), 0)
    for repetition in range(repetitions):
        for at, case in enumerate(cases):
            if case in samples and case.peer not in outcome.skipped:
                try:
                    sample = driver.measure(case, seconds)
                except TransportError as error:
                    _leave_out(case, error, samples, outcome)
                else:
                    samples[case].append(sample)
                    size += sample.payloads * case.size_bytes
            progress(repetition * len(cases) + at + 1, repetitions * len(cases), size)
    outcome.rows.extend(JobRow.of(case, found) for case, found in samples.items() if found)
    return outcome


def _leave_out(
    case: JobCase, error: TransportError, samples: dict[JobCase, list[JobSample]], outcome: JobOutcome
) -> None:
    del samples[case]
    name = f"{case.name}, {show_size(case.size_bytes)}"
    if case.peer == OURS:
        outcome.failed.append(f"{name}: {error}")
    elif isinstance(error, LinkError):
        outcome.skipped[name] = str(error)
    else:  # not installed: no size of it can be measured
        outcome.skipped[case.peer] = str(error)
