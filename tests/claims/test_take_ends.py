"""Ends of claims over the wire that are not consumption: the ring is told why, and what became of what had arrived."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import frame_codec
import pytest
from helpers import asynchronous, until
from scripted_peer import LARGE, Stage
from takes import LONG_S, SLOTS, ended, link_of, tcp

from transport import SharedRingBuffer, UCXXClient
from transport.claims.batch import End, TakenBatch, Verdict
from transport.ticket import Ticket
from transport.wire import frames
from transport.wire.frames import Ended, Kind, Record

pytestmark = pytest.mark.ucx


def counts(ring: SharedRingBuffer) -> dict[str, int]:
    return {name: count for name, count in ring.native.depth(0).items() if count}


def reasons(ring: SharedRingBuffer) -> list[tuple[str, str, str]]:
    return [(how, reason, consumer) for *_, how, reason, consumer, _ in ring.native.failures()]


async def taken(client: UCXXClient, stage: Stage, n: int) -> TakenBatch:
    return await client.take(f"127.0.0.1:{stage.port}", n, wait_s=LONG_S)


def end(number: int, ticket: Ticket, *, texts: bytes = b"", **fields: Any) -> bytes:
    """An END message; ``key`` is the lengths of its texts."""
    record = Record(Kind.END, ticket.slot, ticket.generation, attempts=1)._replace(**fields)
    return bytes(frame_codec.sealed(frame_codec.encode_control(number, [record]) + texts))


# --- connections that end ---------------------------------------------------------------------------
@asynchronous
async def test_a_connection_whose_demand_brought_nothing_is_freed_when_it_ends(
    ring: SharedRingBuffer,
) -> None:
    async with Stage(ring) as stage, tcp() as client:
        nothing = await client.take(f"127.0.0.1:{stage.port}", 1)
        assert len(nothing) == 0
        connection = weakref.ref(nothing.claims.connection)
        nothing.claims.connection.abort()
        del nothing
        ring.write_raw(b"through another connection")
        batch = await taken(client, stage, 1)
        gc.collect()
        assert connection() is None
        assert (await batch.consume()).tolist() == [True]


# --- END --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", list(Ended), ids=lambda how: how.name.lower())
@asynchronous
async def test_a_delivery_that_ends_unused_is_counted_and_logged_as_the_ring_itself_does(
    ring: SharedRingBuffer, how: Ended
) -> None:
    ring.write_raw(b"of no use")
    async with Stage(ring) as stage, tcp() as client:
        batch = await taken(client, stage, 1)
        assert await ended(batch, Verdict[how.name], "it has no\nreward", "trainer 7") == [True]
        assert await ended(batch, Verdict[how.name], "again", "trainer 7") == [True]
        assert (await batch.consume()).tolist() == [False]
    assert reasons(ring) == [(how.name.lower(), "it has no reward", "trainer 7")]
    expected = {"dead": {"dead": 1, "retried": 1}, "aged": {"discarded": 1, "aged": 1}}
    assert counts(ring) == expected.get(how.name.lower(), {"discarded": 1})
    assert ring.statistics().free == SLOTS


@asynchronous
async def test_a_reason_is_cut_to_what_the_ring_keeps_between_two_characters(ring: SharedRingBuffer) -> None:
    ring.write_raw(b"of no use")
    async with Stage(ring) as stage, tcp() as client:
        batch = await taken(client, stage, 1)
        assert await ended(batch, Verdict.DISCARDED, "ä" * 200, "a" + "é" * 99 + "\ud800") == [True]
    assert reasons(ring) == [("discarded", "ä" * 80, "a" + "é" * 27)]


@asynchronous
async def test_texts_that_are_not_utf8_are_stored_as_one_line_that_can_be_shown(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(b"of no use")
    async with Stage(ring) as stage:
        peer = await stage.connected()
        number = peer.tell(Record(Kind.TAKE, slot=1, length=1 << 10, joined_most=1 << 10))
        await peer.endpoint.receive(bytearray(8192), frames.tag(peer.base, number))
        texts = b"\xff\xed\xa0\x80\x1b[2J\n\xc2\x85ok\xf4\x90\x80\x80" + b"a\xc3"
        peer.send(end(peer.number, ticket, texts=texts, key=2 << 32 | len(texts) - 2))
        [answer] = await peer.status(peer.number)
        assert answer.code == 0
    assert reasons(ring) == [("discarded", "???? [2J  ok????", "a?")]


@asynchronous
async def test_an_end_while_the_payload_is_being_sent_frees_the_slot_afterwards(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    async with Stage(ring) as stage:
        peer = await stage.connected()
        peer.tell(Record(Kind.TAKE, slot=1, length=1 << 20, joined_most=1 << 20))
        await until(lambda: ring.native.depth(0)["claimed"] == 1, "it is claimed")
        peer.send(end(peer.number, ticket, texts=b"late", key=4))
        [answer] = await peer.status(peer.number)
        assert answer.code == 0
        assert ring.native.own_pins(ticket.slot) == 1  # UCX is in the slot
        await peer.endpoint.receive(bytearray(1 << 20), frames.tag(peer.base, 1))
        await until(lambda: ring.statistics().free == SLOTS, "the slot is free")
    assert reasons(ring) == [("discarded", "late", "")]


@asynchronous
async def test_a_claim_that_is_given_back_while_its_payload_is_read_leaves_no_pin_behind(
    ring: SharedRingBuffer,
) -> None:
    ticket = ring.write_raw(LARGE)
    async with Stage(ring, ack_timeout_s=3000.0) as stage:
        peer = await stage.connected()
        number = peer.tell(Record(Kind.TAKE, slot=1, length=1 << 20))
        await peer.endpoint.receive(bytearray(8192), frames.tag(peer.base, number))
        peer.holds = True
        [answer] = await peer.ask(Record(Kind.READ, ticket.slot, ticket.generation, 0, ticket.key, ticket.size))
        assert answer.code == 0
        [answer] = await peer.ask(Record(Kind.GIVE_BACK, ticket.slot, ticket.generation, attempts=1))
        assert answer.code == 0
        assert ring.native.own_pins(ticket.slot) == 1  # UCX is in the slot
        await peer.complete()
        await until(lambda: ring.native.own_pins(ticket.slot) == 0, "nothing holds the slot")


@pytest.mark.parametrize(
    ("count", "fields", "texts"),
    [
        (2, {}, b""),
        (1, {"joined_most": 3}, b""),
        (1, {"key": 161}, b"x" * 161),
        (1, {"key": 57 << 32}, b"x" * 57),
        (1, {"key": 5}, b"four"),
        (1, {"key": 3 << 32 | 3}, b"xyz12"),
        (1, {"key": (1 << 64) - 1}, b"x" * 400),
    ],
    ids=["not alone", "unknown way", "long reason", "long name", "short reason", "short name", "lengths"],
)
@asynchronous
async def test_an_end_that_contradicts_itself_closes_that_connection_only(
    ring: SharedRingBuffer, count: int, fields: dict[str, int], texts: bytes
) -> None:
    ticket = ring.write_raw(b"stays")
    async with Stage(ring) as stage:
        other, peer = await stage.connected(), await stage.peer()
        await peer.greet()
        record = Record(Kind.END, ticket.slot, ticket.generation, attempts=1)._replace(**fields)
        peer.send(bytes(frame_codec.encode_control(0, [record] * count)) + texts)
        await peer.task
        assert peer.closed
        assert list(stage.listener._connections) == [other.connection]
    assert counts(ring) == {"ready": 1}


@asynchronous
async def test_a_claim_of_another_connection_cannot_be_ended(ring: SharedRingBuffer) -> None:
    ring.write_raw(b"another's")
    async with Stage(ring) as stage, tcp() as client, tcp() as stranger:
        batch = await taken(client, stage, 1)
        ring.write_raw(b"its own")
        other = link_of(await taken(stranger, stage, 1))
        assert await other.end(batch.rows, End(Verdict.DISCARDED, "not mine", "x"), False) == [1]
        assert (await batch.consume()).tolist() == [True]


# --- what has arrived ---------------------------------------------------------------------------------
