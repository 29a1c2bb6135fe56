"""Names at the ends of a picture's lines, in place of a legend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_APART = 0.05  # of a panel's height, between two names


def name_lines(axes: Any, ends: Sequence[tuple[float, str, str]], *, bold: Sequence[str]) -> None:
    """Right of the panel, at the height of the last point, moved apart where two would cover each other.

    Args:
        ends: last value, name and colour of each line.
        bold: colours whose names are bold.
    """
    axes.get_figure().canvas.draw()
    least, most = axes.transAxes.transform([(0, 0), (0, 1)])[:, 1]
    ordered = sorted(ends)
    heights = [(axes.transData.transform((1, value))[1] - least) / (most - least) for value, _, _ in ordered]
    for height, (_, name, colour) in zip(apart(heights, _APART), ordered, strict=True):
        axes.annotate(
            name,
            (1.03, height),
            xycoords="axes fraction",
            color=colour,
            fontsize=9.5,
            fontweight="bold" if colour in bold else "normal",
            va="center",
            annotation_clip=False,
        )


def apart(heights: Sequence[float], least: float) -> list[float]:
    """Ascending heights in 0 to 1, each at least so far above the one before, and as near to where it was as may be."""
    groups: list[tuple[float, int]] = []  # the lowest of a group, and how many stand on it at that distance
    for height in heights:
        low, number = height, 1
        while groups and groups[-1][0] + groups[-1][1] * least > low:
            before, many = groups.pop()
            # both groups keep their middle, weighted by their numbers
            low = (before * many + (low - many * least) * number) / (many + number)
            number += many
        groups.append((low, number))
    found = [low + at * least for low, number in groups for at in range(number)]
    last = len(found) - 1
    found = [min(height, 1.0 - (last - at) * least) for at, height in enumerate(found)]  # not into the title
    return [max(height, at * least) for at, height in enumerate(found)]


def repetitions(number: int) -> str:
    """As the caption says it."""
    return "one repetition" if number == 1 else f"medians of {number} repetitions"
