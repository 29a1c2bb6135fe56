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
from transport.demo.policy import (
    HIDDEN_SIZE,
    OBSERVATION_SIZE,
    PARAMETER_SHAPES,
    Hyperparameters,
    Learner,
    Policy,
    clipped_surrogate,
    discounted_sums,
    generalised_advantages,
)
from transport.errors import MissingDependencyError, UsageError

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
        {"output_bias": np.zeros(2, np.float32)},
        {"output_bias": np.zeros(1, np.float64)},
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


def test_gradient_matches_finite_differences() -> None:
    rng = np.random.default_rng(4)
    steps = 60
    parameters = {name: rng.normal(0, 0.5, shape) for name, shape in PARAMETER_SHAPES.items()}
    inputs = rng.normal(size=(steps, OBSERVATION_SIZE))
    signs = rng.choice([-1.0, 1.0], steps)
    advantages = rng.normal(size=steps)
    # Old probabilities near and far from the new, so that some steps are inside the clip and some at each bound.
    old = -np.abs(rng.normal(0.7, 0.8, steps))

    def loss_and_gradient() -> tuple[float, dict[str, NDArray[Any]]]:
        return clipped_surrogate(parameters, inputs, signs, advantages, old, Hyperparameters())

    _, gradients = loss_and_gradient()
    width = 1e-6
    for name, values in parameters.items():
        for index in np.ndindex(values.shape):
            kept = values[index]
            values[index] = kept + width
            above, _ = loss_and_gradient()
            values[index] = kept - width
            below, _ = loss_and_gradient()
            values[index] = kept
            assert gradients[name][index] == pytest.approx((above - below) / (2 * width), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "pulls"),
    [(1, 0.0, True), (1, 0.3, False), (1, -9, True), (-1, 0.0, True), (-1, -0.3, False), (-1, 9, False)],
)
def test_a_step_that_moved_far_enough_has_no_gradient(advantage: float, log_ratio: float, pulls: bool) -> None:
    parameters = {name: np.zeros(shape, np.float32) for name, shape in PARAMETER_SHAPES.items()}
    even = np.log(0.5)
    _, gradients = clipped_surrogate(
        parameters,
        np.zeros((1, OBSERVATION_SIZE), np.float32),
        np.ones(1, np.float32),
        np.array([advantage], np.float32),
        np.array([even - log_ratio], np.float32),
        Hyperparameters(),
    )
    assert bool(gradients["output_bias"][0]) == pulls


def test_discounted_sums_and_advantages_by_hand() -> None:
    np.testing.assert_allclose(discounted_sums(np.array([1.0, 2.0, 3.0]), 0.5, last=8), [3.75, 5.5, 7])
    rewards, values = np.ones(2), np.array([10.0, 20.0])
    # errors: 1 + 0.5 * 20 - 10 = 1 and 1 + 0.5 * 4 - 20 = -17
    np.testing.assert_allclose(generalised_advantages(rewards, values, 4.0, discount=0.5, trace=0.5), [-3.25, -17])


def test_learner_is_deterministic_for_a_seed() -> None:
    def learned(seed: int) -> dict[str, NDArray[np.float32]]:
        policy = Policy(seed=0)
        learner = Learner(policy, seed=seed, hyperparameters=Hyperparameters(minibatch_steps=64))
        for batch in range(3):
            learner.learn(play_batch(Policy(seed=0), seed=batch))
        return policy.parameters()

    first, again, other = learned(1), learned(1), learned(2)
    for name in PARAMETER_SHAPES:
        np.testing.assert_array_equal(first[name], again[name])
    assert not np.array_equal(first["output_weights"], other["output_weights"])


def test_learner_reads_received_memory_without_writing_to_it() -> None:
    policy = Policy()
    episodes = play_batch(policy, seed=0)
    for episode in episodes:
        for values in episode.values():
            values.flags.writeable = False
    Learner(policy).learn(episodes)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_returns_grow_although_episodes_are_stale(environment: Environment, staleness: int) -> None:
    actor, learner = Policy(seed=0), Learner(Policy(seed=0))
    published = [learner.policy.parameters()]
    mean_returns = []
    for batch in range(14):
        version = max(0, batch - staleness)
        actor.load(published[version], version)
        mean_returns.append(learner.learn(play_batch(actor, batch, environment)).mean_return)
        published.append(learner.policy.parameters())
    # A dozen seeds ended 9 to 24 times above their start; 2 is what the demo promises.
    assert np.mean(mean_returns[-2:]) > 2 * np.mean(mean_returns[:2])


def trained_policy() -> Policy:
    """A policy that prefers some actions, unlike a fresh one."""
    policy = Policy(seed=2)
    preference = np.linspace(-1, 1, HIDDEN_SIZE, dtype=np.float32)
    policy.load({**policy.parameters(), "output_weights": preference}, version=5)
    return policy
