"""A trainer with worker processes, for tests/adapters/torch: ``python torch_loop.py METHOD URL [wait]``.

Prints one JSON object. With ``wait`` it says "waiting" with its second batch in hand, and goes no further. With
``second worker first`` it prints the steps of all batches, of which the second of two workers has the first. With
``second worker late`` that begins when no ring is left. With ``slow worker`` one starts, says so, and begins when the
trainer is gone.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from helpers import eventually

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from torch.utils.data import DataLoader, get_worker_info

from transport import BlockingClient, Schema, SharedRingBuffer, UCXXServer, UpTo, open_rings
from transport._ring import segments
from transport.adapters.torch import Sample, TicketDataset, TicketLoader
from transport.errors import UsageError

SCHEMA = Schema.of(tokens=("int32", UpTo(64)), step=("int64",))


def pad(samples: list[Sample]) -> tuple[Any, list[int]]:
    tokens = [sample.tensors["tokens"] for sample in samples]
    return torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True), [sample.metadata["step"] for sample in samples]


class SecondFirst(TicketDataset):
    """Its first worker begins when the second one has a batch."""

    has_one = multiprocessing.Event()

    @contextlib.contextmanager
    def stream(self, stopping: Callable[[], object] = lambda: False) -> Iterator[Any]:
        if get_worker_info().id == 0:
            self.has_one.wait()
        with super().stream(stopping) as stream:
            yield stream

    def collated(self, batch: Any) -> Any:
        self.has_one.set()
        return super().collated(batch)


class SecondLate(TicketDataset):
    """Its second worker begins when the rings are gone."""

    @contextlib.contextmanager
    def stream(self, stopping: Callable[[], object] = lambda: False) -> Iterator[Any]:
        if get_worker_info().id == 1:
            prefix = self._rings.removeprefix("rings:")
            eventually(lambda: not any(prefix in name for name in segments()), "the rings are gone")
        with super().stream(stopping) as stream:
            yield stream


class Slow:
    """A collate function that comes to a spawned worker when the trainer is gone."""

    def __getstate__(self) -> dict[str, int]:
        return {"trainer": os.getpid()}

    def __setstate__(self, state: dict[str, int]) -> None:
        print("starting", flush=True)
        eventually(lambda: os.getppid() != state["trainer"], "the trainer is gone")

    def __call__(self, samples: list[Sample]) -> list[Sample]:
        return samples


def refusal(loader: Any) -> str:
    try:
        next(iter(loader))
    except (UsageError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def main() -> None:
    method, url = sys.argv[1], sys.argv[2]
    orders: dict[str, type[TicketDataset]] = {"second worker first": SecondFirst, "second worker late": SecondLate}
    if (order := orders.get("".join(sys.argv[3:]))) is not None:
        ordered = order(url, collate=pad, fill_s=0.1, schema=SCHEMA)
        batches = TicketLoader(ordered, num_workers=2, multiprocessing_context=method)
        print([step for _, steps in batches for step in steps])
        return
    if sys.argv[3:] == ["slow worker"]:
        slow = TicketDataset(url, collate=Slow(), schema=SCHEMA)
        next(iter(TicketLoader(slow, num_workers=1, multiprocessing_context=method)))
    dataset = TicketDataset(
        url, batch_size=4, collate=pad, expected_rollouts=1, fill_s=0.1, schema=SCHEMA, wire={"tcp"}
    )
    workers = 2 if method == "fork" else 1  # spawned ones import torch each
    loader = TicketLoader(dataset, num_workers=workers, multiprocessing_context=method)
    if sys.argv[3:] == ["wait"]:
        for number, _ in enumerate(loader):
            if number == 1:
                print("waiting", flush=True)
                sys.stdin.read()
    found: dict[str, Any] = {}
    with open_rings(url) as queue:
        for number, (_, steps) in enumerate(loader):
            if number == 1:
                loader.consume()
                found["kept"] = steps
            if number == 2:
                break
        depth = queue.depth()
        found["after break"] = [depth.done, depth.claimed, depth.ready]
        found["steps"] = []
        rest = loader if method == "fork" else TicketLoader(dataset)
        for tokens, steps in rest:
            assert all(torch.equal(row[:step], torch.arange(step)) for row, step in zip(tokens, steps, strict=True))
            found["steps"] += steps
        found["after all"] = [queue.depth().done, queue.depth().unfinished]
        if method == "fork":
            found["plain"] = refusal(DataLoader(dataset, batch_size=None, num_workers=1))
            found["device"] = refusal(
                TicketLoader(TicketDataset(url, SCHEMA, layout="padded", shape={"memory": "torch"}), num_workers=1)
            )
            with SharedRingBuffer.create(SCHEMA, slots=1) as ring, UCXXServer(ring, mode="thread"):
                ticket = ring.write({"tokens": np.arange(3, dtype=np.int32), "step": 3})
                with BlockingClient(schemas=[SCHEMA], wire={"tcp"}) as client:
                    client.read(ticket)
                    found["inherited"] = refusal(loader)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
