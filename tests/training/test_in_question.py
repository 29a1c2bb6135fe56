"""What a trainer does with payloads in question: their ring went out of reach before it said who consumed them."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from found_rings import LONG_S
from helpers import NETWORK_WIRE, eventually, free
from takes import broken_between

from transport import Schema, SharedRingBuffer, Trainer, UCXXServer
from transport.claims.outcomes import Outcomes
from transport.claims.taken_part import TakenPart
from transport.errors import UsageError
from transport.training.batch import Batch

pytestmark = [pytest.mark.ucx, pytest.mark.slow]
NUMBERED = Schema.of(number=("int64",))
SLOTS = 4


class Host:
    """A ring whose listeners come and go at one port."""

    def __init__(self, ring: SharedRingBuffer, patch: pytest.MonkeyPatch) -> None:
        self.ring = ring
        self._patch = patch
        self._served = contextlib.ExitStack()
        self.port = 0
        self.serve()

    def serve(self) -> None:
        server = UCXXServer(self.ring, ports=(self.port,), addresses=("127.0.0.1",), mode="thread")
        [self.port] = self._served.enter_context(server).ports
        self._patch.setattr(Outcomes, "patience_s", LONG_S)

    def end(self) -> None:
        self._served.close()
        self._patch.setattr(Outcomes, "patience_s", 0.3)

    def ends_between(self, batch: Batch) -> None:
        """It consumes what is asked next, and is out of reach before it answers."""
        [link] = {part.claims.connection for part in batch.parts if isinstance(part, TakenPart)}
        broken_between(link, lambda: eventually(lambda: free(self.ring), "the ring has consumed them"), self.end)  # type: ignore[arg-type]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    with SharedRingBuffer.create(NUMBERED, prefix=f"asked-{secrets.token_hex(4)}-", slots=SLOTS) as ring:
        host = Host(ring, monkeypatch)
        try:
            yield host
        finally:
            host.end()


@pytest.fixture
def trainer(host: Host) -> Iterator[Trainer]:
    with Trainer(NUMBERED, f"rings://127.0.0.1:{host.port}", wire={NETWORK_WIRE}) as trainer:  # type: ignore[arg-type]
        yield trainer


def write(host: Host, numbers: Sequence[int]) -> None:
    host.ring.write_many([{"number": np.int64(number)} for number in numbers], timeout_s=LONG_S)


def take(trainer: Trainer, count: int) -> Batch:
    batch = trainer.take(count, LONG_S, fill_s=LONG_S)
    assert batch is not None and len(batch) == count
    return batch


def numbers(batch: Batch) -> list[int]:
    return sorted(int(payload["number"]) for payload in batch)


def test_a_batch_that_is_consumed_again_brings_what_was_in_question(host: Host, trainer: Trainer) -> None:
    write(host, range(3))
    batch = take(trainer, 3)
    host.ends_between(batch)
    batch.consume()
    assert (batch.accepted.tolist(), batch.in_question.tolist()) == ([False] * 3, [True] * 3)
    assert trainer.statistics().lost_claims == 0
    host.serve()
    batch.consume()
    assert (batch.accepted.tolist(), batch.in_question.tolist()) == ([True] * 3, [False] * 3)
    assert numbers(batch) == [0, 1, 2]
    assert trainer.statistics().consumed == 3
    batch.consume()  # asks nothing any more
    assert batch.accepted.all()


def test_a_batch_that_left_its_with_block_in_question_can_be_consumed_again(host: Host, trainer: Trainer) -> None:
    write(host, range(3))
    with take(trainer, 3) as batch:
        host.ends_between(batch)
        batch.consume()
    assert (batch.accepted.tolist(), batch.in_question.tolist()) == ([False] * 3, [True] * 3)
    host.serve()
    batch.consume()
    assert (batch.accepted.tolist(), batch.in_question.tolist()) == ([True] * 3, [False] * 3)


def test_what_was_accepted_stays_in_the_record_though_its_consume_is_in_question_and_given_up(
    host: Host, trainer: Trainer
) -> None:
    write(host, range(2))
    batch = take(trainer, 2)
    host.ends_between(batch)
    batch.accept()
    batch.consume()
    assert not batch.accepted.any()
    batch.release()
    assert len(trainer.record) == 2


def test_what_was_in_question_is_consumed_though_its_slots_were_used_again(host: Host, trainer: Trainer) -> None:
    write(host, range(SLOTS))
    batch = take(trainer, SLOTS)
    host.ends_between(batch)
    batch.consume()
    assert not batch.accepted.any()
    host.serve()
    write(host, range(SLOTS, 2 * SLOTS))
    later = take(trainer, SLOTS)
    assert numbers(later) == list(range(SLOTS, 2 * SLOTS))
    later.consume()
    assert later.accepted.all()
    batch.consume()
    assert batch.accepted.all()
    assert trainer.statistics().duplicates == 0


def test_a_batch_in_question_is_not_given_back(host: Host, trainer: Trainer) -> None:
    write(host, range(2))
    batch = take(trainer, 2)
    host.ends_between(batch)
    batch.consume()
    assert batch.in_question.all() if not batch.accepted.any() else False
    with pytest.raises(UsageError):
        batch.give_back()
