"""One rank of a torch job with sharded tensors: ``python -m checkpoint_rank PATH RANK WORLD WHAT [FOLDER]``.

WHAT is "save": its part in an epoch's cooldown, rank 0 with the coordinator; "load": FOLDER with
torch.distributed.checkpoint, by as many ranks as there are now; or "fetch": the same from the destination in PATH.
Prints lines that the test reads.
"""

from __future__ import annotations

import asyncio
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from transport.adapters.torch.checkpoint import CheckpointReader
from transport.cooldown import CooldownHost, ShardedClient, open_destination, recorded_outcomes
from transport.store.sqlite import SQLiteStore

EPOCH = 7
STEP = 30


def whole(step: int) -> dict[str, torch.Tensor]:
    """The model, as one process would have it."""
    return {
        "layer.weight": torch.arange(24 * 10, dtype=torch.float32).reshape(24, 10) + step,
        "layer.columns": torch.arange(7 * 30, dtype=torch.bfloat16).reshape(7, 30),
        "layer.bias": torch.full((5,), float(step)),
    }


PLACEMENTS = {"layer.weight": Shard(0), "layer.columns": Shard(1), "layer.bias": Replicate()}


def sharded(tensors: dict[str, torch.Tensor], world: int) -> dict[str, object]:
    mesh = init_device_mesh("cpu", (world,))
    return {name: distribute_tensor(tensor, mesh, [PLACEMENTS[name]]) for name, tensor in tensors.items()}


async def saving(path: Path, rank: int, world: int) -> None:
    model = sharded(whole(STEP), world)

    def save(folder: Path, step: int) -> None:
        if os.environ.get("KILLED_IN_SAVE") == str(rank):
            print("in save", flush=True)
            sys.stdin.readline()
        dcp.save({"model": model, "step": step}, storage_writer=dcp.FileSystemWriter(folder))

    with SQLiteStore(path / "store.sqlite3") as store:
        scratch = path / f"host-{rank % 2}"  # two hosts with a disk each
        client = ShardedClient(store, "run", f"rank-{rank}", save=save, scratch=scratch, launch="first")
        works = [client.cooldown(EPOCH)]
        if rank == 0:
            host = CooldownHost(
                store, "run", str(path / "destination"), cooldown_s=float(os.environ.get("COOLDOWN_S", "60")), seed=1
            )
            await host.open(EPOCH)
            works.append(host.cooldown(EPOCH, STEP, {f"rank-{each}": f"host-{each % 2}" for each in range(world)}))  # type: ignore[arg-type]
        done = await asyncio.gather(*works)
        print(done[0].record.outcome.value, done[0].part.value, flush=True)


def loading(path: Path, world: int, folder: str | None) -> None:
    model = sharded({name: torch.zeros_like(tensor) for name, tensor in whole(0).items()}, world)
    state = {"model": model, "step": -1}
    if folder is None:
        with open_destination(str(path / "destination")) as destination:
            record = recorded_outcomes(destination, "run")[EPOCH]
            dcp.load(state, storage_reader=CheckpointReader(record, destination))
    else:
        dcp.load(state, checkpoint_id=folder)
    assert state["step"] == STEP, state["step"]
    for name, expected in whole(STEP).items():
        tensor = model[name]
        assert isinstance(tensor, DTensor)
        assert torch.equal(tensor.full_tensor(), expected), name
    print("equal", flush=True)


def main() -> None:
    path, rank, world, what = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{path}/{what}-{world}", rank=rank, world_size=world)
    if what == "save":
        asyncio.run(saving(path, rank, world))
    else:
        loading(path, world, sys.argv[5] if what == "load" else None)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
