"""TransferQueue over our backend: a driver, and actors that do not import it. Prints one JSON object."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import ray
import torch
import transfer_queue as tq
from tensordict import NonTensorStack, TensorDict

import transport.adapters.transferqueue

CONFIG = {"backend": {"storage_backend": "PayloadTransport", "PayloadTransport": {"ring_bytes": 1 << 20}}}
KEYS = [f"sample{n}" for n in range(4)]


@ray.remote(num_cpus=0)
class Worker:
    """Knows TransferQueue only."""

    def __init__(self) -> None:
        tq.init()

    def get(self) -> list[Any]:
        data = tq.kv_batch_get(keys=KEYS, partition_id="train")
        return [float(data["a"].values().sum()), float(data["b"].values().sum()), "".join(data["text"])]

    def put(self, partition: str) -> int:
        tq.kv_batch_put(keys=KEYS, partition_id=partition, fields=TensorDict({"a": torch.ones(4, 8)}, batch_size=4))
        return os.getpid()


def in_use() -> int:
    """Slots of this process's rings."""
    rings = [each for of in transport.adapters.transferqueue.manager._rings.values() for each in of._rings]
    return sum(sum(each.ring.native.state_counts()[1:]) for each in rings)


def main() -> None:
    ray.init("local", num_cpus=4, include_dashboard=False, logging_level="ERROR", object_store_memory=80 << 20)
    found: dict[str, Any] = {}
    try:
        tq.init(CONFIG)
        first, second = Worker.remote(), Worker.remote()
        fields = {"a": torch.arange(16.0).reshape(4, 4), "b": torch.ones(4, 4), "text": NonTensorStack(*"aabb")}
        tq.kv_batch_put(keys=KEYS, partition_id="train", fields=TensorDict(fields, batch_size=4))
        found["sums"] = ray.get([first.get.remote(), second.get.remote()])
        ray.get(first.put.remote("elsewhere"))
        found["put elsewhere"] = float(tq.kv_batch_get(keys=KEYS, partition_id="elsewhere")["a"].values().sum())
        tq.kv_clear(keys=KEYS, partition_id="train")
        try:
            tq.kv_batch_get(keys=KEYS, partition_id="train")
        except Exception as error:
            found["after clear"] = f"{type(error).__name__}: {error}"
        found["in use"] = in_use()
        fields = {"a": torch.ones(4, 4), "b": torch.ones(4, 4)}
        for _ in range(3):
            tq.kv_batch_put(keys=KEYS, partition_id="again", fields=TensorDict(fields, batch_size=4))
        found["put again"] = in_use()
        os.kill(ray.get(second.put.remote("last")), signal.SIGKILL)
        found["putter killed"] = float(tq.kv_batch_get(keys=KEYS, partition_id="last")["a"].values().sum())
        for partition in ("elsewhere", "again", "last"):
            tq.kv_clear(keys=KEYS, partition_id=partition)
        some = TensorDict({"b": torch.ones(2, 8)}, batch_size=2)
        tq.kv_batch_put(keys=KEYS[:2], partition_id="mixed", fields=some)  # the others have a tag only
        tq.kv_batch_put(keys=KEYS[2:], partition_id="mixed", tags=[{"status": "pending"}] * 2)
        tq.kv_clear(keys=KEYS, partition_id="mixed")
        tq.kv_put(key="tag", partition_id="mixed", tag={"status": "finished"})
        tq.get_client().clear_partition("mixed")
        found["in use at the end"] = in_use()
        tq.close()
    finally:
        ray.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
