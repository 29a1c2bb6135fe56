"""Engines of shards that are connected with each other."""

from __future__ import annotations

import asyncio

from transport.weights.engine import ShardEngine


async def connected(senders: list[ShardEngine], receivers: list[ShardEngine]) -> None:
    metadata = [await each.prepare() for each in (*senders, *receivers)]
    actor, rollout = ShardEngine.build_topology(len(senders), len(receivers), metadata)
    await asyncio.gather(
        *(
            each.init_process_group(roles=role)
            for each, role in zip((*senders, *receivers), [*actor["roles"], *rollout["roles"]], strict=True)
        )
    )
