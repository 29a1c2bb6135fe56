"""The model that the benchmark sends: random tensors of a transformer's shapes, about as large as is asked for."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from transport.devices.arrays import require_cupy
from transport.devices.streams import Mark
from transport.weights.worker import ReferenceWorker

HIDDEN, FEED_FORWARD, HEADS, VOCABULARY = 2048, 5632, 256, 32000
_PIECE = 256 << 20  # larger than every cache

_LAYER: dict[str, tuple[int, ...]] = {
    "input_layernorm.weight": (HIDDEN,),
    "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "self_attn.k_proj.weight": (HEADS, HIDDEN),
    "self_attn.v_proj.weight": (HEADS, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "post_attention_layernorm.weight": (HIDDEN,),
    "mlp.gate_proj.weight": (FEED_FORWARD, HIDDEN),
    "mlp.up_proj.weight": (FEED_FORWARD, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, FEED_FORWARD),
}
"""A layer of TinyLlama 1.1B; bfloat16."""


def shapes(size_bytes: int) -> dict[str, tuple[int, ...]]:
    """As many layers as come nearest to the size, with the embedding; a small size has narrower ones."""
    narrower = 1
    while 2 * VOCABULARY * HIDDEN // narrower > size_bytes // 2:
        narrower *= 2
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY // narrower, HIDDEN)}
    left = size_bytes - 2 * VOCABULARY * HIDDEN // narrower
    layer = {
        name: tuple(max(1, each // narrower) if at == 0 else each for at, each in enumerate(shape))
        for name, shape in _LAYER.items()
    }
    of_layer = sum(2 * int(np.prod(shape)) for shape in layer.values())
    for number in range(max(1, round(left / of_layer))):
        found |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return found | {"model.norm.weight": (HIDDEN,)}


class Model:
    """A trainer's tensors. A step changes a share of every tensor's elements in place.

    device: they are in its memory, as CuPy's float16, since older ones have no bfloat16. The device is the current one.
    """

    def __init__(self, size_bytes: int, device: bool = False) -> None:
        rng = np.random.default_rng(0)
        self._tensors = {
            name: rng.integers(0, 1 << 16, shape, dtype=np.uint16).view(ml_dtypes.bfloat16)
            for name, shape in shapes(size_bytes).items()
        }
        self._rng = rng
        self._device = device
        self._sent: dict[str, Any] = {}
        self._move()

    def _move(self) -> None:
        """What is sent: the tensors themselves, or a copy of them on the device."""
        self._sent = dict(self._tensors)
        if self._device:
            cupy = require_cupy()
            self._sent = {name: cupy.asarray(tensor.view(np.float16)) for name, tensor in self._tensors.items()}
            Mark(cupy.cuda.get_current_stream().ptr, cupy.cuda.Device().id).wait()

    def weights(self, _: int) -> Iterator[tuple[str, Any]]:
        """Every tensor."""
        yield from self._sent.items()

    def told(self, changed: float | str) -> int:
        """Change this share of the elements; returns bytes of the model. Or ("memory") as `Server.told`."""
        if isinstance(changed, str):
            return most_memory()
        for tensor in self._tensors.values() if changed else ():
            words = tensor.reshape(-1).view(np.uint16)
            count = max(1, int(len(words) * changed))
            places = self._rng.integers(0, len(words), count)
            words[places] += self._rng.integers(1, 1 << 16, count, dtype=np.uint16)
        if changed:
            self._move()
        return sum(tensor.nbytes for tensor in self._tensors.values())


class Server(ReferenceWorker):
    """A replica that serves what it is given: the mapped version, or arrays of its engine's device; or a copy.

    proves: hashes what it serves, where that is not what it was given. size_bytes: of the model for which it has
    ``tensors``, if versions are to land in these.
    """

    def __init__(self, resident: str = "mapped", proves: bool = True, size_bytes: int = 0) -> None:
        super().__init__(resident)
        self._proves = proves
        self._copied = np.empty(0, np.uint8)
        self.tensors = {
            name: np.ones(shape, np.uint16).view(ml_dtypes.bfloat16)
            for name, shape in (shapes(size_bytes).items() if size_bytes else ())
        }

    def served_checksum(self) -> int | None:
        return super().served_checksum() if self._proves else None

    def told(self, question: str = "memory") -> float:
        """The most memory that this process has had of its own, in bytes; or ("copy") the seconds of one memcpy of what
        it serves, as a load finds it: in memory, not in a cache, into memory that is there."""
        if question == "memory":
            return most_memory()
        size = sum(array.nbytes for array in self.weights.values())
        if len(self._copied) != min(size, _PIECE):
            self._copied = np.ones(min(size, _PIECE), np.uint8)
        at, begun = 0, time.perf_counter()
        for array in self.weights.values():
            piece = array.reshape(-1).view(np.uint8)
            for first in range(0, len(piece), len(self._copied)):
                part = piece[first : first + len(self._copied)]
                at = at if at + len(part) <= len(self._copied) else 0
                self._copied[at : at + len(part)] = part
                at += len(part)
        return time.perf_counter() - begun


def most_memory() -> int:
    """That this process has had of its own, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
