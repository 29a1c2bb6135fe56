"""A policy that plays CartPole-v1, and the learner that improves it from episodes that may be a few versions old.

Both are numpy only and know nothing of the transport. The learner is proximal policy optimisation (PPO): each
episode carries the log-probabilities under the policy that played it, the ratio of new to old probability corrects
for its age, and clipping that ratio bounds what one batch can change.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transport.errors import UsageError

Array = NDArray[Any]

OBSERVATION_SIZE = 4
HIDDEN_SIZE = 32

# Cart position (m) and velocity (m/s), pole angle (rad) and velocity (rad/s) at which an episode is about lost;
# divided by it, all four observations have the size for which the weights are drawn.
OBSERVATION_SCALE = np.array([2.4, 2.0, 0.2, 2.0], np.float32)
_INVERSE_SCALE = 1 / OBSERVATION_SCALE

PARAMETER_SHAPES: dict[str, tuple[int, ...]] = {
    "hidden_weights": (OBSERVATION_SIZE, HIDDEN_SIZE),
    "hidden_bias": (HIDDEN_SIZE,),
    "output_weights": (HIDDEN_SIZE,),
    "output_bias": (1,),
}
"""Names and shapes of a policy's parameters, all float32."""


class Policy:
    """Pushes the cart right with probability sigmoid(logit); the logit comes from one hidden layer of tanh units.

    ``version`` counts the updates that made these parameters. ``act`` reuses its buffers: one thread per policy.
    """

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        weights = rng.normal(0, 1 / math.sqrt(OBSERVATION_SIZE), PARAMETER_SHAPES["hidden_weights"])
        self.version = 0
        self._parameters = {name: np.zeros(shape, np.float32) for name, shape in PARAMETER_SHAPES.items()}
        self._parameters["hidden_weights"][:] = weights
        # Nearly zero: both actions start equally likely everywhere, which explores most.
        self._parameters["output_weights"][:] = rng.normal(0, 0.01, HIDDEN_SIZE)
        self._input = np.empty(OBSERVATION_SIZE, np.float32)
        self._hidden = np.empty(HIDDEN_SIZE, np.float32)

    def __repr__(self) -> str:
        return f"Policy(version={self.version})"

    def act(self, observation: Array, rng: np.random.Generator) -> tuple[int, float]:
        """Draw an action for one observation [4] float32; return it with its log-probability in nats."""
        parameters, inputs, hidden = self._parameters, self._input, self._hidden
        np.multiply(observation, _INVERSE_SCALE, out=inputs)
        np.dot(inputs, parameters["hidden_weights"], out=hidden)
        np.add(hidden, parameters["hidden_bias"], out=hidden)
        np.tanh(hidden, out=hidden)
        logit = float(hidden.dot(parameters["output_weights"])) + float(parameters["output_bias"][0])
        # sigmoid written with tanh cannot overflow; an action that it gives probability 0 is never drawn, so neither
        # can the exponential below.
        if rng.random() < 0.5 + 0.5 * math.tanh(0.5 * logit):
            return 1, -math.log1p(math.exp(-logit))
        return 0, -math.log1p(math.exp(logit))

    def log_probabilities(self, observations: Array, actions: Array) -> Array:
        """Log-probabilities [T] float32 in nats of ``actions`` [T] (0 or 1) at ``observations`` [T, 4] float32."""
        logits, _ = _forward(self._parameters, _scaled(observations))
        return _log_sigmoid(logits * _signs(actions))

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


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """Tuned for batches of about 16 episodes that are 0 to 4 versions old."""

    learning_rate: float = 0.01
    discount: float = 0.98  # looks 50 steps (one second) ahead: a pole is lost or caught within it
    trace: float = 0.95  # lambda of generalised advantage estimation: 1 trusts returns, 0 trusts the critic
    clip: float = 0.2
    ratio_most: float = 3.0  # bounds the pull of one very unlikely old action; 1 + clip does so only for good ones
    epochs: int = 4
    minibatch_steps: int = 512


@dataclass(frozen=True, kw_only=True)
class Update:
    """What one call of ``Learner.learn`` did."""

    version: int
    """Version of the policy after the update."""
    episodes: int
    steps: int
    mean_return: float
    """Sum of rewards, averaged over the episodes of the batch."""
    mean_staleness: float
    """Versions between the policy that played and the one that was improved, averaged over the episodes."""


