"""The programs of deploy/kubernetes as its Jobs run them: with a directory, and a rollout that is pre-empted."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from redis_server import RedisServer, needs_redis
from redis_stores import running

__all__ = ["running"]

pytestmark = [pytest.mark.ucx, pytest.mark.slow, needs_redis]
PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "several_hosts.py"
EPISODES = 400  # more than a ring has slots


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, str(PROGRAM), *map(str, arguments)], stdout=subprocess.PIPE, text=True)


@pytest.mark.nightly
def test_a_rollout_that_is_asked_to_stop_fails_and_the_trainer_ends_with_the_one_in_its_place(
    running: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_ADDRESSES", "127.0.0.1")
    rings = f"rings+{running.place('several-hosts')}"

    def rollout(number: int) -> subprocess.Popen[str]:
        return start("rollout", "--number", number, "--port", 0, "--rings", rings, "--episodes", EPISODES)

    with rollout(0) as stopped, rollout(1) as other:
        assert stopped.stdout is not None
        assert stopped.stdout.readline().startswith("rollout 0 serves")
        stopped.send_signal(signal.SIGTERM)
        with start("trainer", "--rings", rings, "--rollouts", 2, "--episodes", EPISODES) as trainer:
            assert stopped.wait() == 128 + signal.SIGTERM
            assert "rollout 0 was asked to stop" in stopped.communicate()[0]
            with rollout(0) as again:
                said = trainer.communicate()[0]
                assert (again.wait(), other.wait(), trainer.returncode) == (0, 0, 0)
    assert f"trained on {2 * EPISODES} episodes of 2 rollouts" in said
