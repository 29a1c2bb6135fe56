"""TransferQueue over our backend: ``save FOLDER``, or ``load FOLDER`` in another life. Prints one JSON object."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import ray
import torch
import transfer_queue as tq
from tensordict import NonTensorStack, TensorDict

import transport.adapters.transferqueue  # noqa: F401

CONFIG = {"backend": {"storage_backend": "PayloadTransport", "PayloadTransport": {"ring_bytes": 1 << 20}}}
KEYS = [f"sample{n}" for n in range(20)]


@ray.remote(num_cpus=0)
class Putter:
    """Another process that puts."""

    def put(self) -> int:
        tq.init()
        tq.kv_batch_put(keys=KEYS, partition_id="elsewhere", fields=TensorDict({"a": torch.ones(20, 8)}, batch_size=20))
        return os.getpid()


def values() -> dict[str, Any]:
    kept = KEYS[5:]
    data = tq.kv_batch_get(keys=kept, partition_id="train")
    return {
        "a": float(data["a"].sum()),
        "text": "".join(data["text"]),
        "elsewhere": float(tq.kv_batch_get(keys=KEYS, partition_id="elsewhere")["a"].sum()),
        "keys": sorted(tq.kv_list(partition_id="train")["train"]),
    }


def main() -> None:
    what, folder = sys.argv[1:]
    ray.init("local", num_cpus=4, include_dashboard=False, logging_level="ERROR", object_store_memory=80 << 20)
    try:
        tq.init(CONFIG)
        if what == "save":
            fields = {"a": torch.arange(80.0).reshape(20, 4), "text": NonTensorStack(*"abcdefghijklmnopqrst")}
            tq.kv_batch_put(keys=KEYS, partition_id="train", fields=TensorDict(fields, batch_size=20))
            ray.get(Putter.remote().put.remote())
            tq.kv_clear(keys=KEYS[:5], partition_id="train")
            tq.save_checkpoint(folder)
            print(json.dumps(values()), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)  # the test kills what Ray has started
        tq.load_checkpoint(folder)
        found = values()
        tq.load_checkpoint(folder)  # any number of times
        assert values() == found
        tq.kv_clear(keys=KEYS[5:], partition_id="train")
        tq.close()
        print(json.dumps(found), flush=True)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
