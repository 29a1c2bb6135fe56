"""TransferQueue with SimpleStorage, its own storage: put, get_meta, get_data, clear_samples.

get_meta marks payloads as consumed by the task; clear_samples takes them out of the storage, which does not shrink by
itself. Its controller and storage are Ray actors, its data goes over ZeroMQ.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import ray_cluster

_PARTITION = "payloads"
_TASK = "train"
_FIELDS = ["header", "body"]
_WAIT_S = 0.001  # between two looks: it has no call that waits


@contextlib.contextmanager
def service(job: Any) -> Iterator[str]:
    """A cluster with controller and storage."""
    with ray_cluster.cluster(job) as place:
        import transfer_queue
        from omegaconf import OmegaConf

        transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}}))
        try:
            yield place
        finally:
            transfer_queue.close()


def _client(job: Any) -> Any:
    ray_cluster.join(job.place)
    import transfer_queue

    transfer_queue.init()
    return transfer_queue.get_client()


class Writer:
    """Waits by the trainers' count, since the queue has no bound of its own that waits."""

    address = ""
    helpers: Sequence[int] = ()

    def __init__(self, job: Any) -> None:
        self._job = job
        self._client = _client(job)
        self._cells = sys.modules["work"].Cells(job.cells, job.trainers)
        self._written = 0

    def prepare(self, body: bytes) -> Any:
        """A tensor."""
        import numpy
        import torch

        return torch.from_numpy(numpy.frombuffer(body, numpy.uint8).copy())

    def write_many(self, payloads: Sequence[tuple[bytes, Any]]) -> None:
        """As one batch."""
        import torch
        from tensordict import TensorDict

        job = self._job
        while job.writers * (self._written + len(payloads)) - self._cells.total() > job.writers * job.window:
            job.check()
            time.sleep(_WAIT_S)
        headers = torch.frombuffer(bytearray(b"".join(header for header, _ in payloads)), dtype=torch.uint8)
        data = {"header": headers.view(len(payloads), -1), "body": torch.stack([body for _, body in payloads])}
        self._client.put(TensorDict(data, batch_size=len(payloads)), partition_id=_PARTITION)
        self._written += len(payloads)

    def close(self) -> None:
        """Leave the cluster, which ends with its service."""
        self._client.close()


class Trainer:
    """Asks for whole batches, and for single payloads when none comes."""

    def __init__(self, job: Any) -> None:
        self._job = job
        self._client = _client(job)

    def claim(self, n: int, timeout_s: float) -> Any:
        """Metadata and data of up to n payloads."""
        give_up = time.monotonic() + timeout_s
        wanted = 1 if self._job.idle else n
        while True:
            if time.monotonic() > give_up:
                wanted = 1
            found = self._client.get_meta(_FIELDS, wanted, _PARTITION, task_name=_TASK)
            if found.size:
                return found, self._client.get_data(found)
            if time.monotonic() > give_up:
                return None
            time.sleep(_WAIT_S)

    def consume(self, batch: Any) -> Sequence[Any]:
        """Out of the storage."""
        metadata, data = batch
        self._client.clear_samples(metadata)
        return [
            (header.numpy().tobytes(), body.contiguous().numpy())
            for header, body in zip(data["header"].unbind(), data["body"].unbind(), strict=True)
        ]

    def close(self) -> None:
        """Leave the cluster, which ends with its service."""
        self._client.close()
