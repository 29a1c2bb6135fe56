"""The measurements: what they count and refuse, and short real ones. No figure is compared with another."""

from __future__ import annotations

import importlib.util
import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from support import asynchronous

from transport import SharedRingBuffer
from transport.bench import loopback, registry, ring, scaling, session
from transport.bench.machine import settings_of
from transport.bench.peers.harness import Content, Tally, percentile
from transport.bench.processes import Worker, last_line, run_group
from transport.bench.reader import Reader, Reading
from transport.bench.result import Case, Report, Row, Sample, aligned, table
from transport.bench.units import parse_size, show_size
from transport.cli import run
from transport.errors import ChecksumError, LinkError, MissingDependencyError, UsageError
from transport.progress import silent

SHORT = ("--seconds", "0.01", "--repetitions", "1")
ROW_KEYS = ("case", "peer", "wire", "size_bytes", "concurrency", "checksum", "gb_per_s", "us_p50", "us_p99", "verified")


def case(**changed: Any) -> Case:
    """A small read over a mapped ring, but for some."""
    usual = {"case": "read", "peer": "transport", "wire": "mapped", "size_bytes": 4096, "concurrency": 1, "payloads": 4}
    return Case(**{**usual, **changed})


def sample(gb_per_s: float, us: float = 1.0, **more: Any) -> Sample:
    """One repetition."""
    return Sample(gb_per_s=gb_per_s, us_p50=us, us_p99=us, reads=1, **{"verified": True, **more})


