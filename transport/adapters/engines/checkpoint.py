"""The engine that the checkpoint engines of verl and NeMo-RL are: the first trainer's whole model to every replica.

Both frameworks call most methods without await, so the engine runs a loop in its own thread; tensors are produced on
the caller's loop, where their collectives run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any, Literal

import numpy as np

from transport.adapters.engines.options import ring_arguments
from transport.devices.arrays import kind_of
from transport.errors import MissingDependencyError
from transport.runtime.installing import install
from transport.runtime.loop_thread import LoopThread
from transport.weights.engine import WeightsEngine
from transport.weights.plan.steps import Metadata, Weights
from transport.weights.sharding.roles import build_topology
from transport.weights.versions.tensors import tensor_of

log = logging.getLogger(__name__)

_END = ("", None)  # no tensor has this name


class CheckpointAdapter:
    """One object for each worker process. The methods' names are verl's.

    Args:
        bucket_size: bytes.
        is_master: as verl gives it; `build_topology` decides which trainer sends.
        tensors: type of the yielded values: "torch" tensors in host memory, views of the received version, or "numpy".
        options: of `WeightsEngine`, and the fields of `EngineOptions` beside them, as YAML has them
            (`transport.adapters.engines.options`). With ``device="torch"`` CUDA tensors are yielded, on the stream that
            is current in the thread that takes them.
    """

    wire_format = "named_tensors"

    def __init__(
        self, bucket_size: int, is_master: bool = False, *, tensors: Literal["torch", "numpy"] = "torch", **options: Any
    ) -> None:
        if tensors == "torch":
            _torch()
        self.is_master = is_master
        self.bucket_size = bucket_size
        self._tensors = tensors
        self._steps = 0
        arguments = ring_arguments(options)
        arguments.setdefault(
            "name", f"{'actor' if is_master else 'worker'} {id(self):x} {np.random.default_rng().bytes(4).hex()}"
        )
        self._engine = WeightsEngine(bucket_bytes=-(-bucket_size // 64) * 64, **arguments)
        self._loop = LoopThread("transport weights")
        self._loop.closes(self._engine.close)
        self._loading = False  # the consumer has taken a part of a version, and not all of it
        self._again = False  # the next receive_weights yields what is held
        self._receiving: object = None  # the last receive_weights; the end of an earlier one comes too late

    # --- called without await ---------------------------------------------------------------------------------------
    def prepare(self) -> Metadata:
        """See `WeightsEngine`."""
        return self._loop.run(self._engine.prepare())

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """See `transport.weights.sharding.roles.build_topology`."""
        return build_topology(actor_wg_world_size, rollout_world_size, metadata)

    def init_process_group(self, **kwargs: Any) -> None:
        """See `WeightsEngine`."""
        self._loop.run(self._engine.init_process_group(**kwargs))

    def finalize(self) -> None:
        """See `WeightsEngine`."""
        self._loop.run(self._engine.finalize())

    def close(self) -> None:
        """Release everything. verl ends its workers instead of calling this."""
        self._loop.close()

    # --- called with await --------------------------------------------------------------------------------------------
    async def send_weights(self, weights: Weights, global_steps: int | None = None) -> dict[str, Any]:
        """Send, or drain where this is not the first trainer. Returns metrics for verl's step."""
        bridged = _bridge(weights, asyncio.get_running_loop(), self._engine.sends)
        proof = await self._loop.submit(self._engine.send_weights(bridged, self._step(global_steps)))
        if proof is None:
            return {}
        sent = self._engine.statistics().bytes_sent
        return {"payload_transport/version": proof.version, "payload_transport/bytes_sent": sent}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        """Yield the tensors, once the whole version is received and proven.

        The tensors are views of it; they stay readable as long as they exist. If the consumer stops early, the engine
        returns to the previous version; if that fails, ``aclose`` raises the error. The first version has no previous
        one: it is kept, with a warning.
        """
        again, self._again = self._again, False
        self._receiving = mine = object()
        if again:
            async for name, tensor in self._reload():
                yield name, tensor
            return
        held = await self._loop.submit(self._engine.receive(self._step(global_steps)))
        taken = False
        self._loading = True
        try:
            for name, array in self._engine.arrays(held):
                yield name, self._tensor(array)
            taken = True
            self._loading = False
        finally:
            if not taken and self._receiving is mine:
                if self._engine.previous is None:
                    text = "the consumer stopped before the end of version %d, which is kept: no version is before it"
                    log.warning(text, held.proof.version)
                else:
                    self._engine.revert()

    async def get_weights(self) -> AsyncIterator[tuple[str, Any]]:
        """Yield the tensors of the version that this engine holds."""
        held = self._engine.held
        for name, array in () if held is None else self._engine.arrays(held):
            yield name, self._tensor(array)

    # --- for the manager, between a failed transfer and finalize -------------------------------------------------
    def state(self) -> dict[str, Any]:
        """Return the version that this engine holds (-1: none), and whether its consumer has loaded a part alone."""
        held = self._engine.held
        return {"version": -1 if held is None else held.proof.version, "loading": self._loading}

    def restore(self, version: int) -> bool:
        """Go back to ``version``; the next `receive_weights` yields it. False: this engine does not hold it."""
        self._receiving = None
        if self.state()["version"] > version and self._engine.previous is not None:
            self._engine.revert()
        self._again = version >= 0 and self.state()["version"] == version
        return self._again

    async def _reload(self) -> AsyncIterator[tuple[str, Any]]:
        self._loading = True
        async for name, tensor in self.get_weights():
            yield name, tensor
        self._loading = False

    def _step(self, global_steps: int | None) -> int:
        self._steps = self._steps + 1 if global_steps is None else global_steps
        return self._steps

    def _tensor(self, array: Any) -> Any:
        if self._tensors == "numpy" or self._engine.on_device:
            return array
        torch = _torch()
        from transport.devices.host_tensors import as_tensor

        tensor = as_tensor(array)
        # verl's sender copies what fits into its bucket, and passes anything larger on as a handle of CUDA memory.
        return tensor.cuda() if tensor.nbytes > self.bucket_size and torch.cuda.is_available() else tensor


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError(f'tensors="torch" needs torch: {install("torch")}, or tensors="numpy"') from error
    return torch


async def _bridge(weights: Weights, home: asyncio.AbstractEventLoop, sends: bool) -> AsyncIterator[tuple[str, Any]]:
    """Yield the iterator's items, each produced on the loop it belongs to, for the engine's loop.

    sends: they are not only drained.
    """
    plain = iter(weights) if isinstance(weights, Iterable) else None

    async def step() -> tuple[str, Any]:
        if plain is not None:
            item = next(plain, _END)
        else:
            assert not isinstance(weights, Iterable)
            item = await anext(weights, _END)
        if item is _END or not sends or kind_of(item[1]) == "host":
            return item
        return item[0], tensor_of(item[1], item[0])  # the stream that makes it is the current one of this thread

    while True:
        item = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(step(), home))
        if item is _END:
            return
        yield item
