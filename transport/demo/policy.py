"""A policy that plays CartPole-v1, and how it is improved by episodes that may be a few versions old.

Both are numpy only and know nothing of the transport. An update is a step along the gradient of the expected return
(REINFORCE). Each episode carries the log-probabilities under the policy that played it: the ratio of new to old
probability corrects for its age.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from transport.errors import CheckpointDamagedError, UsageError

Array = NDArray[Any]

OBSERVATION_SIZE: Final = 4

# Cart position (m) and velocity (m/s), pole angle (rad) and velocity (rad/s) at which an episode is about lost;
# divided by it, all four observations have the same size.
_INVERSE_SCALE: Final = 1 / np.array([2.4, 2.0, 0.2, 2.0], np.float32)

PARAMETER_SHAPES: Final[dict[str, tuple[int, ...]]] = {"weights": (OBSERVATION_SIZE,), "bias": (1,)}
"""Names and shapes of a policy's parameters, all float32."""

_DISCOUNT: Final = 0.98  # looks 50 steps (one second) ahead: a pole is lost or caught within it
_RATIO_MOST: Final = 3.0  # bounds the pull of one very unlikely old action
_STEP: Final = 1.0  # length of an update, in the units of the parameters


class Policy:
    """Pushes the cart right with probability sigmoid(logit); the logit is linear in the scaled observation.

    ``version`` counts the updates that made these parameters.
    """

    def __init__(self, seed: int = 0) -> None:
        # Nearly zero: both actions start equally likely everywhere, which explores most.
        rng = np.random.default_rng(seed)
        self._parameters = {
            name: rng.normal(0, 0.01, shape).astype(np.float32) for name, shape in PARAMETER_SHAPES.items()
        }
        self.version = 0

    def __repr__(self) -> str:
        return f"Policy(version={self.version})"

    def act(self, observation: Array, rng: np.random.Generator) -> tuple[int, float]:
        """Draw an action for one observation [4] float32; return it with its log-probability in nats."""
        logit = float((observation * _INVERSE_SCALE).dot(self._parameters["weights"])) + float(
            self._parameters["bias"][0]
        )
        # sigmoid written with tanh cannot overflow; an action that it gives probability 0 is never drawn, so neither
        # can the exponential below.
        if rng.random() < 0.5 + 0.5 * math.tanh(0.5 * logit):
            return 1, -math.log1p(math.exp(-logit))
        return 0, -math.log1p(math.exp(logit))

    def log_probabilities(self, observations: Array, actions: Array) -> Array:
        """Log-probabilities [T] float32 in nats of ``actions`` [T] (0 or 1) at ``observations`` [T, 4] float32."""
        logits = (observations * _INVERSE_SCALE) @ self._parameters["weights"] + self._parameters["bias"]
        return -np.logaddexp(0, -logits * _signs(actions))

    def improve(self, episodes: Sequence[Mapping[str, Array]]) -> None:
        """Become the next version, by a batch of episodes (fields as in episode.py), in any order.

        Raises UsageError when the batch has no episode.
        """
        if not episodes:
            raise UsageError("a batch needs at least one episode")
        observations = np.concatenate([episode["observations"] for episode in episodes])
        actions = np.concatenate([episode["actions"] for episode in episodes])
        returns = np.concatenate([_returns(episode) for episode in episodes])
        advantages = (returns - returns.mean()) / (returns.std() + 1e-6)
        now = self.log_probabilities(observations, actions)
        age = now - np.concatenate([episode["log_probabilities"] for episode in episodes])
        ratios = np.exp(np.minimum(age, math.log(_RATIO_MOST)))
        slopes = ratios * advantages * _signs(actions) * (1 - np.exp(now))
        gradient = np.append(slopes @ (observations * _INVERSE_SCALE), slopes.sum())
        step = _STEP * gradient / (np.linalg.norm(gradient) + 1e-12)
        self._parameters["weights"] += step[:-1].astype(np.float32)
        self._parameters["bias"] += step[-1:].astype(np.float32)
        self.version += 1

    def parameters(self) -> dict[str, NDArray[np.float32]]:
        """Return copies of the parameters, so that what is sent does not change with the next update."""
        return {name: values.copy() for name, values in self._parameters.items()}

    def load(self, parameters: Mapping[str, Array], version: int) -> None:
        """Copy ``parameters`` in, all or nothing. Raises UsageError for other names, shapes or dtypes."""
        found = {name: (np.shape(values), np.asarray(values).dtype) for name, values in parameters.items()}
        expected = {name: (shape, np.dtype(np.float32)) for name, shape in PARAMETER_SHAPES.items()}
        if found != expected:
            raise UsageError(f"parameter mismatch: expected {expected}, found {found}")
        for name, values in parameters.items():
            self._parameters[name][:] = values
        self.version = version

    def saved(self) -> bytes:
        """Parameters and version, for `restore`."""
        return msgspec.msgpack.encode(
            (self.version, {name: values.tobytes() for name, values in self._parameters.items()})
        )

    def restore(self, saved: bytes) -> None:
        """Be the policy that was saved. Raises CheckpointDamagedError for bytes of something else."""
        try:
            version, found = msgspec.msgpack.decode(saved, type=tuple[int, dict[str, bytes]])
            self.load({name: np.frombuffer(values, np.float32) for name, values in found.items()}, version)
        except (msgspec.MsgspecError, ValueError) as error:
            raise CheckpointDamagedError(f"this is no policy of the demo: {error}") from error


def _returns(episode: Mapping[str, Array]) -> Array:
    """Discounted returns [T] float64. An episode cut at the time limit would have gone on, at a reward of 1 a step."""
    last = 0.0 if episode["terminated"] else 1 / (1 - _DISCOUNT)
    backwards: Iterable[float] = np.asarray(episode["rewards"], np.float64)[::-1].tolist()
    sums = list(accumulate(backwards, lambda later, reward: reward + _DISCOUNT * later, initial=last))
    return np.array(sums[:0:-1])


def _signs(actions: Array) -> Array:
    """+1 for action 1 (right), -1 for action 0 (left), so that sigmoid(sign * logit) is an action's probability."""
    return np.multiply(actions, 2, dtype=np.float32) - 1
