"""The demo's policy and episodes, without any transport."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from transport.cli import run

pytest.importorskip("gymnasium")
from transport.demo.cartpole import LONGEST, Policy, cartpole, discounted, play


class Corridor:
    """An environment that ends where it is told to, whatever the actions."""

    def __init__(self, length: int, *, terminates: bool) -> None:
        self._length, self._terminates = length, terminates

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        self._left, self._rng = self._length, np.random.default_rng(seed)
        return self._rng.normal(0, 0.1, 4).astype(np.float32), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        over = not self._left
        observation = self._rng.normal(0, 0.1, 4).astype(np.float32)
        return observation, 1.0, over and self._terminates, over and not self._terminates, {}


def episode(length: int, policy: Policy, *, terminates: bool = True) -> dict[str, Any]:
    return play(Corridor(length, terminates=terminates), policy, np.random.default_rng(length))


def test_the_demo_without_gymnasium_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.delitem(sys.modules, "transport.demo.cartpole")
    assert run(["demo"]) == 1
    assert "pip install" in capsys.readouterr().err


def test_an_episode_at_the_time_limit_is_not_terminated_and_would_have_gone_on() -> None:
    cut = episode(LONGEST, Policy(0), terminates=False)
    assert len(cut["observations"]) == LONGEST and not cut["terminated"]
    assert discounted(cut)[-1] > discounted(episode(LONGEST, Policy(0)))[-1] == 1.0


def test_actions_that_earned_more_become_more_probable() -> None:
    policy = Policy(0)
    short, long = episode(5, policy), episode(60, policy)
    short["actions"][:], long["actions"][:] = 0, 1
    before = policy.logits(long["observations"]).mean()
    policy.improve([short, long])
    assert policy.logits(long["observations"]).mean() > before + 0.1


def test_the_same_batches_make_the_same_policy_without_writing_to_them() -> None:
    first, second = Policy(0), Policy(0)
    for policy in (first, second):
        episodes = [episode(length, Policy(0)) for length in range(10, 20)]
        for each in episodes:
            for name in ("observations", "actions", "log_probabilities"):
                each[name].flags.writeable = False
        policy.improve(episodes)
    np.testing.assert_equal(first.parameters, second.parameters)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_returns_grow_although_episodes_are_stale(staleness: int) -> None:
    environment, rng = cartpole(), np.random.default_rng(0)
    learner, actor = Policy(0), Policy(0)
    published, returns = [learner.parameters], []
    for update in range(14):
        actor.parameters = published[max(0, update - staleness)]
        episodes = [play(environment, actor, rng) for _ in range(16)]
        learner.improve(episodes)
        returns.append(np.mean([len(each["actions"]) for each in episodes]))
        published.append(learner.parameters)
    assert np.mean(returns[-2:]) > 2 * np.mean(returns[:2])  # as the demo promises
