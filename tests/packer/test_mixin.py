"""UCXXDataPackerMixin: the whole path over real rings, queue and UCX."""

from __future__ import annotations

import time
from typing import Any

import pytest
from packers import FAST, SCHEMA, Packer, Worker, collected, fetch, write

from transport.client.retry import Deadline
from transport.errors import (
    AuthenticationError,
    DeadlineExceededError,
    StaleSlotError,
    StoreUnavailableError,
    UsageError,
)
from transport.packer.consumed_record import ConsumedRecord
from transport.packer.mixin import UCXXDataPackerMixin
from transport.packer.options import ClientOptions, ServerOptions
from transport.queue import RingQueue


class BasePacker:
    """A trainer framework's own packer."""

    def get_policy_input(self, item: Any, scale: int = 1) -> Any:
        return ("base", item, scale)


class MixedPacker(UCXXDataPackerMixin, BasePacker):
    """As a user writes it."""


@pytest.mark.ucx
def test_a_batch_arrives_in_order_and_is_trained_on_once(worker: Worker, packer: Packer, queue: RingQueue) -> None:
    for step in range(6):
        write(worker, step)
    batch = fetch(packer, 6)
    payloads = packer.consume(batch)
    assert [int(payload["step"]) for payload in payloads] == list(range(6))
    assert [payload["obs"].shape for payload in payloads] == [(step + 1, 4) for step in range(6)]
    assert [payload.metadata["reward"] for payload in payloads] == [float(step) for step in range(6)]
    assert queue.depth().done == 6
    with pytest.raises(UsageError, match="was already consumed"):
        packer.consume(batch)


@pytest.mark.ucx
def test_a_payload_whose_claim_was_lost_is_not_trained_on(worker: Worker, packer: Packer, queue: RingQueue) -> None:
    for step in range(2):
        write(worker, step)
    claims = packer.claim_tickets(2, timeout_s=20)
    batch = collected(packer, claims)
    assert queue.retry(claims[0], reason="taken away by the test")
    assert [int(payload["step"]) for payload in packer.consume(batch)] == [1]
    assert packer.ucxx_statistics().lost_claims == 1
    again = packer.consume(fetch(packer, 1))
    assert [int(payload["step"]) for payload in again] == [0]


@pytest.mark.ucx
def test_a_payload_that_is_gone_is_discarded_and_the_others_arrive(
    worker: Worker, packer: Packer, queue: RingQueue
) -> None:
    tickets = [write(worker, step) for step in range(3)]
    claims = packer.claim_tickets(3, timeout_s=20)
    worker.ring.discard(tickets[1])
    batch = collected(packer, claims)
    assert [int(payload["step"]) for payload in packer.consume(batch)] == [0, 2]
    (failure,) = batch.failures
    assert isinstance(failure.error, StaleSlotError)
    assert queue.depth().ready == queue.depth().claimed == 0
    assert packer.ucxx_statistics().stale == 1


@pytest.mark.ucx
def test_a_duplicate_is_dropped_without_a_read(worker: Worker, packer: Packer, queue: RingQueue) -> None:
    ticket = write(worker, 5)
    packer.consume(fetch(packer, 1))
    batch = collected(packer, [ticket])
    assert batch.items[0].duplicate
    assert packer.consume(batch) == []
    statistics = packer.ucxx_statistics()
    assert (statistics.duplicates, statistics.client.reads) == (1, 1)
    assert queue.depth().unfinished == 0


@pytest.mark.ucx
def test_get_policy_input_resolves_tickets_prefetched_or_not(worker: Worker, queue: RingQueue) -> None:
    prefetched, cold = write(worker, 1), write(worker, 2)
    packer = MixedPacker()
    packer.setup_ucxx_packer(schemas=[SCHEMA])
    packer.start_prefetch([prefetched])
    packer.collect_prefetch(20)
    assert int(packer.get_policy_input(prefetched)["step"]) == 1
    assert int(packer.get_policy_input(cold.encode())["step"]) == 2
    assert packer.get_policy_input("no ticket", scale=3) == ("base", "no ticket", 3)
    assert packer.ucxx_statistics().client.reads == 2
    packer.cleanup_ucxx_packer()


@pytest.mark.ucx
def test_progress_is_reported_up_to_the_whole_batch(worker: Worker) -> None:
    seen: list[tuple[int, int, int]] = []
    packer = Packer()
    packer.setup_ucxx_packer(schemas=[SCHEMA], progress=lambda *state: seen.append(state))
    tickets = [write(worker, step) for step in range(4)]
    batch = collected(packer, tickets)
    assert seen[-1] == (4, 4, sum(ticket.size for ticket in tickets))
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    batch.release()
    packer.cleanup_ucxx_packer()


