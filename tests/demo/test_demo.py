"""The main job as users run it: real processes, real shared memory, real UCX."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import urllib.request
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from demos import AT_WORK, running

from transport import SharedRingBuffer
from transport.client.blocking import BlockingClient
from transport.demo.messages import RolloutDone, TrainerDone
from transport.demo.plan import POLICY_SCHEMA, POLICY_TOPIC, Plan
from transport.demo.policy import Policy
from transport.demo.rollout import PolicyFollower
from transport.demo.summary import Summary, summarise
from transport.queue import QueueDepth, RedisQueue
from transport.weights.offers import offer

pytest.importorskip("gymnasium")
if importlib.util.find_spec("ucxx") is None:  # importing it would make its variables count as the user's
    pytest.skip("needs ucxx", allow_module_level=True)

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


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
def test_a_queue_of_ones_own_stays_and_is_finished(tmp_path: Path, queue_url: str, queue: RedisQueue) -> None:
    with running(tmp_path, "--episodes", "16", "--target", "0", "--queue", queue_url) as demo:
        status, _, err = demo.finished()
    assert status == 0, err
    assert queue.depth() == QueueDepth(done=16)


# --- parts ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("episodes", [1, 16, 479, 480])
@pytest.mark.parametrize("rollouts", [1, 3, 14])
def test_shares_are_even_and_exact(episodes: int, rollouts: int) -> None:
    plan = Plan(episodes=episodes, rollouts=rollouts)
    shares = [plan.share(index) for index in range(rollouts)]
    assert sorted(number for share in shares for number in share) == list(range(episodes))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


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
    rollout = RolloutDone(published=published, pauses_s=[0.002], policies_missed=0)
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


def test_a_rollout_passes_over_versions_that_were_replaced(queue: RedisQueue) -> None:
    newest = Policy(seed=1)
    follower_policy = Policy(seed=2)
    with (
        SharedRingBuffer.create(POLICY_SCHEMA, slots=2, overflow="overwrite") as ring,
        BlockingClient(schemas=[POLICY_SCHEMA], wire="mapped") as client,
    ):
        replaced = ring.write(newest.parameters())
        queue.announce(POLICY_TOPIC, 1, offer(replaced, newest.parameters(), 1))
        ring.discard(replaced)
        follower = PolicyFollower(queue, client, follower_policy, rank=0)
        follower.follow()
        assert (follower.announced, len(follower.pauses_s), follower.missed) == (1, 0, 1)

        queue.announce(POLICY_TOPIC, 2, offer(ring.write(newest.parameters()), newest.parameters(), 2))
        follower.follow()
        assert (follower.announced, len(follower.pauses_s), follower.missed) == (2, 1, 1)
        follower.follow()
        assert len(follower.pauses_s) == 1

        other = Policy(seed=3).parameters()  # what is offered is not what was written: it is not played with
        queue.announce(POLICY_TOPIC, 3, offer(ring.write(other), newest.parameters(), 3))
        follower.follow()
        assert (follower.announced, len(follower.pauses_s), follower.missed) == (3, 1, 2)
    assert follower_policy.version == 2
    np.testing.assert_equal(follower_policy.parameters(), newest.parameters())
