"""Sizes that the cases share, in bytes."""

from __future__ import annotations

SIZES = (1 << 20, 16 << 20, 256 << 20)
LARGEST = max(SIZES)
WEIGHTS = (1 << 30, 4 << 30)
SLOTS = 3  # of a ring
