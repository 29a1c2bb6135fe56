"""Boxes of a tensor: a start and a size in every dimension. Pure; no numpy, because most boxes are few numbers.

`BoxIndex` finds the boxes that overlap another one. It sorts the intervals of each dimension, so a search in boxes that
do not overlap each other costs what it finds, and a bisection.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

Numbers = tuple[int, ...]


class Box(NamedTuple):
    """``start`` and ``size`` in elements, one number for each dimension. A scalar's box has none, and one element."""

    start: Numbers
    size: Numbers

    def __str__(self) -> str:
        return (
            "[" + ", ".join(f"{start}:{start + size}" for start, size in zip(self.start, self.size, strict=True)) + "]"
        )

    @property
    def volume(self) -> int:
        """Elements in it."""
        return math.prod(self.size)

    def within(self, shape: Sequence[int]) -> bool:
        """Return whether it lies inside a tensor of this shape."""
        return len(self.start) == len(self.size) == len(shape) and all(
            start >= 0 and size >= 0 and start + size <= end
            for start, size, end in zip(self.start, self.size, shape, strict=True)
        )

    def intersection(self, other: Box) -> Box | None:
        """Return what both contain; None if that is nothing. Both have the same number of dimensions."""
        start = tuple(map(max, self.start, other.start))
        size = tuple(
            min(a + m, b + n) - at
            for a, m, b, n, at in zip(self.start, self.size, other.start, other.size, start, strict=True)
        )
        return Box(start, size) if all(each > 0 for each in size) else None

    def without(self, other: Box) -> Iterator[Box]:
        """Boxes, which do not overlap, of what this one contains and ``other`` does not."""
        common = self.intersection(other)
        if common is None:
            if self.volume:
                yield self
            return
        start, size = list(self.start), list(self.size)
        for dim, (at, length) in enumerate(zip(common.start, common.size, strict=True)):
            before, after = at - start[dim], start[dim] + size[dim] - (at + length)
            if before:
                yield Box(tuple(start), (*size[:dim], before, *size[dim + 1 :]))
            if after:
                yield Box((*start[:dim], at + length, *start[dim + 1 :]), (*size[:dim], after, *size[dim + 1 :]))
            start[dim], size[dim] = at, length


def left_over(box: Box, taken: Iterable[Box]) -> list[Box]:
    """Return what ``taken`` leaves of a box, as boxes that do not overlap."""
    left = [box] if box.volume else []
    for each in taken:
        left = [piece for old in left for piece in old.without(each)]
    return left


class BoxIndex:
    """Boxes with the same number of dimensions, by place.

    Attributes:
        disjoint: whether no two of them overlap, as far as sorted intervals show it. False does not prove that some do.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        self.disjoint = True
        dims = len(boxes[0].start) if boxes else 0
        # The dimension with the most different intervals comes first: it narrows a search down to few boxes.
        self._order = sorted(range(dims), key=lambda dim: -len({(box.start[dim], box.size[dim]) for box in boxes}))
        self._root = self._level(list(range(len(boxes))), 0)

    def _level(self, among: list[int], depth: int) -> _Level | list[int]:
        if depth == len(self._order):
            self.disjoint &= len(among) <= 1
            return among
        dim = self._order[depth]
        intervals: dict[tuple[int, int], list[int]] = {}
        for number in among:
            box = self._boxes[number]
            if box.size[dim]:
                intervals.setdefault((box.start[dim], box.start[dim] + box.size[dim]), []).append(number)
        ordered = sorted(intervals)
        reach, ends = 0, []
        for start, end in ordered:
            self.disjoint &= start >= reach
            reach = max(reach, end)
            ends.append(reach)
        return _Level(
            dim,
            [start for start, _ in ordered],
            [end for _, end in ordered],
            ends,
            [self._level(intervals[each], depth + 1) for each in ordered],
        )

    def overlapping(self, box: Box) -> list[tuple[int, Box]]:
        """Return (number of the box, what is common) of all that overlap, in the order of their places."""
        if not box.volume:
            return []
        found: list[int] = []
        self._search(self._root, box, found)
        common = ((number, box.intersection(self._boxes[number])) for number in found)
        return sorted(((number, each) for number, each in common if each is not None), key=lambda pair: pair[1])

    def _search(self, level: _Level | list[int], box: Box, found: list[int]) -> None:
        if isinstance(level, list):
            found.extend(level)
            return
        start, end = box.start[level.dim], box.start[level.dim] + box.size[level.dim]
        at = bisect_left(level.starts, end) - 1
        while at >= 0 and level.reach[at] > start:
            if level.ends[at] > start:
                self._search(level.below[at], box, found)
            at -= 1


class _Level(NamedTuple):
    """Intervals of one dimension, by start. ``reach``: the farthest end of this one and all before it."""

    dim: int
    starts: list[int]
    ends: list[int]
    reach: list[int]
    below: list[_Level | list[int]]