# --- sizes, percentiles, content ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("64KiB", 65536),
        ("1 MiB", 1 << 20),
        ("0.5mib", 1 << 19),
        (" 2GiB ", 2 << 30),
        ("1TiB", 1 << 40),
        ("3kB", 3000),
    ],
)
def test_sizes_are_parsed(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "KiB", "1 XiB", "-4", "1e3", "0.3B", "1 MiB 2"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize("text", ["1 B", "1000 B", "4 KiB", "3 MiB", "1 GiB"])
def test_sizes_are_shown_as_they_are_parsed(text: str) -> None:
    assert show_size(parse_size(text)) == text


def test_percentiles_are_values_that_occurred() -> None:
    assert [percentile(range(1, 101), share) for share in (0.01, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
    assert percentile([7.0], 0.99) == 7.0


def test_a_tally_leaves_the_warm_up_out() -> None:
    tally = Tally(seconds=1.0, warm_up_batches=1)
    tally.add([9.0], 9.0, 10**9)
    assert not tally.enough()
    tally.add([0.5, 1.5], 2.0, 4 * 10**9)
    assert tally.enough()
    assert tally.sample() == {"gb_per_s": 2.0, "us_p50": 1e6, "us_p99": 1.5e6, "reads": 2}


@pytest.mark.parametrize("size", [64, 4096, 100_003])
def test_every_payload_has_its_own_content(size: int) -> None:
    content = Content(size)
    for number in range(8):
        content.verify(number, Content(size).payload(number))
        with pytest.raises(ValueError, match=f"payload {number} of {size} bytes"):
            content.verify(number, content.payload(number + 1))


def test_a_single_wrong_byte_is_found() -> None:
    content = Content(4096)
    data = content.payload(3).copy()
    data[4000] ^= 1
    with pytest.raises(ValueError, match="not what was written"):
        content.verify(3, data)


@asynchronous
async def test_a_reader_refuses_another_payload_than_was_written() -> None:
    content = Content(4096)
    with SharedRingBuffer.create(slots=4, slot_bytes=4096) as segment:
        reader = Reader(Reading(way="view", wire="mapped", size_bytes=4096, payloads=1, checksum=False))
        reader.have(1)
        right = segment.write_raw(content.payload(7), metadata={"number": 7})
        assert (await reader.batch([right], 1)).bytes == 4096
        wrong = segment.write_raw(content.payload(7), metadata={"number": 8})
        with pytest.raises(ChecksumError, match="payload 8 of 4096 bytes is not what was written"):
            await reader.batch([wrong], 1)
        await reader.close()


# --- rows -------------------------------------------------------------------------------------------
def test_a_row_has_the_medians_of_its_repetitions() -> None:
    row = Row.of(case(checksum=True), [sample(1.0, 5.0), sample(9.0, 3.0), sample(2.0, 4.0)])
    assert (row.gb_per_s, row.us_p50, row.repetitions, row.reads) == (2.0, 4.0, 3, 3)
    assert (row.checksum, row.verified) == ("on", True)
    assert not Row.of(case(), [sample(1.0), sample(1.0, verified=False)]).verified


def test_the_table_names_what_was_not_verified_and_what_was_skipped() -> None:
    rows = [Row.of(case(), [sample(1.0, verified=False, note="one way", transports=["tcp/lo"])])]
    shown = table(rows, {"ray": "not installed; run: make bench-peers"}).splitlines()
    assert shown[0] == "4 KiB, 1 in flight"
    assert shown[2].endswith("1.00  tcp/lo; not verified; one way")
    assert shown[-1] == "skipped ray: not installed; run: make bench-peers"


def test_columns_are_aligned() -> None:
    assert aligned([("a", "1"), ("bcd", "20")], right=frozenset((1,))) == ["a     1", "bcd  20"]


def test_slots_are_bounded_in_number_and_bytes() -> None:
    assert [loopback.slots_for(size) for size in (1, 1 << 20, 16 << 20, 1 << 30)] == [1024, 128, 8, 4]


def test_our_cases_have_views_where_mapped_and_batches_where_several_are_under_way() -> None:
    alone = loopback.cases([4096], [1], ["mapped", "tcp"], [True, False], 1)
    assert [(each.case, each.wire, each.checksum) for each in alone] == [
        ("read", "mapped", False),
        ("view", "mapped", False),
        ("read", "tcp", True),
        ("read", "tcp", False),
    ]
    several = loopback.cases([65536], [8], ["shm"], [False], 1)
    assert [(each.case, each.size_bytes, each.payloads) for each in several] == [
        ("read", 65536, 1024),
        ("read_many", 65536, 1024),
        ("read_many_1000", 4096, 1000),
    ]


def test_the_peers_have_the_same_sizes_and_payloads() -> None:
    found = session.peer_cases(registry.chosen("memcpy,ucx_perftest"), [1 << 20], [1, 8], ["mapped", "shm", "tcp"])
    assert [(each.peer, each.case, each.wire) for each in found] == [
        ("memcpy", "copy", "memory"),
        ("memcpy", "copy", "memory"),
        ("ucx_perftest", "tag_lat", "shm"),
        ("ucx_perftest", "tag_bw", "shm"),
        ("ucx_perftest", "tag_lat", "tcp"),
        ("ucx_perftest", "tag_bw", "tcp"),
    ]
    assert {each.payloads for each in found} == {loopback.slots_for(1 << 20)}


def test_settings_are_those_of_the_wire() -> None:
    assert settings_of("mapped") == {}
    assert settings_of("tcp")["TLS"] == "tcp,self"


def test_listeners_are_spread_over_rings() -> None:
    jobs = scaling._writers(scaling.Scale(wire="tcp", size_bytes=4096, clients=1, listeners=64))
    assert [job.listeners for job in jobs] == [13, 13, 13, 13, 12]


# --- wrong usage ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["loopback", "--sizes", "4KiB,big"], "'big' is not a size"),
        (["loopback", "--concurrency", "1,x"], "--concurrency 1,x: give whole numbers"),
        (["loopback", "--concurrency", "0"], "--concurrency 0: each is from 1 to 1024"),
        (["loopback", "--wire", "mapped,pigeon"], "--wire mapped,pigeon: choose some of mapped, shm, tcp, rdma"),
        (["loopback", "--checksum", "perhaps"], "--checksum perhaps: choose on, off, or on,off"),
        (["loopback", "--peers", "memcpy,owl"], "'owl' is no peer; choose all, or some of memcpy, ucx_perftest, "),
        (["loopback", "--plot", "picture.jpeg"], "--plot picture.jpeg: give the name of a .png file"),
        (["loopback", "--plot", "/nowhere/picture.png"], "in a folder that exists"),
        (["loopback", "--readers", "15"], "--readers"),
        (["loopback", "--seconds", "0"], "--seconds"),
        (["scaling", "--wire", "mapped"], "--wire mapped: choose some of shm, tcp, rdma"),
        (["scaling", "--clients", ""], "--clients : give whole numbers"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"transport bench {arguments[0]}: ")
    assert expected in printed.err
    assert printed.err.count("\n") == 1


# --- short real ones ----------------------------------------------------------------------------------
@pytest.mark.ucx
def test_loopback_measures_us_and_peers_and_says_who_was_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "ENVIRONMENTS", tmp_path)
    peers = "memcpy,socket,ucx_perftest,pyzmq"
    arguments = ["--sizes", "4KiB", "--concurrency", "1", "--wire", "tcp", "--peers", peers, "--json", "-"]
    assert run(["bench", "loopback", *arguments, *SHORT]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"cpu", "cores", "kernel", "python", "versions"} <= report["machine"].keys()
    assert report["settings"]["tcp"]["TLS"] == "tcp,self"
    assert report["skipped"] == {"pyzmq": "not installed; run: make bench-peers"}
    rows = {row["peer"]: row for row in report["rows"]}
    assert set(rows) == {"transport", "memcpy", "socket", "ucx_perftest"}
    for row in rows.values():
        assert set(ROW_KEYS) <= row.keys()
        assert (row["size_bytes"], row["concurrency"], row["repetitions"]) == (4096, 1, 1)
        assert row["verified"] is (row["peer"] != "ucx_perftest")
        assert 0 < row["us_p50"] <= row["us_p99"] or row["peer"] == "ucx_perftest"
        assert row["reads"] > 0
    assert rows["transport"]["checksum"] == "on"
    assert any(name.startswith("tcp/") for name in rows["transport"]["transports"])


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


@pytest.mark.ucx
def test_several_readers_read_every_payload() -> None:
    measured = loopback.measure(case(case="view", readers=2, payloads=4), seconds=1e-6)
    assert measured.verified
    assert measured.reads % (2 * 4) == 0


@pytest.mark.ucx
def test_read_many_is_measured_by_batches() -> None:
    measured = loopback.measure(case(case="read_many", concurrency=8, payloads=32), seconds=1e-6)
    assert measured.verified
    assert measured.reads == 1


@pytest.mark.ucx
def test_scaling_counts_endpoints_and_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "_IDLE_S", 0.1)
    (row,) = scaling.run([scaling.Scale(wire="tcp", size_bytes=1024, clients=3, listeners=1)], 1e-6, 1, silent)
    assert set(ROW_KEYS) <= {*msgspec.to_builtins(row)}
    assert (row.case, row.clients, row.listeners, row.concurrency) == ("clients", 3, 1, 8)
    assert row.endpoints >= 3
    assert row.client_bytes_per_endpoint > 0
    assert row.verified
    assert "1 KiB" in scaling.table([row])


def test_a_peer_that_fails_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    # this Python has no zmq: a peer whose environment is broken
    monkeypatch.setitem(registry.PEERS, "pyzmq", msgspec.structs.replace(registry.PEERS["pyzmq"], environment=""))
    cases = session.peer_cases([registry.PEERS["pyzmq"]], [1024], [1, 8], ["tcp"])
    outcome = session.run(cases, 0.01, 1, silent)
    assert outcome.rows == outcome.failed == []
    assert outcome.skipped["pyzmq"].startswith("read over tcp, 1 KiB, 1 in flight: status 1: ModuleNotFoundError")


def test_our_own_failure_is_reported_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Case, __: float) -> Sample:
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


