"""Trajectories as payloads: text, messages, 8192 tokens, three arrays of log-probabilities, an image, a reward.

Needs numpy only, since a peer measures with it in an environment that does not have this package. What is measured is
the same for all, in one process that writes and trains:

    put   a batch is handed over
    get   two fields of each payload of it come back: tokens and one array of log-probabilities
    job   a batch is put, taken as a whole, every field looked at, and consumed

    python trajectories.py SCRIPT SECONDS BATCH      a peer: prints the medians as one line of JSON
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

TOKENS = 8192
TWO = ("tokens", "logprobs")
_KINDS = 4
_LEAST_ROUNDS = 3

Sample = dict[str, Any]


class Carrier(Protocol):
    """Carries batches of trajectories. Closed by who made it."""

    def put(self, samples: Sequence[Sample]) -> None:
        """Hand a batch over."""

    def get(self, fields: Sequence[str]) -> list[Sample]:
        """Some fields of the batch that was put last; it stays."""

    def clear(self) -> None:
        """Take that batch away."""

    def take(self) -> list[Sample]:
        """All fields of what was put, consumed."""


def sample(seed: int) -> Sample:
    """One trajectory; its number stands in its reward."""
    rng = np.random.default_rng(seed)
    logprobs = [rng.standard_normal(TOKENS, dtype=np.float32) for _ in range(3)]
    text = "".join(map(chr, rng.integers(97, 123, 2000)))
    return {
        "prompt": text,
        "messages": [
            {"role": "user", "content": text, "turn": 0, "tools": None},
            {"role": "assistant", "content": text[::-1], "turn": 1, "tools": [{"name": "search", "ids": [1, 2, 3]}]},
        ],
        "tokens": rng.integers(0, 32000, TOKENS, dtype=np.int32),
        "logprobs": logprobs[0],
        "ref_logprobs": logprobs[1],
        "old_logprobs": logprobs[2],
        "image": rng.integers(0, 256, (224, 224, 3), dtype=np.uint8),
        "reward": np.float32(seed),
    }


def nbytes(samples: Sequence[Sample], fields: Sequence[str]) -> int:
    """Of the arrays among these fields."""
    return sum(each[name].nbytes for each in samples for name in fields if isinstance(each[name], np.ndarray))


class WrongTrajectoryError(Exception):
    """What came back is not what was put."""


def check(found: Sequence[Sample], wanted: Sequence[Sample], fields: Sequence[str]) -> None:
    """Compare; in any order of the payloads, which their first log-probability names."""
    by_first = {float(np.ravel(each["logprobs"])[0]): each for each in wanted}
    if len(found) != len(wanted):
        raise WrongTrajectoryError(f"{len(found)} of {len(wanted)} trajectories")
    for each in found:
        source = by_first.pop(float(np.ravel(np.asarray(each["logprobs"]))[0]))
        for name in fields:
            same = (
                np.array_equal(np.asarray(each[name]), source[name])
                if isinstance(source[name], np.ndarray | np.generic)
                else each[name] == source[name]
            )
            if not same:
                raise WrongTrajectoryError(f"the field {name} differs from what was put")


def measure(carrier: Carrier, seconds: float, batch: int) -> dict[str, float]:
    """Microseconds for each payload, medians; everything is compared once before."""
    batches = [[sample(kind * batch + at) for at in range(batch)] for kind in range(_KINDS)]
    every = tuple(batches[0][0])
    carrier.put(batches[0])
    check(carrier.get(TWO), batches[0], TWO)
    carrier.clear()
    carrier.put(batches[1])
    check(carrier.take(), batches[1], every)
    times: dict[str, list[float]] = {"put": [], "get": [], "job": []}
    give_up = time.perf_counter() + seconds
    number = 0
    while time.perf_counter() < give_up or number < _LEAST_ROUNDS:
        samples = batches[number % _KINDS]
        number += 1
        begun = time.perf_counter()
        carrier.put(samples)
        put = time.perf_counter()
        found = carrier.get(TWO)
        got = time.perf_counter()
        del found
        carrier.clear()
        again = time.perf_counter()
        carrier.put(samples)
        looked = sum(len(each[name]) for each in carrier.take() for name in ("prompt", "messages", "tokens", "image"))
        ended = time.perf_counter()
        if looked == 0:
            raise WrongTrajectoryError("nothing came back")
        for name, took in (("put", put - begun), ("get", got - put), ("job", ended - again)):
            times[name].append(took / batch * 1e6)
    return {f"{name}_us": statistics.median(each) for name, each in times.items()}


def main() -> int:
    """A peer's run; its script has `carrier`, a context whose value is a `Carrier`."""
    script, seconds, batch = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    sys.path.insert(0, str(script.parent))
    specification = importlib.util.spec_from_file_location(script.stem, script)
    if specification is None or specification.loader is None:
        raise ImportError(f"no module in {script}")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    make: Callable[[], Any] = module.carrier
    with make() as carried:
        print(json.dumps(measure(carried, seconds, batch)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
