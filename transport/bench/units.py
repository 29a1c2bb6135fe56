"""Sizes, numbers and names as people write them in the options of commands."""

from __future__ import annotations

import re
from collections.abc import Sequence

from transport.errors import UsageError

_UNITS = {
    "": 1,
    "b": 1,
    "k": 1 << 10,  # as dd, ls -h and most programs mean them
    "m": 1 << 20,
    "g": 1 << 30,
    "t": 1 << 40,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}


def parse_size(text: str) -> int:
    """Bytes of "64KiB", "1 MiB", "16M", "4096" and the like; K, M and G are KiB, MiB and GiB.

    Raises:
        UsageError: not a positive whole number of bytes.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(found[2].lower()) if found else None
    size = float(found[1]) * unit if found and unit else 0.0
    if size < 1 or size != int(size):
        raise UsageError(f"invalid size {text!r}; give bytes, or a number with KiB, MiB, GiB or TiB (or K, M, G, T)")
    return int(size)


def parse_sizes(texts: str) -> list[int]:
    """Return the sizes of a comma-separated list, in order. Raises as `parse_size`."""
    return sorted({parse_size(text) for text in texts.split(",")})


def parse_numbers(option: str, texts: str, least: int, most: int) -> list[int]:
    """Return the whole numbers of a comma-separated option, in order. UsageError for others, and beyond the limits."""
    try:
        numbers = [int(text) for text in texts.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(least <= number <= most for number in numbers):
        raise UsageError(f"{option} {texts}: give whole numbers from {least} to {most}, separated by commas")
    return numbers


def parse_names(option: str, names: str, known: Sequence[str]) -> list[str]:
    """Return the names of a comma-separated option, in the order of ``known``. UsageError: one that is none of them."""
    wanted = {name.strip() for name in names.split(",")}
    if not wanted <= set(known):
        raise UsageError(f"{option} {names}: choose some of {', '.join(known)}, separated by commas")
    return [name for name in known if name in wanted]


def show_size(size: int) -> str:
    """Return the size in the largest binary unit that divides it: "64 KiB"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"