@pytest.mark.ucx
def test_what_this_trainer_could_not_do_in_time_is_left_for_others(worker: Worker, queue: RingQueue) -> None:
    write(worker, 1)
    packer = Packer()
    packer.setup_ucxx_packer(schemas=[SCHEMA], queue=queue, settings=FAST, wire={"tcp"})
    claims = packer.claim_tickets(1, 20)
    deadline = Deadline.after(0.0, time.monotonic())
    batch = packer._packer.thread.run(packer._ucxx_dp_fetch_all(claims, deadline))
    (failure,) = batch.failures
    assert isinstance(failure.error, DeadlineExceededError)
    assert queue.depth().ready == 1
    packer.cleanup_ucxx_packer()


@pytest.mark.ucx
def test_a_trainers_own_fault_is_raised_and_the_claims_go_back(queue: RingQueue) -> None:
    worker = Worker()
    worker.setup_ucxx(SCHEMA, slots=4, rings=queue, mode="thread", server=ServerOptions(secret=b"right"))
    for step in range(2):
        write(worker, step)
    packer = Packer()
    packer.setup_ucxx_packer(schemas=[SCHEMA], queue=queue, wire={"tcp"}, client=ClientOptions(secret=b"wrong"))
    packer.start_prefetch(packer.claim_tickets(2, 20))
    with pytest.raises(AuthenticationError):
        packer.collect_prefetch(20)
    assert (queue.depth().ready, queue.depth().discarded) == (2, 0)
    packer.setup_ucxx_packer(schemas=[SCHEMA], queue=queue, wire={"tcp"}, client=ClientOptions(secret=b"right"))
    assert len(packer.consume(fetch(packer, 2))) == 2
    packer.cleanup_ucxx_packer()
    worker.cleanup_ucxx()


@pytest.mark.ucx
def test_a_queue_that_was_busy_is_asked_again(
    worker: Worker, packer: Packer, queue: RingQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(worker, 1)
    batch = fetch(packer, 1)
    with monkeypatch.context() as patch:
        patch.setattr(RingQueue, "ack_many", raise_away)
        with pytest.raises(StoreUnavailableError):
            packer.consume(batch)
    assert [int(payload["step"]) for payload in packer.consume(batch)] == [1]
    assert queue.depth().done == 1


def raise_away(*_: object, **__: object) -> None:
    raise StoreUnavailableError("away in the test")


@pytest.mark.ucx
def test_get_policy_input_of_a_claim_consumes_it(worker: Worker, packer: Packer, queue: RingQueue) -> None:
    write(worker, 4)
    (claim,) = packer.claim_tickets(1, 20)
    assert int(packer.get_policy_input(claim)["step"]) == 4
    assert queue.depth().done == 1
    assert packer._packer.claims.in_hand == []
    with pytest.raises(StaleSlotError):
        packer.get_policy_input(claim)


@pytest.mark.ucx
def test_get_policy_input_of_a_payload_that_is_gone_gives_its_claim_up(
    worker: Worker, packer: Packer, queue: RingQueue
) -> None:
    ticket = write(worker, 4)
    (claim,) = packer.claim_tickets(1, 20)
    worker.ring.discard(ticket)
    with pytest.raises(StaleSlotError):
        packer.get_policy_input(claim)
    assert packer._packer.claims.in_hand == []
    assert queue.depth().discarded == 1


@pytest.mark.ucx
def test_get_policy_input_works_before_and_after_consume(worker: Worker, packer: Packer, queue: RingQueue) -> None:
    tickets = [write(worker, step) for step in range(2)]
    batch = fetch(packer, 2)
    assert int(packer.get_policy_input(tickets[0])["step"]) == 0
    assert [int(payload["step"]) for payload in packer.consume(batch)] == [1]
    assert [int(packer.get_policy_input(ticket)["step"]) for ticket in tickets] == [0, 1]
    assert queue.depth().done == 2


@pytest.mark.ucx
def test_an_abandoned_batch_goes_to_another_trainer(worker: Worker, packer: Packer, queue: RingQueue) -> None:
    write(worker, 1)
    packer.abandon(fetch(packer, 1), "the step diverged")
    assert (queue.depth().ready, queue.depth().claimed) == (1, 0)
    assert [int(payload["step"]) for payload in packer.consume(fetch(packer, 1))] == [1]


@pytest.mark.ucx
@pytest.mark.parametrize("wire", ["mapped", "tcp"])
def test_a_duplicate_frees_its_slot(worker: Worker, queue: RingQueue, wire: str) -> None:
    ticket = write(worker, 5)
    (claim,) = queue.claim(1, 20, consumer="a trainer that died")
    record = ConsumedRecord()
    assert queue.ack(claim)
    assert record.accept(*ticket.identity, 0)  # and the slot was never told
    packer = Packer()
    packer.setup_ucxx_packer(schemas=[SCHEMA], consumed=record, wire={wire})
    batch = collected(packer, [ticket])
    assert batch.items[0].duplicate
    packer.cleanup_ucxx_packer()
    assert worker.ring_statistics().ready == 0
