"""A trainer and its replicas as processes, for the tests of updates."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from process_member import ProcessMember
from weights_members import checksum_of

from transport.weights.manager import UpdateOutcome, WeightUpdate

ENGINE: dict[str, Any] = {"bucket_bytes": 16384, "address": "127.0.0.1"}
_PATH = [str(Path(__file__).resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(_PATH), "OPENBLAS_NUM_THREADS": "1"}  # of processes that find this folder


class MemberGroup:
    """One trainer and replicas, each a process; the first two replicas share a host, the third has its own."""

    def __init__(self, trainer: ProcessMember, replicas: list[ProcessMember], **options: Any) -> None:
        self.trainer = trainer
        self.replicas = replicas
        self.manager = WeightUpdate([trainer], replicas, **options)
        self.version = 0

    @classmethod
    async def start(
        cls,
        replicas: int,
        *,
        resident: str = "mapped",
        engine: dict[str, Any] | None = None,
        replica: dict[str, Any] | None = None,
    ) -> MemberGroup:
        source = {"made": "weights_members:Source", "engine": {**ENGINE, "delta": True, **(engine or {})}}
        trainer = await ProcessMember.start("trainer", source, ENVIRONMENT)
        made = [
            await ProcessMember.start(
                f"replica {number}",
                {
                    "made": "weights_members:Worker",
                    "arguments": {"resident": resident},
                    "engine": {**ENGINE, "host": f"host {number // 2}", **(replica or {})},
                },
                ENVIRONMENT,
            )
            for number in range(replicas)
        ]
        return cls(trainer, made)

    async def update(self) -> UpdateOutcome:
        self.version += 1
        return await self.manager.update(self.version)

    async def serves(self, *versions: int) -> None:
        """Every replica serves all of this version and nothing else; -1: its process is gone."""
        for replica, version in zip(self.replicas, versions, strict=True):
            if version < 0:
                assert replica.lost
                continue
            served, checksum, *_ = await replica.call("told", "look")
            assert served == version
            assert checksum == checksum_of(version), f"{replica.name} serves a mixture"

    async def running(self) -> list[bool]:
        """Which replicas generate, with a cache."""
        looks = [await replica.call("told", "look") for replica in self.replicas]
        return [generating and cache for _, _, generating, cache in looks]

    async def close(self) -> None:
        await asyncio.gather(*(member.close() for member in (self.trainer, *self.replicas)))
