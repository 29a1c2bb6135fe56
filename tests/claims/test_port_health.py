"""Reads and claims of one client know the same of a port: what one has found out, the other does not try."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from helpers import asynchronous, dead_port, eventually, until
from loopback import LOOPBACK, at
from takes import remote

from transport import SharedRingBuffer, Ticket, Trainer, UCXXServer
from transport.claims.demands import Demands
from transport.claims.places import RingAddress
from transport.claims.taken_part import TakenPart
from transport.errors import RetriesExhaustedError

pytestmark = pytest.mark.ucx


@pytest.fixture
def ring(prefix: str) -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(prefix=prefix, slots=4, slot_bytes=64) as made, UCXXServer(made, mode="thread"):
        yield made


def demands_of(claims: Any, ring: SharedRingBuffer, dead: int, came: list[TakenPart]) -> Demands:
    """Demands of a ring that is said to be served at a dead port first, then at its own."""
    place = RingAddress((LOOPBACK,), (dead, *ring.native.ports()), ring.ring_id)
    made = Demands(claims, lambda: {"it": place}, came.append, lambda *_: None, rank=0, most_attempts=0)
    made.want(1, 1, None)
    return made


def test_a_trainer_of_shared_memory_alone_waits_for_who_is_not_there_yet() -> None:
    with dead_port() as port, Trainer(rings=f"rings://{at(port)}", wire={"shm"}) as trainer:

        def unreached() -> bool:
            assert trainer.take(1, 0.05) is None
            return bool(trainer.rings._network.unreached(0.0))

        eventually(unreached, "it has tried")


def at_ports(ticket: Ticket, *ports: int) -> Ticket:
    return msgspec.structs.replace(ticket, addresses=(LOOPBACK,), ports=ports)


@asynchronous
async def test_a_port_that_a_claim_could_not_reach_is_not_tried_by_a_read(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "randrange", lambda *_: 0)  # else a claim may begin at the port that answers
    ticket, came = ring.write_raw(b"one"), list[TakenPart]()
    with dead_port() as dead:
        async with remote(ack="manual") as client:
            demands = demands_of(client.claims, ring, dead, came)
            await until(lambda: bool(came), "the payload comes through the other port")
            assert client.statistics().quarantined_ports == (at(dead),)
            for _ in range(4):
                await client.read(at_ports(ticket, dead, *ring.native.ports()))
            assert client.statistics().retries == 0
            demands.close()


@asynchronous
async def test_a_port_that_a_read_could_not_reach_is_not_tried_by_a_claim(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(random, "randrange", lambda *_: 0)
    ticket, came = ring.write_raw(b"one"), list[TakenPart]()
    with dead_port() as dead:
        async with remote(ack="manual") as client:
            with pytest.raises(RetriesExhaustedError):
                await client.read(at_ports(ticket, dead))
            demands = demands_of(client.claims, ring, dead, came)
            await until(lambda: bool(came), "the payload comes through the other port")
            assert [each for each in caplog.messages if "cannot take payloads" in each] == []
            demands.close()


@asynchronous
async def test_a_connection_of_claims_that_breaks_is_known_to_reads_until_its_port_answers(
    ring: SharedRingBuffer,
) -> None:
    with dead_port() as dead:
        async with remote() as client:
            came: list[TakenPart] = []
            demands = demands_of(client.claims, ring, dead, came)
            await until(lambda: bool(demands.connections), "it is connected")
            [connection] = demands.connections
            connection.link.abort()
            await until(lambda: at(connection.link.port[1]) in client.statistics().quarantined_ports, "it is noted")
            demands.close()
            await client.claims.open(connection.link.port)
            assert at(connection.link.port[1]) not in client.statistics().quarantined_ports
