"""ShardedReplica: an inference engine whose weights are spread over ranks, as a manager sees one replica.

    replica = ShardedReplica("server", [ShardRank(engine, worker), …])   # ranks here, or remote ones

The ranks of an engine serve one version, or it serves none. So all ranks land and prove a version before any loads it.
If one fails, those that have loaded it load the version before again. If a rank is lost, so is the replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from transport.errors import ChildrenLostError, MemberFailedError, ParentLostError, UsageError
from transport.weights.plan.engine import Metadata
from transport.weights.plan.steps import Proof
from transport.weights.sharded.engine import ShardEngine
from transport.weights.sharded.held import ShardHeld
from transport.weights.transfer.threads import ended, settled
from transport.weights.worker import Replica, RolloutWorker

T = TypeVar("T")


class Rank(Protocol):
    """A rank of an engine, here (`ShardRank`) or in another process."""

    @property
    def name(self) -> str: ...

    async def abort(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def prepare(self) -> Metadata: ...

    async def init_process_group(self, arguments: dict[str, Any]) -> None: ...

    async def land(self, version: int) -> Proof: ...

    async def load_landed(self) -> Proof: ...

    async def restore(self) -> None: ...

    async def finalize(self) -> None: ...

    async def prove(self) -> Proof | None: ...

    async def resume_kv_cache(self) -> None: ...

    async def resume_generation(self) -> None: ...


class ShardRank(Replica):
    """A rank's worker and its engine. It is a replica by itself, too, for an engine of one rank.

    With ``in_place`` of the engine `load` gets the engine's own tensors, already changed.
    """

    def __init__(self, engine: ShardEngine, worker: RolloutWorker) -> None:
        super().__init__(engine, worker)
        self._shards = engine
        self._landed: ShardHeld | None = None  # in this update
        self._served: ShardHeld | None = None  # what `_loaded` proves

    async def land(self, version: int) -> Proof:
        """Receive and prove a version; the one before is served until `load_landed`, except in place."""
        try:
            self._landed = await self._shards.receive(version)
        finally:
            if self._shards.in_place and (self._landed is not None or self._shards.spoilt):
                self._loaded = None
        return self._landed.proof

    async def load_landed(self) -> Proof:
        """Load what landed, and prove it."""
        if self._landed is None:
            raise UsageError(f"{self.name}: call land() before load_landed()")
        self._served = None
        await self._load(self._landed)
        self._served = self._landed
        return self._landed.proof

    async def restore(self) -> None:
        """Serve the version before. In place it is gone: then this rank proves nothing until the next version."""
        landed, self._landed = self._landed, None
        if landed is None:
            return
        served = self._served
        if self._shards.in_place:
            self._loaded = self._served = None
            self._shards.spoil()
            return
        self._shards.revert()
        if served is not None and served is not landed and self._loaded is not None:
            return  # the worker has not been touched
        self._loaded = self._served = None
        if self._shards.held is not None:
            await self._load(self._shards.held)
            self._served = self._shards.held

    async def finalize(self) -> None:
        """Leave the group; what landed and was not loaded is dropped."""
        try:
            if self._landed is not None and self._served is not self._landed:
                await self.restore()
        finally:
            self._landed = None
            await super().finalize()

    async def receive_weights(self, version: int) -> Proof:
        """`land` and `load_landed`, for an engine of one rank."""
        try:
            await self.land(version)
            return await self.load_landed()
        except BaseException as error:
            await _noted(self, error)
            raise


class ShardedReplica:
    """An engine of several ranks, as a manager drives it. Belongs to one loop; closing the ranks is their owner's."""

    def __init__(self, name: str, ranks: Sequence[Rank]) -> None:
        if not ranks:
            raise UsageError(f"{name}: give at least one rank")
        self.name = name
        self.ranks = tuple(ranks)

    def __repr__(self) -> str:
        return f"<ShardedReplica {self.name}, {len(self.ranks)} ranks>"

    @property
    def lost(self) -> bool:
        """Whether the process of a rank is gone."""
        return any(getattr(rank, "lost", False) for rank in self.ranks)

    async def tidy(self) -> None:
        """Remove the segments of ranks that were killed."""
        for rank in self.ranks:
            if getattr(rank, "lost", False) and hasattr(rank, "tidy"):
                await rank.tidy()

    async def abort(self) -> None:
        """Stop generating, on all ranks."""
        await _all(rank.abort() for rank in self.ranks)

    async def release_kv_cache(self) -> None:
        """Free the cache, on all ranks."""
        await _all(rank.release_kv_cache() for rank in self.ranks)

    async def prepare(self) -> Metadata:
        """The descriptions of all ranks."""
        found = await _all(rank.prepare() for rank in self.ranks)
        return {"ranks": [each for metadata in found for each in metadata["ranks"]]}

    async def init_process_group(self, arguments: dict[str, Any]) -> None:
        """Connect all ranks."""
        roles = arguments["roles"]
        if len(roles) != len(self.ranks):
            raise UsageError(f"{self.name}: {len(roles)} roles for {len(self.ranks)} ranks")
        joining = (rank.init_process_group({"roles": [role]}) for rank, role in zip(self.ranks, roles, strict=True))
        await _all(joining, asyncio.FIRST_EXCEPTION)  # a rank may wait for the one that failed

    async def receive_weights(self, version: int) -> Proof:
        """Receive, load and prove a version on all ranks; or have all of them serve the one before.

        Waits for every rank, also after one has failed: others may relay to other replicas.
        """
        try:
            await _all(rank.land(version) for rank in self.ranks)
            proofs: set[Proof] = set(await _all(rank.load_landed() for rank in self.ranks))
            if len(proofs) != 1:
                raise MemberFailedError(f"{self.name}: its ranks prove {', '.join(sorted(map(str, proofs)))}")
            return proofs.pop()
        except BaseException as error:
            await settled(asyncio.ensure_future(_together(_noted(rank, error) for rank in self.ranks)))
            raise

    async def prove(self) -> Proof | None:
        """The version that all ranks prove; None: they differ, or one proves none."""
        proofs: set[Proof | None] = set(await _all(rank.prove() for rank in self.ranks))
        return proofs.pop() if len(proofs) == 1 else None

    async def finalize(self) -> None:
        """Leave the group, on all ranks."""
        await _all(rank.finalize() for rank in self.ranks)

    async def resume_kv_cache(self) -> None:
        """Have a cache again, on all ranks."""
        await _all(rank.resume_kv_cache() for rank in self.ranks)

    async def resume_generation(self) -> None:
        """Generate again, on all ranks."""
        await _all(rank.resume_generation() for rank in self.ranks)


