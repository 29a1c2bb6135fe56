"""RingEngine: the whole model from one trainer to every replica."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transport.runtime.explaining import explained
from transport.runtime.progress import Progress, silent
from transport.schema import TensorSpec
from transport.weights.options import EngineOptions
from transport.weights.sharded.engine import ShardEngine

BUCKET_BYTES = 256 << 20
IN_FLIGHT = 2
_OPTIONS = EngineOptions()


class RingEngine(ShardEngine):
    """A `ShardEngine` without a layout: the first trainer sends its whole model, all replicas want all of it.

    Args:
        name: unique in the group.
        bucket_bytes, in_flight: size and number of the buckets; every sender has memory for so many.
        delta: keep a copy of the last version, and send only the changes if every replica has that version.
        specs: the tensors of `send_weights`, if known before the first version; otherwise the first version is held in
            memory until its iterator ends.
        address: to listen on; default: the address of this host's default route.
        in_place, device, progress, options: as of `ShardEngine`.

    Raises:
        UsageError: invalid sizes, or a missing device.
        MissingDependencyError: ``device`` without CuPy, torch or CUDA.
    """

    @explained
    def __init__(
        self,
        name: str,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        in_flight: int = IN_FLIGHT,
        delta: bool = False,
        specs: Sequence[TensorSpec] | None = None,
        address: str | None = None,
        in_place: Mapping[str, Any] | None = None,
        device: str | None = None,
        progress: Progress = silent,
        options: EngineOptions = _OPTIONS,
    ) -> None:
        super().__init__(
            name,
            None,
            bucket_bytes=bucket_bytes,
            in_flight=in_flight,
            delta=delta,
            specs=specs,
            address=address,
            in_place=in_place,
            device=device,
            progress=progress,
            options=options,
        )
