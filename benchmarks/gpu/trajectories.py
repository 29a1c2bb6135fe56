"""The trajectory job into device memory: a writer's process, a trainer that takes batches of 32 and consumes them.

The arrays of `benchmarks/job --payload trajectory`, of uneven lengths. Beside it, what a trainer does with torch alone:
the same payloads as views of the slots, padded or concatenated on the host by torch, then copied to the device.
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
from writer import served

from transport import SharedRingBuffer, Trainer, UCXXServer

sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.job.trajectories import TOKENS
from benchmarks.job.trajectory_rows import schema

BATCH = 32
RAGGED = ("tokens", "logprobs", "ref_logprobs", "old_logprobs")
KINDS = 96  # trajectories that are written in turn
SCHEMA = schema().only([*RAGGED, "image", "reward"])  # batches have no text

Way = Literal["ours", "torch"]


def trajectory(number: int) -> dict[str, Any]:
    """One of `KINDS` different ones; its number is its reward."""
    random = np.random.default_rng(number % KINDS)
    length = int(random.integers(TOKENS // 2, TOKENS + 1))
    return {
        "tokens": random.integers(0, 32000, length, dtype=np.int32),
        **{name: random.standard_normal(length, dtype=np.float32) for name in RAGGED[1:]},
        "image": random.integers(0, 256, (224, 224, 3), dtype=np.uint8),
        "reward": np.float32(number % KINDS),
    }


def nbytes() -> int:
    """Of a trajectory's arrays, the mean."""
    return sum(int(value.nbytes) for number in range(KINDS) for value in trajectory(number).values()) // KINDS


def write(count: int) -> None:
    """The writer's process."""
    made = [trajectory(number) for number in range(KINDS)]
    with SharedRingBuffer.create(SCHEMA, slots=3 * BATCH) as ring, UCXXServer(ring, log_level="ERROR") as server:
        print(ring.name, server.ports[0], flush=True)
        for begin in range(0, count, BATCH):
            ring.write_many([made[number % KINDS] for number in range(begin, begin + BATCH)], timeout_s=60)
        sys.stdin.read()  # until the trainer has everything


def job(way: Way, wire: str, layout: Any, count: int) -> float:
    """Seconds for each payload but the first `KINDS`, which are compared; all are on the device, and consumed."""
    begun, first = 0.0, 0
    with (
        served("--trajectories", str(count)) as lines,
    ):
        name, port = lines.readline().split()
        shape: Any = {"layout": layout, "memory": "torch"} if way == "ours" else {}
        rings = f"rings:{name.removeprefix('/transport-')}" if wire == "mapped" else f"rings://127.0.0.1:{port}"
        with Trainer(SCHEMA, rings, wire={wire}, **shape) as trainer:  # type: ignore[arg-type]
            done = 0
            while done < count:
                if begun == 0.0 and done >= KINDS:
                    begun, first = time.perf_counter(), done
                batch = trainer.take(BATCH, 60.0, fill_s=60.0)
                if batch is None:
                    raise SystemExit("nothing came")
                with batch:
                    arrays = batch.arrays() if way == "ours" else by_torch(batch, layout)
                    if done < KINDS:
                        compare(arrays, layout)
                    synchronize()
                    batch.consume()
                    if not batch.accepted.all():
                        raise SystemExit("a batch was not accepted")
                    done += len(batch)
    return (time.perf_counter() - begun) / (count - first)


def synchronize() -> None:
    """The device has done what was queued."""
    import torch

    torch.cuda.current_stream().synchronize()


def by_torch(batch: Any, layout: str) -> dict[str, Any]:
    """The batch's payloads in device memory, as torch alone makes them."""
    import torch

    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # torch only reads it
    found = {}
    for name in SCHEMA.names:
        values = [torch.from_numpy(np.atleast_1d(each[name])) for each in batch]
        if name not in RAGGED:
            made = torch.stack(values)
        elif layout == "padded":
            made = torch.nn.utils.rnn.pad_sequence(values, batch_first=True)
        else:
            made = torch.cat(values)
        found[name] = made.cuda(non_blocking=True)
    return found


def compare(arrays: dict[str, Any], layout: str) -> None:
    """Fail unless these are trajectories as they were written."""
    begin = 0
    for at, reward in enumerate(arrays["reward"].reshape(-1).cpu().numpy()):
        wanted = trajectory(int(reward))
        for name, value in wanted.items():
            if name not in RAGGED:
                found = arrays[name][at]
            elif layout == "padded":
                found = arrays[name][at, : len(value)]
            else:
                found = arrays[name][begin : begin + len(value)]
            if found.cpu().numpy().tobytes() != value.tobytes():
                raise SystemExit(f"{name} of trajectory {at} in the device batch differs from what was written")
        begin += len(wanted["tokens"])
