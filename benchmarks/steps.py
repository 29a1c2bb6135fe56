"""Training steps of two data-parallel ranks: `Trainer.steps` beside TransferQueue's StreamingDataLoader, and Ray.

    python benchmarks/steps.py --kib 32,2048                        # this package alone, over each wire
    build/adapters/bin/python benchmarks/steps.py --kib 32 --peer   # and TransferQueue (balanced sampler), Ray

Through Ray a group is an object, an actor plans the steps as `Trainer.steps` would and keeps references until both
ranks have noted theirs.

One writer goes ahead by two steps, two ranks learn by adding up every byte. A step is 64 groups of 8 samples, whose
sizes have the one given as their mean, and a long tail. In the second row of each, rank 1 is killed in the middle
of a step and started again: ``lost`` counts samples that no rank has learned from at the end, ``twice`` those that are
in two steps. A rank notes what it has learned behind each step, and begins again behind its last note.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

SAMPLES, RANKS, MICRO_BATCH = 8, 2, 16
LONGEST_S = 570.0


def sizes_of(number: int, bytes_: int) -> np.ndarray[Any, Any]:
    """Return the sizes of a group's samples: long answers come together."""
    random = np.random.default_rng(number)
    long = np.clip(random.lognormal(-0.125, 0.5), 0.2, 1.8)
    sizes: np.ndarray[Any, Any] = (bytes_ * long * random.uniform(0.9, 1.1, SAMPLES)).astype(int) // 8 * 8
    return sizes


def learn(data: Any) -> int:
    """Look at every byte."""
    return int(np.asarray(data).view(np.int64).sum())


class Notes:
    """What a rank has learned, in a file: a line for each step."""

    def __init__(self, folder: Path, rank: int, die_in: int) -> None:
        self._place = folder / f"{rank}.jsonl"
        before = self._place.read_text().splitlines() if self._place.exists() else []
        self.steps = len(before)
        self._dies = die_in if not (folder / "died").exists() and rank == 1 else -1
        self._folder = folder

    def micro_batch(self, step: int) -> None:
        """Be killed here, where it is asked for: the step's first micro-batch is learned."""
        if step == self._dies:
            (self._folder / "died").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    def add(self, step: int, samples: list[int], tokens: int) -> None:
        with self._place.open("a") as file:
            file.write(json.dumps([step, samples, tokens, time.time()]) + "\n")


# --- this package -----------------------------------------------------------------------------------------
def our_writer(folder: Path, plan: Mapping[str, Any]) -> None:
    from transport import Rollout, Schema, UpTo

    schema = Schema.of(data=("uint8", UpTo(2 * plan["bytes"])), number="int64")
    slots = 3 * plan["groups"] * SAMPLES
    with Rollout(schema, f"rings:{folder.name}-", slots=slots, mode="process", drain_s=LONGEST_S) as rollout:
        for group in range(plan["groups"] * plan["steps"]):
            for at, size in enumerate(sizes_of(group, plan["bytes"])):
                sample = {"data": np.full(size, group % 251, np.uint8), "number": group * SAMPLES + at}
                rollout.write(sample, group=str(group), of=SAMPLES, tokens=int(size))


def our_rank(folder: Path, plan: Mapping[str, Any], rank: int) -> None:
    from transport import Mesh, Schema, Trainer, UpTo

    schema = Schema.of(data=("uint8", UpTo(2 * plan["bytes"])), number="int64")
    notes = Notes(folder, rank, plan["die_in"])
    mesh = Mesh(RANKS, 1, rank, store=f"sqlite:///{folder}/steps.db")
    record = folder / f"{rank}.record"
    known = record.read_bytes() if record.exists() else None
    with Trainer(schema, f"rings:{folder.name}-", wire={plan["wire"]}, mesh=mesh, record=known) as trainer:
        most = MICRO_BATCH * plan["bytes"]
        for step in trainer.steps(plan["groups"], max_tokens=most):
            samples: list[int] = []
            for micro in step:
                for payload in micro:
                    learn(payload["data"])
                    samples.append(int(payload["number"]))
                notes.micro_batch(step.number)
            step.accept()
            record.with_suffix(".new").write_bytes(trainer.record.to_bytes())
            record.with_suffix(".new").replace(record)
            notes.add(step.number, samples, sum(step.tokens))
            trainer.consume()


# --- TransferQueue ----------------------------------------------------------------------------------------
def their_store(folder: Path, plan: Mapping[str, Any]) -> Iterator[None]:
    """Serve: a controller with the balanced sampler, two storage units, as its documents have it."""
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf  # type: ignore[import-not-found, unused-ignore]
    from transfer_queue.sampler import SeqlenBalancedSampler

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    conf = OmegaConf.create(
        {"controller": {"sampler": SeqlenBalancedSampler(SAMPLES, RANKS), "polling_mode": True}},
        flags={"allow_objects": True},
    )
    made = tq.init(conf)
    (folder / "config").write_bytes(pickle.dumps(made))
    yield
    tq.close()
    ray.shutdown()


