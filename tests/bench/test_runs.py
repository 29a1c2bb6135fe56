"""Short measurements that are really made: readers, peers, rings. No figure is compared with another."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import msgspec
import pytest
from bench_cases import case
from benchmark_programs import benchmark_module

from benchmarks.peers import loopback as peers_loopback
from benchmarks.peers import registry
from transport.bench import checkout, session
from transport.bench.reads import loopback
from transport.bench.result import Case, Row, Timing
from transport.cli import run
from transport.errors import LinkError, MissingDependencyError
from transport.runtime.progress import silent

SHORT = ("--seconds", "0.01", "--repetitions", "1")
ROW_KEYS = ("case", "peer", "wire", "size_bytes", "concurrency", "checksum", "gb_per_s", "us_p50", "us_p99", "verified")


# --- short real ones ------------------------------------------------------------------------------
@pytest.mark.nightly
@pytest.mark.ucx
def test_loopback_measures_us_and_peers_and_says_who_was_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "ENVIRONMENTS", tmp_path)
    peers = "memcpy,socket,pyzmq"
    arguments = ["--sizes", "4KiB", "--concurrency", "1", "--wire", "tcp", "--peers", peers, "--json", "-"]
    assert run(["bench", "loopback", *arguments, *SHORT]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"cpu", "cores", "kernel", "python", "versions"} <= report["machine"].keys()
    assert report["settings"]["tcp"]["TLS"] == "tcp,self"
    assert report["skipped"] == {"pyzmq": "not installed; run: make bench-peers"}
    rows = {row["peer"]: row for row in report["rows"]}
    assert set(rows) == {"transport", "memcpy", "socket"}
    for row in rows.values():
        assert set(ROW_KEYS) <= row.keys()
        assert (row["size_bytes"], row["concurrency"], row["repetitions"]) == (4096, 1, 1)
        assert row["verified"]
        assert 0 < row["us_p50"] <= row["us_p99"]
        assert row["reads"] > 0
    assert rows["transport"]["checksum"] == "on"
    assert any(name.startswith("tcp/") for name in rows["transport"]["transports"])


@pytest.mark.nightly
@pytest.mark.ucx
def test_a_mapped_ring_is_read_and_viewed_and_the_result_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--sizes", "1KiB", "--concurrency", "1", "--wire", "mapped", "--json", str(path)]
    assert run(["bench", "loopback", *arguments, *SHORT]) == 0
    shown = capsys.readouterr().out
    assert "1 KiB, 1 in flight" in shown
    rows = json.loads(path.read_text())["rows"]
    assert [(row["case"], row["wire"], row["checksum"], row["verified"]) for row in rows] == [
        ("read", "mapped", "off", True),
        ("view", "mapped", "off", True),
    ]


@pytest.mark.nightly
@pytest.mark.ucx
def test_several_readers_read_every_payload() -> None:
    measured = loopback.measure(case(case="view", readers=2, payloads=4), seconds=1e-6)
    assert measured.verified
    assert measured.reads % (2 * 4) == 0


@pytest.mark.nightly
@pytest.mark.ucx
def test_read_many_is_measured_by_batches() -> None:
    measured = loopback.measure(case(case="read_many", concurrency=8, payloads=32), seconds=1e-6)
    assert measured.verified
    assert measured.reads == 1


@pytest.mark.nightly
def test_a_peer_that_fails_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    # this Python has no zmq: a peer whose environment is broken
    monkeypatch.setitem(registry.PEERS, "pyzmq", msgspec.structs.replace(registry.PEERS["pyzmq"], environment=""))
    cases = peers_loopback.cases([registry.PEERS["pyzmq"]], [1024], [1, 8], ["tcp"])
    outcome = session.run(cases, 1, silent, lambda case: peers_loopback.measure(case, 0.01), Row.of)
    assert outcome.rows == outcome.failed == []
    assert set(outcome.skipped) == {f"pyzmq, read over tcp, 1 KiB, {number} in flight" for number in (1, 8)}
    assert all(why.startswith("status 1: ModuleNotFoundError") for why in outcome.skipped.values())


@pytest.mark.nightly
def test_our_own_failure_is_reported_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Case, __: float) -> Timing:
        raise LinkError("cut off")

    monkeypatch.setattr(loopback, "measure", fail)
    arguments = ["--sizes", "1KiB", "--concurrency", "1", "--wire", "tcp", "--peers", "memcpy", "--json", "-"]
    assert run(["bench", "loopback", *arguments, *SHORT]) == 1
    printed = capsys.readouterr()
    what = "read over tcp, 1 KiB, 1 in flight: cut off"
    assert printed.err == f"transport bench loopback: {what}\n"
    report = json.loads(printed.out)
    assert report["failed"] == [what]
    assert [row["peer"] for row in report["rows"]] == ["memcpy"]


@pytest.mark.parametrize("option", [("--peers", "memcpy"), ("--plot", "bench.png")])
def test_an_option_that_needs_the_sources_says_so_where_there_are_none(
    option: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkout, "_ROOT", tmp_path)
    assert run(["bench", "loopback", "--wire", "mapped", *SHORT, *option]) == 1
    assert f"{option[0]} needs the project's sources" in capsys.readouterr().err


def test_the_reason_of_a_skipped_peer_is_what_its_installation_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "ENVIRONMENTS", tmp_path)
    home = tmp_path / "ray"
    home.mkdir()
    (home / registry.REASON_FILE).write_text("pip install ray failed: no such wheel\n")
    with pytest.raises(MissingDependencyError, match="no such wheel"):
        registry.interpreter(registry.PEERS["ray"])
    (home / registry.REASON_FILE).unlink()
    (home / registry.STAMP_FILE).touch()
    assert registry.interpreter(registry.PEERS["ray"]) == str(home / "bin" / "python")


# --- ring -----------------------------------------------------------------------------------------
def test_the_ring_is_written_read_and_consumed_from_python() -> None:
    row = benchmark_module("ring").python_row(4096)
    assert row["verified"]
    assert min(row["write_us"], row["read_us"], row["memcpy_us"]) > 0


def test_rows_from_cpp_are_the_lines_that_the_program_prints(tmp_path: Path) -> None:
    program = tmp_path / "ring_bench"
    lines = [{"case": "cycles", "slots": 100, "cycles_per_s": 5}, {"case": "copy", "memcpy_gb_per_s": 4}]
    lines[1]["copy_gb_per_s"] = 3
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{json.dumps(line)}'\n" for line in lines))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    ring = benchmark_module("ring")
    rows = ring.native_rows(program)
    assert rows == [lines[0], {**lines[1], "copy_to_memcpy": 0.75}]
    assert "cycles per s" in ring.table(rows)
