"""The main job as users run it: real processes, real shared memory, real UCX."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from redis_server import needs_redis, redis_server

from transport import SharedRingBuffer
from transport.blocking import BlockingClient
from transport.demo.messages import RolloutDone, TrainerDone
from transport.demo.plan import POLICY_SCHEMA, POLICY_TOPIC, Plan
from transport.demo.policy import Policy
from transport.demo.rollout import PolicyFollower
from transport.demo.summary import Summary, summarise
from transport.queue import QueueDepth, SQLiteQueue, open_queue
from transport.testing import ResourceSnapshot

pytest.importorskip("gymnasium")
if importlib.util.find_spec("ucxx") is None:  # importing it would make its variables count as the user's
    pytest.skip("needs ucxx", allow_module_level=True)

CONTRACT = {
    *("payloads", "bytes", "lost", "duplicates", "stale", "retries", "seconds", "wire"),
    *("mean_return_first", "mean_return_last"),
}
_MARK = "DEMO_TEST"
_AT_WORK = "1000000"  # episodes: more than any test waits for
_CLEAN_UP_S = 30.0  # watchdog


class Demo(NamedTuple):
    """A demo that was started, and how to recognise what belongs to it."""

    process: subprocess.Popen[str]
    mark: str
    temporary: Path

    def until_at_work(self) -> None:
        """Wait until the first episodes were consumed."""
        assert self.process.stderr is not None
        said = []
        for line in self.process.stderr:
            said.append(line)
            if " episodes, " in line:
                return
        pytest.fail(f"the demo ended before its first progress: {''.join(said)}")

    def finished(self) -> tuple[int, str, str]:
        """Wait for its end: exit status, standard output, standard error."""
        out, err = self.process.communicate(timeout=90)
        return self.process.returncode, out, err

    def processes(self, module: str) -> list[int]:
        """Process ids of this demo's processes that run ``module``."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environment = (process / "environ").read_bytes().split(b"\0")
                arguments = (process / "cmdline").read_bytes().split(b"\0")
                if f"{_MARK}={self.mark}".encode() in environment and module.encode() in arguments:
                    found.append(int(process.name))
        return sorted(found)

    def left(self) -> list[str]:
        """What is left in its temporary directory."""
        return [path.name for path in self.temporary.rglob("*")]


@contextlib.contextmanager
def running(tmp_path: Path, *arguments: str) -> Iterator[Demo]:
    temporary = tmp_path / "temporary"
    temporary.mkdir(exist_ok=True)
    mark = secrets.token_hex(8)
    process = subprocess.Popen(
        [sys.executable, "-m", "transport", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary), _MARK: mark},
    )
    try:
        with process:
            yield Demo(process, mark, temporary)
            assert process.poll() is not None, "the test must see the demo's end"
    finally:
        if process.poll() is None:
            process.kill()


# --- runs ------------------------------------------------------------------------------------------------
@pytest.mark.ucx
@pytest.mark.slow
@pytest.mark.parametrize("wire", ["mapped", "tcp"])
def test_every_payload_reaches_every_reader_once(tmp_path: Path, wire: str) -> None:
    report = tmp_path / "demo.json"
    arguments = ("--episodes", "160", "--readers", "2", "--wire", wire, "--target", "0", "--json", str(report))
    with running(tmp_path, *arguments) as demo:
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
    assert demo.left() == []


@pytest.mark.ucx
@pytest.mark.slow
def test_the_default_run_learns_and_prints_nothing_but_json(tmp_path: Path) -> None:
    with running(tmp_path, "--json", "-") as demo:
        status, out, err = demo.finished()
    assert status == 0, err
    result = json.loads(out)
    assert result["payloads"] == 480
    assert (result["lost"], result["duplicates"]) == (0, 0)
    assert result["mean_return_last"] >= 2 * result["mean_return_first"]
    assert demo.left() == []


@pytest.mark.ucx
@pytest.mark.slow
def test_missing_the_target_fails_in_one_line_after_the_summary(tmp_path: Path) -> None:
    with running(tmp_path, "--episodes", "16", "--rollouts", "1", "--target", "1000") as demo:
        status, out, err = demo.finished()
    assert status == 1
    assert out.startswith("payloads  16 episodes")
    assert err.splitlines()[-1].startswith("transport demo: the policy did not learn: the mean return went from ")


@pytest.mark.ucx
@pytest.mark.slow
def test_a_queue_of_ones_own_stays_and_is_finished(tmp_path: Path) -> None:
    queue = tmp_path / "own.sqlite3"
    with running(tmp_path, "--episodes", "16", "--target", "0", "--queue", str(queue)) as demo:
        status, _, err = demo.finished()
    assert status == 0, err
    with SQLiteQueue(queue) as kept:
        assert kept.depth() == QueueDepth(done=16)


@pytest.mark.ucx
@pytest.mark.slow
@needs_redis
def test_the_run_goes_over_a_redis_server_and_leaves_nothing_there(tmp_path: Path) -> None:
    import redis

    with redis_server() as server, redis.Redis(port=server.port) as client:
        arguments = ("--episodes", "64", "--readers", "2", "--target", "0", "--json", "-")
        with running(tmp_path, *arguments, "--queue", f"redis://127.0.0.1:{server.port}/0") as demo:
            status, out, err = demo.finished()
        assert status == 0, err
        result = json.loads(out)
        assert (result["deliveries"], result["lost"], result["duplicates"], result["unread"]) == (128, 0, 0, 0)
        assert client.keys("*") == []
    assert demo.left() == []


