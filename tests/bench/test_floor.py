"""The floor of reads: the same work as a case of ours, by a program of its own on the same UCX library."""

from __future__ import annotations

import pytest

from benchmarks.peers import floor
from transport.bench.result import Case
from transport.errors import MissingDependencyError

pytestmark = pytest.mark.ucx


@pytest.mark.nightly
@pytest.mark.slow
def test_the_floor_reads_and_verifies() -> None:
    asked = Case(
        case="ask", peer="ucx_floor", wire="tcp", size_bytes=1 << 16, concurrency=8, checksum=True, payloads=16
    )
    try:
        floor.program()
    except MissingDependencyError as missing:
        pytest.skip(str(missing))
    found = floor.measure(asked, 0.05)
    assert found.verified
    assert found.reads >= 16
    assert 0 < found.us_p50 <= found.us_p99
