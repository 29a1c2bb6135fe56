"""Micro-batches of training steps as torch's tensors, empty ones as well."""

from __future__ import annotations

import importlib.util
import secrets
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
