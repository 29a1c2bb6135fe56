"""Trainers and replicas of the weights' tests: what they send, what they serve, and what goes wrong with them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from transport.weights.versions.layout import weights_checksum
from transport.weights.worker import ReferenceWorker

SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "embed.weight": ("bfloat16", (257, 96)),
    "layers.0.norm": ("float32", (96,)),
    "layers.0.up": ("bfloat16", (384, 96)),
    "layers.0.empty": ("float32", (0, 3)),
    "layers.0.flag": ("uint8", (3,)),
    "head": ("float32", (257, 96)),
}


def version_of(version: int, changed: float = 0.01) -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a version: each differs from the one before in some elements."""
    made = {}
    for number, (name, (dtype, shape)) in enumerate(SHAPES.items()):
        rng = np.random.default_rng([number])
        kind = np.dtype(dtype) if dtype != "bfloat16" else np.dtype(ml_dtypes.bfloat16)
        flat = rng.integers(0, 100, int(np.prod(shape))).astype(kind)
        for step in range(1, version + 1):
            step_rng = np.random.default_rng([number, step])
            where = step_rng.random(flat.size) < changed
            flat[where] = step_rng.integers(0, 100, int(where.sum())).astype(kind)
        made[name] = flat.reshape(shape)
    return made


def checksum_of(version: int) -> int:
    """What a replica proves that serves it."""
    return weights_checksum(version_of(version))


class Source:
    """A trainer's tensors; at tensor ``at`` of version ``when`` it does ``fault``."""

    def __init__(self, fault: str = "", when: int = -1, at: int = 2) -> None:
        self._fault, self._when, self._at = fault, when, at

    def weights(self, version: int) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        for number, item in enumerate(version_of(version).items()):
            if version == self._when and number == self._at:
                if self._fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif self._fault == "raise":
                    raise RuntimeError("the trainer's iterator failed")
                elif self._fault:  # a path: says that it is here, and goes on when the test does
                    Path(self._fault).touch()
                    while not Path(f"{self._fault}.go").exists():
                        time.sleep(0.005)  # a file wakes nobody
            yield item

    def told(self, fault: str, when: int) -> None:
        self._fault, self._when = fault, when


class Worker(ReferenceWorker):
    """A reference worker whose methods may be told to fail."""

    def __init__(self, resident: str = "mapped") -> None:
        super().__init__(resident)
        self._faults: dict[str, str] = {}

    def told(self, question: str, *rest: str) -> Any:
        """A fault for a method, or a look: (version, checksum of what is served, generating, has a cache)."""
        if question == "look":
            served = weights_checksum(self.weights) if self.weights else None
            return [self.version, served, self.generating, self.cache]
        self._faults[question] = rest[0]
        return None

    def _fault(self, method: str) -> Any:
        fault = self._faults.get(method)
        if fault == "raise":
            raise RuntimeError(f"{method} failed")
        if fault == "return":
            return RuntimeError(f"{method} did not work")
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        return None

    def abort(self) -> Any:
        return self._fault("abort") or super().abort()

    def release_kv_cache(self) -> Any:
        return self._fault("release_kv_cache") or super().release_kv_cache()

    def load(self, weights: Mapping[str, np.ndarray[Any, Any]], version: int) -> Any:
        self._fault("load")
        return super().load(weights, version)

    def load_tensor(self, name: str, array: np.ndarray[Any, Any]) -> None:
        super().load_tensor(name, array)
        if name == "layers.0.up":  # in the middle: some tensors are new, some are old
            fault = self._faults.pop("half", "")
            if fault:
                self._faults["now"] = fault
                self._fault("now")

    def resume_kv_cache(self) -> Any:
        return self._fault("resume_kv_cache") or super().resume_kv_cache()

    def resume_generation(self) -> Any:
        return self._fault("resume_generation") or super().resume_generation()
