"""What an engine holds is given back, also by a close that is cancelled at any of its steps."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest
from helpers import asynchronous
from shard_members import MODEL, local, version_of
from weights_engines import build, engine, transfer

from transport.weights.engine import WeightsEngine
from transport.weights.options import EngineOptions
from transport.weights.sharding import shards
from transport.weights.sharding.layouts import Layout

pytestmark = pytest.mark.ucx

TCP = frozenset({"tcp"})


def segments(prefix: str) -> list[str]:
    return [path.name for path in Path("/dev/shm").iterdir() if prefix in path.name]


async def engines(prefix: str) -> list[WeightsEngine]:
    """Three of three hosts, of which the second relays; two hold two versions, and nobody has left the last group."""
    layout = Layout.of([shards.whole(MODEL["embed"])])
    made = [
        WeightsEngine(
            name,
            layout,
            bucket_bytes=4096,
            address="127.0.0.1",
            options=EngineOptions(host=name, wires=TCP, prefix=prefix, shape="chain"),
        )
        for name in ("t", "a", "b")
    ]
    for version in (1, 2):
        await build(made)
        await asyncio.gather(
            made[0].send_weights(local(layout, version_of(version)), version),
            *(each.receive(version) for each in made[1:]),
        )
    return made


@pytest.mark.nightly
@pytest.mark.parametrize("turns", range(12))
@asynchronous
async def test_a_close_that_is_cancelled_at_any_step_leaves_nothing(turns: int) -> None:
    prefix = f"holdings-{os.getpid()}-"
    made = await engines(prefix)
    assert segments(prefix)
    held = [(each._client, each._feed) for each in made]
    for each in made:
        closing = asyncio.ensure_future(each.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await closing
    if turns:  # at 0 it has not begun
        assert segments(prefix) == []
        for client, feed in held:
            assert client is None or repr(client).startswith("<UCXXClient closed")
            assert feed is None or not feed.children
    for each in made:
        await each.close()
    assert segments(prefix) == []


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=["landed first", "mapped first"])
@asynchronous
async def test_members_of_a_host_release_a_version_in_any_order_and_its_memory_is_used_again(
    order: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    prefix = f"order-{os.getpid()}-"
    made = [engine("t", prefix=prefix), *(engine(f"r{at}", host="a", wires=TCP, prefix=prefix) for at in range(2))]
    for version in (1, 2):
        await transfer(made, version)
    before = segments(prefix)
    for version in (3, 4, 5, 6):
        await transfer(made, version)
    assert segments(prefix) == before
    for at in order:
        await made[at].close()
    assert segments(prefix) == []
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == []
