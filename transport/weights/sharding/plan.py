"""A plan of the slices that each rank sends, from the layouts of all ranks. Pure, and checked: every byte once.

    parts = make_plan(senders, receivers)
    parts[0].streams[0].slices          # what one sender has for the receivers of one part

A *part* is the local tensors that the same receivers want, alike: the shard of one tensor-parallel rank for all
engines, the norms for every rank. Its bytes leave the senders once, whatever the number of its receivers; they relay
it. A *stream* is what one sender has of one part. A *slice* is a box of one of its tensors and the place of that in a
tensor of the part. The time is proportional to the slices, beside one look at every local tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from transport.errors import SchemaError
from transport.schema import DTYPES
from transport.weights.sharding.boxes import Box, BoxIndex, Numbers, left_over
from transport.weights.sharding.layouts import Layout, LocalTensor, Piece

SPLIT_BYTES = 16 << 20  # a slice that several senders have is divided among them in ranges not below this


class Slice(NamedTuple):
    """A box of a sender's tensor, and its place in a tensor of the part. Elements.

    source, target: numbers of the tensors, in the sender's layout and in the part.
    source_start, target_start: an entry for each dimension of that tensor.
    size: of the box, for the last dimensions of both; its size in the others is one.
    """

    source: int
    source_start: Numbers
    target: int
    target_start: Numbers
    size: Numbers

    @property
    def volume(self) -> int:
        """Elements in it."""
        return math.prod(self.size)


class ShardStream(NamedTuple):
    """One sender's share of one part, in the order of the part's bytes."""

    sender: int
    slices: tuple[Slice, ...]
    nbytes: int


class ShardPart(NamedTuple):
    """Tensors that the same receivers want, and who sends which slices of them.

    numbers: of each receiver, those of the tensors in its layout.
    """

    receivers: tuple[int, ...]
    numbers: tuple[Numbers, ...]
    tensors: tuple[LocalTensor, ...]
    streams: tuple[ShardStream, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


class _Owner(NamedTuple):
    sender: int
    tensor: int
    piece: Piece


class _Source:
    """All boxes of a global tensor that senders have."""

    def __init__(self, of: Numbers, dtype: str) -> None:
        self.of = of
        self.dtype = dtype
        self.owners: dict[Box, list[_Owner]] = {}
        self._boxes: list[Box] = []
        self._index: BoxIndex | None = None

    def covering(self, box: Box, what: str) -> list[tuple[Box, list[_Owner]]]:
        """Boxes that fill this one exactly once, and who has each. SchemaError names a gap."""
        owners = self.owners.get(box)
        if owners is not None:
            return [(box, owners)]
        if self._index is None:
            self._boxes = list(self.owners)
            self._index = BoxIndex(self._boxes)
        found = self._index.overlapping(box)
        if not self._index.disjoint:
            found = list(_once(box, found))
        if sum(common.volume for _, common in found) != box.volume:
            gap = left_over(box, (common for _, common in found))[0]
            raise SchemaError(f"{what}: gap: no sender has {gap}")
        return [(common, self.owners[self._boxes[number]]) for number, common in found]


def _once(box: Box, found: Sequence[tuple[int, Box]]) -> Iterator[tuple[int, Box]]:
    """Yield so much of each of overlapping boxes that nothing comes twice."""
    left = [box]
    for number, common in found:
        rest: list[Box] = []
        for piece in left:
            inner = piece.intersection(common)
            if inner is not None:
                yield number, inner
            rest.extend(piece.without(common))
        left = rest


class _Want(NamedTuple):
    part: int
    target: int
    piece: Piece  # of the target
    box: Box
    owners: list[_Owner]
    nbytes: int


def make_plan(senders: Sequence[Layout], receivers: Sequence[Layout]) -> tuple[ShardPart, ...]:
    """All parts, for these layouts by rank. Deterministic.

    A slice that several senders have comes from the one with the least to send; a large one from several.

    Raises:
        SchemaError: a receiver wants what no sender has (it names tensor and gap), or two ranks name a tensor alike and
            disagree about dtype or shape.
    """
    sources = _sources(senders)
    parts = _parts(receivers)
    wants: list[_Want] = []
    for number, part in enumerate(parts):
        for target, tensor in enumerate(part.tensors):
            for piece in tensor.pieces:
                wants.extend(_wants(sources, number, target, tensor, piece))
    streams: dict[tuple[int, int], list[Slice]] = {}
    load = [0] * len(senders)
    shared: list[_Want] = []
    for want in wants:
        if len(want.owners) > 1:
            shared.append(want)
        else:
            _assign(want, want.owners[0], streams, load)
    for want in sorted(shared, key=lambda each: -each.nbytes):
        for divided in _divided(want):
            owner = min(divided.owners, key=lambda each: (load[each.sender], each.sender))
            _assign(divided, owner, streams, load)
    made = []
    for number, part in enumerate(parts):
        made.append(part._replace(streams=tuple(_streams(number, part.tensors, streams, len(senders)))))
        filled = sum(stream.nbytes for stream in made[-1].streams)
        assert filled == part.nbytes, f"part {number}: {filled} of {part.nbytes} bytes"
    return tuple(made)


def _sources(senders: Sequence[Layout]) -> dict[str, _Source]:
    sources: dict[str, _Source] = {}
    for rank, layout in enumerate(senders):
        for number, tensor in enumerate(layout.tensors):
            for piece in tensor.pieces:
                if not piece.box.volume:
                    continue
                source = sources.get(piece.tensor)
                if source is None:
                    source = sources[piece.tensor] = _Source(piece.of, tensor.dtype)
                _agree(source, piece, tensor, f"sender {rank}")
                source.owners.setdefault(piece.box, []).append(_Owner(rank, number, piece))
    return sources


def _agree(source: _Source, piece: Piece, tensor: LocalTensor, who: str) -> None:
    if source.of != piece.of or source.dtype != tensor.dtype:
        raise SchemaError(
            f"{piece.tensor}: {who} has it as {tensor.dtype} {piece.of}, another one as {source.dtype} {source.of}; "
            "convert before sending"
        )


def _parts(receivers: Sequence[Layout]) -> list[ShardPart]:
    """Every part, without its streams; what has no bytes is in none. A layout that receivers share is read once."""
    alike: dict[int, list[int]] = {}
    for rank, layout in enumerate(receivers):
        alike.setdefault(id(layout), []).append(rank)
    wanted: dict[LocalTensor, dict[int, int]] = {}  # number in each layout that has it, by the layout's first rank
    for first, *_ in alike.values():
        for number, tensor in enumerate(receivers[first].tensors):
            if tensor.nbytes:
                wanted.setdefault(tensor, {})[first] = number
    found: dict[tuple[int, ...], list[LocalTensor]] = {}
    for tensor, by in wanted.items():
        found.setdefault(tuple(by), []).append(tensor)
    parts = []
    for firsts, tensors in found.items():
        of_first = {first: tuple(wanted[tensor][first] for tensor in tensors) for first in firsts}
        numbers = {rank: of_first[first] for first in firsts for rank in alike[id(receivers[first])]}
        ranks = tuple(sorted(numbers))
        parts.append(ShardPart(ranks, tuple(numbers[rank] for rank in ranks), tuple(tensors), ()))
    return parts


def _wants(sources: dict[str, _Source], part: int, target: int, tensor: LocalTensor, piece: Piece) -> Iterator[_Want]:
    if not piece.box.volume:
        return
    what = piece.tensor if piece.tensor == tensor.name else f"{tensor.name}: {piece.tensor}"
    source = sources.get(piece.tensor)
    if source is None:
        raise SchemaError(f"{what}: gap: no sender has any of this tensor")
    _agree(source, piece, tensor, "a receiver")
    itemsize = DTYPES[tensor.dtype].itemsize
    for box, owners in source.covering(piece.box, what):
        yield _Want(part, target, piece, box, owners, box.volume * itemsize)


def _divided(want: _Want) -> Iterator[_Want]:
    """Ranges of a large slice along its first dimension that has several elements."""
    count = min(len({owner.sender for owner in want.owners}), want.nbytes // SPLIT_BYTES)
    dim = next((at for at, size in enumerate(want.box.size) if size > 1), None)
    if count <= 1 or dim is None:
        yield want
        return
    start, size = want.box
    count = min(count, size[dim])
    for number in range(count):
        first, end = size[dim] * number // count, size[dim] * (number + 1) // count
        box = Box((*start[:dim], start[dim] + first, *start[dim + 1 :]), (*size[:dim], end - first, *size[dim + 1 :]))
        yield want._replace(box=box, nbytes=want.nbytes // want.box.volume * box.volume)


def _assign(want: _Want, owner: _Owner, streams: dict[tuple[int, int], list[Slice]], load: list[int]) -> None:
    size = want.box.size
    dims = min(len(size), len(owner.piece.at), len(want.piece.at))
    streams.setdefault((want.part, owner.sender), []).append(
        Slice(
            owner.tensor,
            _local(owner.piece, want.box.start),
            want.target,
            _local(want.piece, want.box.start),
            size[len(size) - dims :],
        )
    )
    load[owner.sender] += want.nbytes


def _local(piece: Piece, start: Numbers) -> Numbers:
    """Return the place in the local tensor of an element of the global one."""
    if start == piece.start:
        return piece.at
    lead = len(piece.at) - len(start)  # dimensions that only the local tensor has; below 0: that it lacks
    offset = [at - begin for at, begin in zip(start, piece.start, strict=True)]
    if lead >= 0:
        return (*piece.at[:lead], *(at + each for at, each in zip(piece.at[lead:], offset, strict=True)))
    return tuple(at + each for at, each in zip(piece.at, offset[-lead:], strict=True))


def _streams(
    number: int, tensors: Sequence[LocalTensor], streams: dict[tuple[int, int], list[Slice]], senders: int
) -> Iterator[ShardStream]:
    for sender in range(senders):
        slices = streams.get((number, sender))
        if slices:
            slices.sort(key=lambda each: (each.target, each.target_start))
            merged = tuple(_merged(slices))
            nbytes = sum(each.volume * DTYPES[tensors[each.target].dtype].itemsize for each in merged)
            yield ShardStream(sender, merged, nbytes)


def _merged(slices: Sequence[Slice]) -> Iterator[Slice]:
    """Neighbours that continue each other in source and target become one."""
    last = slices[0]
    for each in slices[1:]:
        joined = _joined(last, each)
        if joined is None:
            yield last
            last = each
        else:
            last = joined
    yield last


def _joined(first: Slice, second: Slice) -> Slice | None:
    if (first.source, first.target) != (second.source, second.target) or len(first.size) != len(second.size):
        return None
    dims = len(first.size)
    ahead = [b - a for a, b in zip(first.target_start, second.target_start, strict=True)]
    if ahead != [0] * (len(ahead) - dims) + ahead[len(ahead) - dims :]:
        return None
    moved = [dim for dim, each in enumerate(ahead[len(ahead) - dims :]) if each]
    if len(moved) != 1:
        return None
    dim = moved[0]
    step = first.size[dim]
    if any(a != b for at, (a, b) in enumerate(zip(first.size, second.size, strict=True)) if at != dim):
        return None
    for start, other in ((first.source_start, second.source_start), (first.target_start, second.target_start)):
        lead = len(start) - dims
        if any(b - a != (step if at == lead + dim else 0) for at, (a, b) in enumerate(zip(start, other, strict=True))):
            return None
    return first._replace(size=(*first.size[:dim], step + second.size[dim], *first.size[dim + 1 :]))
