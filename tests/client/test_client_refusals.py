"""What UCXXClient refuses, or is refused: tickets that are no good, secrets that differ, wires that are not allowed."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from helpers import (
    Child,
    asynchronous,
    every_wire,
    noise,
    serving,
    states,
    until,
)

from transport import Schema, SharedRingBuffer, Ticket, UCXXClient, UpTo
from transport.errors import (
    AuthenticationError,
    LengthMismatchError,
    PayloadLostError,
    StaleSlotError,
    TransportError,
    WireNotAllowedError,
    WrongKeyError,
)

pytestmark = pytest.mark.ucx


# --- tickets that are no good ----------------------------------------------------------------------
def consumed(ring: SharedRingBuffer, ticket: Ticket) -> None:
    ring.read_raw(ticket).consume()


def overwritten(ring: SharedRingBuffer, ticket: Ticket) -> None:
    ring.write_raw(noise(ticket.size, 99))


def discarded(ring: SharedRingBuffer, ticket: Ticket) -> None:
    ring.discard(ticket)


@every_wire
@pytest.mark.parametrize("fate", [consumed, overwritten, discarded])
@pytest.mark.parametrize("size", [10, 50_000])
@asynchronous
async def test_a_payload_that_is_gone_is_stale_and_never_other_bytes(wire: Any, fate: Any, size: int) -> None:
    with serving(slots=1, overflow="overwrite") as (ring, _):
        ticket = ring.write_raw(noise(size))
        fate(ring, ticket)
        out = bytearray(size)
        async with UCXXClient(wire={wire}) as client:
            with pytest.raises(StaleSlotError):
                await client.read(ticket, out=out)
            assert not any(out)
            assert client.statistics().stale == 1
            assert client.statistics().retries == 0
            if tickets := ring.tickets():
                assert np.array_equal((await client.read(tickets[0]))["data"], noise(size, 99))


@every_wire
@asynchronous
async def test_an_expired_payload_is_stale_and_freed(wire: Any) -> None:
    with serving() as (ring, _):
        ticket = ring.write_raw(noise(10), deadline_s=0.0)
        async with UCXXClient(wire={wire}) as client:
            with pytest.raises(StaleSlotError):
                await client.read(ticket)
            assert client.statistics().stale == 1
            assert states(ring) == (0, 0)


@every_wire
@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0], ids=["ahead", "behind"])
@asynchronous
async def test_a_deadline_is_judged_by_the_writers_clock_and_not_by_the_clients(wire: Any, ahead_s: float) -> None:
    """To a client whose clock is ahead, every deadline lies that much further back."""
    with serving() as (ring, _):
        lives, expired = ring.write_raw(noise(10), deadline_s=600.0), ring.write_raw(noise(20), deadline_s=0.0)
        assert lives.deadline is not None
        assert expired.deadline is not None
        lives = msgspec.structs.replace(lives, deadline=lives.deadline - ahead_s)
        expired = msgspec.structs.replace(expired, deadline=expired.deadline - ahead_s)
        async with UCXXClient(wire={wire}) as client:
            outcomes = {outcome.ticket.size: outcome async for outcome in client.read_many([lives, expired])}
            assert outcomes[10].payload is not None
            assert np.array_equal(outcomes[10].payload["data"], noise(10))
            assert isinstance(outcomes[20].error, StaleSlotError)


@every_wire
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"key": 1}, WrongKeyError),
        ({"generation": 2}, WrongKeyError),
        ({"size": 11}, LengthMismatchError),
        ({"size": 20_000}, LengthMismatchError),
    ],
    ids=str,
)
@asynchronous
async def test_an_altered_ticket_is_refused(wire: Any, change: dict[str, Any], error: type[TransportError]) -> None:
    schema = Schema.of(x=("uint8", UpTo(20_000)))
    with serving(schema) as (ring, _):
        ticket = ring.write({"x": noise(10)})
        async with UCXXClient(wire={wire}, schemas=[schema]) as client:
            with pytest.raises(error):
                await client.read(msgspec.structs.replace(ticket, **change))
            await until(lambda: states(ring) == (1, 0))
            assert np.array_equal((await client.read(ticket))["x"], noise(10))


@asynchronous
async def test_a_ticket_of_a_ring_that_nobody_serves_any_more_is_lost() -> None:
    with serving(ports=(0, 0)) as (ring, _):
        foreign = msgspec.structs.replace(ring.write_raw(noise(10)), ring="ab" * 16)
        async with UCXXClient() as client:
            with pytest.raises(PayloadLostError):
                await client.read(foreign)
        async with UCXXClient(wire={"mapped"}) as client:
            with pytest.raises(WireNotAllowedError):
                await client.read(foreign)


# --- who may -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("servers", "clients", "reason"),
    [
        (b"s", b"s", None),
        (b"s", b"other", "has another shared secret"),
        (b"s", None, "this client has none"),
        (None, b"s", "did not authenticate"),
    ],
)
@asynchronous
async def test_both_sides_must_have_the_same_secret_or_both_none(servers: Any, clients: Any, reason: Any) -> None:
    with serving(secret=servers) as (ring, _):
        ticket = ring.write_raw(noise(10))
        async with UCXXClient(wire={"tcp"}, secret=clients) as client:
            if reason is None:
                assert np.array_equal((await client.read(ticket))["data"], noise(10))
            else:
                with pytest.raises(AuthenticationError, match=reason):
                    await client.read(ticket)
                assert client.statistics().retries == 0
                assert states(ring) == (1, 0)


@pytest.mark.parametrize(("allowed", "offered"), [("shm", "tcp"), ("rdma", "tcp")])
@asynchronous
async def test_a_wire_that_is_not_allowed_is_refused_by_name(allowed: Any, offered: Any) -> None:
    with serving(wires=frozenset({offered})) as (ring, _):
        ticket = ring.write_raw(noise(10))
        async with UCXXClient(wire={allowed}) as client:
            with pytest.raises(WireNotAllowedError, match=f"UCX chose {offered} .*allowed are .*{allowed}"):
                await client.read(ticket)
            assert client.statistics().links_in_use + client.statistics().links_idle == 0


def test_without_ucx_payloads_of_this_host_are_read_and_others_name_what_to_install() -> None:
    code = """
import sys
sys.modules["ucxx"] = None
import uvloop
from transport import Ticket, UCXXClient
async def main():
    async with UCXXClient() as client:
        ticket = Ticket.parse(input())
        print(bytes((await client.read(ticket))["data"]).hex())
    async with UCXXClient(wire={"tcp"}) as client:
        try:
            await client.read(ticket)
        except ImportError as error:
            print(type(error).__name__, error)
uvloop.run(main())
"""
    with serving() as (ring, _), Child(code) as child:
        child.tell(ring.write_raw(noise(10), readers=2).to_text())
        assert child.line() == noise(10).tobytes().hex()
        assert child.line().startswith("MissingDependencyError ucxx is not installed")
        assert child.wait() == 0