def test_every_peer_has_its_script() -> None:
    for peer in registry.PEERS.values():
        assert not peer.script or (registry.SCRIPTS / f"{peer.script}.py").exists()


# --- processes ----------------------------------------------------------------------------------------
def test_a_process_that_fails_is_reported_by_its_last_line() -> None:
    with Worker("transport.bench.reader", {"way": "juggle"}) as worker, pytest.raises(LinkError) as failure:
        worker.answer()
    assert "the measuring reader ended with status 1: msgspec.ValidationError" in str(failure.value)


def test_a_program_that_does_not_end_is_ended_with_its_group() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import signal; signal.pause()'])"
    with pytest.raises(LinkError, match="no end within 1 s"):
        run_group([sys.executable, "-c", code], {}, 1.0)


def test_what_a_program_said_last() -> None:
    assert last_line(b"one\ntwo\n\n") == "two"
    assert last_line(b"") == "it said nothing"


# --- ring ---------------------------------------------------------------------------------------------
def test_the_ring_is_written_read_and_consumed_from_python() -> None:
    row = ring.python_row(4096)
    assert row["verified"]
    assert min(row["write_us"], row["read_us"], row["memcpy_us"]) > 0


def test_rows_from_cpp_are_the_lines_that_the_program_prints(tmp_path: Path) -> None:
    program = tmp_path / "ring_bench"
    lines = [{"case": "cycles", "slots": 100, "cycles_per_s": 5}, {"case": "copy", "memcpy_gb_per_s": 4}]
    lines[1]["copy_gb_per_s"] = 3
    program.write_text("#!/bin/sh\n" + "".join(f"echo '{json.dumps(line)}'\n" for line in lines))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    rows = ring.native_rows(program)
    assert rows == [lines[0], {**lines[1], "copy_to_memcpy": 0.75}]
    assert "cycles per s" in ring.table(rows)


