"""Our backend under AReaL's own RTensor, in this process and in workers of AReaL's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from helpers import Child, eventually
from interrupted_lines import at_each_line, interrupts

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
from transport.ticket import Ticket

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


ENGINE = """
import torch
from areal.api import InferenceEngine

class Engine(InferenceEngine):
    initialized = True

    def logits(self):
        return {"logits": torch.arange(1000.0)}

    def total(self, batch):
        return float(batch["logits"].sum())

    def destroy(self):
        pass
"""
SERVER = """
import runpy, sys
sys.argv[0] = "rpc_server"
runpy.run_module("areal.infra.rpc.rpc_server", run_name="__main__")
"""


@contextlib.contextmanager
def areals_worker(folder: Path, number: int) -> Iterator[Callable[..., Any]]:
    """A process of AReaL's own; what calls a method of its engine."""
    options = {"experiment-name": "test", "trial-name": "test", "role": "actor", "worker-index": number}
    places = {"host": "127.0.0.1", "nfs-record-root": folder / "names", "fileroot": folder}
    arguments = [text for name, value in {**options, **places}.items() for text in (f"--{name}", value)]
    with Child(SERVER, *arguments, env={"PYTHONPATH": str(folder)}) as child:
        while (found := re.search(r"Starting Guard on (\S+:\d+)", child.line())) is None:
            pass

        def asked(path: str, **body: Any) -> Any:
            data = json.dumps({"engine_name": "engine", **body}).encode()
            request = Request(f"http://{found[1]}/{path}", data, {"Content-Type": "application/json"})
            with urlopen(request, timeout=60) as answer:
                return deserialize_value(json.load(answer)["result"])

        asked("create_engine", engine="my_engine.Engine")
        yield lambda method, *values: asked("call", method=method, args=serialize_value(list(values)))
        child.process.terminate()
        assert child.wait() == 0


@pytest.mark.slow
@pytest.mark.timeout(300)  # AReaL's import alone takes half a minute where cores are busy
def test_areals_workers_that_start_with_the_pages_file_pass_tensors_by_ticket(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "ADAPTERS.md"
    block = page.read_text(encoding="utf-8").split("\n## AReaL\n")[1].split("```python\n")[1].split("```")[0]
    tmp_path.joinpath("sitecustomize.py").write_text(block, encoding="utf-8")
    tmp_path.joinpath("my_engine.py").write_text(ENGINE, encoding="utf-8")
    with areals_worker(tmp_path, 0) as one, areals_worker(tmp_path, 1) as other:
        remote = one("logits")
        shard = remote["logits"].shard
        assert Ticket.parse(shard.shard_id).size
        assert other("total", remote) == sum(range(1000))
        with contextlib.closing(adapter.RingBackend()) as controller:
            asyncio.run(controller.delete(shard.node_addr, [shard.shard_id]))

            def cleared() -> bool:
                try:
                    controller.fetch([shard])
                except StaleSlotError:
                    return True
                return False

            eventually(cleared, "the tensor is freed where it was returned")


@at_each_line
def test_a_ring_that_is_interrupted_at_any_line_of_its_start_leaves_no_listener(first: int) -> None:
    before = threading.enumerate()
    for interrupt in interrupts(first, ("transport.adapters.areal",)):
        backend = adapter.RingBackend(mode="thread", addresses=("127.0.0.1",))
        with interrupt:
            backend._made(4096)
        backend.close()
        assert threading.enumerate() == before, interrupt.at
