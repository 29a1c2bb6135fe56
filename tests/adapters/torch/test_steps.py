"""Micro-batches of training steps as torch's tensors, empty ones as well."""

from __future__ import annotations

import importlib.util
import secrets
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from found_rings import LONG_S, ring_of

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed: pip install torch", allow_module_level=True)

with warnings.catch_warnings():  # of what torch imports
    warnings.simplefilter("ignore")
    import torch

from transport import Mesh, Schema, Trainer, UpTo
from transport.adapters.torch import TicketDataset, TicketLoader
from transport.errors import UsageError
from transport.group import in_group

pytestmark = pytest.mark.ucx
SCHEMA = Schema.of(tokens=("int32", UpTo(64)), image=("uint8", 2, 3), text=("text", UpTo(16)), reward="float32")


def sample(value: int) -> dict[str, Any]:
    image = np.full((2, 3), value, np.uint8)
    return {"tokens": np.full(value, value, np.int32), "image": image, "text": f"{value}", "reward": value}


@pytest.mark.parametrize("wire", ["mapped", "tcp"])
@pytest.mark.parametrize("layout", ["list", "padded", "packed"])
def test_micro_batches_are_tensors_also_where_a_replica_has_none(tmp_path: Path, wire: str, layout: str) -> None:
    prefix = f"steps-{secrets.token_hex(4)}-"

    def run(rank: int) -> list[Any]:
        mesh = Mesh(2, 1, rank, store=f"sqlite:///{tmp_path}/steps.db")
        with Trainer(SCHEMA, f"rings:{prefix}", wire={wire}, mesh=mesh, layout=layout) as trainer:  # type: ignore[arg-type]
            step = next(iter(trainer.steps(1, max_tokens=4)))
            found = [(micro.torch(), micro.lengths, micro.cu_seqlens) for micro in step]
            step.consume()
            return found

    with ring_of(prefix, schema=SCHEMA, slot_bytes=None) as ring, ThreadPoolExecutor(2) as threads:
        for value in (1, 3, 2):
            ring.write(sample(value), metadata=in_group(None, "p", 3, value))
        ranks = list(threads.map(run, range(2), timeout=3 * LONG_S))

    full, empty = ranks if sum(len(batch["reward"]) for batch, *_ in ranks[0]) else ranks[::-1]
    assert [batch["reward"].tolist() for batch, *_ in full] == [[1, 3], [2]]
    assert [batch["text"] for batch, *_ in full] == [["1", "3"], ["2"]]
    tokens = [[1, 3, 3, 3], [2, 2]] if layout == "packed" else [[[1, 0, 0], [3, 3, 3]], [[2, 2]]]
    assert [batch["tokens"].tolist() for batch, *_ in full] == tokens
    assert len(empty) == len(full) == 2
    for batch, lengths, cu_seqlens in empty:
        assert all(isinstance(batch[name], torch.Tensor) and len(batch[name]) == 0 for name in ("tokens", "reward"))
        assert batch["image"].shape == (0, 2, 3) and batch["text"] == [] and lengths["tokens"].tolist() == []
        if layout == "packed":
            assert cu_seqlens["tokens"].tolist() == [0]


@pytest.mark.parametrize("resumes", ["same", "another"])
@pytest.mark.parametrize("wire", ["mapped", "tcp"])
def test_a_dataset_of_steps_gives_micro_batches_as_tensors_and_resumes_behind_its_state(
    wire: str, resumes: str
) -> None:
    prefix = f"steps-{secrets.token_hex(4)}-"

    def dataset() -> TicketDataset:
        return TicketDataset(
            f"rings:{prefix}", SCHEMA, layout="padded", steps={"groups": 2, "max_tokens": 8}, wire={wire}
        )

    with ring_of(prefix, schema=SCHEMA, slot_bytes=None) as ring:
        for group in range(6):
            for value in (1, 3):
                ring.write(sample(value), metadata=in_group({"of": group}, f"p{group}", 2, value))
        ring.end_data()
        first = dataset()
        loop = iter(TicketLoader(first))
        step = next(loop)
        assert [micro["groups"].tolist() for micro in step] == [[0, 0, 1, 1]]
        assert [micro["tokens"].tolist() for micro in step] == [[[1, 0, 0], [3, 3, 3]] * 2]
        assert [micro["tokens.lengths"].tolist() for micro in step] == [[1, 3, 1, 3]]
        next(loop)  # consumes the first
        assert ring.native.unread == 8
        state = first.state_dict()  # has the second, which is not consumed
        del loop
        second = first
        if resumes == "another":
            second = dataset()
            second.load_state_dict(state)
        assert [sum(len(micro["reward"]) for micro in step) for step in second] == [4]
        assert ring.native.unread == 0


def test_a_dataset_of_steps_refuses_what_it_cannot_do() -> None:
    with pytest.raises(UsageError, match="idle_s"):
        TicketDataset("rings:any-", SCHEMA, layout="padded", steps={"groups": 1}, idle_s=1.0)
    with pytest.raises(UsageError, match="layout"):
        TicketDataset("rings:any-", SCHEMA, steps={"groups": 1})
    loader = TicketLoader(TicketDataset("rings:any-", SCHEMA, layout="padded", steps={"groups": 1}), num_workers=1)
    with pytest.raises(UsageError, match="num_workers"):
        next(iter(loader))


DEVICE_MESHES = """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore  # nobody is at the other end
from transport import Mesh
for rank in range(8):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "tp", "cp"))
    one, both = Mesh.of(mesh), Mesh.of(mesh, ("dp", "cp"))
    print(one.dp, one.tp, one.rank, one.replica, both.dp, both.tp, both.replica)
    dist.destroy_process_group()
"""


def test_a_mesh_is_that_of_a_device_mesh() -> None:
    command = [sys.executable, "-W", "ignore", "-c", DEVICE_MESHES]
    printed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    found = [list(map(int, line.split())) for line in printed.splitlines()]
    assert [each[:4] for each in found] == [[2, 4, rank, rank // 4] for rank in range(8)]
    assert [each[4:] for each in found] == [[4, 2, 2 * (rank // 4) + rank % 2] for rank in range(8)]
