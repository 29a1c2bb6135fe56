"""Sizes that the cases share, in bytes."""

from __future__ import annotations

SIZES = (64 << 10, 1 << 20, 16 << 20)
WEIGHTS = 1 << 30
SLOTS = 3  # of a ring
