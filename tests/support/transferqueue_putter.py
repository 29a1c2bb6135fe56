"""Puts a batch through TransferQueue's backend, prints its metadata and the pids of its listeners, and waits."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from tensordict import TensorDict
from transfer_queue.metadata import BatchMeta, extract_field_schema

from transport.adapters.transferqueue import PayloadTransportStorageManager


class Alone(PayloadTransportStorageManager):
    """Without a controller."""

    def _connect_to_controller(self) -> None: ...

    async def notify_data_update(self, *_: object) -> None: ...


def children() -> list[int]:
    """The supervisor and its listeners."""
    found, pids = [], [os.getpid()]
    while pids:
        below = Path(f"/proc/{pids.pop()}/task").glob("*/children")
        more = [int(pid) for each in below for pid in each.read_text().split()]
        found += more
        pids += more
    return found


def main() -> None:
    manager = Alone(SimpleNamespace(id="none", ip="127.0.0.1"), {"ring_bytes": 1 << 20, "linger_s": 60})
    data = TensorDict({"a": torch.ones(4, 8)}, batch_size=4)
    meta = BatchMeta(
        global_indexes=list(range(4)),
        partition_ids=["train"] * 4,
        field_schema=extract_field_schema(data),
        production_status=np.ones(4, dtype=np.int8),
    )
    asyncio.run(manager.put_data(data, meta))
    sys.stdout.write(pickle.dumps((meta, children())).hex() + "\n")
    sys.stdout.flush()
    time.sleep(600)


if __name__ == "__main__":
    main()
