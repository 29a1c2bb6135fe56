"""ShardedReplica: an inference engine whose weights are spread over ranks, as a manager sees one replica.

    replica = ShardedReplica("server", [Replica(engine, worker), …])   # ranks here, or remote ones

The ranks of an engine serve one version, or it serves none: it has proven what all of its ranks have proven. If a rank
is lost, so is the replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from transport.errors import MemberFailedError, UsageError
from transport.weights.plan.steps import Metadata, VersionProof, remoteness
from transport.weights.transfer.threads import ended
from transport.weights.updating import ReplicaMember


class ShardedReplica:
    """An engine of several ranks, as a manager drives it. Belongs to one loop; closing the ranks is their owner's."""

    def __init__(self, name: str, ranks: Sequence[ReplicaMember]) -> None:
        if not ranks:
            raise UsageError(f"{name}: give at least one rank")
        self.name = name
        self.ranks = tuple(ranks)

    def __repr__(self) -> str:
        return f"<ShardedReplica {self.name}, {len(self.ranks)} ranks>"

    @property
    def lost(self) -> bool:
        """True if the process of a rank is gone."""
        return any(getattr(rank, "lost", False) for rank in self.ranks)

    async def tidy(self) -> None:
        """Remove the segments of ranks that were killed."""
        for rank in self.ranks:
            if getattr(rank, "lost", False) and hasattr(rank, "tidy"):
                await rank.tidy()

    async def pause(self) -> None:
        """Stop generating, and free the cache, on all ranks."""
        await _all(rank.pause() for rank in self.ranks)

    async def prepare(self) -> Metadata:
        """Return the descriptions of all ranks."""
        found = await _all(rank.prepare() for rank in self.ranks)
        in_place = any(metadata.get("in_place") for metadata in found)
        return {"ranks": [each for metadata in found for each in metadata["ranks"]], "in_place": in_place}

    async def init_process_group(self, arguments: dict[str, Any]) -> None:
        """Connect all ranks."""
        roles = arguments["roles"]
        if len(roles) != len(self.ranks):
            raise UsageError(f"{self.name}: {len(roles)} roles for {len(self.ranks)} ranks")
        joining = (rank.init_process_group({"roles": [role]}) for rank, role in zip(self.ranks, roles, strict=True))
        await _all(joining, asyncio.FIRST_EXCEPTION)  # a rank may wait for the one that failed

    async def land(self, version: int) -> VersionProof:
        """Receive a version and prove what landed, on all ranks.

        Waits for every rank, also after one has failed: others may relay to other replicas.
        """
        proofs: set[VersionProof] = set(await _all(rank.land(version) for rank in self.ranks))
        if len(proofs) != 1:
            raise MemberFailedError(f"{self.name}: its ranks prove {', '.join(sorted(map(str, proofs)))}")
        return proofs.pop()

    async def load(self) -> VersionProof | None:
        """Load what has landed, on all ranks, and `prove` it."""
        return _common(await _all(rank.load() for rank in self.ranks))

    async def restore(self) -> VersionProof | None:
        """Serve the version before again, on all ranks, and `prove` it."""
        return _common(await _all(rank.restore() for rank in self.ranks))

    async def prove(self) -> VersionProof | None:
        """Return the version that all ranks prove; None: they differ, or one proves none."""
        return _common(await _all(rank.prove() for rank in self.ranks))

    async def finalize(self) -> None:
        """Leave the group, on all ranks."""
        await _all(rank.finalize() for rank in self.ranks)

    async def resume(self, generate: bool) -> None:
        """Have a cache again, and generate, on all ranks."""
        await _all(rank.resume(generate) for rank in self.ranks)


def _common(proofs: list[VersionProof | None]) -> VersionProof | None:
    return proofs[0] if len(set(proofs)) == 1 else None


async def _all(calls: Any, until: str = asyncio.ALL_COMPLETED) -> list[Any]:
    """Wait for all calls, then raise the first error: causes first, cancellations last, then by rank.

    With FIRST_EXCEPTION the calls that have not ended by then are cancelled.
    """
    tasks = [asyncio.ensure_future(each) for each in calls]
    try:
        await asyncio.wait(tasks, return_when=until)
    finally:
        await ended(*tasks)
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    failed = [each for each in answers if isinstance(each, BaseException)]
    if failed:
        raise min(failed, key=remoteness)
    return answers
