"""bench serve and bench fetch: two processes over loopback, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from two_hosts import two_hosts, why_not

from transport.bench.reads.remote import MOST_BYTES, RemoteWriter, WantedRead, cases, measure
from transport.cli import run
from transport.doctor import infiniband
from transport.errors import LinkError, UnreachableError

PATIENCE_S = 60.0

pytestmark = pytest.mark.ucx


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of a benchmark server in a process of its own, ended by SIGTERM."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("UCX")}
    process = subprocess.Popen(
        [sys.executable, "-m", "transport", "bench", "serve", "--port", "0", "--bind", "127.0.0.1"],
        stdout=subprocess.PIPE,
        text=True,
        env={**inherited, "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path.cwd())]))},
    )
    assert process.stdout is not None
    yield int(process.stdout.readline().split()[-1])
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    process.stdout.close()


@pytest.mark.nightly
def test_fetch_measures_and_verifies(port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--sizes",
        "64KiB",
        "--concurrency",
        "1",
        "--seconds",
        "0.01",
        "--repetitions",
        "1",
        "--listeners",
        "2",
    ]
    assert run(["bench", "fetch", f"127.0.0.1:{port}", *arguments, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    (row,) = report["rows"]
    assert (row["wire"], row["peer"], row["verified"], row["size_bytes"]) == ("tcp", "transport", True, 65536)
    assert row["gb_per_s"] > 0
    assert report["machine"]["server"]["cores"] > 0
    assert report["rails"] == {}


@pytest.mark.nightly
@pytest.mark.slow
def test_fetch_measures_between_two_hosts(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(f"two hosts are not tested: {reason}")
    transport = [sys.executable, "-m", "transport", "bench"]
    few = ["--sizes", "64KiB", "--concurrency", "1", "--seconds", "0.01", "--repetitions", "1", "--json", "-"]
    with (
        two_hosts(tmp_path) as (here, there),
        subprocess.Popen(here.command(*transport, "serve"), stdout=subprocess.PIPE, text=True) as serving,
    ):
        assert serving.stdout is not None
        at = int(serving.stdout.readline().split()[-1])
        fetch = subprocess.run(
            there.command(*transport, "fetch", f"{here.address}:{at}", *few), capture_output=True, text=True
        )
        serving.terminate()
        assert serving.wait(PATIENCE_S) == 0
    assert fetch.returncode == 0, fetch.stderr
    (row,) = json.loads(fetch.stdout)["rows"]
    assert (row["wire"], row["verified"], row["gb_per_s"] > 0) == ("tcp", True, True)


@pytest.mark.nightly
def test_another_wire_than_the_one_asked_for_has_no_figure(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader is told to take shared memory, which leads to a listener that has TCP only."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    (case,) = cases([65536], [1], "shm", [True], device=False)
    with pytest.raises(LinkError, match=r"UCX chose|was asked for"):
        measure("127.0.0.1", port, case, 0.01, 1)


def test_rdma_without_a_device_is_wrong_usage(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    if infiniband.ports():
        pytest.skip("this host has one")
    assert run(["bench", "fetch", f"127.0.0.1:{port}", "--wire", "rdma"]) == 2
    assert "no InfiniBand or RoCE device" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["nowhere"], ["host:port"], ["127.0.0.1:1", "--wire", "mapped"]])
def test_wrong_usage(arguments: list[str]) -> None:
    assert run(["bench", "fetch", *arguments]) == 2


def test_nobody_there_is_said_with_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert run(["bench", "fetch", f"127.0.0.1:{bound.getsockname()[1]}"]) == 1
    assert "start it there: transport bench serve --port" in capsys.readouterr().err


@pytest.mark.nightly
def test_what_is_too_large_or_garbled_is_refused(port: int) -> None:
    with pytest.raises(LinkError, match=f"more than {MOST_BYTES}"):
        RemoteWriter("127.0.0.1", port, WantedRead(size_bytes=MOST_BYTES, payloads=2, listeners=1))
    for line in (b"{}", b"[1]", b"\xff\xff", b'{"size_bytes":-1,"payloads":1,"listeners":1}'):
        with socket.create_connection(("127.0.0.1", port), 10) as strange:
            strange.sendall(line + b"\n")
            assert msgspec.json.decode(strange.makefile("rb").readline())["error"]
    with pytest.raises(UnreachableError):
        RemoteWriter("host.invalid", port, WantedRead(size_bytes=1, payloads=1, listeners=1))
