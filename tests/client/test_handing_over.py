"""ack="on_arrival" and `read_many`: what is acknowledged is what somebody was handed, however the iteration ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from helpers import NETWORK_WIRE, asynchronous, every_wire, noise, serving, states, until

from transport import SharedRingBuffer, Ticket, UCXXClient
from transport.client.blocking import BlockingClient
from transport.client.payload import ReadOutcome
from transport.errors import ClosedError, StaleSlotError
from transport.runtime.loop_thread import Job

pytestmark = pytest.mark.ucx

COUNT = 64
SMALL = 500  # of which one message brings 31
LARGE = 70_000

Outcomes = AsyncGenerator[ReadOutcome, None]


def written(ring: SharedRingBuffer, size: int) -> list[Ticket]:
    return [ring.write_raw(noise(size, number)) for number in range(COUNT)]


async def until_fetched_ahead(client: UCXXClient) -> None:
    """Payloads beyond the one handed over are here, as many as there will be while nobody asks for the next."""
    await until(lambda: client.statistics().reads > 1)
    await until(lambda: client.statistics().links_in_use == 0)


async def _leaves(client: UCXXClient, outcomes: Outcomes) -> Ticket:
    async for outcome in outcomes:
        ticket = outcome.ticket
        del outcome
        await until_fetched_ahead(client)
        break
    await outcomes.aclose()
    return ticket


async def _throws(client: UCXXClient, outcomes: Outcomes) -> Ticket:
    ticket = (await anext(outcomes)).ticket
    await until_fetched_ahead(client)
    with contextlib.suppress(KeyError):
        await outcomes.athrow(KeyError("of whoever iterates"))
    return ticket


async def _is_cancelled(client: UCXXClient, outcomes: Outcomes) -> Ticket:
    seen: list[Ticket] = []

    async def iterate() -> None:
        async for outcome in outcomes:
            seen.append(outcome.ticket)
            del outcome
            await until_fetched_ahead(client)
            await asyncio.get_running_loop().create_future()

    iterating = asyncio.create_task(iterate())
    await until(lambda: seen)
    await until_fetched_ahead(client)
    iterating.cancel()
    await asyncio.wait([iterating])
    await outcomes.aclose()
    (ticket,) = seen
    return ticket


async def _forgets(client: UCXXClient, outcomes: Outcomes) -> Ticket:
    ticket = (await anext(outcomes)).ticket
    await until_fetched_ahead(client)
    del outcomes  # the loop ends it
    return ticket


async def _closes_the_client(client: UCXXClient, outcomes: Outcomes) -> Ticket:
    ticket = (await anext(outcomes)).ticket
    await until_fetched_ahead(client)
    await client.close()
    rest = [(outcome.payload, type(outcome.error)) async for outcome in outcomes]
    assert rest == [(None, ClosedError)] * (COUNT - 1)
    return ticket


@pytest.mark.nightly(keep=1)
@every_wire
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("who", [_leaves, _throws, _is_cancelled, _forgets, _closes_the_client])
@asynchronous
async def test_what_nobody_was_handed_is_not_consumed(
    wire: Any, size: int, who: Callable[[UCXXClient, Outcomes], Coroutine[Any, Any, Ticket]]
) -> None:
    with serving(slots=COUNT, slot_bytes=LARGE) as (ring, _):
        tickets = written(ring, size)
        async with UCXXClient(wire={wire}) as client:
            handed = await who(client, client.read_many(tickets))
            gc.collect()
        await until(lambda: states(ring) == (COUNT - 1, 0), "all but the one handed over are there to be read")
        assert ring.statistics().consumes == 1
        left = [ticket for ticket in tickets if ticket != handed]
        async with UCXXClient(wire={wire}) as other:
            async for _, ticket, payload, error in other.read_many(left):
                assert error is None
                assert payload is not None
                assert np.array_equal(payload["data"], noise(size, tickets.index(ticket)))
            del payload
            await until(lambda: gc.collect() is not None and states(ring) == (0, 0))
        assert ring.statistics().consumes == COUNT


# --- without a loop --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("wire", "how"), [("mapped", "close"), (NETWORK_WIRE, "throw"), (NETWORK_WIRE, "closed client")]
)
def test_what_a_thread_was_not_handed_is_not_consumed(wire: Any, how: str) -> None:
    with serving(slots=COUNT, slot_bytes=LARGE) as (ring, _):
        tickets = written(ring, SMALL)
        with BlockingClient(wire={wire}) as client:
            outcomes: Any = client.read_many(tickets)
            next(outcomes)
            client._thread.run(until_fetched_ahead(client._client))
            if how == "close":
                outcomes.close()
            elif how == "throw":
                with pytest.raises(KeyError):
                    outcomes.throw(KeyError("of whoever iterates"))
            else:
                client.close()
                outcomes.close()
        gc.collect()
        asyncio.run(until(lambda: states(ring) == (COUNT - 1, 0)))
        assert ring.statistics().consumes == 1


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    ("wire", "call"), [("mapped", "read_many"), (NETWORK_WIRE, "read"), (NETWORK_WIRE, "read_many")]
)
def test_a_call_that_is_interrupted_when_its_payload_is_here_consumes_nothing(
    wire: Any, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Job.result

    def interrupted(job: Job[Any], timeout: float | None = None) -> Any:
        try:
            result(job, timeout)  # the payload came; this thread had not looked yet
        finally:
            monkeypatch.undo()
        raise KeyboardInterrupt

    with serving(slots=4, slot_bytes=LARGE) as (ring, _):
        ticket = ring.write_raw(noise(SMALL))
        with BlockingClient(wire={wire}) as client:
            monkeypatch.setattr(Job, "result", interrupted, raising=False)
            with pytest.raises(KeyboardInterrupt):
                if call == "read":
                    client.read(ticket)
                else:
                    next(client.read_many([ticket]))
            gc.collect()
        asyncio.run(until(lambda: states(ring) == (1, 0)))
        assert ring.statistics().consumes == 0
        with BlockingClient(wire={wire}) as client:
            assert np.array_equal(client.read(ticket)["data"], noise(SMALL))
        gc.collect()
        asyncio.run(until(lambda: states(ring) == (0, 0)))


def test_what_was_handed_over_and_dropped_frees_its_slot_before_all_are() -> None:
    with serving(slots=COUNT, slot_bytes=LARGE) as (ring, _), BlockingClient(wire={"mapped"}) as client:
        in_use = [sum(states(ring)) for _ in client.read_many(written(ring, SMALL)[:8])]
        assert in_use == list(range(COUNT, COUNT - 8, -1))  # the last one is in the hands of the iteration


def test_a_payload_that_another_reader_consumed_meanwhile_is_handed_to_nobody() -> None:
    with serving(slots=4, slot_bytes=LARGE) as (ring, _), BlockingClient(wire={"mapped"}) as client:
        ticket = ring.write_raw(noise(SMALL))
        first, second = client.read_many([ticket, ticket])  # both are read before one is handed over
        assert first.error is None
        assert second.payload is None
        assert isinstance(second.error, StaleSlotError)
