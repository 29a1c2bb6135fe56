"""The main job as users run it: real processes, real shared memory, real UCX."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import urllib.request
from pathlib import Path

import pytest
from demos import AT_WORK, running

from transport.testing import ResourceSnapshot

pytest.importorskip("gymnasium")
if importlib.util.find_spec("ucxx") is None:  # importing it would make its variables count as the user's
    pytest.skip("needs ucxx", allow_module_level=True)

_CLEAN_UP_S = 30.0  # watchdog
CONTRACT = {
    *("payloads", "bytes", "lost", "duplicates", "stale", "retries", "seconds", "wire"),
    *("mean_return_first", "mean_return_last"),
}


# --- runs -----------------------------------------------------------------------------------------
@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
@pytest.mark.parametrize("wire", ["tcp", "mapped"])
def test_every_payload_reaches_every_reader_once(tmp_path: Path, wire: str) -> None:
    report = tmp_path / "demo.json"
    arguments = ("--episodes", "160", "--readers", "2", "--wire", wire, "--target", "0", "--json", str(report))
    with running(tmp_path, *arguments) as demo:
        status, _, err = demo.finished()
    assert status == 0, err
    result = json.loads(report.read_text())
    assert result.keys() >= CONTRACT
    assert (result["payloads"], result["deliveries"]) == (160, 320)
    assert (result["lost"], result["duplicates"], result["stale"]) == (0, 0, 0)
    assert result["wire"] == wire
    assert result["bytes_by_wire"] == {wire: result["bytes"]}
    assert result["updates"] > 5
    assert demo.left() == []


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
def test_the_default_run_loses_nothing_and_prints_nothing_but_json(tmp_path: Path) -> None:
    """How much it learns depends on how old the policies are that its rollouts get; test_demo_policy.py has that."""
    with running(tmp_path, "--target", "0", "--json", "-") as demo:
        status, out, err = demo.finished()
    assert status == 0, err
    result = json.loads(out)
    assert result["payloads"] == 480
    assert (result["lost"], result["duplicates"]) == (0, 0)
    assert demo.left() == []


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
def test_missing_the_target_fails_in_one_line_after_the_summary(tmp_path: Path) -> None:
    with running(tmp_path, "--episodes", "16", "--rollouts", "1", "--target", "1000") as demo:
        status, out, err = demo.finished()
    assert status == 1
    assert out.startswith("payloads  16 episodes")
    assert err.splitlines()[-1].startswith("transport demo: ")


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
def test_the_trainers_metrics_are_served_while_it_runs(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with running(tmp_path, "--episodes", AT_WORK, "--metrics-port", str(port)) as demo:
        demo.until_at_work()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            assert b"transport_queue_" in answer.read()
        demo.process.send_signal(signal.SIGINT)
        demo.finished()


# --- what goes wrong ------------------------------------------------------------------------------
@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_everything_in_order(tmp_path: Path, number: signal.Signals, status: int) -> None:
    before = ResourceSnapshot.take()
    with running(tmp_path, "--episodes", AT_WORK) as demo:
        demo.until_at_work()
        demo.process.send_signal(number)
        found, out, err = demo.finished()
    assert (found, out) == (status, "")
    assert "Traceback" not in err
    assert before.leaks(grace_s=0) == []
    assert demo.left() == []


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
def test_a_killed_rollout_ends_the_run(tmp_path: Path) -> None:
    before = ResourceSnapshot.take()
    with running(tmp_path, "--episodes", AT_WORK) as demo:
        demo.until_at_work()
        os.kill(demo.processes("--multiprocessing-fork")[0], signal.SIGKILL)
        status, out, err = demo.finished()
    assert (status, out) == (1, "")
    assert err.splitlines()[-1].startswith("transport demo: rollout ")
    assert demo.left() == []
    assert before.leaks(grace_s=_CLEAN_UP_S) == []


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    before = ResourceSnapshot.take()
    with running(tmp_path, "--episodes", AT_WORK) as demo:
        demo.until_at_work()
        demo.process.kill()
        demo.finished()
    assert before.leaks(grace_s=_CLEAN_UP_S) == []
    assert demo.left() == []
