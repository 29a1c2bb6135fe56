"""Trainers whose payloads name parents: one joined payload, consumed as a whole; a part that is gone; lost claims."""

from __future__ import annotations

import gc
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from found_rings import LONG_S
from helpers import eventually

from transport import Schema, SharedRingBuffer, Ticket, Trainer, UCXXServer, UpTo
from transport.joined import PARENTS, JoinedPayload, Parent, with_parents, write_group
from transport.packer.consumed_record import ConsumedRecord
from transport.training.batch import Batch

pytestmark = pytest.mark.ucx

ROLLOUT = Schema.of(prompt=("text", UpTo(64)), tokens=("int32", UpTo(64)))
REFERENCE = Schema.of(ref_logprobs=("float32", UpTo(64)), parents=PARENTS)
REWARD = Schema.of(reward="float32", parents=PARENTS)
SCHEMAS = [ROLLOUT, REFERENCE, REWARD]
OF_PARENTS = [ROLLOUT, REFERENCE]
Make = Callable[..., Trainer]


class Stages:
    """A served ring for each stage of one run, and the rings of the last one alone."""

    def __init__(self, *, readers: int = 1) -> None:
        self.run = f"{secrets.token_hex(8)}-"
        prefixes = [f"{self.run}rollout-", f"{self.run}reference-", f"{self.run}reward-"]
        self.all = [
            SharedRingBuffer.create(schema, slots=4, prefix=prefix)
            for schema, prefix in zip(SCHEMAS, prefixes, strict=True)
        ]
        self._readers = readers
        self.rollout, self.reference, self.reward = self.all
        self.servers = [UCXXServer(ring, mode="thread") for ring in self.all]

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
        for server in self.servers:
            server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            server.__exit__(None, None, None)
        for ring in self.all:
            ring.close()


@pytest.fixture
def stages() -> Iterator[Stages]:
    with Stages() as made:
        yield made


@pytest.fixture
def trainer(stages: Stages) -> Iterator[Make]:
    opened: list[Trainer] = []

    def make(**options: Any) -> Trainer:
        of = {"schema": REWARD, "rings": f"rings:{stages.run}", "joined": OF_PARENTS}
        opened.append(Trainer(**{"wire": {"mapped", "tcp"}, **of, **options}))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def taken(trainer: Trainer, count: int) -> Batch:
    batch = trainer.take(count, LONG_S, fill_s=LONG_S)
    assert batch is not None and len(batch) == count
    return batch


def consume(batch: Batch) -> list[str]:
    """The prompts of what was consumed."""
    prompts = [str(payload["prompt"]) for payload in batch]
    batch.consume()
    return [prompt for prompt, ours in zip(prompts, batch.accepted.tolist(), strict=True) if ours]


def test_a_trainer_gets_one_payload_of_all_parts_and_consumes_all(stages: Stages, trainer: Make) -> None:
    for number in range(3):
        stages.write(number)
    loop = trainer()
    batch = taken(loop, 3)
    assert [ring.statistics().free for ring in stages.all] == [1, 1, 1]
    for number, payload in enumerate(batch):
        assert isinstance(payload.fields, JoinedPayload)
        assert set(payload) == {"prompt", "tokens", "ref_logprobs", "reward"}
        assert payload["prompt"] == f"p{number}" and payload["ref_logprobs"].tolist() == [0.5] * number
        assert [part.ticket.size for part in payload.fields.parts]
        assert all(part.data.dtype == "uint8" for part in payload.fields.parts)
    assert consume(batch) == ["p0", "p1", "p2"]
    batch.release()
    del payload, batch
    loop.close()
    assert stages.all_free()


def test_payloads_of_parents_schemas_are_read_and_not_taken(stages: Stages, trainer: Make) -> None:
    for number in range(3):
        stages.write(number)
    loop = trainer(wire={"mapped"})
    batch = taken(loop, 3)
    assert consume(batch) == ["p0", "p1", "p2"]
    assert loop.take(9) is None
    batch.release()


def test_parents_lie_in_their_slots_no_longer_than_the_payloads_that_name_them(stages: Stages, trainer: Make) -> None:
    for number in range(4):
        stages.write(number)
    loop = trainer(wire={"mapped"})
    batch = taken(loop, 4)
    assert [ring.native.lent for ring in stages.all[:2]] == [4, 4]  # none was copied
    assert len(consume(batch)) == 4
    assert loop.take(1) is None
    assert stages.all_free()