class Learner:
    """Improves ``policy`` in place, batch by batch; the same seed and batches give the same parameters."""

    def __init__(self, policy: Policy, seed: int = 0, hyperparameters: Hyperparameters | None = None) -> None:
        self.policy = policy
        self._settings = hyperparameters or Hyperparameters()
        self._rng = np.random.default_rng(seed)
        self._critic = Critic()
        self._adam = _Adam(self._settings.learning_rate)

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """All but the policy: arrays by name, and the state of the random numbers."""
        return {
            "critic": self._critic._weights,
            "steps": np.array(self._adam._steps),
            **{f"first.{name}": each for name, each in self._adam._first.items()},
            **{f"second.{name}": each for name, each in self._adam._second.items()},
        }, dict(self._rng.bit_generator.state)

    def load_state(self, arrays: Mapping[str, Array], generator: dict[str, Any]) -> None:
        """Go on as the learner that had this `state`. Raises KeyError or ValueError for what is none."""
        self._critic._weights[:] = arrays["critic"]
        self._adam._steps = int(arrays["steps"])
        for name in PARAMETER_SHAPES:
            self._adam._first[name][...] = arrays[f"first.{name}"]
            self._adam._second[name][...] = arrays[f"second.{name}"]
        self._rng.bit_generator.state = generator

    def learn(self, episodes: Sequence[Mapping[str, Array]]) -> Update:
        """Make one new version of the policy from a batch of episodes (fields as in episode.py), in any order.

        Raises UsageError when the batch has no episode.
        """
        if not episodes:
            raise UsageError("a batch needs at least one episode")
        settings = self._settings
        staleness = [self.policy.version - int(episode["policy_version"]) for episode in episodes]
        returns = [float(np.sum(episode["rewards"])) for episode in episodes]

        inputs = _scaled(np.concatenate([episode["observations"] for episode in episodes]))
        signs = _signs(np.concatenate([episode["actions"] for episode in episodes]))
        old = np.concatenate([episode["log_probabilities"] for episode in episodes])
        advantages = self._advantages(inputs, episodes)

        steps = len(inputs)
        minibatches = math.ceil(steps / settings.minibatch_steps)
        for _ in range(settings.epochs):
            for rows in np.array_split(self._rng.permutation(steps), minibatches):
                _, gradients = clipped_surrogate(
                    self.policy._parameters, inputs[rows], signs[rows], advantages[rows], old[rows], settings
                )
                self._adam.step(self.policy._parameters, gradients)

        self.policy.version += 1
        return Update(
            version=self.policy.version,
            episodes=len(episodes),
            steps=steps,
            mean_return=float(np.mean(returns)),
            mean_staleness=float(np.mean(staleness)),
        )

    def _advantages(self, inputs: Array, episodes: Sequence[Mapping[str, Array]]) -> Array:
        """Fit the critic to the batch; return advantages [T] float32 over all its steps, mean 0 and deviation 1."""
        rewards = [np.asarray(episode["rewards"], np.float64) for episode in episodes]
        # An episode cut at the time limit would have gone on: what it would still have earned is taken to be the
        # critic's value of its last observation, since the one after it is not part of the payload.
        continues = [not bool(episode["terminated"]) for episode in episodes]
        ends = np.cumsum([len(values) for values in rewards])[:-1]
        features = Critic.features(inputs)

        discount = self._settings.discount
        values = np.split(self._critic.values(features), ends)
        targets = [
            discounted_sums(reward, discount, last=value[-1] * goes_on)
            for reward, value, goes_on in zip(rewards, values, continues, strict=True)
        ]
        self._critic.fit(features, np.concatenate(targets))

        values = np.split(self._critic.values(features), ends)
        advantages = np.concatenate(
            [
                generalised_advantages(reward, value, value[-1] * goes_on, discount, self._settings.trace)
                for reward, value, goes_on in zip(rewards, values, continues, strict=True)
            ]
        )
        normalised: Array = (advantages - advantages.mean()) / (advantages.std() + 1e-6)
        return normalised.astype(np.float32)


class Critic:
    """Expected discounted return as a quadratic of the observation, fitted by least squares.

    Near its balance CartPole is almost linear and its cost almost quadratic, so this closed form learns in one batch
    what a network would need many for.
    """

    _RIDGE = 1e-4  # per step; keeps what a narrow batch says nothing about where earlier batches put it
    _ROWS, _COLUMNS = np.triu_indices(OBSERVATION_SIZE)

    def __init__(self) -> None:
        self._weights = np.zeros(1 + OBSERVATION_SIZE + len(self._ROWS))

    @classmethod
    def features(cls, inputs: Array) -> Array:
        """Constant, scaled observations and their products: [T, 15] float64 for inputs [T, 4]."""
        inputs = inputs.astype(np.float64)
        return np.hstack([np.ones((len(inputs), 1)), inputs, inputs[:, cls._ROWS] * inputs[:, cls._COLUMNS]])

    def values(self, features: Array) -> Array:
        """Values [T] float64; zeros before the first fit."""
        values: Array = features @ self._weights
        return values

    def fit(self, features: Array, targets: Array) -> None:
        """Move to the least-squares fit of ``targets`` [T] float64."""
        normal = features.T @ features + self._RIDGE * len(features) * np.eye(features.shape[1])
        self._weights += np.linalg.solve(normal, features.T @ (targets - self.values(features)))


