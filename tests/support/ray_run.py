"""A rollout as a Ray actor and its trainers, for tests/adapters/test_ray.py. Prints one JSON object."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import ray

from transport import BlockingClient, Schema, StaleSlotError, Ticket, UCXXRolloutMixin, UpTo

SCHEMA = Schema.of(tokens=("int32", UpTo(4096)))


@ray.remote(num_cpus=0)
class Rollout(UCXXRolloutMixin):
    """Keeps its ring in its own process; what leaves it are tickets."""

    def __init__(self, schema: Schema) -> None:
        self.setup_ucxx(schema, slots=8)

    def play(self, step: int) -> Ticket:
        return self.write_to_buffer({"tokens": np.arange(step, dtype=np.int32)}, metadata={"step": step})

    def played(self) -> tuple[int, int]:
        return os.getpid(), self.ring_statistics().consumes

    def close(self) -> None:
        self.cleanup_ucxx()


@ray.remote(num_cpus=0, max_retries=0)
def train(ticket: Ticket, wire: str) -> tuple[int, int, str]:
    """A task that is given the ticket itself, though its caller passed a reference to it."""
    with BlockingClient(schemas=[SCHEMA], wire={wire}) as client:
        payload = client.read(ticket)
        return os.getpid(), int(payload["tokens"].sum()), payload.wire


@ray.remote(num_cpus=0)
def train_all(references: list[Any]) -> list[int]:
    """References within a list are resolved by the task."""
    with BlockingClient(schemas=[SCHEMA]) as client:
        return [len(client.read(ticket)["tokens"]) for ticket in ray.get(references)]


def main() -> None:
    ray.init("local", num_cpus=1, include_dashboard=False, logging_level="ERROR", object_store_memory=80 << 20)
    try:
        rollout = Rollout.remote(SCHEMA)
        found: dict[str, Any] = {}
        ticket = ray.get(rollout.play.remote(100))
        found["same"] = Ticket.parse(ticket.encode()) == ticket == ray.get(ray.put(ticket))
        found["shown"] = repr(ticket)
        found["tcp"] = ray.get(train.remote(rollout.play.remote(200), "tcp"))  # the driver never sees this ticket
        found["mapped"] = ray.get(train.remote(ticket, "mapped"))
        found["list"] = ray.get(train_all.remote([rollout.play.remote(step) for step in (1, 2, 3)]))
        with BlockingClient(schemas=[SCHEMA]) as client:
            try:
                client.read(ticket)
            except StaleSlotError:
                found["again"] = "StaleSlotError"
        found["driver"], (found["rollout"], found["consumed"]) = os.getpid(), ray.get(rollout.played.remote())
        ray.get(rollout.close.remote())
    finally:
        ray.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
