"""A batch made on arrival against the same payloads as a list that numpy concatenates or pads.

    .venv/bin/python benchmarks/batches.py [--bytes 16384] [--batch 32] [--rounds 400]

Payloads have two ragged tensors and a number. Claimed, verified, laid out and consumed, in one process; writing is not
timed. All ways take turns. Prints a JSON line: microseconds of a batch, medians, and how many times sooner the batch
on arrival is there than each way with numpy that verifies as it does. "unverified" is a list whose checksums nobody
looks at.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from transport import Schema, SharedRingBuffer
from transport.schema import UpTo


def payloads_of(size: int, count: int, schema: Schema) -> list[dict[str, object]]:
    """Of about ``size`` bytes each, between half and all of it."""
    random = np.random.default_rng(1)
    most = schema.ragged[0].shape[0]
    made: list[dict[str, object]] = []
    for _ in range(count):
        rows = int(random.integers(most // 2, most + 1))
        made.append(
            {
                "tokens": random.integers(0, 50_000, rows).astype(np.int32),
                "logprobs": random.random(rows, np.float32),
                "reward": np.float32(1.0),
            }
        )
    return made


def claims_concatenated(ring: SharedRingBuffer, n: int) -> object:
    """One object for each payload, verified, its ticket decoded; then numpy."""
    claims = ring.claim(n)
    for claim in claims:
        claim.verify()
    arrays = [claim.arrays() for claim in claims]
    joined = {name: np.concatenate([each[name] for each in arrays]) for name in ("tokens", "logprobs")}
    ends = np.cumsum([0, *(len(each["tokens"]) for each in arrays)], dtype=np.int32)
    rewards = np.stack([each["reward"] for each in arrays])
    ring.consume(claims)
    return joined, ends, rewards


def list_concatenated(ring: SharedRingBuffer, n: int, verify: bool = True) -> object:
    """The layout "list", then numpy."""
    with ring.claim_batch(n, verify=verify) as batch:
        arrays = list(batch)
        joined = {name: np.concatenate([each[name] for each in arrays]) for name in ("tokens", "logprobs")}
        ends = np.cumsum([0, *(len(each["tokens"]) for each in arrays)], dtype=np.int32)
        rewards = np.stack([each["reward"] for each in arrays])
        batch.consume()
    return joined, ends, rewards


def list_padded(ring: SharedRingBuffer, n: int) -> object:
    """The layout "list", then numpy."""
    with ring.claim_batch(n, verify=True) as batch:
        arrays = list(batch)
        longest = max(len(each["tokens"]) for each in arrays)
        joined = {}
        for name in ("tokens", "logprobs"):
            joined[name] = np.zeros((len(arrays), longest), arrays[0][name].dtype)
            for row, each in zip(joined[name], arrays, strict=True):
                row[: len(each[name])] = each[name]
        rewards = np.stack([each["reward"] for each in arrays])
        batch.consume()
    return joined, rewards


def packed(ring: SharedRingBuffer, n: int) -> object:
    """On arrival."""
    with ring.claim_batch(n, layout="packed") as batch:
        batch.consume()
        return batch.arrays()


def padded(ring: SharedRingBuffer, n: int) -> object:
    """On arrival."""
    with ring.claim_batch(n, layout="padded") as batch:
        batch.consume()
        return batch.arrays()


WAYS: dict[str, Callable[[SharedRingBuffer, int], object]] = {
    "packed": packed,
    "claims_concatenated": claims_concatenated,
    "list_concatenated": list_concatenated,
    "list_concatenated_unverified": lambda ring, n: list_concatenated(ring, n, verify=False),
    "padded": padded,
    "list_padded": list_padded,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=16384)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=400)
    options = parser.parse_args()
    rows = max(2, options.bytes // 8)
    schema = Schema.of(tokens=("int32", UpTo(rows)), logprobs=("float32", UpTo(rows)), reward=("float32",))
    payloads = payloads_of(options.bytes, options.batch, schema)
    took: dict[str, list[float]] = {name: [] for name in WAYS}
    with SharedRingBuffer.create(schema, slots=options.batch) as ring:
        for _ in range(options.rounds):
            for name, way in WAYS.items():
                ring.write_many(payloads)
                begun = time.perf_counter()
                kept = way(ring, options.batch)
                took[name].append((time.perf_counter() - begun) * 1e6)
                del kept
    us = {name: round(statistics.median(times), 1) for name, times in took.items()}
    ratios = {
        f"{ours}_against_{name}": round(us[name] / us[ours], 2)
        for ours, name in (
            ("packed", "claims_concatenated"),
            ("packed", "list_concatenated"),
            ("packed", "list_concatenated_unverified"),
            ("padded", "list_padded"),
        )
    }
    print(json.dumps({"bytes": options.bytes, "batch": options.batch, "us": us, "ratios": ratios}))


if __name__ == "__main__":
    main()