class _Adam:
    """Adam with its usual decays, over named parameters."""

    _DECAY_1, _DECAY_2, _EPSILON = 0.9, 0.999, 1e-8

    def __init__(self, learning_rate: float) -> None:
        self._rate = learning_rate
        self._steps = 0
        self._first = {name: np.zeros(shape, np.float32) for name, shape in PARAMETER_SHAPES.items()}
        self._second = {name: np.zeros(shape, np.float32) for name, shape in PARAMETER_SHAPES.items()}

    def step(self, parameters: Mapping[str, Array], gradients: Mapping[str, Array]) -> None:
        """Move ``parameters`` in place against ``gradients``."""
        self._steps += 1
        unbias_1 = 1 - self._DECAY_1**self._steps
        unbias_2 = 1 - self._DECAY_2**self._steps
        for name, gradient in gradients.items():
            first, second = self._first[name], self._second[name]
            first += (1 - self._DECAY_1) * (gradient - first)
            second += (1 - self._DECAY_2) * (gradient * gradient - second)
            parameters[name][...] -= self._rate / unbias_1 * first / (np.sqrt(second / unbias_2) + self._EPSILON)


def clipped_surrogate(
    parameters: Mapping[str, Array],
    inputs: Array,
    signs: Array,
    advantages: Array,
    old_log_probabilities: Array,
    settings: Hyperparameters,
) -> tuple[float, dict[str, Array]]:
    """Return PPO's loss, ``-mean(clipped ratio * advantage)``, and its gradient by parameter name.

    ``inputs`` [T, 4] are scaled observations, ``signs`` [T] are +1 for right and -1 for left, the rest is [T]. The
    ratio is new to old probability; a step whose ratio has moved as far as its advantage may pull it has no gradient.
    """
    logits, hidden = _forward(parameters, inputs)
    log_probabilities = _log_sigmoid(signs * logits)
    log_ratios = log_probabilities - old_log_probabilities
    good = advantages > 0
    lowest = np.where(good, -np.inf, math.log1p(-settings.clip))
    highest = np.where(good, math.log1p(settings.clip), math.log(settings.ratio_most))
    pulls = np.where((lowest < log_ratios) & (log_ratios < highest), 1, 0)
    # Clipped as a logarithm, so that no policy can be far enough from the old one to overflow.
    gains = np.exp(np.clip(log_ratios, lowest, highest)) * advantages

    slopes = -(gains * pulls * signs * (1 - np.exp(log_probabilities)) / len(inputs)).astype(inputs.dtype)
    back = np.outer(slopes, parameters["output_weights"]) * (1 - hidden * hidden)
    return -float(gains.mean()), {
        "hidden_weights": inputs.T @ back,
        "hidden_bias": back.sum(axis=0),
        "output_weights": hidden.T @ slopes,
        "output_bias": slopes.sum(keepdims=True),
    }


def generalised_advantages(rewards: Array, values: Array, last: float, discount: float, trace: float) -> Array:
    """Advantages [T] float64 of one episode by GAE; ``last`` is the value after its last step, 0 if it terminated."""
    errors = rewards + discount * np.append(values[1:], last) - values
    return discounted_sums(errors, discount * trace)


def discounted_sums(terms: Array, discount: float, last: float = 0.0) -> Array:
    """Sums [T] float64 with ``sums[t] = terms[t] + discount * sums[t + 1]`` and ``sums[T] = last``."""
    # Plain floats: for the 500 steps of an episode this is faster than any vectorised form of the recurrence.
    backwards: Iterable[float] = terms[::-1].tolist()
    sums = list(accumulate(backwards, lambda later, term: term + discount * later, initial=float(last)))
    return np.array(sums[:0:-1])


def _scaled(observations: Array) -> Array:
    return np.multiply(observations, _INVERSE_SCALE)


def _signs(actions: Array) -> Array:
    """+1 for action 1 (right), -1 for action 0 (left), so that sigmoid(sign * logit) is an action's probability."""
    return np.multiply(actions, 2, dtype=np.float32) - 1


def _forward(parameters: Mapping[str, Array], inputs: Array) -> tuple[Array, Array]:
    """Logits [T] of pushing right, and the hidden layer [T, 32], in the dtype of ``inputs``."""
    hidden = np.tanh(inputs @ parameters["hidden_weights"] + parameters["hidden_bias"])
    return hidden @ parameters["output_weights"] + parameters["output_bias"], hidden


def _log_sigmoid(logits: Array) -> Array:
    return -np.logaddexp(0, -logits)
