"""The demo's policy, learner and episodes, without any transport."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from transport.demo.episode import (
    MAXIMUM_LENGTH,
    Environment,
    Episode,
    make_environment,
    play_episode,
)
from transport.demo.policy import OBSERVATION_SIZE, PARAMETER_SHAPES, Policy
from transport.errors import CheckpointDamagedError, MissingDependencyError, UsageError

BATCH = 16


@pytest.fixture
def environment() -> Environment:
    pytest.importorskip("gymnasium")
    return make_environment()


class Corridor:
    """An environment that ends where it is told to, whatever the actions."""

    def __init__(self, length: int, *, terminates: bool) -> None:
        self._length, self._terminates, self._steps = length, terminates, 0

    def reset(self, *, seed: int | None = None) -> tuple[NDArray[np.float32], Mapping[str, Any]]:
        self._steps = 0
        self._rng = np.random.default_rng(seed)
        return self._observation(), {}

    def step(self, action: Any, /) -> tuple[NDArray[np.float32], float, bool, bool, Mapping[str, Any]]:
        assert action in (0, 1)
        self._steps += 1
        ended = self._steps == self._length
        return self._observation(), 1.0, ended and self._terminates, ended and not self._terminates, {}

    def _observation(self) -> NDArray[np.float32]:
        return self._rng.normal(0, 0.1, OBSERVATION_SIZE).astype(np.float32)


def play_batch(policy: Policy, seed: int, environment: Environment | None = None) -> list[Episode]:
    rng = np.random.default_rng(seed)
    corridors = [Corridor(length, terminates=length < 25) for length in range(10, 10 + BATCH)]
    return [play_episode(environment or corridor, policy, rng) for corridor in corridors]


def test_environment_without_gymnasium_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(MissingDependencyError, match="pip install"):
        make_environment()


@pytest.mark.parametrize("length", [MAXIMUM_LENGTH, MAXIMUM_LENGTH + 1])
def test_episode_at_the_time_limit_is_not_terminated(length: int) -> None:
    episode = play_episode(Corridor(length, terminates=False), Policy(), np.random.default_rng(0))
    assert len(episode["observations"]) == MAXIMUM_LENGTH
    assert not episode["terminated"]


def test_acting_and_the_batch_agree_on_log_probabilities() -> None:
    policy = trained_policy()
    episode = play_episode(Corridor(200, terminates=True), policy, np.random.default_rng(1))
    assert {0, 1} == set(episode["actions"].tolist())
    batch = policy.log_probabilities(episode["observations"], episode["actions"])
    np.testing.assert_allclose(batch, episode["log_probabilities"], rtol=1e-5, atol=1e-6)


def test_parameters_round_trip() -> None:
    source, target = trained_policy(), Policy(seed=99)
    target.load(source.parameters(), source.version)
    observations = np.random.default_rng(0).normal(size=(50, OBSERVATION_SIZE)).astype(np.float32)
    actions = np.zeros(50, np.int8)
    np.testing.assert_array_equal(
        source.log_probabilities(observations, actions), target.log_probabilities(observations, actions)
    )
    assert repr(target) == f"Policy(version={source.version})"
    assert {name: values.shape for name, values in target.parameters().items()} == PARAMETER_SHAPES


@pytest.mark.parametrize(
    "wrong",
    [
        {"bias": np.zeros(2, np.float32)},
        {"bias": np.zeros(1, np.float64)},
        {"extra": np.zeros(1, np.float32)},
    ],
)
def test_loading_foreign_parameters_is_refused_and_changes_nothing(wrong: dict[str, NDArray[Any]]) -> None:
    policy, other = Policy(seed=0), Policy(seed=1)
    before = policy.parameters()
    with pytest.raises(UsageError, match="parameter mismatch"):
        policy.load({**other.parameters(), **wrong}, version=1)
    assert policy.version == 0
    for name, values in policy.parameters().items():
        np.testing.assert_array_equal(values, before[name])


def test_a_saved_policy_is_restored_and_bytes_of_something_else_are_refused() -> None:
    source, target = trained_policy(), Policy(seed=99)
    target.restore(source.saved())
    assert target.version == source.version
    np.testing.assert_equal(target.parameters(), source.parameters())
    for wrong in (b"", b"\xc1", source.saved()[:-1], Policy().saved().replace(b"weights", b"heights")):
        with pytest.raises(CheckpointDamagedError):
            target.restore(wrong)
    assert target.version == source.version


def test_the_same_batches_make_the_same_policy() -> None:
    first, second = Policy(seed=0), Policy(seed=0)
    for policy in (first, second):
        for batch in range(3):
            policy.improve(play_batch(Policy(seed=0), seed=batch))
    np.testing.assert_equal(first.parameters(), second.parameters())
    assert first.version == 3


def test_actions_that_earned_more_become_more_probable() -> None:
    policy = Policy()
    short, long = (
        play_episode(Corridor(length, terminates=True), policy, np.random.default_rng(0)) for length in (5, 60)
    )
    short["actions"][:], long["actions"][:] = 0, 1
    policy.improve([short, long])
    right = policy.log_probabilities(long["observations"], np.ones(60, np.int8))
    assert np.exp(right).mean() > 0.55


def test_an_update_reads_received_memory_without_writing_to_it() -> None:
    policy = Policy()
    episodes = play_batch(policy, seed=0)
    for episode in episodes:
        for values in episode.values():
            values.flags.writeable = False
    policy.improve(episodes)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_returns_grow_although_episodes_are_stale(environment: Environment, staleness: int) -> None:
    actor, learner = Policy(seed=0), Policy(seed=0)
    published = [learner.parameters()]
    mean_returns = []
    for batch in range(14):
        version = max(0, batch - staleness)
        actor.load(published[version], version)
        episodes = play_batch(actor, batch, environment)
        learner.improve(episodes)
        mean_returns.append(np.mean([len(episode["actions"]) for episode in episodes]))
        published.append(learner.parameters())
    assert np.mean(mean_returns[-2:]) > 2 * np.mean(mean_returns[:2])  # as the demo promises


def trained_policy() -> Policy:
    """A policy that prefers some actions, unlike a fresh one."""
    policy = Policy()
    policy.load({"weights": np.linspace(-1, 1, OBSERVATION_SIZE, dtype=np.float32), "bias": np.ones(1, np.float32)}, 5)
    return policy
