"""The measurements: what they count and refuse, and how it is shown. No figure is compared with another."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from bench_cases import case, report, sample
from helpers import asynchronous

from benchmarks.peers.plot import pictures
from transport import SharedRingBuffer
from transport.bench.processes import BenchProcess, run_group
from transport.bench.reads.content import Content, Tally, percentile
from transport.bench.reads.reader import Reader, Reading
from transport.bench.reads.writer import Writing
from transport.bench.result import Row
from transport.bench.units import parse_size
from transport.cli import run
from transport.errors import ChecksumError, LinkError, UsageError


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
        ("16M", 16 << 20),
        ("64k", 65536),
    ],
)
def test_sizes_are_parsed(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "KiB", "1 XiB", "-4", "1e3", "0.3B", "1 MiB 2"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="invalid size"):
        parse_size(text)


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


@asynchronous
async def test_a_reader_refuses_another_payload_than_was_written() -> None:
    content = Content(4096)
    with SharedRingBuffer.create(slots=4, slot_bytes=4096) as segment:
        reader = Reader(Reading(way="view", wire="mapped", size_bytes=4096, payloads=1, checksum=False))
        reader.have(1)
        right = segment.write_raw(content.payload(7), metadata={"number": 7})
        assert (await reader.batch([right], 1)).bytes == 4096
        wrong = segment.write_raw(content.payload(7), metadata={"number": 8})
        with pytest.raises(ChecksumError, match="payload 8 of 4096 bytes differs from what was written"):
            await reader.batch([wrong], 1)
        await reader.close()


# --- rows -----------------------------------------------------------------------------------------
def test_a_row_has_the_medians_of_its_repetitions() -> None:
    row = Row.of(case(checksum=True), [sample(1.0, 5.0), sample(9.0, 3.0), sample(2.0, 4.0)])
    assert (row.gb_per_s, row.us_p50, row.repetitions, row.reads) == (2.0, 4.0, 3, 3)
    assert (row.checksum, row.verified) == ("on", True)
    assert not Row.of(case(), [sample(1.0), sample(1.0, verified=False)]).verified


@pytest.mark.nightly(keep=3)
# --- wrong usage ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["loopback", "--sizes", "4KiB,big"], "invalid size 'big'"),
        (["loopback", "--concurrency", "1,x"], "--concurrency 1,x: give whole numbers"),
        (["loopback", "--concurrency", "0"], "--concurrency 0: give whole numbers from 1 to 1024"),
        (["loopback", "--wire", "mapped,pigeon"], "--wire mapped,pigeon: choose some of mapped, shm, tcp, rdma"),
        (["loopback", "--checksum", "perhaps"], "--checksum perhaps: choose some of on, off"),
        (["loopback", "--peers", "memcpy,owl"], "unknown peer 'owl'; choose all, or some of memcpy, ucx_floor, "),
        (["loopback", "--plot", "picture.jpeg"], "--plot picture.jpeg: give a .png file"),
        (["loopback", "--plot", "/nowhere/picture.png"], "in an existing folder"),
        (["loopback", "--readers", "15"], "--readers"),
        (["loopback", "--seconds", "0"], "--seconds"),
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


@pytest.mark.nightly
# --- processes ------------------------------------------------------------------------------------
def test_a_writer_whose_answer_nobody_takes_ends_in_order() -> None:
    job = Writing(size_bytes=64, payloads=1000, listeners=0)  # their tickets fill a pipe several times
    with BenchProcess("transport.bench.reads.writer", job) as worker:
        worker.tell({})
    assert worker._process.returncode == 0  # and was not killed, which would leave its segment


@pytest.mark.nightly
def test_a_process_that_fails_is_reported_by_its_last_line() -> None:
    with BenchProcess("transport.bench.reads.reader", {"way": "juggle"}) as worker, pytest.raises(LinkError) as failure:
        worker.answer()
    assert "the measuring reader ended with status 1: msgspec.ValidationError" in str(failure.value)


def test_a_program_that_does_not_end_is_ended_with_its_group() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import signal; signal.pause()'])"
    with pytest.raises(LinkError, match="not finished within 1 s"):
        run_group([sys.executable, "-c", code], {}, 1.0)


# --- the picture ----------------------------------------------------------------------------------
ROOT = Path(__file__).resolve().parents[2]
DRAW = """
import sys
from pathlib import Path
import msgspec
from benchmarks.peers.plot import check, draw_reads
from transport.bench.result import BenchReport, Row
report = msgspec.json.decode(sys.stdin.buffer.read(), type=BenchReport)
path = Path(sys.argv[1])
check(path)
draw_reads(msgspec.structs.replace(report, rows=[msgspec.convert(row, Row) for row in report.rows]), path)
"""


@pytest.mark.nightly
def test_the_picture_is_a_png(tmp_path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("matplotlib is not installed (the extra bench)")
    path = tmp_path / "picture.png"
    # in a process of its own, since matplotlib keeps its fonts open for life
    encoded = msgspec.json.encode(report())
    subprocess.run([sys.executable, "-c", DRAW, str(path)], input=encoded, cwd=ROOT, check=True, timeout=60)
    assert not path.exists()
    drawn = sorted(tmp_path.iterdir())
    assert drawn == sorted(pictures(report().rows, path))
    assert {each.name for each in drawn} <= {"picture-host.png", "picture-network.png"}
    for each in drawn:
        data = each.read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = np.frombuffer(data[16:24], ">u4")
        assert width > height > 500


def test_without_matplotlib_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(["bench", "loopback", "--plot", str(tmp_path / "picture.png")]) == 1
    assert "pip install 'matplotlib" in capsys.readouterr().err
