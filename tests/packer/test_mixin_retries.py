"""Layers 2 and 3 of the retries, over a client whose first calls for a payload fail as on a connection that is cut."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from packers import FAST, SCHEMA, Packer, Worker, collected, write

from transport.client.payload import ReadOutcome
from transport.errors import ConnectionLostError, RetriesExhaustedError, StaleSlotError
from transport.packer import mixin
from transport.packer.mixin import FetchedBatch
from transport.packer.options import ClientOptions
from transport.settings import Settings
from transport.ticket import Ticket

pytestmark = pytest.mark.ucx
ALWAYS = 1000


class CutClient:
    """A client that answers as many calls for each slot as are given with a connection that was lost."""

    def __init__(self, client: Any, cuts: dict[int, int]) -> None:
        self._client = client
        self._cuts = cuts
        self.calls = dict.fromkeys(cuts, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def _is_cut(self, ticket: Ticket) -> bool:
        self.calls[ticket.slot] += 1
        return self.calls[ticket.slot] <= self._cuts[ticket.slot]

    async def read(self, ticket: Ticket, **options: Any) -> Any:
        if self._is_cut(ticket):
            raise ConnectionLostError("cut")
        return await self._client.read(ticket, **options)

    async def read_many(self, tickets: list[Ticket], **options: Any) -> AsyncIterator[ReadOutcome]:
        cut = [each for each in tickets if self._is_cut(each)]
        for ticket in cut:
            yield ReadOutcome(0, ticket, None, ConnectionLostError("cut"))
        async for outcome in self._client.read_many([each for each in tickets if each not in cut], **options):
            yield outcome


def fetched(
    worker: Worker, cuts: list[int], gone: tuple[int, ...] = (), settings: Settings = FAST
) -> tuple[FetchedBatch, list[int]]:
    """A batch of as many payloads as there are ``cuts``, and how many calls each took; ``gone``: discarded before."""
    tickets = [write(worker, step) for step in range(len(cuts))]
    for at in gone:
        assert worker.ring.discard(tickets[at])
    packer = Packer()
    packer.setup_ucxx_packer(schemas=[SCHEMA], wire={"mapped"}, client=ClientOptions(settings=settings))
    try:
        client = CutClient(packer._packer.client, {each.slot: cut for each, cut in zip(tickets, cuts, strict=True)})
        packer._packer.client = client  # type: ignore[assignment]
        batch = collected(packer, tickets)
        assert len(packer.consume(batch)) == len(batch.payloads)
    finally:
        packer.cleanup_ucxx_packer()
    return batch, list(client.calls.values())


def test_a_ticket_that_always_fails_costs_calls_times_rounds_and_no_more(worker: Worker) -> None:
    batch, calls = fetched(worker, [ALWAYS])
    assert calls == [FAST.calls_per_ticket * FAST.rounds_per_batch]
    assert batch.rounds == FAST.rounds_per_batch
    assert isinstance(batch.items[0].error, RetriesExhaustedError)
    assert isinstance(batch.items[0].error.__cause__, ConnectionLostError)


def test_a_final_error_is_tried_once(worker: Worker) -> None:
    batch, calls = fetched(worker, [0, 0], gone=(0,))
    assert (calls, batch.rounds) == ([1, 1], 1)
    assert isinstance(batch.items[0].error, StaleSlotError)
    assert batch.items[1].payload is not None


def test_a_later_round_reads_only_what_failed(worker: Worker) -> None:
    batch, calls = fetched(worker, [0, 2, 1])
    assert (calls, batch.rounds, batch.failures) == ([1, 3, 2], 2, [])


def test_each_round_waits_longer_than_the_one_before(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[int] = []
    monkeypatch.setattr(mixin, "backoff", lambda rounds, *_: failures.append(rounds) or 0.0)
    fetched(worker, [ALWAYS])
    assert failures == list(range(1, FAST.rounds_per_batch))


def test_no_round_begins_that_would_end_its_pause_after_the_deadline(worker: Worker) -> None:
    long = msgspec.structs.replace(FAST, calls_per_ticket=1, backoff_first_s=1e9, backoff_most_s=1e9)
    batch, calls = fetched(worker, [ALWAYS], settings=long)
    assert (calls, batch.rounds) == ([1], 1)
    assert isinstance(batch.items[0].error, ConnectionLostError)
