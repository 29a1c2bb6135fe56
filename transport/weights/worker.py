"""RolloutWorker, which a rollout engine implements to receive weights; Replica and Trainer, the members of an update.

    class MyWorker(RolloutWorker):
        def abort(self): self.llm.abort_all_requests()
        def release_kv_cache(self): self.llm.sleep(level=1)
        def load(self, weights, version): self.llm.load_weights(weights.items())
        def resume_kv_cache(self): self.llm.wake_up(tags=["kv_cache"])
        def resume_generation(self): self.llm.resume()

Each may be a coroutine function; others run in a thread. Raise, or return an exception, to report a failure.
"""

from __future__ import annotations

import abc
import asyncio
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from transport.errors import MemberFailedError, UsageError, WeightsChecksumError
from transport.runtime.explaining import explained_calls
from transport.weights.plan.engine import Metadata
from transport.weights.plan.steps import Proof
from transport.weights.transfer.threads import in_thread, settled
from transport.weights.versions.layout import weights_checksum


class RolloutWorker(abc.ABC):
    """An inference engine as an update uses it.

    Attributes:
        serves_given: whether it serves the arrays of `load` in their own memory. They have just been verified, and are
            not hashed again after the load; `prove` always hashes them. With ``device=`` the arrays are copies, and are
            hashed.
    """

    serves_given: bool = False

    @abc.abstractmethod
    def abort(self) -> Any:
        """Stop generating; running requests are saved or aborted. May be called on a stopped worker."""

    @abc.abstractmethod
    def release_kv_cache(self) -> Any:
        """Free the cache. May be called without a cache."""

    @abc.abstractmethod
    def load(self, weights: Mapping[str, np.ndarray[Any, Any]], version: int) -> Any:
        """Take complete, verified weights. They stay readable as long as their arrays are kept.

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
        """`weights_checksum` of the weights served now; None: unknown, and a load that returned counts as proof."""
        return None


@explained_calls
class ReferenceWorker(RolloutWorker):
    """A worker on numpy, for tests, the demo and the benchmark. Serves whatever `weights` holds.

    resident: "mapped" serves the landed version itself, without a copy; "own" copies it and then swaps;
        "in_place" overwrites tensor after tensor, as engines on devices do: undefined in the middle of a load.
    """

    def __init__(self, resident: str = "mapped") -> None:
        self.resident = resident
        self.serves_given = resident == "mapped"
        self.weights: dict[str, np.ndarray[Any, Any]] = {}
        self.version = -1
        self.generating = True
        self.cache = True

    def abort(self) -> Any:
        self.generating = False

    def release_kv_cache(self) -> Any:
        self.cache = False

    def load(self, weights: Mapping[str, np.ndarray[Any, Any]], version: int) -> Any:
        if self.resident == "in_place" and self.weights.keys() == weights.keys():
            for name, array in weights.items():
                self.load_tensor(name, array)
        elif self.resident == "mapped":
            self.weights = dict(weights)
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


class Version(Protocol):
    """A complete version that an engine holds."""

    @property
    def proof(self) -> Proof: ...

    @property
    def checksum(self) -> int: ...

    def settle(self) -> None: ...


class ReplicaEngine(Protocol):
    """What a replica uses of its engine."""

    name: str

    @property
    def held(self) -> Any: ...

    @property
    def on_device(self) -> bool: ...

    async def prepare(self) -> Metadata: ...

    async def init_process_group(self, **arguments: Any) -> None: ...

    async def receive(self, global_steps: int) -> Any: ...

    def arrays(self, held: Any) -> Iterable[tuple[str, Any]]: ...

    def revert(self) -> None: ...

    async def finalize(self) -> None: ...

    async def close(self) -> None: ...

    def statistics(self) -> Any: ...


@explained_calls
class Replica:
    """A worker and its engine, as a manager drives them. Belongs to one loop; closing is its owner's."""

    def __init__(self, engine: ReplicaEngine, worker: RolloutWorker) -> None:
        self.engine = engine
        self.worker = worker
        self.name = engine.name
        self._loaded: Proof | None = None  # None: nothing, or unknown weights
        self._checksum = 0  # of what is loaded

    # --- the worker's part -------------------------------------------------------------------------------------
    async def abort(self) -> None:
        """Stop generating."""
        await call(self.worker.abort)

    async def release_kv_cache(self) -> None:
        """Free the cache."""
        await call(self.worker.release_kv_cache)

    async def resume_kv_cache(self) -> None:
        """Have a cache again."""
        await call(self.worker.resume_kv_cache)

    async def resume_generation(self) -> None:
        """Generate again."""
        await call(self.worker.resume_generation)

    # --- the engine's part -------------------------------------------------------------------------------------
    async def prepare(self) -> Metadata:
        """See `WeightEngine`."""
        return await self.engine.prepare()

    async def init_process_group(self, arguments: dict[str, Any]) -> None:
        """See `WeightEngine`."""
        await self.engine.init_process_group(**arguments)

    async def finalize(self) -> None:
        """See `WeightEngine`."""
        await self.engine.finalize()

    async def receive_weights(self, version: int) -> Proof:
        """Receive, load and prove version ``version``.

        If loading fails, is cancelled or has a checksum mismatch, the previous version is loaded again, if any.
        """
        held: Version = await self.engine.receive(version)
        try:
            await self._load(held)
            return held.proof
        except BaseException as error:
            await self._restore(error)
            raise

    async def _load(self, held: Version) -> None:
        self._loaded = None
        weights = dict(self.engine.arrays(held))
        if self.engine.on_device:
            await in_thread(held.settle)  # the worker's threads and streams are its own
        await call(self.worker.load, weights, held.proof.version)
        del weights
        as_given = self.worker.serves_given and not self.engine.on_device
        served = None if as_given else await call(self.worker.served_checksum)
        if served is not None and served != held.checksum:
            raise WeightsChecksumError(
                f"{self.name}: checksum mismatch after loading {held.proof}: it would serve {served:016x}; its load "
                "changed or lost tensors"
            )
        self._loaded, self._checksum = held.proof, held.checksum

    async def _restore(self, first: BaseException) -> None:
        """Load the previous version, which is still held. An error becomes a note of ``first``."""
        try:
            self.engine.revert()
            if self.engine.held is not None:
                await settled(asyncio.ensure_future(self._load(self.engine.held)))
        except BaseException as error:
            first.add_note(f"{self.name}: the previous version was not restored: {type(error).__name__}: {error}")

    async def prove(self) -> Proof | None:
        """The version that is served, proven by the checksum of all its bytes. None: unknown."""
        if self._loaded is None:
            return None
        served = await call(self.worker.served_checksum)
        if served is not None and served != self._checksum:
            return None
        return self._loaded


