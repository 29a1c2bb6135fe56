"""A rollout's ring and a trainer's client in one process: write, read over TCP, read the same ring mapped.

.venv/bin/python examples/one_process.py
"""

import numpy as np

from transport import BlockingClient, Schema, SharedRingBuffer, UCXXServer, UpTo

SCHEMA = Schema.of(obs=("float32", UpTo(500), 4), reward=("float32", UpTo(500)))


def episode(steps: int) -> dict[str, np.ndarray]:
    return {"obs": np.full((steps, 4), steps, np.float32), "reward": np.ones(steps, np.float32)}


def main() -> None:
    with SharedRingBuffer.create(SCHEMA, slots=8) as ring, UCXXServer(ring, mode="thread") as server:
        tickets = [ring.write(episode(steps), metadata={"steps": steps}) for steps in (3, 120, 500)]
        print(f"{server}: tickets of {len(tickets[0].encode())} bytes, payloads of {[each.size for each in tickets]}")
        for wire in ({"tcp"}, {"mapped"}):
            with BlockingClient(schemas=[SCHEMA], wire=wire) as client, client.read(tickets.pop()) as payload:
                assert payload["obs"].shape == (payload.metadata["steps"], 4)
                print(payload)
        ring.discard(tickets.pop())  # nobody wants the last one
        print(f"{ring.get_ready_count()} payloads unread")


if __name__ == "__main__":
    main()
