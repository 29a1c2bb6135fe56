"""The usual shards: which local tensor a rank has under FSDP, tensor, expert and pipeline parallelism, and fused ones.

    specs = [TensorSpec("up", "bfloat16", (5632, 2048)), …]
    trainer = Layout.of(rows(spec, rank, 4) for spec in specs)                        # FSDP: rows, uneven ones too
    server = Layout.of([columns(down, rank, 2), gate_up("gate_up", gate, up, rank, 2)])  # TP

A pipeline stage is a layout that lacks the tensors of other stages. Functions take the global tensor's spec and return
the local tensor, named like the global one unless ``name`` says otherwise. Dimensions are numbered from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from transport.errors import SchemaError, UsageError
from transport.schema import TensorSpec
from transport.weights.sharding.boxes import Box
from transport.weights.sharding.layouts import Layout, LocalTensor, Piece


def whole(spec: TensorSpec, name: str | None = None) -> LocalTensor:
    """All of a tensor, as a rank has it that replicates it."""
    return box(spec, Box((0,) * len(spec.shape), spec.shape), name)


@lru_cache(4)
def whole_model(specs: tuple[TensorSpec, ...]) -> Layout:
    """All of these tensors, as a rank has them that has the whole model. Remembered: they are the same every time."""
    return Layout.of(whole(spec) for spec in specs)


def box(spec: TensorSpec, part: Box, name: str | None = None) -> LocalTensor:
    """Any box of a tensor."""
    piece = Piece(spec.name, spec.shape, part.start, part.size, (0,) * len(part.start))
    return LocalTensor(name or spec.name, spec.dtype, part.size, (piece,))


def rows(spec: TensorSpec, rank: int, world: int, name: str | None = None) -> LocalTensor:
    """FSDP's rows, divided as torch's ``chunk`` does: the last ranks have fewer, or none."""
    return chunk(spec, 0, rank, world, name)


def chunk(spec: TensorSpec, dim: int, rank: int, world: int, name: str | None = None) -> LocalTensor:
    """Rank's chunk of one dimension: ``ceil(length / world)``, and what is left for the last ones."""
    _check(spec, dim, rank, world)
    length = spec.shape[dim]
    step = -(-length // world)
    start = min(rank * step, length)
    return _range(spec, dim, start, min(step, length - start), name)


def columns(spec: TensorSpec, rank: int, world: int, name: str | None = None) -> LocalTensor:
    """Even columns (dimension 1): inputs of a row-parallel layer. UsageError if they do not divide evenly."""
    return even(spec, 1, rank, world, name)


def even(spec: TensorSpec, dim: int, rank: int, world: int, name: str | None = None) -> LocalTensor:
    """Return an even share of one dimension. UsageError if the dimension does not divide evenly."""
    _check(spec, dim, rank, world)
    step, rest = divmod(spec.shape[dim], world)
    if rest:
        raise UsageError(f"{spec.name}: dimension {dim} of {spec.shape} does not divide by {world}")
    return _range(spec, dim, rank * step, step, name)


def fused(name: str, parts: Sequence[LocalTensor], dim: int = 0) -> LocalTensor:
    """One local tensor made of others, one behind another along ``dim``; their other dimensions are equal."""
    first = _first(name, parts)
    pieces, end = [], 0
    for part in parts:
        same = [
            each == other for at, (each, other) in enumerate(zip(part.shape, first.shape, strict=False)) if at != dim
        ]
        if part.dtype != first.dtype or not dim < len(part.shape) == len(first.shape) or not all(same):
            raise SchemaError(
                f"{name}: {part.name} is {part.dtype} {part.shape}, which cannot stand behind {first.name}, "
                f"{first.dtype} {first.shape}, along dimension {dim}"
            )
        for piece in part.pieces:
            at = list(piece.at)
            at[dim] += end
            pieces.append(piece._replace(at=tuple(at)))
        end += part.shape[dim]
    shape = (*first.shape[:dim], end, *first.shape[dim + 1 :])
    return LocalTensor(name, first.dtype, shape, tuple(pieces))


def gate_up(name: str, gate: TensorSpec, up: TensorSpec, rank: int, world: int) -> LocalTensor:
    """Rank's rows of the gate, then its rows of the up projection, in one tensor."""
    return fused(name, [even(gate, 0, rank, world), even(up, 0, rank, world)])


def qkv(
    name: str,
    q: TensorSpec,
    k: TensorSpec,
    v: TensorSpec,
    *,
    heads: int,
    kv_heads: int,
    rank: int = 0,
    world: int = 1,
    by_group: bool = False,
) -> LocalTensor:
    """Rank's heads of q, k and v in one tensor, rows by heads, for grouped-query attention under tensor parallelism.

    With more ranks than key and value heads, several ranks have the same of these. ``by_group``: for each key and
    value head its query heads, its key, its value, as Megatron has them; otherwise all of q, then k, then v, as vLLM
    and SGLang have them.
    """
    if min(heads, kv_heads, world) < 1:
        raise UsageError(f"{name}: heads={heads}, kv_heads={kv_heads}, world={world}: give at least one of each")
    if heads % world or heads % kv_heads or (kv_heads % world and world % kv_heads):
        raise UsageError(
            f"{name}: {heads} heads and {kv_heads} key and value heads do not divide over {world} ranks; the number of "
            "heads is a multiple of both, and one of the others a multiple of the other"
        )
    for spec in (q, k, v):
        _check(spec, 0, rank, world)
    head = q.shape[0] // heads
    of_q, of_kv = heads // world, max(1, kv_heads // world)
    first = rank * kv_heads // world
    if q.shape[0] != heads * head or any(spec.shape[0] != kv_heads * head for spec in (k, v)):
        raise SchemaError(f"{name}: {q}, {k} and {v} are not {heads} and twice {kv_heads} heads of {head} rows")

    def of(spec: TensorSpec, start: int, count: int) -> LocalTensor:
        return _range(spec, 0, start * head, count * head, None)

    if not by_group:
        return fused(name, [of(q, rank * of_q, of_q), of(k, first, of_kv), of(v, first, of_kv)])
    each = of_q // of_kv
    parts = []
    for group in range(of_kv):
        parts += [of(q, rank * of_q + group * each, each), of(k, first + group, 1), of(v, first + group, 1)]
    return fused(name, parts)


def stacked(name: str, parts: Sequence[LocalTensor]) -> LocalTensor:
    """Local tensors of one shape in a new first dimension: the experts of a rank, each a global tensor of its own."""
    first = _first(name, parts)
    pieces = []
    for number, part in enumerate(parts):
        if (part.dtype, part.shape) != (first.dtype, first.shape):
            raise SchemaError(
                f"{name}: {part.name} is {part.dtype} {part.shape}, {first.name} {first.dtype} {first.shape}: tensors "
                "of a stack are alike"
            )
        pieces += [piece._replace(at=(number, *piece.at)) for piece in part.pieces]
    return LocalTensor(name, first.dtype, (len(parts), *first.shape), tuple(pieces))


def experts(spec: TensorSpec, numbers: Sequence[int], name: str | None = None) -> LocalTensor:
    """Return some experts of a global tensor whose first dimension is the expert's number, in any order."""
    _check(spec, 0, 0, 1)
    rest = spec.shape[1:]
    pieces = tuple(
        Piece(spec.name, spec.shape, (number, *(0 for _ in rest)), (1, *rest), (at, *(0 for _ in rest)))
        for at, number in enumerate(numbers)
    )
    return LocalTensor(name or spec.name, spec.dtype, (len(numbers), *rest), pieces)


def _first(name: str, parts: Sequence[LocalTensor]) -> LocalTensor:
    if not parts:
        raise UsageError(f"{name}: parts={parts!r}: give at least one local tensor")
    return parts[0]


def _range(spec: TensorSpec, dim: int, start: int, length: int, name: str | None) -> LocalTensor:
    before, after = spec.shape[:dim], spec.shape[dim + 1 :]
    part = Box((0,) * dim + (start,) + (0,) * len(after), (*before, length, *after))
    return box(spec, part, name)


def _check(spec: TensorSpec, dim: int, rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise UsageError(f"{spec.name}: rank {rank} of {world}: give a rank from 0 to {world - 1}")
    if not 0 <= dim < len(spec.shape):
        raise UsageError(f"{spec.name}: it has no dimension {dim}; its shape is {spec.shape}")
