"""Our backend under AReaL's own RTensor: what one process returns, another one localizes and clears."""

from __future__ import annotations

import asyncio
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import Child, eventually

with warnings.catch_warnings():  # of the framework and of what it imports
    warnings.simplefilter("ignore")
    manager = logging.Logger.manager
    torch = pytest.importorskip("torch")
    pytest.importorskip("areal", reason="areal is not installed", exc_type=ImportError)
    from areal.infra.rpc import rtensor
    from areal.infra.rpc.serialization import deserialize_value, serialize_value

    # What AReaL imports sets another one, whose loggers have a root of their own: pytest has no record of them.
    logging.Logger.manager = manager

from transport import SharedRingBuffer
from transport.adapters import areal as adapter
from transport.errors import StaleSlotError, UsageError

pytestmark = pytest.mark.ucx

ADDRESS = "10.0.0.1:8000"  # AReaL's, of the node; not ours


@pytest.fixture(params=["auto", {"tcp"}], ids=["mapped", "tcp"])
def backend(request: pytest.FixtureRequest) -> Iterator[adapter.RingBackend]:
    made = adapter.use(ring_bytes=1 << 16, mode="thread", client={"wire": request.param}, addresses=("127.0.0.1",))
    try:
        yield made
    finally:
        rtensor.clear_fetch_buffer()
        rtensor.set_backend(None)
        made.close()


def batch() -> dict[str, Any]:
    return {
        "input_ids": torch.arange(40).reshape(2, 20),
        "attention_mask": torch.ones(2, 20, dtype=torch.bool),
        "logprobs": torch.randn(2, 20, generator=torch.Generator().manual_seed(1)),
        "values": [torch.full((3,), 0.5, dtype=torch.bfloat16), torch.tensor(7), torch.empty(0, 4)],
        "large": torch.arange(1 << 16),  # larger than a ring that is made for small ones
        "version": 3,
    }


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def through_json(value: Any) -> Any:
    """As AReaL's remote calls carry it."""
    return deserialize_value(json.loads(json.dumps(serialize_value(value))))


def rings(backend: adapter.RingBackend) -> list[SharedRingBuffer]:
    return [ring for some in backend._rings.values() for ring, _ in some]


def free(ring: SharedRingBuffer) -> bool:
    return ring.native.state_counts()[0] == ring.slot_count


def test_what_a_worker_returns_is_localized_and_cleared(backend: adapter.RingBackend) -> None:
    remote = through_json(rtensor.RTensor.remotize(batch(), ADDRESS))
    assert remote["input_ids"].data.is_meta
    assert equal(rtensor.RTensor.localize(remote), batch())
    again = through_json(rtensor.RTensor.remotize(batch(), ADDRESS))
    rtensor.clear_fetch_buffer()
    for address, shards in rtensor.RTensor.collect_shards([remote, again]).items():
        asyncio.run(rtensor.RTensor.clear_node(address, shards))
        asyncio.run(rtensor.RTensor.clear_node(address, shards))  # of what is gone already
    eventually(lambda: all(map(free, rings(backend))), "what was cleared is freed")
    with pytest.raises(StaleSlotError):
        rtensor.RTensor.localize(again)


def test_cleared_tensors_make_room_for_others(backend: adapter.RingBackend) -> None:
    for _ in range(3):
        kept = [rtensor.RTensor.remotize(torch.full((2000,), number), ADDRESS) for number in range(10)]
        assert [int(each.to_local()[0]) for each in kept] == list(range(10))
        for address, shards in rtensor.RTensor.collect_shards(kept).items():
            asyncio.run(rtensor.RTensor.clear_node(address, shards))
        eventually(lambda: all(map(free, rings(backend))), "what was cleared is freed")
    assert len(rings(backend)) == 3  # four tensors in a ring


def test_a_second_backend_in_a_process_is_refused(backend: adapter.RingBackend) -> None:
    with pytest.raises(UsageError, match="RingBackend already"):
        adapter.use()


WORKER = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from areal.infra.rpc import rtensor
from areal.infra.rpc.serialization import serialize_value
from transport.adapters.areal import use
backend = use(mode="thread", addresses=("127.0.0.1",))
remote = rtensor.RTensor.remotize({"logits": torch.arange(1000.0)}, "10.0.0.1:8000")
print("remote", json.dumps(serialize_value(remote)), flush=True)
sys.stdin.readline()
[[(ring, _)]] = backend._rings.values()
while ring.native.state_counts()[0] < ring.slot_count:
    ring.native.wait_freed(ring.native.freed_event(), 1.0)
print("freed true", flush=True)
backend.close()
"""


def line(child: Child, name: str) -> Any:
    """What the child says under this name; AReaL's own log goes to standard output."""
    while True:
        first, _, rest = child.line().partition(" ")
        if first == name:
            return json.loads(rest)


@pytest.mark.slow
@pytest.mark.timeout(300)  # AReaL's import alone takes half a minute where cores are busy
def test_tensors_of_another_process_are_read_and_freed_there(backend: adapter.RingBackend, tmp_path: Path) -> None:
    with Child(WORKER) as worker:
        remote = deserialize_value(line(worker, "remote"))
        assert torch.equal(rtensor.RTensor.localize(remote)["logits"], torch.arange(1000.0))
        asyncio.run(rtensor.RTensor.clear_node(ADDRESS, [remote["logits"].shard.shard_id]))
        worker.tell()
        assert line(worker, "freed")
        assert worker.wait() == 0