def test_a_part_that_is_gone_fails_alone_and_frees_the_others(
    stages: Stages, trainer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    written = [stages.write(number) for number in range(3)]
    rolled, _, rewarded = written[1]
    stages.rollout.discard(rolled)
    loop = trainer()
    batch = loop.take(3, LONG_S)
    assert batch is not None and consume(batch) == ["p0", "p2"]
    assert any(f"payload {rewarded.name} cannot be read: its part {rolled.name}: " in each for each in caplog.messages)
    assert loop.statistics().failed == 1
    eventually(lambda: any(rolled.name in each.reason for each in loop.rings.failures()), "its reason is there")
    batch.release()
    del batch
    loop.close()
    gc.collect()
    assert stages.all_free()


def test_a_batch_that_is_given_back_can_be_taken_again_with_all_parts(stages: Stages, trainer: Make) -> None:
    stages.write(2)
    loop = trainer()
    taken(loop, 1).give_back()
    assert consume(taken(loop, 1)) == ["p2"]
    loop.close()
    assert stages.all_free()


# --- how joined payloads end ------------------------------------------------------------------------------
def test_a_duplicate_ends_with_its_parts(stages: Stages, trainer: Make) -> None:
    record = ConsumedRecord()
    for number in range(3):
        record.accept(*stages.write(number)[2].origin, 0)
    loop = trainer(record=record)

    def dropped() -> bool:
        assert loop.take(3, 0.05) is None
        return loop.statistics().duplicates == 3

    eventually(dropped, "they are dropped")
    loop.close()
    assert stages.all_free()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_duplicate_whose_parts_are_out_of_reach_keeps_nothing_from_the_trainer(
    stages: Stages, trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_READ_TIMEOUT_S", "0.5")
    monkeypatch.setenv("TRANSPORT_BATCH_DEADLINE_S", "1")
    record = ConsumedRecord()
    rolled, _, rewarded = stages.write(0)
    record.accept(*rewarded.origin, 0)
    stages.reward.write(with_parents({"reward": 1}, [rolled]))
    loop = trainer(record=record, wire={"tcp"})
    away = stages.servers[1]
    ports = away.ports
    away.__exit__(None, None, None)
    batch = taken(loop, 1)
    assert [float(each["reward"]) for each in batch] == [1.0] and not loop.statistics().duplicates
    with UCXXServer(stages.reference, ports=ports, mode="thread"):
        eventually(lambda: loop.take(1) or loop.statistics().duplicates == 1, "it ends when they are there again")


def test_a_payload_whose_claim_is_lost_keeps_its_parts_for_the_next_trainer(stages: Stages, trainer: Make) -> None:
    stages.write(1)
    first, second = trainer(wire={"tcp"}), trainer()
    batch = taken(first, 1)
    first._thread.run(first._client.close())  # its connections end, and its claims with them
    batch.consume()
    assert not batch.accepted.any()
    batch.release()
    again = taken(second, 1)
    assert consume(again) == ["p1"]
    again.release()
    first.close()
    second.close()
    assert stages.all_free()


_KILLED = """
import os, signal, sys
import msgspec
from transport import Schema, Trainer

parents, [schema] = ([Schema.from_json(each) for each in given] for given in msgspec.json.decode(sys.argv[2]))
trainer = Trainer(schema, sys.argv[1], joined=parents, wire={"mapped"})
batch = trainer.take(1, 30.0)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.nightly
def test_what_a_killed_trainer_had_comes_whole_to_the_next(stages: Stages, trainer: Make) -> None:
    told = msgspec.json.encode([[each.to_json() for each in of] for of in (OF_PARENTS, [REWARD])])
    rewarded = stages.write(1)[2]
    killed = subprocess.run([sys.executable, "-c", _KILLED, f"rings:{stages.run}", told], check=False)
    assert killed.returncode == -signal.SIGKILL
    for ring in stages.all:
        ring.reclaim()
    loop = trainer(wire={"mapped"})
    batch = taken(loop, 1)
    assert [each.ticket for each in batch] == [rewarded]
    assert consume(batch) == ["p1"]
    batch.release()
    loop.close()
    assert stages.all_free()


def test_without_joined_the_parents_are_a_field(stages: Stages, trainer: Make) -> None:
    stages.write(1)
    [payload] = taken(trainer(joined=False), 1)
    assert not isinstance(payload.fields, JoinedPayload)
    assert len(payload["parents"]) == 2


def test_a_parent_whose_schema_is_unknown_is_an_error_that_names_it(
    stages: Stages, trainer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    rolled, *_ = stages.write(1)
    loop = trainer(joined=[REFERENCE])
    assert loop.take(1, 1.0) is None
    assert any("schema" in each and rolled.ring[:4] in each for each in caplog.messages)


@pytest.mark.parametrize("wire", ["mapped", "tcp"])
def test_samples_of_a_group_come_with_what_they_share(stages: Stages, trainer: Make, wire: str) -> None:
    shared: dict[str, Any] = {"prompt": "shared", "tokens": [1]}
    write_group(stages.rollout, shared, [{"reward": at} for at in range(3)], samples_ring=stages.reward)
    loop = trainer(wire={wire, "tcp"})
    batch = taken(loop, 3)
    assert [(each["prompt"], float(each["reward"])) for each in batch] == [("shared", at) for at in range(3)]
    assert consume(batch) == ["shared"] * 3
    batch.release()
    del batch
    loop.close()
    assert stages.all_free()


def test_a_payload_that_two_parents_lead_to_by_different_ranks_is_acknowledged_for_both(
    stages: Stages, trainer: Make
) -> None:
    rolled = stages.rollout.write({"prompt": "p", "tokens": [1]}, readers=2)
    referenced = stages.reference.write(with_parents({"ref_logprobs": [1.0]}, [Parent(rolled, 1)]))
    stages.reward.write(with_parents({"reward": 1.0}, [rolled, referenced]))
    loop = trainer(wire={"tcp"})
    assert consume(taken(loop, 1)) == ["p"]
    loop.close()
    assert stages.all_free()
