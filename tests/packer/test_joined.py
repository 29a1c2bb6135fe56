"""Trainers whose payloads name parents: one joined payload, consumed as a whole; a part that is gone; lost claims."""

from __future__ import annotations

import contextlib
import gc
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from transport import Schema, SharedRingBuffer, StaleSlotError, Ticket, UCXXServer, UpTo
from transport.errors import SchemaError, UsageError
from transport.joined import PARENTS, JoinedPayload, Parent, with_parents, write_group
from transport.packer.consumed_record import ConsumedRecord
from transport.packer.mixin import TicketTrainer
from transport.queue import RingQueue, open_queue
from transport.queue.group import GroupQueue
from transport.store.memory import MemoryStore

pytestmark = pytest.mark.ucx

ROLLOUT = Schema.of(prompt=("text", UpTo(64)), tokens=("int32", UpTo(64)))
REFERENCE = Schema.of(ref_logprobs=("float32", UpTo(64)), parents=PARENTS)
REWARD = Schema.of(reward="float32", parents=PARENTS)
SCHEMAS = [ROLLOUT, REFERENCE, REWARD]
OF_PARENTS = [ROLLOUT, REFERENCE]
Make = Callable[..., TicketTrainer]


class Stages:
    """A served ring for each stage, and a queue of what the last one wrote."""

    def __init__(self, *, readers: int = 1, prefix: str = "") -> None:
        self.all = [SharedRingBuffer.create(schema, slots=4, prefix=prefix) for schema in SCHEMAS]
        self._readers = readers
        self.rollout, self.reference, self.reward = self.all
        self._servers = [UCXXServer(ring, mode="thread") for ring in self.all]
        self.queue = RingQueue([self.reward])

    def write(self, number: int) -> tuple[Ticket, Ticket, Ticket]:
        """A rollout, and what two stages add, the second to both."""
        of = self._readers
        rolled = self.rollout.write({"prompt": f"p{number}", "tokens": [number] * 3}, readers=of)
        referenced = self.reference.write(with_parents({"ref_logprobs": [0.5] * number}, [rolled]), readers=of)
        rewarded = self.reward.write(with_parents({"reward": number}, [rolled, referenced]), readers=of)
        return rolled, referenced, rewarded

    def all_free(self) -> bool:
        """Whether every slot of every ring can be taken; waits for those that are being freed."""
        taken = [ring.native.take(20.0) for ring in self.all for _ in range(4)]
        return all(loan is not None and loan.release() for loan in taken)

    def __enter__(self) -> Stages:
        for server in self._servers:
            server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.queue.close()
        for server in self._servers:
            server.__exit__(None, None, None)
        for ring in self.all:
            ring.close()


@pytest.fixture
def stages() -> Iterator[Stages]:
    with Stages() as made:
        yield made


@pytest.fixture
def trainer(stages: Stages) -> Iterator[Make]:
    opened: list[TicketTrainer] = []

    def make(**options: Any) -> TicketTrainer:
        of = {"schemas": [REWARD], "parents": OF_PARENTS, "joined": True}
        opened.append(TicketTrainer(**{"wire": {"mapped", "tcp"}, "queue": stages.queue, **of, **options}))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def fetched(trainer: TicketTrainer, count: int) -> Any:
    claims: list[Any] = []
    while len(claims) < count:
        claims += trainer.claim_tickets(count - len(claims), 30.0)
    trainer.start_prefetch(claims)
    return trainer.collect_prefetch()


def test_a_trainer_gets_one_payload_of_all_parts_and_consumes_all(
    stages: Stages, trainer: Callable[..., TicketTrainer]
) -> None:
    for number in range(3):
        stages.write(number)
    loop = trainer()
    batch = fetched(loop, 3)
    assert [ring.statistics().free for ring in stages.all] == [1, 1, 1]
    assert batch.bytes == sum(part.ticket.size for payload in batch.payloads for part in payload.parts)
    for number, payload in enumerate(loop.consume(batch)):
        assert isinstance(payload, JoinedPayload)
        assert dict(payload)["prompt"] == f"p{number}"
        assert set(payload) == {"prompt", "tokens", "ref_logprobs", "reward"}
        assert payload["ref_logprobs"].tolist() == [0.5] * number
        assert payload.acknowledged
    del payload
    batch.release()
    loop.close()
    assert stages.all_free()


