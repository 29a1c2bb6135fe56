"""A complete version of a receiver's shards: in slots that its host shares, or in its own tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from transport.devices.libraries import Library
from transport.schema import DTYPES, Placement
from transport.weights.plan.steps import Proof
from transport.weights.sharding.layouts import Layout
from transport.weights.versions.copies import Held
from transport.weights.versions.layout import weights_checksum


class ShardHeld:
    """All parts of a version, proven, in the order of the receiver's layout.

    Attributes:
        checksum: of the receiver's own tensors, as `weights_checksum` has it: what it would serve.
    """

    def __init__(
        self, layout: Layout, proof: Proof, parts: Sequence[Held], own: Mapping[str, np.ndarray[Any, Any]] | None = None
    ) -> None:
        self.layout = layout
        self.proof = proof
        self._parts = list(parts)
        self._own = own
        self.checksum = 0

    def __repr__(self) -> str:
        return f"<ShardHeld {self.proof}, {self.layout.nbytes} bytes{'' if self._own is None else ', in place'}>"

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """The tensors by name: read-only views, or the engine's own tensors."""
        found: dict[str, np.ndarray[Any, Any]] = dict(self._own or {})
        for part in self._parts:
            found |= part.arrays()
        return {each.name: found[each.name] if each.nbytes else _empty(each) for each in self.layout.tensors}

    def on_device(self, library: Library, device: int, group_bytes: int) -> Iterator[tuple[str, Any]]:
        """The tensors by name, in new memory of a device (see `Held.on_device`).

        All of them are there at once where the version is of several parts.
        """
        if self._is_one_part:
            yield from self._parts[0].on_device(library, device, group_bytes)
            return
        found = {name: value for part in self._parts for name, value in part.on_device(library, device, group_bytes)}
        for each in self.layout.tensors:
            if not each.nbytes:
                memory = library.empty(0, device, own=False)
                found[each.name] = library.view(memory, Placement(each.name, DTYPES[each.dtype], each.shape, 0, 0))
            yield each.name, found[each.name]

    def hash(self) -> None:
        """Compute `checksum`, once, when the version is complete. Blocks."""
        self.checksum = self._parts[0].checksum if self._is_one_part else weights_checksum(self.arrays())

    @property
    def _is_one_part(self) -> bool:
        return len(self._parts) == 1 and self._parts[0].layout.specs == self.layout.specs

    def settle(self) -> None:
        """Wait until copies to a device are done. Blocks."""
        for part in self._parts:
            part.settle()

    def release(self) -> None:
        """Release the slots. Idempotent."""
        parts, self._parts = self._parts, []
        for part in parts:
            part.release()


def _empty(tensor: Any) -> np.ndarray[Any, Any]:
    return np.empty(tensor.shape, DTYPES[tensor.dtype])
