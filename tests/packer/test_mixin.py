"""UCXXDataPackerMixin: the whole path from tickets to payloads over real rings and UCX."""

from __future__ import annotations

import time
from typing import Any

import pytest
from helpers import eventually, free
from packers import FAST, SCHEMA, Packer, Worker, collected, write

from transport.client.retry import Deadline
from transport.errors import AuthenticationError, DeadlineExceededError, StaleSlotError, TicketError, UsageError
from transport.packer.consumed_record import ConsumedRecord
from transport.packer.mixin import UCXXDataPackerMixin
from transport.packer.options import ClientOptions, ServerOptions

pytestmark = pytest.mark.ucx


class BasePacker:
    """A trainer framework's own packer."""

    def get_policy_input(self, item: Any, scale: int = 1) -> Any:
        return ("base", item, scale)


class MixedPacker(UCXXDataPackerMixin, BasePacker):
    """As a user writes it."""


def steps(payloads: Any) -> list[int]:
    return [int(payload["step"]) for payload in payloads]


def test_a_batch_arrives_in_order_and_is_trained_on_once(worker: Worker, packer: Packer) -> None:
    tickets = [write(worker, step) for step in range(6)]
    batch = collected(packer, tickets)
    payloads = packer.consume(batch)
    assert steps(payloads) == list(range(6))
    assert [payload["obs"].shape for payload in payloads] == [(step + 1, 4) for step in range(6)]
    assert [payload.metadata["reward"] for payload in payloads] == [float(step) for step in range(6)]
    assert packer.consume(batch) == payloads  # asked again
    assert packer.ucxx_statistics().consumed == 6
    assert len(packer.consumed_record()) == 6
    payloads.clear()
    batch.release()
    eventually(lambda: free(worker.ring), "every slot is free")


def test_a_payload_that_is_gone_is_missing_and_the_others_arrive(worker: Worker, packer: Packer) -> None:
    tickets = [write(worker, step) for step in range(3)]
    worker.ring.discard(tickets[1])
    batch = collected(packer, tickets)
    assert steps(packer.consume(batch)) == [0, 2]
    (failure,) = batch.failures
    assert isinstance(failure.error, StaleSlotError)
    assert packer.ucxx_statistics().stale == 1


def test_a_duplicate_is_dropped_without_a_read(worker: Worker, packer: Packer) -> None:
    ticket = write(worker, 5)
    packer.consume(collected(packer, [ticket]))
    batch = collected(packer, [ticket])
    assert batch.items[0].duplicate
    assert packer.consume(batch) == []
    statistics = packer.ucxx_statistics()
    assert (statistics.duplicates, statistics.client.reads) == (1, 1)


def test_a_ticket_that_comes_twice_in_a_batch_is_trained_on_once(worker: Worker, packer: Packer) -> None:
    ticket = write(worker, 5)
    batch = collected(packer, [ticket, ticket])
    assert len(batch.payloads) == 2
    assert steps(packer.consume(batch)) == [5]
    assert packer.ucxx_statistics().duplicates == 1


def test_a_payload_that_another_reader_has_consumed_is_not_trained_on(worker: Worker) -> None:
    ticket = write(worker, 5)
    packers = [Packer(), Packer()]
    for each in packers:
        each.setup_ucxx_packer(schemas=[SCHEMA], wire={"mapped"})
    try:
        first, second = (collected(each, [ticket]) for each in packers)
        assert steps(packers[1].consume(second)) == [5]
        assert packers[0].consume(first) == []
        assert packers[0].ucxx_statistics().lost_claims == 1
        first.release()
        second.release()
    finally:
        for each in packers:
            each.cleanup_ucxx_packer()


def test_get_policy_input_resolves_tickets_prefetched_or_not(worker: Worker) -> None:
    prefetched, cold = write(worker, 1), write(worker, 2)
    packer = MixedPacker()
    packer.setup_ucxx_packer(schemas=[SCHEMA])
    packer.start_prefetch([prefetched])
    batch = packer.collect_prefetch(20)
    assert int(packer.get_policy_input(prefetched)["step"]) == 1
    assert int(packer.get_policy_input(cold.encode())["step"]) == 2
    assert packer.get_policy_input("no ticket", scale=3) == ("base", "no ticket", 3)
    assert packer.ucxx_statistics().client.reads == 2
    with pytest.raises(StaleSlotError, match="already consumed"):
        packer.get_policy_input(cold)
    del batch
    packer.cleanup_ucxx_packer()