def test_payloads_of_parents_schemas_are_read_and_not_claimed() -> None:
    with Stages() as stages, open_queue(f"rings:{secrets.token_hex(8)}-") as queue:
        for ring in stages.all:
            queue.hand_out(ring)
        for number in range(3):
            stages.write(number)
        with TicketTrainer(schemas=[REWARD], parents=OF_PARENTS, joined=True, wire={"mapped"}, queue=queue) as loop:
            batch = fetched(loop, 3)
            assert [payload["prompt"] for payload in loop.consume(batch)] == ["p0", "p1", "p2"]
            assert loop.claim_tickets(9) == []
            batch.release()
        assert stages.all_free()


def test_schemas_of_parents_are_for_joined_payloads(stages: Stages, trainer: Make) -> None:
    with pytest.raises(UsageError, match="joined=True"):
        trainer(joined=False)


def test_the_policys_input_is_joined(stages: Stages, trainer: Make) -> None:
    stages.write(1)
    loop = trainer()
    [claim] = loop.claim_tickets(1, 30.0)
    assert set(loop.get_policy_input(claim)) == {"prompt", "tokens", "ref_logprobs", "reward"}
    loop.close()
    assert stages.all_free()


def test_a_part_that_is_gone_fails_alone_and_frees_the_others(stages: Stages, trainer: Make) -> None:
    written = [stages.write(number) for number in range(3)]
    rolled, _, rewarded = written[1]
    stages.rollout.discard(rolled)
    loop = trainer()
    batch = fetched(loop, 3)
    assert [item.error is None for item in batch] == [True, False, True]
    assert isinstance(batch[1].error, StaleSlotError)
    assert f"payload {rewarded.name} cannot be read: its part {rolled.name}: " in str(batch[1].error)
    assert [payload["prompt"] for payload in loop.consume(batch)] == ["p0", "p2"]
    [failure] = stages.queue.failures()
    assert rolled.name in failure.reason
    batch.release()
    loop.close()
    gc.collect()
    assert stages.all_free()


def test_an_abandoned_batch_can_be_claimed_again_with_all_parts(
    stages: Stages, trainer: Callable[..., TicketTrainer]
) -> None:
    stages.write(2)
    loop = trainer()
    batch = fetched(loop, 1)
    loop.abandon(batch)
    assert [payload["prompt"] for payload in loop.consume(fetched(loop, 1))] == ["p2"]
    loop.close()
    assert stages.all_free()


# --- how joined payloads end ------------------------------------------------------------------------------
def test_a_duplicate_ends_with_its_parts(stages: Stages, trainer: Make) -> None:
    record = ConsumedRecord()
    for number in range(3):
        record.accept(*stages.write(number)[2].origin, 0)
    loop = trainer(consumed=record)
    batch = fetched(loop, 3)
    assert [item.duplicate for item in batch] == [True] * 3
    assert loop.consume(batch) == []
    loop.close()
    assert stages.all_free()


def test_a_payload_whose_claim_is_lost_keeps_its_parts_for_the_next_trainer(stages: Stages, trainer: Make) -> None:
    stages.write(1)
    first, second = trainer(), trainer()
    batch = fetched(first, 1)
    assert stages.queue.retry(batch[0].claim)
    assert first.consume(batch) == []
    batch.release()
    again = fetched(second, 1)
    assert [payload["prompt"] for payload in second.consume(again)] == ["p1"]
    again.release()
    first.close()
    second.close()
    assert stages.all_free()


def test_a_payload_that_a_group_refuses_keeps_its_parts() -> None:
    with Stages(readers=2) as stages, ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stack:
        stages.write(1)
        store = MemoryStore()
        ranks = [
            stack.enter_context(
                TicketTrainer(
                    schemas=[REWARD],
                    parents=OF_PARENTS,
                    joined=True,
                    rank=rank,
                    wire={"mapped"},
                    queue=GroupQueue(stages.queue, store, "group", rank, 2),
                )
            )
            for rank in range(2)
        ]
        batches = list(pool.map(fetched, ranks, [1, 1]))
        ranks[1].abandon(batches[1])
        assert ranks[0].consume(batches[0]) == []
        batches[0].release()
        batches = list(pool.map(fetched, ranks, [1, 1]))
        for batch, consumed in zip(
            batches, pool.map(lambda rank, batch: rank.consume(batch), ranks, batches), strict=True
        ):
            assert [payload["prompt"] for payload in consumed] == ["p1"]
            batch.release()


