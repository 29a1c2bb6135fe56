"""RolloutWorker, which a rollout engine implements to receive weights; Replica and WeightsTrainer, members of updates.

    class MyWorker(RolloutWorker):
        def abort(self): self.llm.abort_all_requests()
        def release_kv_cache(self): self.llm.sleep(level=1)
        def load(self, weights, version): self.llm.load_weights(weights.items())
        def resume_kv_cache(self): self.llm.wake_up(tags=["kv_cache"])
        def resume_generation(self): self.llm.resume()

Each may be a coroutine function; others run in a thread. One runs after the other, each to its end, even where an
update does not wait for it any more. Raise, or return an exception, to report a failure.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from transport.errors import UsageError
from transport.weights.plan.steps import Metadata, VersionProof
from transport.weights.received_weights import ReceivedWeights
from transport.weights.versions.layout import weights_checksum
from transport.weights.worker_calls import WorkerQueue

if TYPE_CHECKING:
    from transport.weights.engine import WeightsEngine


class RolloutWorker(abc.ABC):
    """An inference engine as an update uses it.

    Attributes:
        serves_given: whether it serves the arrays of `load` in their own memory. They were verified before the pause,
            and are not hashed in it; with ``device=`` they are copies of what was verified.
    """

    serves_given: bool = False

    def stage(self, weights: Mapping[str, np.ndarray[Any, Any]], version: int) -> Any:
        """Take complete, verified weights beside those that are served, before the pause; returns what `load` gets.

        A worker with memory for two versions copies them here, so that its `load` only switches. ``weights`` is a
        read-only mapping. What it returns in its place is hashed before the pause, and read-only from then on. It may
        be called and no `load` follow. Where another call is late, it is called in the pause, and so it is with
        ``device=`` of the engine, when the cache has left room.
        """
        return weights

    @abc.abstractmethod
    def abort(self) -> Any:
        """Stop generating; running requests are saved or aborted. May be called on a stopped worker."""

    @abc.abstractmethod
    def release_kv_cache(self) -> Any:
        """Free the cache. May be called without a cache."""

    @abc.abstractmethod
    def load(self, weights: Mapping[str, np.ndarray[Any, Any]], version: int) -> Any:
        """Serve what `stage` returned: complete, verified weights, readable as long as their arrays are kept.

        With ``device=`` of the engine they are arrays in device memory, which have arrived there.

        A load that raises may leave partial weights: the replica loads the previous version again.
        """

    @abc.abstractmethod
    def resume_kv_cache(self) -> Any:
        """Allocate the cache again. May be called with a cache."""

    @abc.abstractmethod
    def resume_generation(self) -> Any:
        """Generate again, with the weights loaded last."""

    def served_checksum(self) -> int | None:
        """`weights_checksum` of the weights served now; None: unknown, and a load that returned counts as proof.

        Called in the pause, unless the worker serves what it was given: it takes as long as half to all of a copy.
        """
        return None


class ReferenceWorker(RolloutWorker):
    """A worker on numpy, for tests, the demo and the benchmark. Serves whatever `weights` holds.

    resident: "mapped" serves the landed version itself, without a copy; "own" copies it before the pause, and then
        swaps; "in_place" overwrites tensor after tensor, as engines on devices do: undefined in the middle of a load.
    """

    def __init__(self, resident: str = "mapped") -> None:
        self.resident = resident
        self.serves_given = resident != "in_place"
        self.weights: dict[str, np.ndarray[Any, Any]] = {}
        self._spare: dict[str, np.ndarray[Any, Any]] = {}  # of "own": the memory of the version before
        self.version = -1
        self.generating = True
        self.cache = True

    def abort(self) -> Any:
        self.generating = False

    def release_kv_cache(self) -> Any:
        self.cache = False

    def stage(self, weights: Mapping[str, np.ndarray[Any, Any]], version: int) -> Any:
        if self.resident != "own":
            return weights
        spare, self._spare = self._spare, {}
        for name, array in weights.items():
            into = spare.get(name)
            if into is None or (into.shape, into.dtype) != (array.shape, array.dtype):
                into = np.empty_like(array)
            into.flags.writeable = True
            into[...] = array
            self._spare[name] = into
        return dict(self._spare)

    def load(self, weights: Mapping[str, np.ndarray[Any, Any]], version: int) -> Any:
        if self.serves_given:
            if self.resident == "own":
                self._spare = self.weights  # is not freed in the pause
            self.weights = dict(weights)
        elif self.weights.keys() == weights.keys():
            for name, array in weights.items():
                self.load_tensor(name, array)
        else:
            self.weights = {name: np.array(array) for name, array in weights.items()}
        self.version = version

    def load_tensor(self, name: str, array: np.ndarray[Any, Any]) -> None:
        """Overwrite one tensor of a worker that loads in place."""
        if name not in self.weights:
            raise UsageError(f"name={name!r:.80}: no tensor of this name is loaded")
        self.weights[name][...] = array

    def resume_kv_cache(self) -> Any:
        self.cache = True

    def resume_generation(self) -> Any:
        self.generating = True

    def served_checksum(self) -> int | None:
        return weights_checksum(self.weights) if self.weights else None


class Replica:
    """A worker and its engine, as a manager drives them. Belongs to one loop; closing is its owner's.

    With ``in_place`` of the engine `RolloutWorker.load` gets the engine's own tensors, already changed.
    """

    def __init__(self, engine: WeightsEngine, worker: RolloutWorker) -> None:
        self.engine = engine
        self.worker = worker
        self.name = engine.name
        self._calls = WorkerQueue()
        self._weights = ReceivedWeights(engine, worker, self._calls.wait)

    # --- the worker's part -------------------------------------------------------------------------------------
    async def pause(self) -> None:
        """Stop generating, and free the cache."""
        await self._each(self.worker.abort, self.worker.release_kv_cache)

    async def resume(self, generate: bool) -> None:
        """Have a cache again, and generate, if its weights are known: what was loaded stays then."""
        if generate and self._weights.in_doubt:
            self._weights.keep()
        await self._each(self.worker.resume_kv_cache, *[self.worker.resume_generation] * generate)

    async def _each(self, *methods: Callable[[], Any]) -> None:
        def calls() -> None:
            for method in methods:
                self._weights.switch.call(method)

        await self._calls.run(calls)

    # --- the engine's part -------------------------------------------------------------------------------------
    async def prepare(self) -> Metadata:
        """See `WeightsEngine`. What no manager has decided, since the last one was lost, is dropped."""
        await self._weights.finalize()
        return await self.engine.prepare()

    async def init_process_group(self, arguments: dict[str, Any]) -> None:
        """See `WeightsEngine`."""
        await self.engine.init_process_group(**arguments)

    async def land(self, version: int) -> VersionProof:
        """Receive a version and prove what landed. The one before is served until `load`, except in place."""
        landed = await self._weights.land(version)
        # A device has room for a second version when the cache is gone; a worker that is late has none for a third.
        if not self.engine.on_device and not self._calls.busy:
            await self._calls.run(partial(self._weights.switch.stage, landed))
        return landed.proof

    async def load(self) -> VersionProof | None:
        """Load what has landed, and prove it. Until `resume` it is in doubt whether it stays."""
        landed = self._weights.landed
        await self._calls.run(self._weights.load)
        return None if landed is None else landed.proof

    async def restore(self) -> VersionProof | None:
        """Serve the version before again, if there is one, and `prove` it. In place it is gone: nothing is proven."""
        await self._calls.run(self._weights.go_back)
        return await self.prove()

    async def prove(self) -> VersionProof | None:
        """Prove the version that is served. None: unknown. WeightsChecksumError if the worker serves something else.

        What the worker serves is hashed, unless it serves the memory that was hashed when the version landed
        (`RolloutWorker.serves_given`).
        """
        version = self._weights.switch.version
        if version is not None and not self.worker.serves_given:
            version = await self._calls.run(self._weights.switch.prove)
        return None if version is None else version.proof

    async def finalize(self) -> None:
        """Leave the group; what has landed and does not stay is dropped."""
        await self._weights.finalize()


class TensorSource(Protocol):
    """Source of a trainer's tensors."""

    def weights(self, version: int) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """Every tensor of a version, in an order that stays."""


class WeightsTrainer:
    """A trainer's engine and its tensors, as a manager drives them."""

    def __init__(self, engine: WeightsEngine, source: TensorSource) -> None:
        self.engine = engine
        self.name = engine.name
        self.source = source
        self.prepare = engine.prepare
        self.finalize = engine.finalize

    async def init_process_group(self, arguments: dict[str, Any]) -> None:
        """See `WeightsEngine`."""
        await self.engine.init_process_group(**arguments)

    async def send_weights(self, version: int) -> VersionProof | None:
        """Send what the source gives."""
        return await self.engine.send_weights(self.source.weights(version), version)
