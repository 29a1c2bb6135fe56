"""A payload filled in the slot's own memory, and received into memory of the reader's own.

.venv/bin/python examples/without_copies.py
"""

import numpy as np

from transport import BlockingClient, Schema, SharedRingBuffer, UCXXServer, UpTo

SCHEMA = Schema.of(frames=("uint8", UpTo(64), 84, 84), steps=("int64",))


def main() -> None:
    out = np.empty(SCHEMA.max_bytes, np.uint8)  # kept from step to step; pinned or device memory goes as well
    with SharedRingBuffer.create(SCHEMA, slots=4) as ring, UCXXServer(ring, mode="thread"):
        for step in range(3):
            with ring.reserve({"frames": 16 * (step + 1)}) as lease:  # the end of the block publishes
                lease["frames"][:] = step
                lease["steps"][...] = step
                lease.metadata["step"] = step
            ticket = lease.ticket
            with BlockingClient(schemas=[SCHEMA], wire={"tcp", "shm"}) as client:
                payload = client.read(ticket, out=out[: ticket.size])
                assert np.shares_memory(payload["frames"], out)
                assert payload["frames"].shape == (16 * (step + 1), 84, 84)
                print(payload, int(payload["frames"].max()), payload.metadata)


if __name__ == "__main__":
    main()
