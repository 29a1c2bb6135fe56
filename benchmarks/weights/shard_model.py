"""The model that the benchmark sends as shards: what each trainer rank has of it, and what each engine rank wants.

Values follow from name, place and version, so that every receiver can say whether a tensor is what it should be. From
one version to the next every ``every``-th element of a tensor changes, another one each time; with 1 all of them do.
"""

from __future__ import annotations

import math
import zlib
from typing import Any

import ml_dtypes
import model
import numpy as np

from transport.schema import TensorSpec
from transport.weights.sharding import shards
from transport.weights.sharding.boxes import Box
from transport.weights.sharding.layouts import Layout, LocalTensor

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, HEAD, VOCABULARY = 1024, 2816, 16, 8, 64, 16000


def specs(size_bytes: int) -> dict[str, TensorSpec]:
    """Embedding, head and as many layers as come nearest to the size; bfloat16. A small size has a small vocabulary."""
    vocabulary = min(VOCABULARY, max(64, size_bytes // (16 * HIDDEN) // 64 * 64))
    rows = {"embed": (vocabulary, HIDDEN), "head": (vocabulary, HIDDEN), "norm": (HIDDEN,)}
    layer = {
        "norm.in": (HIDDEN,),
        "q": (HEADS * HEAD, HIDDEN),
        "k": (KV_HEADS * HEAD, HIDDEN),
        "v": (KV_HEADS * HEAD, HIDDEN),
        "o": (HIDDEN, HEADS * HEAD),
        "norm.mlp": (HIDDEN,),
        "gate": (FEED_FORWARD, HIDDEN),
        "up": (FEED_FORWARD, HIDDEN),
        "down": (HIDDEN, FEED_FORWARD),
    }
    of_layer = sum(2 * int(np.prod(shape)) for shape in layer.values())
    for number in range(max(1, round((size_bytes - 4 * vocabulary * HIDDEN) / of_layer))):
        rows |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    return {name: TensorSpec(name, "bfloat16", shape) for name, shape in rows.items()}


def trained(size_bytes: int, rank: int, world: int) -> Layout:
    """Rows of FSDP."""
    return Layout.of(shards.rows(spec, rank, world) for spec in specs(size_bytes).values())


def served(size_bytes: int, rank: int, world: int) -> Layout:
    """Tensor parallel, with fused qkv and gate_up."""
    of = specs(size_bytes)
    tensors = [shards.chunk(of["embed"], 0, rank, world), shards.chunk(of["head"], 0, rank, world)]
    tensors.append(shards.whole(of["norm"]))
    for at in (name.removesuffix(".q") for name in of if name.endswith(".q")):
        q, k, v, gate, up = (of[f"{at}.{name}"] for name in ("q", "k", "v", "gate", "up"))
        tensors += [
            shards.whole(of[f"{at}.norm.in"]),
            shards.qkv(f"{at}.qkv", q, k, v, heads=HEADS, kv_heads=KV_HEADS, rank=rank, world=world),
            shards.columns(of[f"{at}.o"], rank, world),
            shards.whole(of[f"{at}.norm.mlp"]),
            shards.gate_up(f"{at}.gate_up", gate, up, rank, world),
            shards.columns(of[f"{at}.down"], rank, world),
        ]
    return Layout.of(tensors)


def filled(tensor: LocalTensor, version: int, every: int = 1) -> np.ndarray[Any, Any]:
    """What a local tensor contains in this version; as 16-bit words."""
    made = np.empty(tensor.shape, np.uint16)
    for piece in tensor.pieces:
        place: Box = tensor.box_of(piece)
        start = zlib.crc32(piece.tensor.encode())
        values = np.zeros((1,) * len(piece.size), np.uint32)  # the places in the global tensor
        stride = 1
        for dim in reversed(range(len(piece.size))):
            line = np.arange(piece.start[dim], piece.start[dim] + piece.size[dim], dtype=np.uint32) * np.uint32(stride)
            values = values + line.reshape(tuple(-1 if at == dim else 1 for at in range(len(piece.size))))
            stride *= piece.of[dim]
        values = start + values + (values + version) // every - values // every
        made[tuple(slice(a, a + n) for a, n in zip(place.start, place.size, strict=True))] = values.reshape(place.size)
    return made


class Shards:
    """A trainer rank's tensors. ``whole``: the rank has all of the model, as today's rank 0 gathers it."""

    def __init__(self, size_bytes: int, rank: int, world: int, whole: bool = False, every: int = 1) -> None:
        layout = trained(size_bytes, rank, world)
        if not whole:  # its presence makes the member's engine one of shards
            self.layout = layout
        self._words = {each.name: filled(each, 0) for each in layout.tensors}
        # Rows of a global tensor are one range of its places.
        self._first = {each.name: each.pieces[0].start[0] * math.prod(each.shape[1:]) for each in layout.tensors}
        self._every = every
        self._version = 0

    def weights(self, version: int) -> Any:
        """Every tensor of the version."""
        for step in range(self._version + 1, version + 1):
            for name, words in self._words.items():
                words.reshape(-1)[-(self._first[name] + step) % self._every :: self._every] += np.uint16(1)
        self._version = version
        tensors = {name: words.view(ml_dtypes.bfloat16) for name, words in self._words.items()}
        return tensors if hasattr(self, "layout") else iter(tensors.items())

    def told(self, _: str) -> int:
        """The most memory that this process has had, in bytes."""
        return model.most_memory()


class Server(model.Server):
    """An engine's rank. ``whole``: it gets all of the model."""

    def __init__(self, size_bytes: int, rank: int, world: int, whole: bool = False, every: int = 1) -> None:
        super().__init__()
        self._every = every
        self._layout = served(size_bytes, rank, world)
        if whole:
            self._layout = trained(size_bytes, 0, 1)
        else:
            self.layout = self._layout

    def told(self, question: str = "memory") -> float:
        """As `model.Server`; or ("verify") how many tensors are not this version's."""
        if question != "verify":
            return super().told(question)
        return sum(
            not np.array_equal(self.weights[each.name].view(np.uint16), filled(each, self.version, self._every))
            for each in self._layout.tensors
        )
