"""Weight engines of one process, over real rings, listeners and feeds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from weights_members import version_of

from transport.weights.engine import RingEngine
from transport.weights.options import EngineOptions
from transport.weights.versions.layout import VersionLayout, specs_of, weights_checksum

BUCKET = 16384
TOTAL = VersionLayout.of(specs_of(version_of(0))).total


def engine(name: str, **options: Any) -> RingEngine:
    """Fields of `EngineOptions` stand beside the arguments of `RingEngine`."""
    further = {key: options.pop(key) for key in EngineOptions.__struct_fields__ if key in options}
    arguments = {"bucket_bytes": BUCKET, "address": "127.0.0.1", **options}
    return RingEngine(name, **arguments, options=EngineOptions(**further))


@contextlib.asynccontextmanager
async def engines(hosts: str, **trainer: Any) -> AsyncIterator[list[RingEngine]]:
    """A trainer, and a replica for each letter; those of one letter share a host."""
    made = [engine("trainer", **trainer)]
    made += [engine(f"replica {at}", host=host, wires=frozenset({"tcp"})) for at, host in enumerate(hosts)]
    try:
        yield made
    finally:
        for each in made:
            await each.close()


async def build(made: list[RingEngine]) -> None:
    metadata = [await each.prepare() for each in made]
    actor, rollout = RingEngine.build_topology(1, len(made) - 1, metadata)
    arguments = [{key: values[at] for key, values in actor.items()} for at in range(1)]
    arguments += [{key: values[at] for key, values in rollout.items()} for at in range(len(made) - 1)]
    await asyncio.gather(*(each.init_process_group(**row) for each, row in zip(made, arguments, strict=True)))


async def transfer(made: list[RingEngine], version: int, weights: dict[str, Any] | None = None) -> int:
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
