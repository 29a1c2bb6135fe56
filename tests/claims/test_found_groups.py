"""Groups of ranks, and several independent ranks, over rings that are their queue."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers import NETWORK_WIRE, Child, eventually, free
from packers import Packer, Worker, collected

from transport.packer.options import RingOptions, ServerOptions
from transport.queue import FoundRings, open_queue
from transport.queue.group import GroupQueue
from transport.settings import Settings
from transport.store import SQLiteStore, Store

pytestmark = [pytest.mark.ucx, pytest.mark.slow]
both = pytest.mark.parametrize("wire", ["mapped", NETWORK_WIRE])
LONG_S = 30.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with SQLiteStore(tmp_path / "store.db") as made:
        yield made


@contextlib.contextmanager
def members(
    store: Store, prefix: str, wire: str, name: str = "g", patience_s: float = LONG_S
) -> Iterator[list[Packer]]:
    """The two packers of a group, each with a queue of its own as processes have."""
    with contextlib.ExitStack() as stack:
        found = []
        for rank in range(2):
            queue = stack.enter_context(open_queue(f"rings:{prefix}"))
            packer = Packer()
            stack.callback(packer.cleanup_ucxx_packer)
            packer.setup_ucxx_packer(
                queue=GroupQueue(queue, store, name, rank, 2, patience_s=patience_s),
                rank=rank,
                wire={wire},  # type: ignore[arg-type]
            )
            found.append(packer)
        yield found


def at_once(*calls: Callable[[], object]) -> list[object]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [each.result(LONG_S) for each in [threads.submit(call) for call in calls]]


def train(packer: Packer, n: int) -> list[int]:
    batch = collected(packer, packer.claim_tickets(n, LONG_S))
    return [int(payload["step"]) for payload in packer.consume(batch)]


def grouped(prefix: str, queue: FoundRings, slots: int = 8) -> Worker:
    worker = Worker()
    worker.setup_ucxx(
        slots=slots,
        readers=2,
        grouped=True,
        rings=queue,
        mode="thread",
        ring=RingOptions(slot_bytes=4096),
        server=ServerOptions(addresses=("127.0.0.1",)),
    )
    return worker


@both
def test_what_one_rank_gives_back_no_rank_trains_on_and_it_comes_again(store: Store, wire: str) -> None:
    prefix = f"group-{secrets.token_hex(4)}-"
    with open_queue(f"rings:{prefix}") as queue, members(store, prefix, wire) as (leader, follower):
        assert isinstance(queue, FoundRings)
        worker = grouped(prefix, queue)
        try:
            worker.write_to_buffer({"step": np.int64(1)})

            def refuse() -> list[int]:
                follower.abandon(collected(follower, follower.claim_tickets(1, LONG_S)), "not now")
                return []

            assert at_once(lambda: train(leader, 1), refuse) == [[], []]
            assert at_once(lambda: train(leader, 1), lambda: train(follower, 1)) == [[1], [1]]
            eventually(lambda: free(worker.ring), "every rank has acknowledged")
        finally:
            worker.cleanup_ucxx()


@pytest.mark.nightly(keep=1)
@both
def test_slots_of_a_group_whose_follower_died_are_freed_for_the_writer(store: Store, wire: str) -> None:
    prefix = f"group-{secrets.token_hex(4)}-"
    with open_queue(f"rings:{prefix}") as queue, open_queue(f"rings:{prefix}") as theirs:
        assert isinstance(queue, FoundRings)
        worker = grouped(prefix, queue, slots=2)
        try:
            for step in range(2):
                worker.write_to_buffer({"step": np.int64(step)})
            packer = Packer()
            packer.setup_ucxx_packer(queue=theirs, wire={wire})  # type: ignore[arg-type]
            steps: list[int] = []
            while len(steps) < 2:  # the leader's acknowledgement; rank 1 never sends its own
                steps += train(packer, 2)
            assert worker.ring_statistics().free == 0
            worker.write_to_buffer({"step": np.int64(2)}, timeout_s=LONG_S)
            packer.cleanup_ucxx_packer()
        finally:
            worker.cleanup_ucxx()


RANK = """
import sys
from transport.packer.mixin import UCXXDataPackerMixin
class Packer(UCXXDataPackerMixin): ...
packer, rank = Packer(), int(sys.argv[1])
packer.setup_ucxx_packer(rank=rank)
found = []
while len(found) < int(sys.argv[2]):
    claims = packer.claim_tickets(5, 20.0)
    packer.start_prefetch(claims)
    found += [int(payload["step"]) for payload in packer.consume(packer.collect_prefetch())]
packer.cleanup_ucxx_packer()
print(*found, flush=True)
"""


@pytest.mark.nightly(keep=1)
@both
def test_independent_ranks_each_consume_every_payload_once(wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", wire)
    worker = Worker()
    try:
        with contextlib.ExitStack() as stack:
            ranks = [stack.enter_context(Child(RANK, rank, 40)) for rank in range(2)]
            worker.setup_ucxx(
                slots=8,
                readers=2,
                mode="thread",
                ring=RingOptions(slot_bytes=4096),
                server=ServerOptions(addresses=("127.0.0.1",)),
                settings=Settings(),
            )
            for step in range(40):
                worker.write_to_buffer({"step": np.int64(step)}, timeout_s=LONG_S)
            for rank in ranks:
                assert sorted(map(int, rank.line().split())) == list(range(40))
                assert rank.wait() == 0
        eventually(lambda: free(worker.ring), "every slot is free")
    finally:
        worker.cleanup_ucxx()
