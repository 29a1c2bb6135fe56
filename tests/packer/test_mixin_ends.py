"""The packer on a cold start, cancelled, stopped: what it had read stays in its ring."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from helpers import eventually
from packers import SCHEMA, Packer, Worker, collected, write

from transport.client.payload import ReadOutcome
from transport.errors import (
    ClosedError,
)


def test_before_setup_and_after_cleanup_every_call_says_what_to_do() -> None:
    packer = Packer()
    for _ in range(2):
        with pytest.raises(ClosedError, match="setup_ucxx_packer"):
            packer.start_prefetch([])
        packer.setup_ucxx_packer()
        packer.cleanup_ucxx_packer()
        packer.cleanup_ucxx_packer()


def test_collecting_on_a_cold_start_gives_nothing() -> None:
    packer = Packer()
    packer.setup_ucxx_packer()
    assert packer.collect_prefetch() is None
    assert packer.wait_prefetch(0.0) is False
    packer.cleanup_ucxx_packer()


def test_setup_again_cleans_up_first() -> None:
    packer = Packer()
    packer.setup_ucxx_packer()
    packer.setup_ucxx_packer()
    assert sum(thread.name == "transport data packer" for thread in threading.enumerate()) == 1
    packer.cleanup_ucxx_packer()


@pytest.mark.ucx
@pytest.mark.parametrize(("wire", "how"), [("mapped", "cancel_prefetch"), ("tcp", "cleanup_ucxx_packer")])
def test_what_had_arrived_when_the_fetch_was_cancelled_is_read_by_another_one(
    worker: Worker, wire: str, how: str
) -> None:
    tickets = [write(worker, step) for step in range(2)]
    packer = Packer()
    packer.setup_ucxx_packer(schemas=[SCHEMA], wire={wire})  # type: ignore[arg-type]
    session = packer._packer
    arrived = threading.Event()

    async def read_many(tickets: Any, **options: Any) -> AsyncGenerator[ReadOutcome, None]:
        """All payloads arrive, but the last one is never told of."""
        payloads = [await session.client.read(ticket, rank=options["rank"]) for ticket in tickets]
        yield ReadOutcome(0, tickets[0], payloads[0], None)
        arrived.set()
        await asyncio.Event().wait()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session.client, "read_many", read_many)
        packer.start_prefetch(tickets)
        assert arrived.wait(20)
        getattr(packer, how)()
    assert worker.ring_statistics().consumes == 0
    another = Packer()
    another.setup_ucxx_packer(schemas=[SCHEMA], wire={wire})  # type: ignore[arg-type]
    batch = collected(another, tickets)
    assert sorted(int(payload["step"]) for payload in another.consume(batch)) == [0, 1]
    another.cleanup_ucxx_packer()
    packer.cleanup_ucxx_packer()


@pytest.mark.ucx
@pytest.mark.parametrize("how", ["cancel_prefetch", "cleanup_ucxx_packer"])
def test_a_batch_that_arrived_and_was_not_collected_stays_in_its_ring(worker: Worker, how: str) -> None:
    packer = Packer()
    packer.setup_ucxx_packer(schemas=[SCHEMA], wire={"tcp"})
    packer.start_prefetch([write(worker, step) for step in range(2)])
    assert packer.wait_prefetch(20)
    getattr(packer, how)()
    packer.cleanup_ucxx_packer()
    eventually(lambda: worker.ring_statistics().ready == 2)  # its listener sees in its own time that the reader left
