"""Samples with nested values as batches: by this package's collate, by torch's own, with worker processes."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed: pip install torch", allow_module_level=True)

with warnings.catch_warnings():  # of what torch imports
    warnings.simplefilter("ignore")
    import torch
from torch.utils.data import default_collate

from transport import open_rings
from transport.adapters.torch import Sample, TicketDataset, TicketLoader, collate
from transport.errors import UsageError
from transport.packer.options import RingOptions
from transport.packer.rollout import UCXXRolloutMixin

pytestmark = pytest.mark.ucx


class Worker(UCXXRolloutMixin):
    """The mixin alone."""


def a_sample(at: int) -> dict[str, Any]:
    return {
        "prompt": f"prompt {at}",
        "messages": [{"role": "user", "content": f"{at}"}] * (at + 1),
        "tokens": np.arange(at + 2, dtype=np.int32),
        "scores": {"policy": np.full(3, at, np.float32), "of": {"step": at, "done": at > 1}},
        "half": torch.full((2,), at, dtype=torch.bfloat16),
        "blob": bytes([at]),
        "extra": None,
        "reward": float(at),
    }


@pytest.fixture
def written(queue_url: str) -> Iterator[Callable[..., str]]:
    """Writes payloads and gives the URL of their queue."""
    with open_rings(queue_url) as queue:
        worker = Worker()
        worker.setup_ucxx(slots=4, rings=queue, mode="thread", ring=RingOptions(slot_bytes=1 << 16))

        def write(*payloads: dict[str, Any]) -> str:
            for at, payload in enumerate(payloads):
                worker.write_to_buffer(payload, metadata={"episode": at})
            return queue_url

        yield write
        worker.cleanup_ucxx()


def only_batch(queue: str, collate: Any, num_workers: int = 0) -> Any:
    dataset = TicketDataset(queue, batch_size=3, fill_s=60, idle_s=0.0, collate=collate)
    how = {"multiprocessing_context": "spawn"} if num_workers else {}
    [batch] = TicketLoader(dataset, num_workers=num_workers, **how)
    return batch


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_samples_with_everything_nested_are_one_batch(written: Callable[..., str], num_workers: int) -> None:
    batch = only_batch(written(*map(a_sample, range(3))), collate, num_workers)
    assert type(batch) is Sample
    found = batch.tensors
    assert found["prompt"] == ["prompt 0", "prompt 1", "prompt 2"]
    assert [len(each) for each in found["messages"]] == [1, 2, 3]
    assert [each.tolist() for each in found["tokens"]] == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert found["scores"]["policy"].shape == (3, 3)
    assert found["scores"]["of"]["step"].tolist() == [0, 1, 2]
    assert found["scores"]["of"]["done"].dtype == torch.bool
    assert (found["half"].dtype, found["half"].tolist()) == (torch.bfloat16, [[0, 0], [1, 1], [2, 2]])
    assert found["blob"] == [b"\0", b"\1", b"\2"]
    assert found["extra"] == [None] * 3
    assert (found["reward"].dtype, found["reward"].tolist()) == (torch.float64, [0, 1, 2])
    assert batch.metadata["episode"].tolist() == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # torch's, of arrays inside of values
def test_torchs_own_collate_takes_what_it_knows(written: Callable[..., str]) -> None:
    samples = [{"text": f"{at}", "x": {"a": np.full(2, at), "n": at}, "y": np.float32(at)} for at in range(3)]
    batch = only_batch(written(*samples), default_collate)
    assert type(batch) is Sample
    assert batch.tensors["text"] == ["0", "1", "2"]
    assert batch.tensors["x"]["a"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert batch.tensors["x"]["n"].tolist() == [0, 1, 2]
    assert batch.tensors["y"].tolist() == [0, 1, 2]
    assert batch.metadata["episode"].tolist() == [0, 1, 2]


def test_a_payload_with_its_parents_is_one_sample(written: Callable[..., str]) -> None:
    from transport import SharedRingBuffer
    from transport.joined import with_parents

    with SharedRingBuffer.create(slots=2, slot_bytes=4096) as first:
        rolled = [first.write({"tokens": np.arange(3) + at, "prompt": f"{at}"}) for at in range(2)]
        queue = written(*(with_parents({"reward": float(at)}, [each]) for at, each in enumerate(rolled)))
        dataset = TicketDataset(queue, batch_size=2, fill_s=60, idle_s=0.0, collate=collate, joined=True)
        [batch] = TicketLoader(dataset)
        assert set(batch.tensors) == {"tokens", "prompt", "reward"}
        assert batch.tensors["tokens"].tolist() == [[0, 1, 2], [1, 2, 3]]
        assert batch.tensors["reward"].tolist() == [0, 1]
        taken = [first.native.take(20.0) for _ in range(2)]
        assert all(taken)  # both were acknowledged
    with pytest.raises(UsageError, match="joined=True has payloads of several"):
        TicketDataset(queue, layout="packed", joined=True)


def column(*values: Any) -> Any:
    return collate([Sample({"x": each}, {}) for each in values]).tensors["x"]


@pytest.mark.parametrize(
    "values",
    [
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, None),
        (1, 2.0),
        (1, True),
        (1 << 70, 1),
        ([1, 2], [3, 4]),
        ((1,), (2,)),
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.zeros((1, 2)), np.zeros((2, 1))),
        ("a", b"a"),
    ],
)
def test_what_is_not_alike_stays_a_list(values: tuple[Any, ...]) -> None:
    assert column(*values) is not values
    assert [type(each) for each in column(*values)] == [type(each) for each in values]


def test_arrays_of_a_dtype_that_torch_lacks_stay_a_list() -> None:
    import ml_dtypes

    assert not hasattr(torch, "float8_e4m3b11fnuz")
    found = column(*[np.zeros(2, ml_dtypes.float8_e4m3b11fnuz)] * 2)
    assert [each.dtype.name for each in found] == ["float8_e4m3b11fnuz"] * 2


def test_numbers_of_one_type_are_a_tensor_of_it() -> None:
    assert [column(value, value).dtype for value in (1, 1.0, True, 1j, np.int16(3), np.zeros((), np.uint8))] == [
        torch.int64,
        torch.float64,
        torch.bool,
        torch.complex128,
        torch.int16,
        torch.uint8,
    ]