_KILLED = """
import os, signal, sys
import msgspec
from transport import Schema
from transport.packer.mixin import TicketTrainer
from transport.packer.claims import ClaimBook
from transport.queue import open_queue

parents, schemas = ([Schema.from_json(each) for each in given] for given in msgspec.json.decode(sys.argv[2]))
with open_queue(sys.argv[1]) as queue:
    trainer = TicketTrainer(schemas=schemas, parents=parents, joined=True, wire={"mapped"}, queue=queue)
    trainer.start_prefetch(trainer.claim_tickets(1, 30.0))
    batch = trainer.collect_prefetch()
    ClaimBook.settle = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    trainer.consume(batch)
"""


def test_what_a_trainer_that_is_killed_while_it_consumes_had_comes_whole_to_the_next() -> None:
    prefix = f"{secrets.token_hex(8)}-"
    told = msgspec.json.encode([[each.to_json() for each in of] for of in (OF_PARENTS, [REWARD])])
    with Stages(prefix=prefix) as stages, open_queue(f"rings:{prefix}") as queue:
        rewarded = stages.write(1)[2]
        killed = subprocess.run([sys.executable, "-c", _KILLED, f"rings:{prefix}", told], check=False)
        assert killed.returncode == -signal.SIGKILL
        for ring in stages.all:
            ring.reclaim()
        with TicketTrainer(schemas=[REWARD], parents=OF_PARENTS, joined=True, wire={"mapped"}, queue=queue) as loop:
            assert [each.ticket for each in loop.consume(fetched(loop, 1))] == [rewarded]
        assert stages.all_free()


def test_without_joined_the_parents_are_a_field(stages: Stages, trainer: Make) -> None:
    stages.write(1)
    loop = trainer(joined=False, parents=())
    batch = fetched(loop, 1)
    [payload] = batch.payloads
    assert not isinstance(payload, JoinedPayload)
    assert len(payload["parents"]) == 2
    batch.release()


def test_a_parent_whose_schema_is_unknown_is_an_error_that_names_it(
    stages: Stages, trainer: Callable[..., TicketTrainer]
) -> None:
    rolled, *_ = stages.write(1)
    loop = trainer(parents=[REFERENCE])
    batch = fetched(loop, 1)
    assert isinstance(batch[0].error, SchemaError)
    assert rolled.ring[:4] in str(batch[0].error)


@pytest.mark.parametrize("wire", ["mapped", "tcp"])
def test_samples_of_a_group_come_with_what_they_share(wire: str) -> None:
    with Stages() as stages:
        shared: dict[str, Any] = {"prompt": "shared", "tokens": [1]}
        write_group(stages.rollout, shared, [{"reward": at} for at in range(3)], samples_ring=stages.reward)
        with TicketTrainer(
            schemas=[REWARD], parents=OF_PARENTS, joined=True, wire={wire, "tcp"}, queue=stages.queue
        ) as loop:
            batch = fetched(loop, 3)
            found = [(each["prompt"], float(each["reward"])) for each in loop.consume(batch)]
            assert found == [("shared", at) for at in range(3)]
            batch.release()
        assert stages.all_free()


def test_bytes_and_layouts_are_those_of_the_parts(stages: Stages, trainer: Make) -> None:
    stages.write(1)
    batch = fetched(trainer(), 1)
    [payload] = batch.payloads
    for ask in (lambda: payload.data, payload.layout):
        with pytest.raises(UsageError, match="is joined of 3 parts"):
            ask()
    batch.release()


def test_a_payload_that_two_parents_lead_to_by_different_ranks_is_acknowledged_for_both() -> None:
    with Stages() as stages:
        rolled = stages.rollout.write({"prompt": "p", "tokens": [1]}, readers=2)
        referenced = stages.reference.write(with_parents({"ref_logprobs": [1.0]}, [Parent(rolled, 1)]))
        stages.reward.write(with_parents({"reward": 1.0}, [rolled, referenced]))
        with TicketTrainer(schemas=[REWARD], parents=OF_PARENTS, joined=True, wire={"tcp"}, queue=stages.queue) as loop:
            batch = fetched(loop, 1)
            assert len(loop.consume(batch)) == 1
            batch.release()
        assert stages.all_free()
