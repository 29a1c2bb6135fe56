"""What payload number n of a writer looks like: size, deadline and every byte follow from the two numbers.

Bytes are a window into one block of noise, behind a header that names the payload. Two payloads differ in their header
at least, and almost always in size and window, so bytes of another payload, of another generation of a slot, or half
of each, are seen as wrong.
"""

from __future__ import annotations

import os
import struct
from typing import Any

import numpy as np

HEADER = struct.Struct("<IQI")  # writer, number, size
LARGEST = int(os.environ.get("SOAK_LARGEST", 128 << 10))  # bytes
_WINDOWS = 1 << 20
NOISE = np.random.default_rng(20).integers(0, 256, _WINDOWS + LARGEST, dtype=np.uint8)
_MIX = 0x9E3779B97F4A7C15


def _hash(writer: int, number: int) -> int:
    mixed = ((writer << 48) ^ number) * _MIX & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF


def size_of(writer: int, number: int) -> int:
    """Mostly some hundred bytes; one in 32 up to 64 KiB (joined to answers), one in 128 up to LARGEST."""
    mixed = _hash(writer, number)
    kind, amount = mixed & 127, mixed >> 8
    if kind == 0:
        return (64 << 10) + 1 + amount % (LARGEST - (64 << 10))
    if kind < 5:
        return HEADER.size + amount % ((64 << 10) - HEADER.size + 1)
    return HEADER.size + amount % 2048


def deadline_s(writer: int, number: int) -> float | None:
    """One in 32 has a deadline: too short, about what the queue takes, or long."""
    kind = _hash(writer, number) >> 40
    return (0.02, 0.5, 5.0)[kind // 32 % 3] if kind % 32 == 0 else None


def make(writer: int, number: int) -> np.ndarray:
    """The payload's bytes."""
    size = size_of(writer, number)
    start = (_hash(writer, number) >> 24) % _WINDOWS
    data = NOISE[start : start + size].copy()
    data[: HEADER.size] = np.frombuffer(HEADER.pack(writer, number, size), np.uint8)
    return data


def is_right(writer: int, number: int, data: Any) -> bool:
    """Whether ``data`` is this payload, to the last byte."""
    seen = np.frombuffer(data, np.uint8)
    size = size_of(writer, number)
    start = (_hash(writer, number) >> 24) % _WINDOWS
    return (
        len(seen) == size
        and seen[: HEADER.size].tobytes() == HEADER.pack(writer, number, size)
        and bool(np.array_equal(seen[HEADER.size :], NOISE[start + HEADER.size : start + size]))
    )