def their_client(folder: Path) -> tuple[Any, Any]:
    from transfer_queue.client import TransferQueueClient

    config = pickle.loads((folder / "config").read_bytes())
    client = TransferQueueClient(f"bench-{secrets.token_hex(4)}", config.controller.zmq_info)
    client.initialize_storage_manager(manager_type="SimpleStorage", config=config.backend.SimpleStorage)
    return client, config


def their_writer(folder: Path, plan: Mapping[str, Any]) -> None:
    import torch
    from tensordict import TensorDict

    client, _ = their_client(folder)
    for step in range(plan["steps"]):
        while step > 2 and not (folder / f"learned-{step - 3}").exists():  # ahead by two steps, as our slots allow
            time.sleep(0.002)
        for group in range(step * plan["groups"], (step + 1) * plan["groups"]):
            sizes = sizes_of(group, plan["bytes"])
            data = [torch.full((int(size),), group % 251, dtype=torch.uint8) for size in sizes]
            numbers = torch.arange(group * SAMPLES, (group + 1) * SAMPLES)
            fields = {"data": torch.nested.as_nested_tensor(data, layout=torch.jagged), "number": numbers}
            meta = client.get_meta(["data", "number"], SAMPLES, f"train_{step}", mode="insert")
            meta.update_custom_meta([{"total_lengths": int(size)} for size in sizes])
            client.put(TensorDict(fields, batch_size=SAMPLES), meta)


def their_rank(folder: Path, plan: Mapping[str, Any], rank: int) -> None:
    from transfer_queue import StreamingDataLoader, StreamingDataset

    client, config = their_client(folder)
    notes = Notes(folder, rank, plan["die_in"])
    mine = plan["groups"] * SAMPLES // RANKS
    fields = ["data", "number"]
    dataset = StreamingDataset(config, mine, MICRO_BATCH, fields, f"train_{notes.steps}", "learn", rank)
    for number in range(notes.steps, plan["steps"]):
        dataset.step(f"train_{number}")
        samples: list[int] = []
        tokens = 0
        for batch, _ in StreamingDataLoader(dataset, num_workers=0):
            for data, at in zip(batch["data"].unbind(), batch["number"].flatten().tolist(), strict=True):
                learn(data.numpy())
                samples.append(at)
                tokens += len(data)
            notes.micro_batch(number)
            if len(samples) >= mine:
                break
        notes.add(number, samples, tokens)
        (folder / f"learned-{number}-{rank}").touch()
        if rank == 0:  # who frees a step has to know that the other rank is behind it
            while not (folder / f"learned-{number}-1").exists():
                time.sleep(0.002)
            client.clear_partition(f"train_{number}")
            (folder / f"learned-{number}").touch()


