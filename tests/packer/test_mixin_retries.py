"""Layers 2 and 3 of the retries, with a scripted client and its clock."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from packers import FAST, Packer, replace_client, ticket_of

from transport.client.payload import ReadOutcome
from transport.client.retry import Deadline
from transport.errors import (
    ConnectionLostError,
    DeadlineExceededError,
    RetriesExhaustedError,
    StaleSlotError,
    TransportError,
)
from transport.packer.mixin import FetchedBatch
from transport.packer.options import ClientOptions
from transport.ticket import Ticket


class ScriptedClient:
    """Answers each ticket with the outcomes scripted for it, in turn; the last one repeats."""

    def __init__(self, script: dict[int, list[TransportError | None]]) -> None:
        self.script = script
        self.calls: dict[int, int] = {}

    def _answer(self, ticket: Ticket) -> Any:
        call = self.calls.get(ticket.slot, 0)
        self.calls[ticket.slot] = call + 1
        outcomes = self.script[ticket.slot]
        return outcomes[min(call, len(outcomes) - 1)]

    async def read(self, ticket: Ticket, **_: Any) -> Any:
        outcome = self._answer(ticket)
        if outcome is not None:
            raise outcome
        return FakePayload(ticket)

    async def read_many(self, tickets: list[Ticket], **_: Any) -> AsyncGenerator[Any, None]:
        for ticket in tickets:
            outcome = self._answer(ticket)
            yield ReadOutcome(0, ticket, None if outcome else FakePayload(ticket), outcome)  # type: ignore[arg-type]

    def end(self) -> None: ...

    async def close(self) -> None:
        pass


class FakePayload:
    """As much of a payload as the layers touch."""

    undescribed = ""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.nbytes = ticket.size

    def release(self) -> None:
        pass


def scripted(script: dict[int, list[TransportError | None]]) -> tuple[Packer, ScriptedClient]:
    packer = Packer()
    packer.setup_ucxx_packer(client=ClientOptions(settings=FAST))
    client = ScriptedClient(script)
    replace_client(packer, client)
    return packer, client


def run_fetch(packer: Packer, slots: list[int], seconds: float = 60.0) -> FetchedBatch:
    deadline = Deadline.after(seconds, time.monotonic())
    batch = packer._packer.thread.run(packer._ucxx_dp_fetch_all([ticket_of(slot) for slot in slots], deadline))
    packer.cleanup_ucxx_packer()
    return batch


def test_a_ticket_that_always_fails_costs_calls_times_rounds_and_no_more() -> None:
    packer, client = scripted({0: [ConnectionLostError("gone")]})
    batch = run_fetch(packer, [0])
    assert client.calls[0] == FAST.calls_per_ticket * FAST.rounds_per_batch
    assert batch.rounds == FAST.rounds_per_batch
    assert isinstance(batch.items[0].error, RetriesExhaustedError)
    assert batch.items[0].error.__cause__ is not None


def test_a_final_error_is_tried_once() -> None:
    packer, client = scripted({0: [StaleSlotError("gone")], 1: [None]})
    batch = run_fetch(packer, [0, 1])
    assert client.calls == {0: 1, 1: 1}
    assert batch.rounds == 1
    assert isinstance(batch.items[0].error, StaleSlotError)
    assert batch.items[1].payload is not None


def test_a_later_round_reads_only_what_failed() -> None:
    lost = ConnectionLostError("cut")
    packer, client = scripted({0: [None], 1: [lost, lost, None], 2: [lost, None]})
    batch = run_fetch(packer, [0, 1, 2])
    assert client.calls == {0: 1, 1: 3, 2: 2}
    assert batch.rounds == 2
    assert batch.failures == []


def test_no_round_begins_after_the_deadline() -> None:
    packer, client = scripted({0: [ConnectionLostError("cut")]})
    batch = run_fetch(packer, [0], seconds=0.0)
    assert client.calls[0] == 1
    assert batch.rounds == 1
    assert isinstance(batch.items[0].error, DeadlineExceededError)
