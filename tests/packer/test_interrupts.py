"""A trainer's calls, interrupted at every instant: repeated they give the same payloads, and no claim is forgotten."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import interrupted_instants
import interrupted_lines
import numpy as np
import pytest

from transport import Schema, SharedRingBuffer, Trainer, UCXXServer
from transport.packer.prefetch import FetchedBatch
from transport.packer.rollout import queued
from transport.queue import Claim
from transport.testing import MemoryQueue

pytestmark = [
    pytest.mark.ucx,
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # which that one becomes
]
SCHEMA = Schema.of(step=("int64",))
Interrupting = Callable[[int, Callable[[], object]], bool]
WAYS = pytest.mark.parametrize(
    "interrupted", [interrupted_lines.interrupted, interrupted_instants.interrupted], ids=["lines", "instants"]
)


class Job:
    """A trainer over the rings' tickets in a queue of this process."""

    def __init__(self, trainer: Trainer, ring: SharedRingBuffer, queue: MemoryQueue) -> None:
        self.trainer, self.ring, self.queue = trainer, ring, queue
        self.steps = 0

    def publish(self, count: int) -> list[int]:
        steps = list(range(self.steps, self.steps + count))
        self.queue.publish([queued(self.ring.write({"step": np.int64(step)})) for step in steps])
        self.steps += count
        return steps

    def collected(self, count: int) -> FetchedBatch:
        claims: list[Claim] = self.trainer.claim_tickets(count, 5.0)
        assert len(claims) == count
        self.trainer.start_prefetch(claims)
        batch = self.trainer.collect_prefetch(20.0)
        assert batch is not None and not batch.failures
        return batch


@pytest.fixture(params=["on_consumed", "on_arrival"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    with (
        SharedRingBuffer.create(SCHEMA, slots=8) as ring,
        UCXXServer(ring, addresses=("127.0.0.1",), mode="thread"),
        contextlib.closing(MemoryQueue()) as queue,
        Trainer(schemas=[SCHEMA], queue=queue, wire={"mapped"}, ack=request.param) as trainer,
    ):
        yield Job(trainer, ring, queue)


def in_the_trainer(interrupted: Interrupting, at: int, job: Job, call: Callable[[], Any]) -> bool:
    """Interrupted outside the queue: what its ends answer is its own affair."""
    ends: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ack_many", "finish", "retry", "discard", "claim"):
            ends[name] = getattr(job.queue, name)
            patch.setattr(job.queue, name, unseen(ends[name]))
        return interrupted(at, call)


def unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    import sys

    def called(*arguments: Any, **named: Any) -> Any:
        tracing = sys.gettrace()
        sys.settrace(None)
        try:
            return function(*arguments, **named)
        finally:
            sys.settrace(tracing)

    return called


@WAYS
def test_a_batch_whose_consumption_is_interrupted_anywhere_is_trained_on_once(
    job: Job, interrupted: Interrupting
) -> None:
    at, goes_on = 0, True
    while goes_on:
        at += 1
        steps = job.publish(2)
        batch = job.collected(2)
        trained: list[Any] = []
        goes_on = in_the_trainer(
            interrupted, at, job, lambda batch=batch, trained=trained: trained.append(job.trainer.consume(batch))
        )
        if not trained:
            trained.append(job.trainer.consume(batch))
        assert [int(payload["step"]) for payload in trained[0]] == steps, f"interrupted at {at}"
    assert at > 10
    statistics = job.trainer.ucxx_statistics()
    assert (statistics.consumed, statistics.duplicates, statistics.lost_claims) == (2 * at, 0, 0)
    assert job.queue.depth().done == 2 * at


def test_a_claim_that_was_not_prefetched_becomes_a_policy_input(job: Job) -> None:
    """With ``ack="on_arrival"`` it arrives first."""
    job.publish(1)
    [claim] = job.trainer.claim_tickets(1, 5.0)
    assert job.trainer.get_policy_input(claim)["step"] == 0
    assert job.queue.depth().done == 1


@WAYS
def test_a_payload_whose_input_was_interrupted_anywhere_is_the_next_calls(job: Job, interrupted: Interrupting) -> None:
    at, goes_on = 0, True
    while goes_on:
        at += 1
        [step] = job.publish(1)
        [claim] = job.trainer.claim_tickets(1, 5.0)
        given: list[Any] = []
        goes_on = in_the_trainer(
            interrupted,
            at,
            job,
            lambda claim=claim, given=given: given.append(job.trainer.get_policy_input(claim)),
        )
        if not given:
            given.append(job.trainer.get_policy_input(claim))
        assert int(given[0]["step"]) == step, f"interrupted at {at}"
    assert at > 10


@WAYS
@pytest.mark.parametrize("call", ["claim_tickets", "abandon", "cancel_prefetch"])
def test_claims_of_an_interrupted_call_are_given_back_when_the_trainer_ends(
    job: Job, interrupted: Interrupting, call: str
) -> None:
    calls: dict[str, Callable[[FetchedBatch | None], object]] = {
        "claim_tickets": lambda _: job.trainer.claim_tickets(1, 5.0),
        "abandon": lambda batch: job.trainer.abandon(batch),  # type: ignore[arg-type]
        "cancel_prefetch": lambda _: job.trainer.cancel_prefetch(),
    }
    at, goes_on = 0, True
    while goes_on:
        at += 1
        job.publish(2)
        batch = job.collected(1) if call == "abandon" else None
        if call == "cancel_prefetch":
            job.trainer.claim_tickets(1, 5.0)
        goes_on = in_the_trainer(interrupted, at, job, lambda batch=batch: calls[call](batch))
        packer = job.trainer._packer
        packer.claims.give_back(packer.claims.in_hand, "the end")
        assert job.queue.depth().claimed == 0, f"interrupted at {at}"
        for claim in job.queue.claim(8, consumer="test"):
            job.queue.ack(claim)
        for ticket in job.ring.tickets():
            job.ring.discard(ticket)
    assert at > 2