# --- Ray --------------------------------------------------------------------------------------------------
class Planned:
    """An actor with references to groups, and the steps that have them."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._waiting: list[tuple[int, Any]] = []
        self._steps: list[list[list[Any]]] = []  # of each rank the references
        self._noted: Counter[int] = Counter()

    def add(self, tokens: int, group: list[Any]) -> None:
        self._waiting.append((tokens, group[0]))
        if len(self._waiting) == self._groups:
            loads: list[int] = [0] * RANKS
            shares: list[list[Any]] = [[] for _ in range(RANKS)]
            for size, each in sorted(self._waiting, key=lambda each: -each[0]):
                rank = loads.index(min(loads))
                loads[rank] += size
                shares[rank].append(each)
            self._steps.append(shares)
            self._waiting.clear()

    def take(self, step: int, rank: int) -> list[Any]:
        return self._steps[step][rank] if step < len(self._steps) else []

    def note(self, step: int) -> None:
        self._noted[step] += 1
        if self._noted[step] == RANKS:
            self._steps[step] = []

    def behind(self) -> int:
        return sum(count == RANKS for count in self._noted.values())


def ray_store(folder: Path, plan: Mapping[str, Any]) -> Iterator[None]:
    """Serve: a cluster of this host, and the actor."""
    import ray

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, namespace="steps")
    (folder / "config").write_text(ray.get_runtime_context().gcs_address)
    held = ray.remote(Planned).options(name="steps", num_cpus=0).remote(plan["groups"])
    yield
    del held
    ray.shutdown()


def ray_actor(folder: Path) -> Any:
    import ray

    ray.init(address=(folder / "config").read_text(), log_to_driver=False, namespace="steps")
    return ray.get_actor("steps")


def ray_writer(folder: Path, plan: Mapping[str, Any]) -> None:
    import ray

    steps = ray_actor(folder)
    for step in range(plan["steps"]):
        while step > 2 and ray.get(steps.behind.remote()) < step - 2:  # ahead by two steps, as our slots allow
            time.sleep(0.002)
        for group in range(step * plan["groups"], (step + 1) * plan["groups"]):
            sizes = sizes_of(group, plan["bytes"])
            samples = [(group * SAMPLES + at, np.full(size, group % 251, np.uint8)) for at, size in enumerate(sizes)]
            ray.get(steps.add.remote(int(sizes.sum()), [ray.put(samples)]))
    while ray.get(steps.behind.remote()) < plan["steps"]:  # who puts an object owns it
        time.sleep(0.05)


def ray_rank(folder: Path, plan: Mapping[str, Any], rank: int) -> None:
    import ray

    steps = ray_actor(folder)
    notes = Notes(folder, rank, plan["die_in"])
    for number in range(notes.steps, plan["steps"]):
        while not (groups := ray.get(steps.take.remote(number, rank))):
            time.sleep(0.002)
        samples: list[int] = []
        tokens = 0
        for at in range(0, len(groups), MICRO_BATCH // SAMPLES):
            for group in ray.get(groups[at : at + MICRO_BATCH // SAMPLES]):
                for sample, data in group:
                    learn(data)
                    samples.append(sample)
                    tokens += len(data)
            notes.micro_batch(number)
        notes.add(number, samples, tokens)
        ray.get(steps.note.remote(number))


# --- a run ------------------------------------------------------------------------------------------------
def measured(system: str, wire: str, kib: int, groups: int, steps: int, die: bool) -> dict[str, Any]:
    """Run writer and ranks as processes; one row."""
    with tempfile.TemporaryDirectory(prefix="steps-") as name:
        folder = Path(name)
        plan = {"wire": wire, "bytes": kib << 10, "groups": groups, "steps": steps, "die_in": steps // 2 if die else -1}
        (folder / "plan").write_text(json.dumps(plan))
        stores = {"transferqueue": their_store, "ray": ray_store}
        store = stores[system](folder, plan) if system in stores else iter([None])
        next(store)

        def start(*role: str) -> subprocess.Popen[bytes]:
            return subprocess.Popen([sys.executable, __file__, "--role", *role, "--folder", name])

        ranks = [start(f"{system}-rank-{rank}") for rank in range(RANKS)]
        writer = start(f"{system}-writer")
        give_up = time.monotonic() + LONGEST_S
        try:
            while any(each.poll() is None for each in ranks) and time.monotonic() < give_up:
                time.sleep(0.05)
                if ranks[1].poll() == -signal.SIGKILL:
                    ranks[1] = start(f"{system}-rank-1")
            writer.wait(max(1.0, give_up - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            ended = all(each.poll() == 0 for each in [*ranks, writer])
            for each in [*ranks, writer]:
                each.kill()
                each.wait()
            next(store, None)
        return {"system": system, "wire": wire, "kib": kib} | figures(folder, plan, ended)


def figures(folder: Path, plan: Mapping[str, Any], ended: bool) -> dict[str, Any]:
    places = [folder / f"{rank}.jsonl" for rank in range(RANKS)]
    lines = [[json.loads(line) for line in place.read_text().splitlines()] for place in places if place.exists()]
    learned = Counter(sample for rank in lines for _, samples, _, _ in rank for sample in samples)
    written = plan["groups"] * plan["steps"] * SAMPLES
    row: dict[str, Any] = {
        "killed": (folder / "died").exists(),
        "ended": ended,
        "steps": [len(rank) for rank in lines],
        "lost": written - len(learned),
        "twice": sum(count > 1 for count in learned.values()),
    }
    ends = [max(line[3] for line in step) for step in zip(*lines, strict=False)]
    paces = [later - earlier for earlier, later in pairwise(ends[1:])]
    loads = [[line[2] for line in step] for step in zip(*lines, strict=False)]
    if paces:
        row["seconds_a_step"] = round(statistics.median(paces), 3)
        row["heaviest_over_mean"] = round(statistics.mean(max(load) * RANKS / sum(load) for load in loads), 3)
        row["longest_step_s"] = round(max(paces), 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kib", default="32", help="sizes of a sample")
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--wires", default="mapped,tcp")
    parser.add_argument("--peer", action="store_true", help="TransferQueue and Ray as well")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role:
        plan = json.loads((given.folder / "plan").read_text())
        match given.role.split("-"):
            case ["ours", "writer"]:
                our_writer(given.folder, plan)
            case ["ours", "rank", rank]:
                our_rank(given.folder, plan, int(rank))
            case ["ray", "writer"]:
                ray_writer(given.folder, plan)
            case ["ray", "rank", rank]:
                ray_rank(given.folder, plan, int(rank))
            case [_, "writer"]:
                their_writer(given.folder, plan)
            case [_, "rank", rank]:
                their_rank(given.folder, plan, int(rank))
        return
    for kib in map(int, given.kib.split(",")):
        ours = [("ours", wire) for wire in given.wires.split(",")]
        for system, wire in ours + [("transferqueue", "tcp"), ("ray", "")] * given.peer:
            for die in (False, True):
                print(json.dumps(measured(system, wire, kib, given.groups, given.steps, die)), flush=True)


if __name__ == "__main__":
    main()
