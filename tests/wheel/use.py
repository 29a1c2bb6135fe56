"""What a user does first, in the environment that the wheel was installed into: README's example, over each wire."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import transport
from transport import BlockingClient, Schema, SharedRingBuffer, Ticket, UCXXServer, UpTo

assert Path(transport.__file__).is_relative_to(sys.prefix), f"{transport.__file__} is not what was installed"

schema = Schema.of(obs=("float32", UpTo(500), 4), reward=("float32", UpTo(500)))
episode = {"obs": np.arange(480, dtype=np.float32).reshape(120, 4), "reward": np.ones(120, np.float32)}

for wire in ("tcp", "mapped"):
    with SharedRingBuffer.create(schema, slots=8) as ring, UCXXServer(ring, ports=(0,)):  # a listener process
        ticket = Ticket.parse(ring.write(episode, metadata={"episode": 7}).to_text())
        with BlockingClient(schemas=[schema], wire={wire}) as client:
            payload = client.read(ticket)
            assert payload.metadata == {"episode": 7}
            for name, values in episode.items():
                np.testing.assert_array_equal(payload[name], values)
            del payload
