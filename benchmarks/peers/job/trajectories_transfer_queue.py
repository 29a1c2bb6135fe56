"""TransferQueue with trajectories, for benchmarks/job/trajectories.py: put, get_meta, get_data, clear_samples.

Arrays are stacked into tensors, text and messages are the stacks of other values that tensordict has. Controller and
storage are Ray actors, in processes of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import ray_cluster

_PARTITION = "trajectories"
_EVERY = (
    "prompt",
    "messages",
    "tokens",
    "logprobs",
    "ref_logprobs",
    "old_logprobs",
    "image",
    "reward",
)


class Carrier:
    """One client puts, gets and clears."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._meta: Any = None
        self._count = 0

    def put(self, samples: Sequence[dict[str, Any]]) -> None:
        """As one batch."""
        import numpy
        import torch
        from tensordict import TensorDict
        from tensordict.tensorclass import NonTensorStack

        fields: dict[str, Any] = {}
        for name in _EVERY:
            values = [each[name] for each in samples]
            if isinstance(values[0], numpy.ndarray | numpy.generic):
                fields[name] = torch.stack([torch.from_numpy(numpy.asarray(value)) for value in values])
            else:
                fields[name] = NonTensorStack(*values)
        self._count += 1
        self._client.put(TensorDict(fields, batch_size=len(samples)), partition_id=_PARTITION)
        self._size = len(samples)

    def _found(self, fields: Sequence[str], task: str) -> tuple[Any, Any]:
        meta = self._client.get_meta(list(fields), self._size, _PARTITION, task_name=task)
        while not meta.size:
            meta = self._client.get_meta(list(fields), self._size, _PARTITION, task_name=task)
        return meta, self._client.get_data(meta)

    def get(self, fields: Sequence[str]) -> list[dict[str, Any]]:
        """As one batch."""
        self._meta, data = self._found(fields, "get")
        return self._samples(data, fields)

    def clear(self) -> None:
        """Out of the storage."""
        self._client.clear_samples(self._meta)

    def take(self) -> list[dict[str, Any]]:
        """All fields, then out of the storage."""
        meta, data = self._found(_EVERY, "take")
        found = self._samples(data, _EVERY)
        self._client.clear_samples(meta)
        return found

    @staticmethod
    def _samples(data: Any, fields: Sequence[str]) -> list[dict[str, Any]]:
        columns = {}
        for name in fields:
            column = data[name]
            columns[name] = (
                [each.numpy() for each in column.unbind()] if hasattr(column, "untyped_storage") else list(column)
            )
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


@contextlib.contextmanager
def carrier() -> Iterator[Carrier]:
    """A cluster of its own."""
    job = SimpleNamespace(window=64, writers=1, size_bytes=1 << 20)
    with ray_cluster.cluster(job):
        import transfer_queue
        from omegaconf import OmegaConf

        transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}}))
        try:
            yield Carrier(transfer_queue.get_client())
        finally:
            transfer_queue.close()
