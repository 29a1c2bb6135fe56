"""One episode of CartPole-v1 as a payload: its fields, and the loop that plays it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from transport.demo.policy import OBSERVATION_SIZE, Policy
from transport.errors import MissingDependencyError
from transport.runtime.installing import install
from transport.schema import Schema, UpTo

if TYPE_CHECKING:
    from collections.abc import Mapping

ENVIRONMENT = "CartPole-v1"
MAXIMUM_LENGTH = 500
"""Steps after which CartPole-v1 truncates an episode."""

Episode = dict[str, NDArray[Any]]


EPISODE_SCHEMA: Final = Schema.of(
    observations=("float32", UpTo(MAXIMUM_LENGTH), OBSERVATION_SIZE),  # m, m/s, rad, rad/s; one for each step played
    actions=("int8", UpTo(MAXIMUM_LENGTH)),  # 0 pushes left, 1 pushes right
    rewards=("float32", UpTo(MAXIMUM_LENGTH)),
    log_probabilities=("float32", UpTo(MAXIMUM_LENGTH)),  # nats, under the policy that played
    policy_version="int64",
    terminated="bool",  # False: cut at the time limit, the pole still stood
)


class Environment(Protocol):
    """What is used of a Gymnasium environment."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, Mapping[str, Any]]: ...

    def step(self, action: Any, /) -> tuple[Any, Any, bool, bool, Mapping[str, Any]]: ...


def make_environment() -> Environment:
    """Return a CartPole-v1 with its time limit. Raises MissingDependencyError without Gymnasium."""
    try:
        import gymnasium
    except ImportError as error:
        raise MissingDependencyError(f"the demo needs Gymnasium's CartPole: {install('demo')}") from error
    # The checker looks at every step for mistakes of an environment's author; CartPole is not ours.
    environment: Environment = gymnasium.make(ENVIRONMENT, disable_env_checker=True)
    return environment


def play_episode(environment: Environment, policy: Policy, rng: np.random.Generator) -> Episode:
    """Play one episode of T <= MAXIMUM_LENGTH steps; the arrays are those of EPISODE_SCHEMA, T long where ragged.

    The episode follows from ``policy`` and the state of ``rng`` alone: the start is drawn from ``rng`` as well.
    """
    observations = np.empty((MAXIMUM_LENGTH, OBSERVATION_SIZE), np.float32)
    actions = np.empty(MAXIMUM_LENGTH, np.int8)
    rewards = np.empty(MAXIMUM_LENGTH, np.float32)
    log_probabilities = np.empty(MAXIMUM_LENGTH, np.float32)
    terminated = truncated = False
    length = 0

    observation, _ = environment.reset(seed=int(rng.integers(2**31)))
    while not (terminated or truncated) and length < MAXIMUM_LENGTH:
        action, log_probability = policy.act(observation, rng)
        observations[length] = observation
        actions[length] = action
        log_probabilities[length] = log_probability
        observation, rewards[length], terminated, truncated, _ = environment.step(action)
        length += 1

    return {
        "observations": observations[:length],
        "actions": actions[:length],
        "rewards": rewards[:length],
        "log_probabilities": log_probabilities[:length],
        "policy_version": np.array(policy.version, np.int64),
        "terminated": np.array(terminated, np.bool_),
    }
