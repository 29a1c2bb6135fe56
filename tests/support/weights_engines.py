"""Weight engines of one process, over real rings, listeners and feeds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from helpers import NETWORK
from weights_members import version_of

from transport.weights.engine import WeightsEngine
from transport.weights.options import EngineOptions
from transport.weights.sharding.roles import build_topology
from transport.weights.versions.layout import row_of, specs_of, weights_checksum

BUCKET = 16384
TOTAL = row_of(specs_of(version_of(0))).total


def engine(name: str, **options: Any) -> WeightsEngine:
    """Fields of `EngineOptions` stand beside the arguments of `WeightsEngine`."""
    further = {key: options.pop(key) for key in EngineOptions.__struct_fields__ if key in options}
    arguments = {"bucket_bytes": BUCKET, "address": "127.0.0.1", **options}
    return WeightsEngine(name, **arguments, options=EngineOptions(**further))


@contextlib.asynccontextmanager
async def engines(hosts: str, **trainer: Any) -> AsyncIterator[list[WeightsEngine]]:
    """A trainer, and a replica for each letter; those of one letter share a host."""
    made = [engine("trainer", **trainer)]
    made += [engine(f"replica {at}", host=host, wires=NETWORK) for at, host in enumerate(hosts)]
    try:
        yield made
    finally:
        for each in made:
            await each.close()


def sizes(prefix: str) -> list[int]:
    """Return the sizes of the segments with this prefix, in bytes."""
    return [path.stat().st_size for path in Path("/dev/shm").iterdir() if prefix in path.name]


async def build(made: list[WeightsEngine]) -> None:
    """Connect them; the first one sends."""
    metadata = [await each.prepare() for each in made]
    actor, rollout = build_topology(1, len(made) - 1, metadata)
    roles = [*actor["roles"], *rollout["roles"]]
    await asyncio.gather(*(each.init_process_group(roles=role) for each, role in zip(made, roles, strict=True)))


async def transfer(made: list[WeightsEngine], version: int, weights: dict[str, Any] | None = None) -> int:
    """Send a version to all; the checksum of the tensors that each of them holds then."""
    await build(made)
    sent = weights or version_of(version)
    proof, *held = await asyncio.gather(
        made[0].send_weights(iter(sent.items()), version), *(each.receive(version) for each in made[1:])
    )
    for each in made:
        await each.finalize()
    assert proof is not None
    assert {each.proof for each in held} == {proof}
    (checksum,) = {each.checksum for each in held}
    for each in made[1:]:
        assert weights_checksum({name: array async for name, array in each.get_weights()}) == checksum
    return checksum
