"""The layout of a training step: which replica trains on which samples, in which micro-batches. No I/O.

groups of samples ──largest first to the lightest replica──► replicas
a replica's groups ──packed up to max_tokens──► micro-batches ──split until all have as many──► the step
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from transport.errors import UsageError


class SampleSize(NamedTuple):
    """One sample of a step: the numbers of its group and of itself in the group."""

    group: int
    number: int


MicroBatch = tuple[SampleSize, ...]
StepLayout = tuple[tuple[MicroBatch, ...], ...]  # of each replica


def lay_out(groups: Sequence[Sequence[int]], replicas: int, max_tokens: int | None = None) -> StepLayout:
    """Lay a step out. It holds for every layout that:

    * every sample is in one micro-batch, and all samples of a group are on one replica;
    * every replica has the same number of micro-batches, at least one;
    * no micro-batch has more than ``max_tokens``, unless it is one sample;
    * the heaviest replica has at most the mean of all, and the heaviest group;
    * a micro-batch is empty only where its replica has fewer samples than micro-batches;
    * the same groups give the same layout, in every process.

    Args:
        groups: of each group the tokens of its samples, 0 or more each.
        replicas: data-parallel replicas.
        max_tokens: of a micro-batch; None: a replica has one micro-batch.

    Raises:
        UsageError: an argument makes no sense.
    """
    if replicas < 1:
        raise UsageError(f"replicas={replicas}: a step is for at least one")
    if max_tokens is not None and max_tokens < 1:
        raise UsageError(f"max_tokens={max_tokens}: give 1 or more, or None for no limit")
    if any(tokens < 0 for group in groups for tokens in group):
        raise UsageError("a sample has 0 tokens or more")
    shares = _shares(groups, replicas)
    packed = [_packed(groups, share, max_tokens) for share in shares]
    most = max(map(len, packed))
    return tuple(_split(groups, batches, most) for batches in packed)


def _shares(groups: Sequence[Sequence[int]], replicas: int) -> list[list[int]]:
    """Give each replica its groups: the largest first, each to the replica that is lightest by then."""
    shares: list[list[int]] = [[] for _ in range(replicas)]
    lightest = [(0, 0, replica) for replica in range(replicas)]  # tokens, samples, replica
    for number in sorted(range(len(groups)), key=lambda each: (-sum(groups[each]), -len(groups[each]), each)):
        tokens, samples, replica = heapq.heappop(lightest)
        shares[replica].append(number)
        heapq.heappush(lightest, (tokens + sum(groups[number]), samples + len(groups[number]), replica))
    return [sorted(share) for share in shares]


def _packed(groups: Sequence[Sequence[int]], share: Sequence[int], most: int | None) -> list[list[SampleSize]]:
    """Pack a replica's groups: each into the first micro-batch that has room for all of it, else into its own."""
    every = [[SampleSize(group, number) for number in range(len(groups[group]))] for group in share]
    if most is None:
        return [[each for group in every for each in group]]
    batches: list[list[SampleSize]] = []
    loads: list[int] = []
    for samples in sorted(every, key=lambda each: (-_tokens(groups, each), each)):
        pieces = [samples] if _tokens(groups, samples) <= most else _pieces(groups, samples, most)
        for piece in pieces:
            tokens = _tokens(groups, piece)
            at = next((at for at, load in enumerate(loads) if load + tokens <= most), None)
            if at is None:
                batches.append(list(piece))
                loads.append(tokens)
            else:
                batches[at] += piece
                loads[at] += tokens
    return batches or [[]]


def _pieces(groups: Sequence[Sequence[int]], samples: Sequence[SampleSize], most: int) -> list[list[SampleSize]]:
    """Cut a group that is too large for one micro-batch, in the order of its samples."""
    pieces: list[list[SampleSize]] = []
    load = 0
    for each in samples:
        tokens = groups[each.group][each.number]
        if not pieces or load + tokens > most:
            pieces.append([])
            load = 0
        pieces[-1].append(each)
        load += tokens
    return pieces


def _split(groups: Sequence[Sequence[int]], batches: list[list[SampleSize]], count: int) -> tuple[MicroBatch, ...]:
    """Split the heaviest micro-batches of several samples in two until there are ``count``; then add empty ones."""
    heaviest = [(-_tokens(groups, batch), at) for at, batch in enumerate(batches) if len(batch) > 1]
    heapq.heapify(heaviest)
    while len(batches) < count and heaviest:
        _, at = heapq.heappop(heaviest)
        batch, half, load = batches[at], 1, groups[batches[at][0].group][batches[at][0].number]
        whole = _tokens(groups, batch)
        while half < len(batch) - 1 and 2 * load < whole:
            load += groups[batch[half].group][batch[half].number]
            half += 1
        batches[at : at + 1] = [batch[:half]]
        batches.append(batch[half:])
        for index in (at, len(batches) - 1):
            if len(batches[index]) > 1:
                heapq.heappush(heaviest, (-_tokens(groups, batches[index]), index))
    return tuple(map(tuple, batches)) + ((),) * (count - len(batches))


def _tokens(groups: Sequence[Sequence[int]], samples: Sequence[SampleSize]) -> int:
    return sum(groups[each.group][each.number] for each in samples)