def test_get_policy_input_works_before_and_after_consume(worker: Worker, packer: Packer) -> None:
    tickets = [write(worker, step) for step in range(2)]
    batch = collected(packer, tickets)
    assert int(packer.get_policy_input(tickets[0])["step"]) == 0
    assert steps(packer.consume(batch)) == [1]
    assert [int(packer.get_policy_input(ticket)["step"]) for ticket in tickets] == [0, 1]
    assert packer.ucxx_statistics().consumed == 2
    batch.release()


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


def test_what_could_not_be_read_in_time_is_read_later(worker: Worker) -> None:
    ticket = write(worker, 1)
    packer = Packer()
    packer.setup_ucxx_packer(schemas=[SCHEMA], client=ClientOptions(settings=FAST), wire={"tcp"})
    deadline = Deadline.after(0.0, time.monotonic())
    batch = packer._packer.thread.run(packer._ucxx_dp_fetch_all([ticket], deadline))
    (failure,) = batch.failures
    assert isinstance(failure.error, DeadlineExceededError)
    assert steps(packer.consume(collected(packer, [ticket]))) == [1]
    packer.cleanup_ucxx_packer()


def test_a_trainers_own_fault_is_raised_and_the_payloads_stay() -> None:
    worker = Worker()
    worker.setup_ucxx(SCHEMA, slots=4, mode="thread", server=ServerOptions(secret=b"right"))
    tickets = [write(worker, step) for step in range(2)]
    packer = Packer()
    packer.setup_ucxx_packer(schemas=[SCHEMA], wire={"tcp"}, client=ClientOptions(secret=b"wrong"))
    packer.start_prefetch(tickets)
    with pytest.raises(AuthenticationError):
        packer.collect_prefetch(20)
    packer.setup_ucxx_packer(schemas=[SCHEMA], wire={"tcp"}, client=ClientOptions(secret=b"right"))
    assert len(packer.consume(collected(packer, tickets))) == 2
    packer.cleanup_ucxx_packer()
    worker.cleanup_ucxx()


def test_a_ring_of_another_secret_is_a_failure_of_its_payloads_alone(worker: Worker) -> None:
    stranger, packer = Worker(), Packer()
    stranger.setup_ucxx(SCHEMA, slots=4, mode="thread", server=ServerOptions(secret=b"of another start"))
    packer.setup_ucxx_packer(schemas=[SCHEMA], wire={"tcp"})
    batch = collected(packer, [write(worker, 1), write(stranger, 2)])
    assert [type(failure.error) for failure in batch.failures] == [AuthenticationError]
    assert steps(packer.consume(batch)) == [1]
    packer.cleanup_ucxx_packer()
    stranger.cleanup_ucxx()


def test_what_is_no_ticket_is_refused_and_fetches_nothing(worker: Worker, packer: Packer) -> None:
    with pytest.raises(TicketError):
        packer.start_prefetch([write(worker, 1), b"no ticket"])  # type: ignore[list-item]
    assert packer.collect_prefetch(0.0) is None
    with pytest.raises(UsageError, match="give the batch"):
        packer.consume([])  # type: ignore[arg-type]


def test_a_payload_of_an_unknown_schema_fails_and_is_read_by_who_knows_it(worker: Worker) -> None:
    ticket = write(worker, 3)
    packer = Packer()
    packer.setup_ucxx_packer(client=ClientOptions(settings=FAST))
    batch = collected(packer, [ticket])
    assert "schema" in str(batch.failures[0].error)
    assert packer.consume(batch) == []
    packer.setup_ucxx_packer(schemas=[SCHEMA])
    assert steps(packer.consume(collected(packer, [ticket]))) == [3]
    packer.cleanup_ucxx_packer()


@pytest.mark.parametrize("wire", ["mapped", "tcp"])
def test_a_duplicate_frees_its_slot(worker: Worker, wire: str) -> None:
    ticket = write(worker, 5)
    record = ConsumedRecord()
    assert record.accept(*ticket.identity, 0)  # and the slot was never told
    packer = Packer()
    packer.setup_ucxx_packer(schemas=[SCHEMA], consumed=record, wire={wire})  # type: ignore[arg-type]
    batch = collected(packer, [ticket])
    assert batch.items[0].duplicate
    packer.cleanup_ucxx_packer()
    assert worker.ring_statistics().ready == 0
