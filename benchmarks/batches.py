"""A batch made on arrival against the same payloads as a list that numpy concatenates or pads.

    .venv/bin/python benchmarks/batches.py [--bytes 16384] [--batch 32] [--rounds 400] [--wire mapped tcp]

Payloads have two ragged tensors and a number. Claimed or taken, verified, laid out and consumed, by one process;
writing is not timed, and over tcp a listener process sends them. All ways take turns. Prints a JSON line for each wire:
microseconds of a batch, medians, and how many times sooner the batch on arrival is there than each way with numpy that
verifies as it does. "unverified" is a list whose checksums nobody looks at. "objects" is how many Python objects exist
more while a packed batch is in hand, for the batch and for one of eight times as many payloads.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from transport import BlockingClient, Schema, SharedRingBuffer, UCXXServer
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


# --- the same over the wire -----------------------------------------------------------------------
def taken_concatenated(client: BlockingClient, address: str, n: int) -> object:
    """One object for each payload of a TAKE, then numpy."""
    with client.take_batch(address, n, layout="list") as batch:
        arrays = list(batch)
        joined = {name: np.concatenate([each[name] for each in arrays]) for name in ("tokens", "logprobs")}
        ends = np.cumsum([0, *(len(each["tokens"]) for each in arrays)], dtype=np.int32)
        rewards = np.stack([each["reward"] for each in arrays])
        batch.consume()
    return joined, ends, rewards


def taken_alone(client: BlockingClient, address: str, n: int) -> object:
    """The list without numpy: what no layout can save."""
    with client.take_batch(address, n, layout="list") as batch:
        batch.consume()
        return len(batch)


def taken_packed(client: BlockingClient, address: str, n: int) -> object:
    """On arrival."""
    with client.take_batch(address, n, layout="packed") as batch:
        batch.consume()
        return batch.arrays()


MAPPED: dict[str, Callable[[SharedRingBuffer, int], object]] = {
    "packed": packed,
    "claims_concatenated": claims_concatenated,
    "list_concatenated": list_concatenated,
    "list_concatenated_unverified": lambda ring, n: list_concatenated(ring, n, verify=False),
    "padded": padded,
    "list_padded": list_padded,
}
TAKEN: dict[str, Callable[[BlockingClient, str, int], object]] = {
    "packed": taken_packed,
    "list_concatenated": taken_concatenated,
    "list_alone": taken_alone,
}
PAIRS = {
    "mapped": (
        ("packed", "claims_concatenated"),
        ("packed", "list_concatenated"),
        ("packed", "list_concatenated_unverified"),
        ("padded", "list_padded"),
    ),
    "tcp": (("packed", "list_concatenated"),),
}


def medians(
    ring: SharedRingBuffer, payloads: list[dict[str, object]], rounds: int, ways: dict[str, Callable[[], object]]
) -> dict[str, float]:
    """Microseconds of each way; all take turns."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            ring.write_many(payloads)
            begun = time.perf_counter()
            kept = way()
            took[name].append((time.perf_counter() - begun) * 1e6)
            del kept
    return {name: round(statistics.median(times), 1) for name, times in took.items()}


def objects(ring: SharedRingBuffer, payloads: list[dict[str, object]], batch: Callable[[], object]) -> int:
    """Python objects more while a batch of these is in hand, once nothing is made for the first time."""
    more = []
    for _ in range(5):
        ring.write_many(payloads)
        gc.collect()
        before = sys.getallocatedblocks()
        kept = batch()
        more.append(sys.getallocatedblocks() - before)
        kept.consume()  # type: ignore[attr-defined]
        del kept
    return statistics.median_low(more)


def measure(wire: str, options: argparse.Namespace) -> dict[str, object]:
    """One wire."""
    rows = max(2, options.bytes // 8)
    schema = Schema.of(tokens=("int32", UpTo(rows)), logprobs=("float32", UpTo(rows)), reward=("float32",))
    n, many = options.batch, 8 * options.batch
    payloads = payloads_of(options.bytes, many, schema)
    with contextlib.ExitStack() as stack:
        ring = stack.enter_context(SharedRingBuffer.create(schema, slots=many))
        ways: dict[str, Callable[[], object]]
        if wire == "mapped":
            ways = {name: partial(way, ring, n) for name, way in MAPPED.items()}
            batch = partial(ring.claim_batch, layout="packed")
        else:
            stack.enter_context(UCXXServer(ring, log_level="ERROR"))
            client = stack.enter_context(BlockingClient(wire={"tcp"}, schemas=[schema]))
            address = f"127.0.0.1:{ring.native.ports()[0]}"
            ways = {name: partial(way, client, address, n) for name, way in TAKEN.items()}
            batch = partial(client.take_batch, address, layout="packed")
        us = medians(ring, payloads[:n], options.rounds, ways)
        counts = {str(count): objects(ring, payloads[:count], partial(batch, count)) for count in (n, many)}
    ratios = {f"{ours}_against_{name}": round(us[name] / us[ours], 2) for ours, name in PAIRS[wire]}
    return {
        "wire": wire,
        "bytes": options.bytes,
        "batch": n,
        "us": us,
        "ratios": ratios,
        "objects": counts,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=16384)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--wire", nargs="+", choices=("mapped", "tcp"), default=("mapped", "tcp"))
    options = parser.parse_args()
    for wire in options.wire:
        print(json.dumps(measure(wire, options)), flush=True)


if __name__ == "__main__":
    main()
