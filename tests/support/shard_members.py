"""Trainer ranks and engine ranks of the tests of sharded weights: what they have, what they serve, what goes wrong."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from transport.schema import DTYPES, TensorSpec
from transport.weights.sharding import shards
from transport.weights.sharding.boxes import Box
from transport.weights.sharding.layouts import Layout
from transport.weights.versions.layout import weights_checksum
from transport.weights.worker import ReferenceWorker

HEADS, KV_HEADS = 8, 2
MODEL = {
    spec.name: spec
    for spec in (
        TensorSpec("embed", "bfloat16", (130, 96)),
        TensorSpec("norm", "float32", (96,)),
        TensorSpec("q", "bfloat16", (128, 96)),
        TensorSpec("k", "bfloat16", (32, 96)),
        TensorSpec("v", "bfloat16", (32, 96)),
        TensorSpec("o", "bfloat16", (96, 128)),
        TensorSpec("gate", "bfloat16", (160, 96)),
        TensorSpec("up", "bfloat16", (160, 96)),
        TensorSpec("down", "bfloat16", (96, 160)),
        TensorSpec("experts", "float32", (4, 48, 24)),
        TensorSpec("empty", "float32", (0, 3)),
        TensorSpec("flag", "uint8", (3,)),
        TensorSpec("scale", "float32", ()),
    )
}


def trained(rank: int, world: int) -> Layout:
    """FSDP's rows; what cannot be divided is replicated."""
    return Layout.of(shards.rows(spec, rank, world) if spec.shape else shards.whole(spec) for spec in MODEL.values())


def served(rank: int, world: int) -> Layout:
    """Tensor parallel, fused as inference engines have it, and experts by rank in another order."""
    of = MODEL
    return Layout.of(
        [
            shards.chunk(of["embed"], 0, rank, world),
            shards.qkv("qkv", of["q"], of["k"], of["v"], heads=HEADS, kv_heads=KV_HEADS, rank=rank, world=world),
            shards.whole(of["norm"]),
            shards.columns(of["o"], rank, world),
            shards.gate_up("gate_up", of["gate"], of["up"], rank, world),
            shards.columns(of["down"], rank, world),
            shards.experts(of["experts"], list(range(4))[rank::world][::-1]),
            shards.whole(of["empty"]),
            shards.whole(of["flag"]),
            shards.whole(of["scale"]),
        ]
    )


SPARSE = 1000  # versions from here on differ from this one in few elements


def version_of(version: int) -> dict[str, np.ndarray[Any, Any]]:
    """The global tensors of a version."""
    made: dict[str, Any] = {}
    if version > SPARSE:
        made = version_of(SPARSE)
        for number, array in enumerate(made.values()):
            rng = np.random.default_rng([number, version])
            count = array.size // 200 if number % 3 else 0  # some tensors do not change at all
            array.reshape(-1)[rng.integers(0, max(1, array.size), count)] = version % 251
        return made
    for number, spec in enumerate(MODEL.values()):
        rng = np.random.default_rng([number, version])
        kind = DTYPES[spec.dtype]
        values = rng.integers(0, 255, spec.shape)
        made[spec.name] = np.asarray(values).astype(kind if kind != ml_dtypes.bfloat16 else np.float32).astype(kind)
    return made


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.start, box.size, strict=True))


def local(layout: Layout, tensors: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """What a rank has of the global tensors, cut out by numpy."""
    made = {}
    for tensor in layout.tensors:
        array = np.zeros(tensor.shape, DTYPES[tensor.dtype])
        for piece in tensor.pieces:
            place = tensor.box_of(piece)
            array[_index(place)] = tensors[piece.tensor][_index(piece.box)].reshape(place.size)
        made[tensor.name] = array
    return made


def checksum_of(layout: Layout, version: int) -> int:
    """What a rank of this layout serves if it serves this version and nothing else."""
    return weights_checksum(local(layout, version_of(version)))


class Faults:
    """Ends or fails its process at a place that a test names. Places: a word, and how often it is passed before."""

    def __init__(self) -> None:
        self._at: dict[str, tuple[int, str]] = {}

    def told(self, question: str, *rest: Any) -> Any:
        """Set a fault: place, number of passings, "kill", "stop" or "raise"."""
        self._at[question] = int(rest[0]), str(rest[1])
        return None

    def passed(self, place: str) -> None:
        """The process is here now."""
        if place not in self._at:
            return
        left, fault = self._at[place]
        self._at[place] = left - 1, fault
        if left == 0:
            if fault == "raise":
                raise RuntimeError(f"{place} failed")
            os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)

    def progress(self, done: int, due: int, moved: int) -> None:
        """Called by the engine with every bucket."""
        self.passed("bucket")


class Shards(Faults):
    """A trainer rank's tensors."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.layout = trained(rank, world)

    def weights(self, version: int) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        for item in local(self.layout, version_of(version)).items():
            self.passed("tensor")
            yield item


class Serving(ReferenceWorker, Faults):
    """An engine's rank."""

    def __init__(self, rank: int, world: int, resident: str = "mapped") -> None:
        ReferenceWorker.__init__(self, resident)
        Faults.__init__(self)
        self.layout = served(rank, world)
        self.tensors = {each.name: np.zeros(each.shape, DTYPES[each.dtype]) for each in self.layout.tensors}

    def told(self, question: str, *rest: Any) -> Any:
        if question == "look":
            served = weights_checksum(self.weights) if self.weights else None
            return [self.version, served, self.generating, self.cache]
        return super().told(question, *rest)

    def abort(self) -> Any:
        self.passed("abort")
        return super().abort()

    def release_kv_cache(self) -> Any:
        self.passed("release")
        return super().release_kv_cache()

    def load(self, weights: Mapping[str, np.ndarray[Any, Any]], version: int) -> Any:
        self.passed("load")
        result = super().load(weights, version)
        self.passed("loaded")
        return result

    def resume_kv_cache(self) -> Any:
        self.passed("resume")
        return super().resume_kv_cache()