async def _noted(rank: Rank, first: BaseException) -> None:
    """Restore a rank. An error becomes a note of ``first``."""
    try:
        await settled(asyncio.ensure_future(rank.restore()))
    except Exception as error:
        first.add_note(f"{rank.name}: the previous version was not restored: {type(error).__name__}: {error}")


async def _together(calls: Any) -> None:
    await asyncio.gather(*calls)


async def _all(calls: Any, until: str = asyncio.ALL_COMPLETED) -> list[Any]:
    """Wait for all calls, then raise the first error: causes first, cancellations last, then by rank.

    With FIRST_EXCEPTION the calls that have not ended by then are cancelled.
    """
    tasks = [asyncio.ensure_future(each) for each in calls]
    try:
        _, left = await asyncio.wait(tasks, return_when=until)
        await ended(*left)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    failed = [error for task in tasks if (error := _error(task)) is not None]
    if failed:
        raise min(failed, key=_remoteness)
    return [task.result() for task in tasks]


def _remoteness(error: BaseException) -> int:
    """How far an error is from its cause: 0, 1 for what members say when others fail, 2 for a cancellation."""
    if isinstance(error, asyncio.CancelledError):
        return 2
    return int(isinstance(error, ParentLostError | ChildrenLostError))


def _error(task: asyncio.Future[Any]) -> BaseException | None:
    if task.cancelled():
        return asyncio.CancelledError()
    return task.exception()
