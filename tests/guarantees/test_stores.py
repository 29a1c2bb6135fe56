"""The store of a mesh fails in the middle of a step: it comes back, it comes back empty, or it never does."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from found_rings import LONG_S, ring_of
from helpers import eventually
from redis_server import RedisServer, needs_redis, redis_server

from transport import ClientOptions, Schema, SharedRingBuffer, UpTo
from transport.errors import RunLostError, StoreUnavailableError
from transport.group import in_group
from transport.packer.consumed_record import ConsumedRecord
from transport.settings import DEFAULTS
from transport.storage.urls import parse_url
from transport.store.base import Store
from transport.store.redis import RedisStore
from transport.training.mesh import Mesh
from transport.training.trainer import Trainer

pytestmark = [pytest.mark.ucx, needs_redis]
SCHEMA = Schema.of(tokens=("int32", UpTo(64)))
CLIENT = ClientOptions(settings=msgspec.structs.replace(DEFAULTS, batch_deadline_s=3.0, read_timeout_s=1.0))
RANKS, GROUPS = 2, 6


@pytest.fixture
def ring(prefix: str) -> Iterator[SharedRingBuffer]:
    with ring_of(prefix, schema=SCHEMA, slot_bytes=None, slots=64) as made:
        for group in range(GROUPS):
            for _ in range(2):
                metadata = in_group(None, f"p{group}", 2)
                made.write({"tokens": np.full(8, group, np.int32)}, metadata=metadata, timeout_s=LONG_S)
        made.end_data()
        yield made


def ranks_run(
    prefix: str, url: str, run: Callable[[Trainer, int], Any], record: ConsumedRecord | None = None
) -> list[Any]:
    """What ``run`` returns on each rank of a mesh, whose ranks are threads here."""
    found: dict[int, Any] = {}
    all_done = threading.Barrier(RANKS)

    def rank_of(rank: int, store: Store) -> None:
        known = None if record is None else record.copy()
        mesh = Mesh(RANKS, 1, rank, store=store)
        with Trainer(SCHEMA, f"rings:{prefix}", mesh=mesh, record=known, client=CLIENT) as trainer:
            found[rank] = run(trainer, rank)
        all_done.wait(LONG_S)  # a server that one of these threads has started ends with the thread

    stores = [RedisStore(parse_url(url), patience_s=0.5) for _ in range(RANKS)]
    threads = [threading.Thread(target=rank_of, args=each) for each in enumerate(stores)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(6 * LONG_S)
    for store in stores:
        store.close()
    assert sorted(found) == list(range(RANKS))
    return [found[rank] for rank in range(RANKS)]


def learned_to_the_end(trainer: Trainer, _: int) -> list[str]:
    names = []
    for step in trainer.steps(1):
        names += step.groups
        step.consume()
    return names


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as made:
        yield made


@pytest.mark.nightly
@pytest.mark.guarantee("the store of a mesh is killed")
def test_a_store_that_is_killed_in_the_middle_of_a_step_and_comes_back_costs_nothing(
    ring: SharedRingBuffer, prefix: str, server: RedisServer
) -> None:
    together, failed = threading.Barrier(RANKS), threading.Barrier(RANKS)

    def run(trainer: Trainer, rank: int) -> list[str]:
        names = []
        for step in trainer.steps(1):
            names += step.groups
            if len(names) == 3:
                if together.wait(LONG_S) == 0:
                    server.kill()
                together.wait(LONG_S)
                with pytest.raises(StoreUnavailableError):
                    step.consume()
                if failed.wait(LONG_S) == 0:
                    server.start()
                failed.wait(LONG_S)
            step.consume()
        return names

    one, other = ranks_run(prefix, server.place(), run)
    assert one == other and Counter(one) == Counter(f"p{group}" for group in range(GROUPS))
    assert ring.native.unread == 0


@pytest.mark.nightly
@pytest.mark.guarantee("the store of a mesh is killed")
@pytest.mark.parametrize(
    ("fault", "error"),
    [("never back", StoreUnavailableError), ("emptied", RunLostError), ("back as it was earlier", RunLostError)],
)
def test_a_store_that_is_lost_is_an_error_on_every_rank_and_the_checkpoint_has_what_was_learned(
    ring: SharedRingBuffer, prefix: str, server: RedisServer, fault: str, error: type[Exception]
) -> None:
    together = threading.Barrier(RANKS)
    faults = {"never back": server.kill, "emptied": server.flush, "back as it was earlier": server.go_back}

    def run(trainer: Trainer, rank: int) -> tuple[list[str], ConsumedRecord]:
        names = []
        steps = iter(trainer.steps(1))
        for number in range(3):
            step = next(steps)
            names += step.groups
            step.accept()
            if number == 0 and together.wait(LONG_S) == 0:
                server.keep()
            together.wait(LONG_S)
            if number < 2:
                trainer.consume()
        if together.wait(LONG_S) == 0:
            faults[fault]()
        together.wait(LONG_S)
        with pytest.raises(error):
            trainer.consume()
        with pytest.raises(error):
            names += next(steps).groups  # it may have been read by all before
            next(steps)
        return names[:3], trainer.record

    (one, record), (other, _) = ranks_run(prefix, server.place(), run)
    assert one == other
    with redis_server() as another:
        rest, same = ranks_run(prefix, another.place(), learned_to_the_end, record)
    assert rest == same and Counter(one + rest) == Counter(f"p{group}" for group in range(GROUPS))
    eventually(lambda: ring.native.unread == 0)
