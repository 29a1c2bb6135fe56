"""Measurements and their results: cases, samples, rows, and the report that is printed."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from transport.bench.units import show_size

OURS = "transport"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to measure.

    Attributes:
        case: what is done: read, view, read_many, or what a peer does instead.
        peer: who does it.
        checksum: whether the reader verifies the writer's checksum as part of the read.
        payloads: how many there are at once, unread or under way.
    """

    case: str
    peer: str
    wire: str
    size_bytes: int
    concurrency: int
    checksum: bool = False
    payloads: int = 64
    readers: int = 1

    @property
    def label(self) -> str:
        """Name of the case in messages."""
        return f"{self.case} over {self.wire}, {show_size(self.size_bytes)}, {self.concurrency} in flight"


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """One repetition of a case.

    Attributes:
        verified: every payload was compared, whole, with what was to be read.
        transports: (transport, device) as UCX reports them for the connections that carried the bytes.
        note: what a reader of the figures should know.
    """

    gb_per_s: float
    us_p50: float
    us_p99: float
    reads: int
    verified: bool
    transports: list[str] = []
    note: str = ""

    @property
    def count(self) -> int:
        """Payloads that were read."""
        return self.reads


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A case and the medians of its repetitions."""

    case: str
    peer: str
    wire: str
    size_bytes: int
    concurrency: int
    checksum: str
    gb_per_s: float
    us_p50: float
    us_p99: float
    verified: bool
    readers: int = 1
    reads: int = 0
    repetitions: int = 0
    transports: list[str] = []
    note: str = ""

    @classmethod
    def of(cls, case: Case, samples: Sequence[Timing]) -> Row:
        """Medians over the repetitions, each figure for itself."""

        def median(name: str) -> float:
            values: list[float] = [getattr(sample, name) for sample in samples]
            return statistics.median(values)

        return cls(
            case=case.case,
            peer=case.peer,
            wire=case.wire,
            size_bytes=case.size_bytes,
            concurrency=case.concurrency,
            checksum="on" if case.checksum else "off",
            gb_per_s=round(median("gb_per_s"), 4),
            us_p50=round(median("us_p50"), 2),
            us_p99=round(median("us_p99"), 2),
            verified=all(sample.verified for sample in samples),
            readers=case.readers,
            reads=sum(sample.reads for sample in samples),
            repetitions=len(samples),
            transports=sorted({name for sample in samples for name in sample.transports}),
            note=samples[-1].note,
        )


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON of `bench loopback`, `benchmarks/job` and of the programs in benchmarks/.

    Attributes:
        settings: the UCX settings in force, by wire.
        failed: our own cases that have no row, with the reason.
        skipped: peers, or cases of peers, that have no rows, with the reason.
        rails: bytes that each InfiniBand port of this host carried meanwhile.
    """

    machine: dict[str, Any]
    settings: dict[str, dict[str, str]]
    rows: list[Any]
    failed: list[str] = []
    skipped: dict[str, str] = {}
    rails: dict[str, int] = {}


def table(rows: Sequence[Row], skipped: dict[str, str]) -> str:
    """Return the rows as text, by size and concurrency, fastest first."""
    lines = []
    groups = sorted({(row.size_bytes, row.concurrency) for row in rows})
    for size, concurrency in groups:
        group = [row for row in rows if (row.size_bytes, row.concurrency) == (size, concurrency)]
        lines.append(f"{show_size(size)}, {concurrency} in flight")
        cells: list[tuple[str, ...]] = [("", "case", "wire", "checksum", "µs p50", "µs p99", "GB/s", "")]
        cells += [_cells(row) for row in sorted(group, key=lambda row: row.us_p50)]
        lines += [f"  {line}" for line in aligned(cells, right=frozenset((4, 5, 6)))]
        lines.append("")
    lines += [f"skipped {name}: {reason}" for name, reason in skipped.items()]
    return "\n".join(lines).rstrip()


def _cells(row: Row) -> tuple[str, ...]:
    notes = [*([] if row.verified else ["not verified"]), *([row.note] if row.note else [])]
    if row.transports:
        notes.insert(0, " ".join(row.transports))
    return (
        row.peer,
        row.case,
        row.wire,
        row.checksum,
        f"{row.us_p50:,.1f}",
        f"{row.us_p99:,.1f}",
        f"{row.gb_per_s:,.2f}",
        "; ".join(notes),
    )


def aligned(cells: Iterable[Sequence[str]], right: frozenset[int] = frozenset()) -> list[str]:
    """Rows of cells as lines with columns; the columns in ``right`` end at the same place."""
    rows = list(cells)
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
