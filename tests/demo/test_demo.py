"""The main job as users run it: real processes, real shared memory, real UCX."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from demos import AT_WORK, running
from helpers import eventually

from transport.demo.plan import Plan
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
    with running(tmp_path, *arguments, "--trace", str(tmp_path / "trace.json")) as demo:
        status, out, err = demo.finished()
    assert status == 0, err
    assert "160 episodes of 2 rollouts, 320 deliveries to 2 trainers" in out
    result = json.loads(report.read_text())
    assert result.keys() >= CONTRACT
    assert result["payloads"] == 160
    assert result["deliveries"] == 320
    assert (result["lost"], result["duplicates"], result["stale"], result["unread"]) == (0, 0, 0, 0)
    assert result["wire"] == wire
    assert result["bytes_by_wire"] == {wire: result["bytes"]}
    assert result["updates"] == 10
    assert result["policies_fetched"] > 0  # the backlog is bounded by versions, so somebody has waited for one
    assert 0 < result["policy_pause_ms"] <= result["policy_pause_ms_most"] < result["seconds"] * 1e3
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = Counter(event["name"] for event in events if event["ph"] == "b")
    assert named["write"] == 160
    assert named["take"] == 320
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {
        *("trainer 0", "trainer 1", "rollout 0", "rollout 1")
    }
    assert demo.left() == []


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
def test_metrics_are_those_of_every_process_of_the_run(tmp_path: Path) -> None:
    with running(tmp_path, "--episodes", AT_WORK, "--metrics-port", "0") as demo:
        assert demo.process.stderr is not None
        address = demo.process.stderr.readline().split()[-1]
        demo.until_at_work()
        with urllib.request.urlopen(address, timeout=60) as answer:
            text = answer.read().decode()
        demo.process.send_signal(signal.SIGINT)
        demo.finished()
    assert len(re.findall(r"^transport_ring_published_total.* [1-9]", text, re.MULTILINE)) >= 2
    assert re.search(r'^transport_client_reads_total\{client="trainer 0"\} [1-9]', text, re.MULTILINE)
    assert re.search(r'^transport_queue_finished_total\{outcome="done",queue="demo"\} [1-9]', text, re.MULTILINE)
    assert demo.left() == []


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
    assert err.splitlines()[-1].startswith("transport demo: the policy did not learn: the mean return went from ")


# --- parts ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("episodes", [1, 16, 479, 480])
@pytest.mark.parametrize("rollouts", [1, 3, 14])
def test_shares_are_even_and_exact(episodes: int, rollouts: int) -> None:
    plan = Plan(episodes=episodes, rollouts=rollouts)
    shares = [plan.share(index) for index in range(rollouts)]
    assert sorted(number for share in shares for number in share) == list(range(episodes))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


# --- another run, another server --------------------------------------------------------------------------
@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
def test_a_second_run_resumes_from_the_checkpoint_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSPORT_STORE", f"sqlite://{tmp_path}/epochs/store.sqlite3")
    results = []
    for part in ("first", "second"):
        (tmp_path / part).mkdir()
        arguments = ("--episodes", "48", "--target", "0", "--json", "-", "--checkpoint", str(tmp_path / "checkpoints"))
        with running(tmp_path / part, *arguments) as demo:
            status, out, err = demo.finished()
        assert status == 0, err
        assert demo.left() == []
        results.append(json.loads(out))
    first, second = results
    assert (first["epoch"], first["resumed_from"], first["checkpoint"], first["updates"]) == (1, 0, "checkpointed", 3)
    assert (second["epoch"], second["resumed_from"], second["checkpoint"]) == (2, 1, "checkpointed")
    assert "resumed from epoch 1, version 3" in err
    places = [Path(result["checkpoint_place"].removeprefix("file://")) / "files" for result in results]
    assert [msgspec.msgpack.decode((place / "policy.msgpack").read_bytes())[0] for place in places] == [3, 6]

    shown = subprocess.run(
        [sys.executable, "-m", "transport", "cooldown", "status", "--json", "-"], capture_output=True, text=True
    )
    epochs = json.loads(shown.stdout)["epochs"]
    assert [(epoch["epoch"], epoch["step"], epoch["outcome"]) for epoch in epochs] == [
        (1, 3, "checkpointed"), (2, 6, "checkpointed"),
    ]  # fmt: skip


@pytest.mark.nightly  # guarantees/test_restart has its like
@pytest.mark.ucx
@pytest.mark.slow
def test_a_run_that_is_killed_with_all_of_its_processes_is_resumed_and_trains_on_each_episode_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    saved = tmp_path / "state" / "transport" / "demo" / "demo-resume" / "snapshots"
    arguments = ("--resume", "--episodes", "320", "--target", "0", "--json", "-")
    with running(tmp_path, *arguments) as demo:
        eventually(lambda: len(list(saved.glob("*/*/manifest.json"))) > 1, "two snapshots")
        demo.process.kill()
        while left := demo.processes("transport"):
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        demo.process.communicate()
    (tmp_path / "second").mkdir()
    with running(tmp_path / "second", *arguments, "--rollouts", "3") as again:
        status, out, err = again.finished()
    assert status == 0, err
    result = json.loads(out)
    assert 0 < result["trained_before"] < 320
    assert (result["payloads"], result["lost"], result["duplicates"], result["unread"]) == (320, 0, 0, 0)
    assert result["deliveries"] == 320 - result["trained_before"]
    assert "resumed at version" in err
    assert not saved.exists()  # it came to its end


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
def test_a_destination_that_may_not_be_written_ends_the_run_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_STORE", f"sqlite://{tmp_path}/store.sqlite3")
    with running(tmp_path, "--episodes", "16", "--checkpoint", "/proc/self/task") as demo:
        status, out, err = demo.finished()
    assert (status, out) == (1, "")
    assert "cannot join: it cannot create files in" in err.splitlines()[-1]
    assert demo.left() == []


# --- what goes wrong ------------------------------------------------------------------------------
@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
def test_a_trace_that_cannot_be_written_is_named_once_and_the_summary_counts(tmp_path: Path) -> None:
    with running(tmp_path, "--episodes", "40", "--rollouts", "1", "--trace", "/dev/full", "--json", "-") as demo:
        _, out, err = demo.finished()
    assert json.loads(out)["payloads"] == 40
    named = [line for line in err.splitlines() if "/dev/full" in line]
    assert named == ["--trace /dev/full was not written: No space left on device"]
    assert Path("/dev/full").exists()


@pytest.mark.nightly(keep=1)
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
    how = "interrupted" if number == signal.SIGINT else "stopped by SIGTERM"
    assert err.splitlines()[-1] == f"transport demo: {how}; nothing is left behind"
    assert before.leaks(grace_s=0) == []
    assert demo.left() == []


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rollout", "trainer"])
def test_a_killed_worker_ends_the_run(tmp_path: Path, kind: str) -> None:
    before = ResourceSnapshot.take()
    with running(tmp_path, "--episodes", AT_WORK) as demo:
        demo.until_at_work()
        os.kill(demo.processes(f"transport.demo.{kind}")[0], signal.SIGKILL)
        status, out, err = demo.finished()
    assert (status, out) == (1, "")
    last = err.splitlines()[-1]
    assert last.startswith(f"transport demo: {kind} ")
    assert last.endswith(" was killed by SIGKILL before its work was done")
    assert demo.left() == []
    assert before.leaks(grace_s=_CLEAN_UP_S) == []


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
