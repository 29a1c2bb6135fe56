"""Payloads whose tensors differ in length, for the tests of batches over the wire."""

from __future__ import annotations

from typing import Any

import numpy as np
from helpers import until
from takes import depth

from transport import Schema, SharedRingBuffer, UCXXClient
from transport.schema import DTYPES, UpTo

SCHEMA = Schema.of(tokens=("int32", UpTo(8)), mask=("bool", UpTo(5), 3), reward=("bfloat16",))
SLOTS = 16


def payload(number: int) -> dict[str, Any]:
    rows = number % 9
    return {
        "tokens": np.arange(rows, dtype=np.int32) + number,
        "mask": np.full((number % 6, 3), number % 2, np.bool_),
        "reward": np.asarray(number, DTYPES["bfloat16"]),
    }


def address(ring: SharedRingBuffer) -> str:
    return f"127.0.0.1:{ring.native.ports()[0]}"


def tcp(**arguments: Any) -> UCXXClient:
    return UCXXClient(wire={"tcp"}, **{"schemas": [SCHEMA], **arguments})


async def given_back(ring: SharedRingBuffer, ready: int) -> None:
    await until(lambda: depth(ring) == (ready, 0), "every claim has ended")
