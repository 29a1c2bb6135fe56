"""Cases, samples and a report as tests of the benchmark make them up."""

from __future__ import annotations

from typing import Any

from transport.bench.result import BenchReport, Case, Row, Timing


def case(**changed: Any) -> Case:
    """A small read over a mapped ring, but for some."""
    usual = {"case": "read", "peer": "transport", "wire": "mapped", "size_bytes": 4096, "concurrency": 1, "payloads": 4}
    return Case(**{**usual, **changed})


def sample(gb_per_s: float, us: float = 1.0, **more: Any) -> Timing:
    """One repetition."""
    return Timing(gb_per_s=gb_per_s, us_p50=us, us_p99=us, reads=1, **{"verified": True, **more})


def report() -> BenchReport:
    """Made-up rows of every wire and kind."""
    rows = [
        Row.of(case(case=what, peer=peer, wire=wire, size_bytes=size, concurrency=many), [sample(size / 1e6, size / 9)])
        for what, peer, wire in (
            ("read", "transport", "tcp"),
            ("view", "transport", "mapped"),
            ("read_many", "transport", "shm"),
            ("read_many_1000", "transport", "tcp"),
            ("read", "pyzmq", "tcp"),
            ("copy", "memcpy", "memory"),
            ("ask", "ucx_floor", "shm"),
        )
        for size in (65536, 1 << 20)
        for many in (1, 8)
    ]
    about = {"date": "2026-01-01", "cpu": "a", "cores": 2, "kernel": "6", "python": "3", "versions": {}}
    about["versions"] = {"payload-transport": "1", "ucx": "1.21"}
    return BenchReport(machine=about, settings={}, rows=rows, skipped={"ray": "not installed"})