@pytest.mark.ucx
@pytest.mark.slow
@needs_redis
def test_a_named_run_stays_and_its_server_may_be_killed_meanwhile(tmp_path: Path) -> None:
    with redis_server() as server:
        arguments = ("--episodes", "160", "--target", "0", "--json", "-", "--queue", server.place("kept"))
        with running(tmp_path, *arguments) as demo:
            demo.until_at_work()
            server.kill()
            server.start()
            status, out, err = demo.finished()
        assert status == 0, err
        result = json.loads(out)
        assert (result["deliveries"], result["lost"], result["duplicates"], result["unread"]) == (160, 0, 0, 0)
        with open_queue(server.place("kept")) as queue:
            assert queue.depth().done == 160
        with running(tmp_path, *arguments) as again:
            status, _, err = again.finished()
        assert status == 2
        assert "was used before" in err.splitlines()[-1]


# --- what goes wrong -------------------------------------------------------------------------------------
@pytest.mark.ucx
@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_everything_in_order(tmp_path: Path, number: signal.Signals, status: int) -> None:
    before = ResourceSnapshot.take()
    with running(tmp_path, "--episodes", _AT_WORK) as demo:
        demo.until_at_work()
        demo.process.send_signal(number)
        found, out, err = demo.finished()
    assert (found, out) == (status, "")
    assert err.splitlines()[-1] == f"transport demo: stopped by {number.name}; nothing is left behind"
    assert before.leaks(grace_s=0) == []
    assert demo.left() == []


@pytest.mark.ucx
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rollout", "trainer"])
def test_a_killed_worker_ends_the_run(tmp_path: Path, kind: str) -> None:
    before = ResourceSnapshot.take()
    with running(tmp_path, "--episodes", _AT_WORK) as demo:
        demo.until_at_work()
        os.kill(demo.processes(f"transport.demo.{kind}")[0], signal.SIGKILL)
        status, out, err = demo.finished()
    assert (status, out) == (1, "")
    last = err.splitlines()[-1]
    assert last.startswith(f"transport demo: {kind} ")
    assert last.endswith(" was ended by SIGKILL in the middle of the run")
    assert before.leaks(grace_s=0) == []
    assert demo.left() == []


@pytest.mark.ucx
@pytest.mark.slow
def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    before = ResourceSnapshot.take()
    with running(tmp_path, "--episodes", _AT_WORK) as demo:
        demo.until_at_work()
        demo.process.kill()
        demo.finished()
    assert before.leaks(grace_s=_CLEAN_UP_S) == []
    assert demo.left() == []


@pytest.mark.ucx
@pytest.mark.slow
def test_a_killed_listener_costs_no_payload(tmp_path: Path) -> None:
    with running(tmp_path, "--wire", "tcp", "--target", "0", "--json", "-") as demo:
        demo.until_at_work()
        os.kill(demo.processes("transport.listener_process")[0], signal.SIGKILL)
        status, out, err = demo.finished()
    assert status == 0, err
    result = json.loads(out)
    assert result["deliveries"] == 480
    assert (result["lost"], result["duplicates"], result["unread"]) == (0, 0, 0)


# --- parts -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("episodes", [1, 16, 479, 480])
@pytest.mark.parametrize("rollouts", [1, 3, 14])
def test_shares_are_even_and_exact(episodes: int, rollouts: int) -> None:
    plan = Plan(episodes=episodes, rollouts=rollouts)
    shares = [plan.share(index) for index in range(rollouts)]
    assert sum(shares) == episodes
    assert max(shares) - min(shares) <= 1


def outcome(*, published: int = 10, consumed: int = 10, waiting: int = 0, last: float = 40.0) -> Summary:
    trainer = TrainerDone(
        consumed=consumed,
        duplicates=0,
        stale=0,
        retries=0,
        bytes_by_wire={"tcp": 100},
        mean_return_first=20.0,
        mean_return_last=last,
        mean_staleness=1.0,
        updates=1,
    )
    rollout = RolloutDone(published=published, policies=1, policies_missed=0)
    depth = QueueDepth(ready=waiting, done=consumed)
    return summarise(Plan(rollouts=1, trainers=2, episodes=10), [rollout], [trainer, trainer], depth, 1.0)


def test_a_run_without_faults_has_no_problems() -> None:
    assert outcome().problems(10, target=2.0) == []


def test_what_is_neither_consumed_nor_queued_is_lost() -> None:
    summary = outcome(consumed=7, waiting=4)
    assert (summary.lost, summary.unread) == (2, 4)
    assert summary.problems(10, target=0) == ["2 deliveries were lost", "4 deliveries were not read"]


def test_learning_too_little_is_a_problem() -> None:
    (problem,) = outcome(last=39.9).problems(10, target=2.0)
    assert problem.startswith("the policy did not learn")


def test_a_rollout_passes_over_versions_that_were_replaced(tmp_path: Path) -> None:
    newest = Policy(seed=1)
    follower_policy = Policy(seed=2)
    with (
        SQLiteQueue(tmp_path / "queue.sqlite3") as queue,
        SharedRingBuffer.create(POLICY_SCHEMA, slots=2, overflow="overwrite") as ring,
        BlockingClient(schemas=[POLICY_SCHEMA], wire="mapped") as client,
    ):
        replaced = ring.write(newest.parameters())
        queue.announce(POLICY_TOPIC, 1, replaced.encode())
        ring.discard(replaced)
        follower = PolicyFollower(queue, client, follower_policy, rank=0)
        follower.follow()
        assert (follower.announced, follower.fetched, follower.missed) == (1, 0, 1)

        queue.announce(POLICY_TOPIC, 2, ring.write(newest.parameters()).encode())
        follower.follow()
        assert (follower.announced, follower.fetched, follower.missed) == (2, 1, 1)
        follower.follow()
        assert follower.fetched == 1
    assert follower_policy.version == 2
    np.testing.assert_equal(follower_policy.parameters(), newest.parameters())
