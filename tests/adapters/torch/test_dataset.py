"""Torch's loops over a real ring and queue: in this process, and in worker processes, forked and spawned."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from claimed import claim_batch
from helpers import eventually, free, serving

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed: pip install torch", allow_module_level=True)

with warnings.catch_warnings():  # of what torch imports
    warnings.simplefilter("ignore")
    import torch

import torch_loop
from torch.utils.data import DataLoader

from transport import FoundRings, SharedRingBuffer
from transport.adapters.torch import TicketDataset, TicketLoader
from transport.adapters.torch.tensors import tensors
from transport.client.blocking import BlockingClient
from transport.errors import BatchTooLargeError, SchemaError, UsageError
from transport.packer.options import ClientOptions
from transport.packer.rollout import UCXXRolloutMixin
from transport.schema import DTYPES, Schema, UpTo

pytestmark = pytest.mark.ucx

SCHEMA = torch_loop.SCHEMA


class Worker(UCXXRolloutMixin):
    """The mixin alone."""

    def play(self, steps: int) -> None:
        """Write these steps; then the data has ended."""
        for step in range(1, 1 + steps):
            payload = {"tokens": np.arange(step, dtype=np.int32), "step": step}
            self.write_to_buffer(payload, metadata={"step": step}, policy_version=step)
        self.ring.end_data()


@pytest.fixture
def worker(queue: FoundRings) -> Iterator[Worker]:
    worker = Worker()
    worker.setup_ucxx(SCHEMA, slots=32, rings=queue, mode="thread")
    yield worker
    worker.cleanup_ucxx()


@pytest.fixture(params=["mapped", "tcp"])
def dataset(request: pytest.FixtureRequest, queue: FoundRings) -> Callable[..., TicketDataset]:
    def make(**options: Any) -> TicketDataset:
        given = {"batch_size": 4, "fill_s": 0.5, "expected_rollouts": 1, "wire": {request.param}, **options}
        return TicketDataset(queue, SCHEMA, **given)

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
    worker: Worker, queue: FoundRings, dataset: Callable[..., TicketDataset]
) -> None:
    worker.play(8)
    batches = iter(TicketLoader(dataset()))
    next(batches)
    assert queue.depth().done == 0
    next(batches)
    eventually(lambda: queue.depth().done == 4, "the first batch is consumed")
    batches.close()


def test_a_slot_is_free_once_a_batch_that_was_copied_is_consumed(worker: Worker, queue: FoundRings) -> None:
    worker.play(4)
    dataset = TicketDataset(queue, batch_size=4, collate=torch_loop.pad, idle_s=0.0, schema=SCHEMA, wire={"mapped"})
    batches = iter(dataset)
    next(batches)
    assert next(batches, None) is None
    assert (queue.depth().done, worker.ring.statistics().free) == (4, 32)


def test_a_loop_that_is_left_gives_back_what_it_had_not_used(
    worker: Worker, queue: FoundRings, dataset: Callable[..., TicketDataset]
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


@pytest.mark.parametrize("kind", [lambda dataset: dataset, TicketLoader])
def test_a_loop_that_another_follows_gives_back_its_batch_and_ends(
    kind: Callable[..., Any], worker: Worker, queue: FoundRings, dataset: Callable[..., TicketDataset]
) -> None:
    worker.play(8)
    loader = kind(dataset(batch_size=2))
    first = iter(loader)
    assert steps_of(next(first)) == [1, 2]
    found = []
    for batch in loader:
        found += steps_of(batch)
        if first is not None:
            with pytest.raises(UsageError, match="one loop at a time"):
                next(first)
            first = None
    assert sorted(found) == list(range(1, 9))
    assert queue.depth().done == 8


def test_what_was_consumed_before_a_break_is_not_given_back(
    worker: Worker, queue: FoundRings, dataset: Callable[..., TicketDataset]
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
    loader = TicketLoader(dataset(max_age=1))
    loader.set_version(8)
    assert [steps_of(batch) for batch in loader] == [[7, 8]]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"batch_size": 4}, "batch_size: the TicketDataset makes the batches"),
        ({"persistent_workers": True, "num_workers": 1}, "persistent_workers=True"),
        ({"in_order": True, "num_workers": 2}, "in_order=True"),
    ],
)
def test_what_a_loader_cannot_do_is_refused(
    options: dict[str, Any], why: str, dataset: Callable[..., TicketDataset]
) -> None:
    with pytest.raises(UsageError, match=why):
        TicketLoader(dataset(), **options)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"batch_size": 0}, "batch_size=0; give a whole number of at least 1"),
        ({"fill_s": float("nan")}, "fill_s is not a number"),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        TicketDataset("redis://127.0.0.1:1/0?run=never-opened", **options)


def test_an_option_that_no_trainer_has_is_refused_when_the_dataset_is_made() -> None:
    with pytest.raises(TypeError, match="schemas"):
        TicketDataset("rings:never-opened", schemas=[SCHEMA])


def test_a_tensor_that_does_not_fit_is_told_how_torch_casts() -> None:
    with serving(SCHEMA) as (ring, _), pytest.raises(SchemaError, match=r"tokens\.to\(torch\.int32\)"):
        ring.write({"tokens": torch.arange(3), "step": 1})


def test_a_loader_that_asks_for_several_batches_at_once_is_refused(
    worker: Worker, queue: FoundRings, dataset: Callable[..., TicketDataset]
) -> None:
    worker.play(4)
    with pytest.raises(UsageError, match="batch_size=None"):
        next(iter(DataLoader(dataset(batch_size=1), batch_size=2, collate_fn=list)))
    assert (queue.depth().done, queue.depth().ready) == (0, 4)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.parametrize("kind", [TicketLoader, lambda dataset: DataLoader(dataset, batch_size=None)])
def test_a_loader_that_asks_ahead_is_refused(
    kind: Callable[..., Any], worker: Worker, queue: FoundRings, dataset: Callable[..., TicketDataset]
) -> None:
    from accelerate import Accelerator

    worker.play(4)
    loader = Accelerator(cpu=True).prepare(kind(dataset(batch_size=1)))
    with pytest.raises(UsageError, match=r"prepare\(\)"):
        next(iter(loader))
    assert (queue.depth().done, queue.depth().ready) == (0, 4)


def test_opened_rings_cannot_go_to_a_spawned_worker(dataset: Callable[..., TicketDataset]) -> None:
    with pytest.raises(UsageError, match="give their text, not FoundRings"):
        next(iter(TicketLoader(dataset(), num_workers=1, multiprocessing_context="spawn")))


# --- batches in place -----------------------------------------------------------------------------------
def test_a_packed_batch_is_a_dict_of_tensors(worker: Worker, dataset: Callable[..., TicketDataset]) -> None:
    worker.play(6)
    first, second = TicketLoader(dataset(layout="packed"))
    assert {name: each.tolist() for name, each in first.items()} == {
        "tokens": [0, 0, 1, 0, 1, 2, 0, 1, 2, 3],
        "tokens.lengths": [1, 2, 3, 4],
        "tokens.cu_seqlens": [0, 1, 3, 6, 10],
        "step": [1, 2, 3, 4],
    }
    assert (first["tokens"].dtype, first["tokens.cu_seqlens"].dtype) == (torch.int32, torch.int32)
    assert second["tokens.cu_seqlens"].tolist() == [0, 5, 11]
    first["tokens"] += 1  # the memory is the batch's own
    eventually(lambda: free(worker.ring), "every slot is free again")


def test_a_padded_batch_has_the_fill_value_and_collate_gets_the_metadata(
    worker: Worker, dataset: Callable[..., TicketDataset]
) -> None:
    worker.play(2)
    made = dataset(layout="padded", shape={"fill": -1, "pad_to": 3}, collate=lambda batch, metadata: (batch, metadata))
    [(batch, metadata)] = TicketLoader(made)
    assert batch["tokens"].tolist() == [[0, -1, -1], [0, 1, -1]]
    assert batch.keys() == {"tokens", "tokens.lengths", "step"}
    assert [each["step"] for each in metadata] == [1, 2]


def test_every_dtype_that_torch_has_is_in_a_batch_bit_by_bit() -> None:
    names = [name for name in DTYPES if hasattr(torch, name)]
    schema = Schema.of(**{name: (name, UpTo(16)) for name in names}, scalar=("bool",))
    written = {name: np.arange(7).astype(DTYPES[name]) for name in names} | {"scalar": np.bool_(True)}
    with serving(schema) as (ring, _):
        ring.write_many([written, written])
        with claim_batch(ring, 2, layout="packed") as batch:
            found = batch.torch()
        for name in names:
            assert found[name].dtype == getattr(torch, name)
            assert found[name].data_ptr() == batch[name].__array_interface__["data"][0]
            assert bytes(found[name].view(torch.uint8).numpy()) == written[name].tobytes() * 2
        assert found["scalar"].tolist() == [True, True]


def test_a_batch_is_written_into_the_callers_tensor() -> None:
    schema = Schema.of(tokens=("int32", UpTo(8)))
    with serving(schema) as (ring, _):
        ring.write_many([{"tokens": np.arange(n, dtype=np.int32)} for n in (2, 3)])
        out = torch.full((10,), 9, dtype=torch.int32)
        with claim_batch(ring, 2, layout="packed", out={"tokens": out}) as batch:
            assert out.tolist() == [0, 1, 0, 1, 2, 9, 9, 9, 9, 9]
            assert batch.torch()["tokens"].data_ptr() == out.data_ptr()


def test_a_batch_that_cannot_be_made_gives_its_payloads_back(
    worker: Worker, queue: FoundRings, dataset: Callable[..., TicketDataset]
) -> None:
    worker.play(4)
    with pytest.raises(BatchTooLargeError, match="more than the 3 that the batch is padded to"):
        next(iter(TicketLoader(dataset(layout="padded", shape={"pad_to": 3}))))
    assert (queue.depth().done, queue.depth().claimed, queue.depth().ready) == (0, 0, 4)
    with pytest.raises(UsageError, match="memory"):
        dataset(layout="packed", client=ClientOptions(device="torch"))
    with pytest.raises(UsageError, match="overwritten by the next batch"):
        dataset(layout="packed", shape={"out": {}})


def test_payloads_of_any_schema_make_a_list_and_no_packed_batch(queue: FoundRings) -> None:
    with serving(None, slots=4, slot_bytes=4096) as (ring, _):
        for payload in ({"x": np.zeros(3, np.int8)}, {"y": np.zeros(3, np.int8)}):
            ring.write(payload)
        queue.hand_out(ring)
        options: dict[str, Any] = {"batch_size": 2, "fill_s": 0.0, "idle_s": 0.0, "wire": {"mapped"}}
        with pytest.raises(SchemaError):
            next(iter(TicketDataset(queue, layout="packed", **options)))
        assert queue.depth().ready == 2
        assert [sample.tensors.keys() for sample in next(iter(TicketDataset(queue, **options)))] == [{"x"}, {"y"}]


# --- in worker processes --------------------------------------------------------------------------------
@pytest.fixture
def served(queue: FoundRings) -> Iterator[Worker]:
    worker = Worker()
    worker.setup_ucxx(SCHEMA, slots=32, rings=queue, mode="thread")
    worker.play(32)
    yield worker
    worker.cleanup_ucxx()


def loop(method: str, url: str, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, torch_loop.__file__, method, url, *more],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_processes_fetch_acknowledge_and_give_back(method: str, served: Worker, queue_url: str) -> None:
    with loop(method, queue_url) as trainer:
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
        assert "only the trainer process has its device memory" in found["device"]
        assert 'multiprocessing_context="spawn"' in found["inherited"]


@pytest.mark.slow
def test_the_last_batch_comes_from_whichever_worker_has_it_and_the_iteration_ends() -> None:
    run = f"last-batch-{os.getpid()}-"
    with SharedRingBuffer.create(SCHEMA, slots=4, prefix=run) as ring:
        ring.write({"tokens": np.arange(1, dtype=np.int32), "step": 1}, metadata={"step": 1})
        ring.end_data()
        with loop("fork", f"rings:{run}", "second worker first") as trainer:
            output, errors = trainer.communicate()
        assert (trainer.returncode, output) == (0, "[1]\n"), errors
        assert ring.unread() == []


@pytest.mark.slow
def test_the_iteration_ends_with_the_rollouts_though_a_worker_begins_behind_their_end() -> None:
    run = f"late-worker-{os.getpid()}-"
    with SharedRingBuffer.create(SCHEMA, slots=4, prefix=run) as ring:
        ring.write({"tokens": np.arange(1, dtype=np.int32), "step": 1}, metadata={"step": 1})
        ring.end_data()
        with loop("fork", f"rings:{run}", "second worker late") as trainer:
            eventually(lambda: ring.unread() == [], "it is trained on")
            ring.close()
            output, errors = trainer.communicate()
        assert (trainer.returncode, output) == (0, "[1]\n"), errors


@pytest.mark.slow
def test_an_iteration_behind_the_end_of_data_ends_and_one_with_another_rollout_has_its_payloads() -> None:
    run = f"again-{os.getpid()}-"
    dataset = TicketDataset(f"rings:{run}", fill_s=0.0, schema=SCHEMA, expected_rollouts=1)

    def learned(*written: int) -> list[int]:
        with SharedRingBuffer.create(SCHEMA, slots=4, prefix=run) as ring:
            for step in written:
                ring.write({"tokens": np.arange(step, dtype=np.int32), "step": step})
            ring.end_data()
            return [step for batch in dataset for step in steps_of(batch)]

    assert learned(1, 2) == [1, 2]
    assert list(dataset) == list(TicketLoader(dataset)) == []
    assert learned(3) == [3]


@pytest.mark.slow
def test_workers_of_a_killed_trainer_give_back_what_it_had(served: Worker, queue: FoundRings, queue_url: str) -> None:
    with loop("fork", queue_url, "wait") as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "waiting\n"
        trainer.kill()
    eventually(lambda: queue.depth().claimed == 0, "the workers have noticed")
    assert (queue.depth().done, queue.depth().ready) == (4, 28)


@pytest.mark.slow
def test_a_worker_whose_trainer_is_killed_while_it_starts_ends() -> None:
    run = f"slow-worker-{os.getpid()}-"
    with SharedRingBuffer.create(SCHEMA, slots=1, prefix=run) as ring:
        ring.write({"tokens": np.arange(1, dtype=np.int32), "step": 1})
        with loop("spawn", f"rings:{run}", "slow worker") as trainer:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "starting\n"
            trainer.kill()
            assert trainer.stdout.read() == ""  # the worker holds the other end
        assert ring.statistics().ready == 1
