"""A short run with faults accounts for every payload, and an aborted one leaves nothing behind. The long version of
these tests is `make cluster`."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmark_programs import BENCHMARKS
from helpers import eventually
from redis_server import needs_redis

COMMAND = [sys.executable, "-P", str(BENCHMARKS / "cluster")]
SKIPPED = 77


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Any]:
    """Processes that name this test's folder, anywhere on the machine; there must be none in the end."""

    def there() -> list[str]:
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = entry.read_bytes()
            except OSError:
                continue
            if str(tmp_path).encode() in words and entry.parent.name != "self":
                found.append(words.replace(b"\0", b" ").decode())
        return found

    yield there
    eventually(lambda: not there(), "no process of the cluster is left")


@pytest.mark.parametrize("without", ["programs", "rights"])
def test_where_there_can_be_no_cluster_the_run_says_why_in_one_line(tmp_path: Path, without: str) -> None:
    words, path, reason = [*COMMAND, "--hosts", "4", "--folder", str(tmp_path / "run")], str(tmp_path), "iproute2"
    if without == "rights":
        if shutil.which("setpriv") is None or os.geteuid() != 0:
            pytest.skip("needs root, to give rights up")
        if shutil.which("ip") is None:
            pytest.skip("iproute2 is not installed")
        words = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin", *words]
        path, reason = os.environ["PATH"], os.strerror(errno.EPERM)
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env={**os.environ, "PATH": path})
    assert done.returncode == SKIPPED
    [line] = done.stderr.splitlines()
    assert reason in line


@pytest.mark.nightly
@needs_redis
@pytest.mark.ucx
@pytest.mark.slow
@pytest.mark.timeout(400)  # where a fault does not settle, the run waits for a minute and says so
def test_a_short_run_with_faults_accounts_for_every_payload(tmp_path: Path, processes: Any) -> None:
    report = tmp_path / "report.json"
    options = ["--hosts", "6", "--find", "directory", "--faults", "one-way,returned,redis-promoted", "--seed", "3"]
    places = ["--folder", str(tmp_path / "run"), "--json", str(report)]
    done = subprocess.run([*COMMAND, *options, *places], capture_output=True, text=True, timeout=400)
    if done.returncode == SKIPPED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    [run] = json.loads(report.read_text())
    assert run["passed"]
    assert {each["name"] for each in run["episodes"]} == {"one-way", "returned", "redis-promoted"}
    excused = run["excused"]
    ended = run["consumed"] + run["silent"] + excused.get("with host", 0) + excused.get("reported", 0)
    assert ended - excused.get("forgotten", 0) == run["payloads"] > 0


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_aborted_run_leaves_no_process_no_namespace_and_no_link(
    tmp_path: Path, processes: Any, number: signal.Signals
) -> None:
    def named() -> list[str]:
        listed = [subprocess.run(["ip", *words], capture_output=True, text=True).stdout for words in _LISTS]
        return [line for text in listed for line in text.splitlines() if "br0" in line or "host" in line]

    before = named()
    options = ["--hosts", "4", "--find", "addresses", "--folder", str(tmp_path / "run")]
    with subprocess.Popen([*COMMAND, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stderr is not None
        for line in run.stdout:
            if "fault 1" in line:
                break
        else:
            assert run.wait() == SKIPPED, run.stderr.read()
            pytest.skip("there can be no cluster here")
        assert len(processes()) > 4
        run.send_signal(number)
        run.wait(60)
        assert run.returncode != 0
    eventually(lambda: not processes(), "every process of the cluster ends")
    assert named() == before


_LISTS = (("netns",), ("-brief", "link"))
