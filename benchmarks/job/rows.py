"""What comes out of `benchmarks/job`: rows, and the table with our figures as multiples of the peers'."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from benchmarks.job.driver import JobSample
from benchmarks.job.plan import JobCase
from transport.bench.result import OURS, BenchReport, aligned
from transport.bench.units import show_size


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """A case and the medians of its repetitions.

    Attributes:
        wire, layout: of a peer the wire only.
        payloads_per_s: from the first call of write until the last payload is consumed and verified.
        payloads_per_s_range: of the repetitions, the least and the greatest.
        ms_p50, ms_p99: from the call of write to consumed.
        cpu_us_per_payload: of writers and trainers together.
        helpers_cpu_us_per_payload: of what runs beside them: listeners, a server, a cluster.
        lost, duplicated: payloads of all repetitions.
        mode: "throughput", or "idle": one payload at a time, with the trainer waiting.
    """

    peer: str
    wire: str
    layout: str
    size_bytes: int
    writers: int
    trainers: int
    payloads_per_s: float
    gb_per_s: float
    ms_p50: float
    ms_p99: float
    cpu_us_per_payload: float
    lost: int
    duplicated: int
    payloads_per_s_range: tuple[float, float]
    helpers_cpu_us_per_payload: float
    batch: int
    mode: str
    payloads: int
    repetitions: int

    @classmethod
    def of(cls, case: JobCase, samples: Sequence[JobSample]) -> JobRow:
        """Medians over the repetitions, each figure for itself."""
        rates = [(sample.payloads - sample.lost) / sample.seconds for sample in samples]
        rate = statistics.median(rates)
        return cls(
            peer=case.peer,
            wire=case.wire,
            layout=case.layout,
            size_bytes=case.size_bytes,
            writers=case.writers,
            trainers=case.trainers,
            payloads_per_s=round(rate, 1),
            gb_per_s=round(rate * case.size_bytes / 1e9, 4),
            ms_p50=round(statistics.median(sample.ms_p50 for sample in samples), 3),
            ms_p99=round(statistics.median(sample.ms_p99 for sample in samples), 3),
            cpu_us_per_payload=round(statistics.median(s.cpu_s / s.payloads for s in samples) * 1e6, 2),
            lost=sum(sample.lost for sample in samples),
            duplicated=sum(sample.duplicated for sample in samples),
            payloads_per_s_range=(round(min(rates), 1), round(max(rates), 1)),
            helpers_cpu_us_per_payload=round(statistics.median(s.helpers_cpu_s / s.payloads for s in samples) * 1e6, 2),
            batch=1 if case.idle else case.batch,
            mode="idle" if case.idle else "throughput",
            payloads=sum(sample.payloads for sample in samples),
            repetitions=len(samples),
        )

    @property
    def name(self) -> str:
        """Without the size: wire and layout for ours, a peer by its name."""
        if self.peer != OURS:
            return self.peer
        return self.wire + (f", {self.layout}" if self.layout != "list" else "")


_HEADINGS = ("", "payloads/s", "least to most", "GB/s", "ms p50", "ms p99", "CPU µs", "beside µs", "lost", "twice")


def table(report: BenchReport) -> str:
    """By size, fastest first, and below it what ours are to each peer."""
    lines = []
    for size in sorted({row.size_bytes for row in report.rows}):
        rows = [row for row in report.rows if row.size_bytes == size]
        one = rows[0]
        how = (
            "one payload at a time, the trainer waiting"
            if one.mode == "idle"
            else f"written and claimed {one.batch} at a time"
        )
        lines.append(f"{show_size(size)}, {_some(one.writers, 'writer')} to {_some(one.trainers, 'trainer')}, {how}")
        order = sorted(rows, key=lambda row: row.ms_p50 if one.mode == "idle" else -row.payloads_per_s)
        cells = [_HEADINGS, *(_cells(row) for row in order)]
        lines += [f"  {line}" for line in aligned(cells, right=frozenset(range(1, len(_HEADINGS))))]
        lines += [f"  {line}".rstrip() for line in _ratios(rows)]
        lines.append("")
    lines += [f"skipped {name}: {reason}" for name, reason in report.skipped.items()]
    return "\n".join(lines).rstrip()


def _some(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _cells(row: JobRow) -> tuple[str, ...]:
    least, most = row.payloads_per_s_range
    return (
        f"transport {row.name}" if row.peer == OURS else row.peer,
        f"{row.payloads_per_s:,.0f}",
        f"{least:,.0f} to {most:,.0f}",
        f"{row.gb_per_s:,.3f}",
        f"{row.ms_p50:,.2f}",
        f"{row.ms_p99:,.2f}",
        f"{row.cpu_us_per_payload:,.0f}",
        f"{row.helpers_cpu_us_per_payload:,.0f}",
        str(row.lost),
        str(row.duplicated),
    )


def _ratios(rows: Sequence[JobRow]) -> list[str]:
    """Payloads a second of each of ours as a multiple of each peer's; idle, how many times sooner."""
    peers = [row for row in rows if row.peer != OURS]
    ours = [row for row in rows if row.peer == OURS]
    if not peers or not ours:
        return []
    idle = rows[0].mode == "idle"

    def ratio(mine: JobRow, theirs: JobRow) -> str:
        value = theirs.ms_p50 / mine.ms_p50 if idle else mine.payloads_per_s / theirs.payloads_per_s
        return f"{value:.3g}×"

    heading = ("times sooner than" if idle else "times as many as", *(row.peer for row in peers))
    cells = [heading, *((f"transport {row.name}", *(ratio(row, each) for each in peers)) for row in ours)]
    return ["", *aligned(cells, right=frozenset(range(1, len(heading))))]