class Source(Protocol):
    """Where a trainer's tensors come from."""

    def weights(self, version: int) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """Every tensor of a version, in an order that stays."""


class TrainerEngine(Protocol):
    """What a trainer uses of its engine."""

    name: str

    async def prepare(self) -> Metadata: ...

    async def init_process_group(self, **arguments: Any) -> None: ...

    async def send_weights(self, weights: Iterator[tuple[str, Any]], global_steps: int) -> Proof | None: ...

    async def finalize(self) -> None: ...

    async def close(self) -> None: ...

    def statistics(self) -> Any: ...


@explained_calls
class Trainer:
    """A trainer's engine and its tensors, as a manager drives them."""

    def __init__(self, engine: TrainerEngine, source: Source) -> None:
        self.engine = engine
        self.name = engine.name
        self.source = source
        self.prepare = engine.prepare
        self.finalize = engine.finalize

    async def init_process_group(self, arguments: dict[str, Any]) -> None:
        """See `WeightEngine`."""
        await self.engine.init_process_group(**arguments)

    async def send_weights(self, version: int) -> Proof | None:
        """Send what the source gives."""
        return await self.engine.send_weights(self.source.weights(version), version)


async def call(method: Any, *arguments: Any) -> Any:
    """Call a worker's method, coroutine or not. Raises its errors, and MemberFailedError for an error it returns."""
    if inspect.iscoroutinefunction(method):
        result = await method(*arguments)
    else:
        result = await settled(asyncio.ensure_future(asyncio.to_thread(method, *arguments)))
    check(result, getattr(method, "__name__", "a call"))
    return result


def check(result: object, what: str) -> None:
    """Raise MemberFailedError for a returned error, because some engines return their errors."""
    if isinstance(result, BaseException):
        raise MemberFailedError(f"{what} returned {type(result).__name__}: {result}") from result
    if isinstance(result, Mapping) and (result.get("error") or result.get("success") is False):
        raise MemberFailedError(f"{what} returned {dict(result)!r:.200}")
    if result is False:
        raise MemberFailedError(f"{what} returned False")
