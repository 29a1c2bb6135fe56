"""The floor of reads: the same work as a case of ours, by a program of its own on the same UCX library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks.peers import floor, loopback, registry
from transport.bench.result import Case
from transport.errors import MissingDependencyError

pytestmark = pytest.mark.ucx


def test_the_floor_hashes_where_our_reads_verify() -> None:
    found = loopback.cases(registry.chosen("ucx_floor"), [1 << 20], [8], ["mapped", "tcp"], [False, True])
    assert [(each.case, each.wire, each.checksum) for each in found] == [("ask", "tcp", False), ("ask", "tcp", True)]


def test_the_program_gets_the_case_and_the_settings_of_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Sequence[str], Mapping[str, str]]] = []

    def run(command: Sequence[str], environment: Mapping[str, str], _: float) -> bytes:
        seen.append((command, environment))
        return b'{"gb_per_s": 1.5, "us_p50": 2.0, "us_p99": 3.0, "reads": 4, "verified": true}'

    monkeypatch.setattr(floor, "program", lambda: Path("/floor"))
    asked = Case(
        case="ask", peer="ucx_floor", wire="tcp", size_bytes=1 << 20, concurrency=32, checksum=True, payloads=128
    )
    assert floor.measure(asked, 0.5, run).gb_per_s == 1.5
    ((command, environment),) = seen
    assert command == ["/floor", "1048576", "32", "0.5", "128", "8", "1"]  # not more connections than a client has
    assert environment["UCX_TLS"] == "tcp,self"
    assert environment["UCX_RNDV_THRESH"] == "9m"


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