def test_without_sources_the_cpp_rows_say_so(tmp_path: Path) -> None:
    with pytest.raises(MissingDependencyError, match="built from the project's sources"):
        ring.build(tmp_path)


# --- the picture --------------------------------------------------------------------------------------
def report() -> Report:
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
            ("tag_bw", "ucx_perftest", "shm"),
        )
        for size in (65536, 1 << 20)
        for many in (1, 8)
    ]
    about = {"date": "2026-01-01", "cpu": "a", "cores": 2, "kernel": "6", "python": "3", "versions": {}}
    about["versions"] = {"payload-transport": "1", "ucx": "1.21"}
    return Report(machine=about, settings={}, rows=rows, skipped={"ray": "not installed"})


DRAW = """
import sys
from pathlib import Path
import msgspec
from transport.bench.plot import check, draw
from transport.bench.result import Report, Row
report = msgspec.json.decode(sys.stdin.buffer.read(), type=Report)
path = Path(sys.argv[1])
check(path)
draw(msgspec.structs.replace(report, rows=[msgspec.convert(row, Row) for row in report.rows]), path)
"""


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed (the extra bench)")
    path = tmp_path / "picture.png"
    # in a process of its own, since matplotlib keeps its fonts open for life
    encoded = msgspec.json.encode(report())
    subprocess.run([sys.executable, "-c", DRAW, str(path)], input=encoded, check=True, timeout=60)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = np.frombuffer(data[16:24], ">u4")
    assert width > height > 500


def test_without_matplotlib_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(["bench", "loopback", "--plot", str(tmp_path / "picture.png")]) == 1
    assert "pip install 'payload-transport[bench]'" in capsys.readouterr().err


@pytest.mark.ucx
@pytest.mark.slow
def test_weights_reach_every_replica_and_a_delta_costs_less_of_the_link(tmp_path: Path) -> None:
    report = tmp_path / "weights.json"
    arguments = ["--replicas", "1,3", "--hosts", "2", "--size", "4MiB", "--rate", "0", "--bucket", "1MiB"]
    command = [sys.executable, "-m", "transport", "bench", "weights", *arguments, "--json", str(report)]
    subprocess.run(command, check=True, capture_output=True, timeout=90)
    rows = json.loads(report.read_text())["rows"]
    assert [(row["replicas"], row["mode"]) for row in rows] == [(1, "full"), (1, "delta"), (3, "full"), (3, "delta")]
    for row in rows:
        assert row["verified"]
        size = row["model_bytes"]
        assert row["link_bytes"] == size if row["mode"] == "full" else row["link_bytes"] < 0.1 * size
        assert row["trainer_copies"] == 2.0 if row["mode"] == "full" else row["trainer_copies"] < 0.2
    assert [row["received"] for row in rows if row["mode"] == "full"] == [1.0, 2.0]  # once for each host
