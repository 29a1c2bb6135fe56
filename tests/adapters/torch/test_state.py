"""Loops that are resumed in the middle of an epoch: what the checkpoint has learned from does not come again."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import secrets
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers import Child
from ring_files import forget

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed: pip install torch", allow_module_level=True)

with warnings.catch_warnings():  # of what torch imports
    warnings.simplefilter("ignore")

import torch_loop

from transport import open_rings
from transport.adapters.torch import TicketDataset, TicketLoader
from transport.errors import UsageError
from transport.packer.options import RingOptions
from transport.packer.rollout import Rollout
from transport.snapshots import restore, snapshot

pytestmark = pytest.mark.ucx

LOOP = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch, torch_loop
from transport.adapters.torch import TicketDataset
url, checkpoint, loader, wire = sys.argv[1:]
dataset = TicketDataset(url, batch_size=4, fill_s=0.0, schema=torch_loop.SCHEMA, wire={wire})
if loader == "torchdata":
    from torchdata.stateful_dataloader import StatefulDataLoader
    loop = stateful = StatefulDataLoader(dataset, batch_size=None)
else:
    loop, stateful = dataset, dataset
learned = []
try:
    stored = torch.load(checkpoint, weights_only=False)
    learned = stored["learned"]
    stateful.load_state_dict(stored["loop"])
except FileNotFoundError:
    pass
for batch in loop:
    learned += [int(sample.tensors["step"]) for sample in batch]
    torch.save({"learned": learned, "loop": stateful.state_dict()}, checkpoint)
    print(json.dumps(learned), flush=True)
    sys.stdin.readline()
    if len(learned) >= 20:
        break
"""


@pytest.fixture
def rollout(tmp_path: Path) -> Iterator[Rollout]:
    url = f"rings:state-{secrets.token_hex(4)}-"
    with open_rings(url) as queue:
        file = tmp_path / "ring"
        made = Rollout(torch_loop.SCHEMA, slots=32, rings=queue, mode="thread", ring=RingOptions(file=file))
        made.url = url  # type: ignore[attr-defined]
        for step in range(1, 21):
            made.write_to_buffer({"tokens": np.arange(step, dtype=np.int32), "step": step})
        yield made
        made.close()
        forget(file)


needs_torchdata = pytest.mark.skipif(importlib.util.find_spec("torchdata") is None, reason="torchdata is not installed")


@pytest.mark.parametrize("wire", ["mapped", "tcp"])
@pytest.mark.parametrize("loader", ["dataset", pytest.param("torchdata", marks=needs_torchdata)])
def test_a_loop_that_is_killed_goes_on_behind_its_checkpoint(
    rollout: Rollout, loader: str, wire: str, tmp_path: Path
) -> None:
    given = rollout.url, tmp_path / "checkpoint", loader, wire  # type: ignore[attr-defined]
    with Child(LOOP, *given) as first:
        json.loads(first.line())
        first.tell()
        before = json.loads(first.line())
        first.kill()  # the second batch is in the checkpoint, and not acknowledged
    with Child(LOOP, *given) as second:
        learned: list[int] = []
        while len(learned) < 20:
            learned = json.loads(second.line())
            second.tell()
        assert second.wait() == 0
    assert learned[: len(before)] == before
    assert sorted(learned) == [*range(1, 21)]


@pytest.mark.parametrize("wire", ["mapped", "tcp"])
def test_what_a_state_has_does_not_come_again_in_the_next_loop(rollout: Rollout, wire: str) -> None:
    dataset = TicketDataset(
        rollout.url,  # type: ignore[attr-defined]
        batch_size=4,
        fill_s=0.0,
        schema=torch_loop.SCHEMA,
        wire=(wire,),
    )
    learned: list[int] = []
    while len(learned) < 20:
        for batch in dataset:
            learned += [int(sample.tensors["step"]) for sample in batch]
            state = dataset.state_dict()
            break
        assert dataset.state_dict() == state
    assert sorted(learned) == [*range(1, 21)]


def test_a_state_that_is_none_is_refused(rollout: Rollout) -> None:
    dataset = TicketDataset(rollout.url)  # type: ignore[attr-defined]
    for other in ({}, {"consumed": 3}, {"consumed": b"other bytes"}, None):
        with pytest.raises(UsageError):
            dataset.load_state_dict(other)  # type: ignore[arg-type]
    dataset.load_state_dict(dataset.state_dict())


def test_the_state_of_worker_processes_is_refused(rollout: Rollout) -> None:
    dataset = TicketDataset(rollout.url, batch_size=4, schema=torch_loop.SCHEMA)  # type: ignore[attr-defined]
    loader = TicketLoader(dataset, num_workers=1, multiprocessing_context="spawn")
    for _ in loader:
        with pytest.raises(UsageError, match="num_workers=0"):
            dataset.state_dict()
        break
    with pytest.raises(UsageError, match="num_workers=0"):
        dataset.state_dict()  # its own record has nothing of what the worker consumed


def test_the_state_knows_restored_payloads_by_the_ids_that_they_had_first(tmp_path: Path) -> None:
    url = f"rings:origin-{secrets.token_hex(4)}-"

    def rollout_of(steps: int) -> Rollout:
        made = Rollout(torch_loop.SCHEMA, slots=8, rings=stack.enter_context(open_rings(url)), mode="thread", drain_s=0)
        for step in range(1, steps + 1):
            made.write_to_buffer({"tokens": np.arange(step, dtype=np.int32), "step": step})
        return stack.enter_context(made)

    def dataset() -> TicketDataset:
        return TicketDataset(url, batch_size=4, fill_s=0.0, schema=torch_loop.SCHEMA, wire=("mapped",))

    def learned(batch: object) -> list[int]:
        return [int(sample.tensors["step"]) for sample in batch]  # type: ignore[attr-defined]

    with contextlib.ExitStack() as stack:
        rollout_of(8)
        snapshot(url, str(tmp_path), 1).wait(60)
    with contextlib.ExitStack() as stack:
        restore(str(tmp_path), 1, rollout_of(0))
        loop, first = dataset(), []
        for batch in loop:
            first = learned(batch)
            state = loop.state_dict()
            break
    with contextlib.ExitStack() as stack:  # none of the former rings is there any more
        restore(str(tmp_path), 1, rollout_of(0))
        loop = dataset()
        loop.load_state_dict(state)
        steps = list(first)
        for batch in loop:
            steps += learned(batch)
            if len(steps) >= 8:
                break
    assert len(first) == 4 and sorted(steps) == [*range(1, 9)]
