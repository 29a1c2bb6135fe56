"""Torch's loops over a real ring and queue: in this process, and in worker processes, forked and spawned."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import eventually, free, serving

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed: pip install torch", allow_module_level=True)

with warnings.catch_warnings():  # of what torch imports
    warnings.simplefilter("ignore")
    import torch

import torch_loop
from torch.utils.data import DataLoader

from transport.adapters.tensors import tensors
from transport.adapters.torch import TicketDataset, TicketLoader
from transport.client.blocking import BlockingClient
from transport.errors import UsageError
from transport.packer.rollout import UCXXRolloutMixin
from transport.queue.sqlite import SQLiteQueue
from transport.schema import DTYPES, Schema, UpTo

pytestmark = pytest.mark.ucx

SCHEMA = torch_loop.SCHEMA


class Worker(UCXXRolloutMixin):
    """The mixin alone."""

    def play(self, steps: int, first: int = 1) -> None:
        for step in range(first, first + steps):
            payload = {"tokens": np.arange(step, dtype=np.int32), "step": step}
            self.write_to_buffer(payload, metadata={"step": step}, policy_version=step)


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[SQLiteQueue]:
    with SQLiteQueue(tmp_path / "tickets.sqlite3") as opened:
        yield opened


@pytest.fixture
def worker(queue: SQLiteQueue) -> Iterator[Worker]:
    worker = Worker()
    worker.setup_ucxx(SCHEMA, slots=32, queue=queue, mode="thread")
    yield worker
    worker.cleanup_ucxx()


@pytest.fixture(params=["mapped", "tcp"])
def dataset(request: pytest.FixtureRequest, queue: SQLiteQueue) -> Callable[..., TicketDataset]:
    def make(**options: Any) -> TicketDataset:
        waits = {"fill_s": 0.0, "idle_s": 0.0}
        return TicketDataset(
            queue, **{"batch_size": 4, **waits, "schemas": [SCHEMA], "wire": {request.param}, **options}
        )

    return make


def steps_of(batch: Any) -> list[int]:
    return [int(sample.tensors["step"]) for sample in batch]


# --- tensors ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("wire", ["mapped", "tcp"])
def test_tensors_are_views_of_what_arrived(wire: str) -> None:
    schema = Schema.of(tokens=("int32", UpTo(64)), scalar=("float32",))
    with serving(schema) as (ring, _), BlockingClient(schemas=[schema], wire={wire}, ack="manual") as client:
        payload = client.read(ring.write({"tokens": np.arange(5, dtype=np.int32), "scalar": 2.5}))
        found = tensors(payload)
        assert found["tokens"].data_ptr() == payload["tokens"].__array_interface__["data"][0]
        assert found["tokens"].tolist() == [0, 1, 2, 3, 4]
        assert found["scalar"].shape == () and found["scalar"].item() == 2.5
        payload.ack()
        payload.release()
        assert found["tokens"].tolist() == [0, 1, 2, 3, 4]  # they keep the memory
        del found
        eventually(lambda: free(ring), "the slot is free")


def test_every_dtype_that_torch_has_arrives_bit_by_bit() -> None:
    names = [name for name in DTYPES if hasattr(torch, name)]
    assert {"bfloat16", "float8_e4m3fn", "bool", "uint16", "complex64"} <= set(names)
    schema = Schema.of(**{name: (name, UpTo(16)) for name in names})
    written = {name: np.arange(7).astype(DTYPES[name]) for name in names}
    with serving(schema) as (ring, _), BlockingClient(schemas=[schema], wire={"tcp"}) as client:
        found = tensors(client.read(ring.write(written)))
        for name in names:
            assert found[name].dtype == getattr(torch, name)
            assert bytes(found[name].view(torch.uint8).numpy()) == written[name].tobytes()
        assert found["bfloat16"].float().tolist() == written["bfloat16"].astype(np.float32).tolist()
        assert written["bfloat16"].dtype == ml_dtypes.bfloat16


def test_a_payload_of_no_bytes_has_empty_tensors() -> None:
    schema = Schema.of(tokens=("int32", UpTo(64), 3))
    with serving(schema) as (ring, _), BlockingClient(schemas=[schema], wire={"tcp"}) as client:
        found = tensors(client.read(ring.write({"tokens": np.empty((0, 3), np.int32)})))
        assert found["tokens"].shape == (0, 3)


# --- in this process ------------------------------------------------------------------------------------
def test_a_dataset_is_iterated_as_it_is(worker: Worker, dataset: Callable[..., TicketDataset]) -> None:
    worker.play(10)
    found = [(steps_of(batch), [sample.metadata["step"] for sample in batch]) for batch in dataset()]
    assert found == [([1, 2, 3, 4],) * 2, ([5, 6, 7, 8],) * 2, ([9, 10],) * 2]
    eventually(lambda: free(worker.ring), "every slot is free again")


@pytest.mark.parametrize("kind", [TicketLoader, lambda dataset: DataLoader(dataset, batch_size=None)])
def test_a_loader_without_workers_gives_the_same(
    kind: Callable[..., Any], worker: Worker, dataset: Callable[..., TicketDataset]
) -> None:
    worker.play(6)
    batches = [tokens.shape for tokens, _ in kind(dataset(collate=torch_loop.pad))]
    assert batches == [(4, 4), (2, 6)]


def test_asking_for_the_next_batch_acknowledges_the_one_before(
    worker: Worker, queue: SQLiteQueue, dataset: Callable[..., TicketDataset]
) -> None:
    worker.play(8)
    batches = iter(TicketLoader(dataset()))
    next(batches)
    assert queue.depth().done == 0
    next(batches)
    assert queue.depth().done == 4
    batches.close()


def test_a_slot_is_not_pinned_by_a_batch_that_was_copied(worker: Worker, queue: SQLiteQueue) -> None:
    worker.play(4)
    dataset = TicketDataset(queue, batch_size=4, collate=torch_loop.pad, idle_s=0.0, schemas=[SCHEMA], wire={"mapped"})
    batches = iter(dataset)
    next(batches)
    assert (worker.ring.statistics().ready, worker.ring.statistics().reading) == (4, 0)
    assert next(batches, None) is None
    assert (queue.depth().done, worker.ring.statistics().free) == (4, 32)


def test_a_loop_that_is_left_gives_back_what_it_had_not_used(
    worker: Worker, queue: SQLiteQueue, dataset: Callable[..., TicketDataset]
) -> None:
    worker.play(12)
    loader = TicketLoader(dataset())
    with pytest.raises(ZeroDivisionError):
        for number, batch in enumerate(loader):
            steps = steps_of(batch)
            del batch
            if number == 1:
                raise ZeroDivisionError
    assert (queue.depth().done, queue.depth().claimed, queue.depth().ready) == (4, 0, 8)
    assert steps_of(next(iter(loader))) == steps


def test_what_was_consumed_before_a_break_is_not_given_back(
    worker: Worker, queue: SQLiteQueue, dataset: Callable[..., TicketDataset]
) -> None:
    worker.play(12)
    loader = TicketLoader(dataset())
    for _ in loader:
        loader.consume()
        loader.consume()
        break
    assert (queue.depth().done, queue.depth().claimed, queue.depth().ready) == (4, 0, 8)


def test_the_version_that_is_trained_bounds_the_age(worker: Worker, dataset: Callable[..., TicketDataset]) -> None:
    worker.play(8)
    loader = TicketLoader(dataset(max_policy_age=1))
    loader.set_policy_version(8)
    assert [steps_of(batch) for batch in loader] == [[7, 8]]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"batch_size": 4}, "batch_size: the TicketDataset makes the batches"),
        ({"persistent_workers": True, "num_workers": 1}, "persistent_workers=True"),
    ],
)
def test_what_a_loader_cannot_do_is_refused(
    options: dict[str, Any], why: str, dataset: Callable[..., TicketDataset]
) -> None:
    with pytest.raises(UsageError, match=why):
        TicketLoader(dataset(), **options)


def test_a_queue_object_cannot_go_to_a_spawned_worker(dataset: Callable[..., TicketDataset]) -> None:
    with pytest.raises(UsageError, match="give its URL, not a SQLiteQueue"):
        next(iter(TicketLoader(dataset(), num_workers=1, multiprocessing_context="spawn")))


# --- in worker processes --------------------------------------------------------------------------------
@pytest.fixture
def served(queue: SQLiteQueue) -> Iterator[Worker]:
    worker = Worker()
    worker.setup_ucxx(SCHEMA, slots=32, queue=queue, mode="thread")
    worker.play(32)
    yield worker
    worker.cleanup_ucxx()


def loop(method: str, folder: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, torch_loop.__file__, method, str(folder), *more],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_processes_fetch_acknowledge_and_give_back(method: str, served: Worker, tmp_path: Path) -> None:
    with loop(method, tmp_path) as trainer:
        output, errors = trainer.communicate()
    assert trainer.returncode == 0, errors
    found = json.loads(output)
    assert found["after break"] == [8, 0, 24]  # the batch that was consumed, and the one before it
    trained = found["steps"] + found["kept"]  # without the first batch
    assert len(trained) == len(set(trained)) == 28
    assert found["after all"] == [32, 0]
    eventually(lambda: free(served.ring), "every slot is free again")
    if method == "fork":
        assert "UsageError" in found["plain"] and "use it instead of DataLoader" in found["plain"]
        assert "only the trainer process reads into its device memory" in found["device"]
        assert 'multiprocessing_context="spawn"' in found["inherited"]


@pytest.mark.slow
def test_workers_of_a_killed_trainer_give_back_what_it_had(served: Worker, queue: SQLiteQueue, tmp_path: Path) -> None:
    with loop("fork", tmp_path, "wait") as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "waiting\n"
        trainer.kill()
    eventually(lambda: queue.depth().claimed == 0, "the workers have noticed")
    assert (queue.depth().done, queue.depth().ready) == (4, 28)
