"""Peers that break the protocol after the handshake: nobody else notices, and every pin comes back."""

from __future__ import annotations

import contextlib

import frame_codec
import pytest
from helpers import asynchronous
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from scripted_peer import (
    LARGE,
    READY,
    SLOTS,
    SMALL,
    Stage,
    ack,
    pins,
    read,
    record,
    states,
)

from transport.errors import ConnectionLostError, StaleSlotError
from transport.ring.buffer import SharedRingBuffer
from transport.testing import run
from transport.wire import frames
from transport.wire.frames import Kind, Record

pytestmark = pytest.mark.ucx


# --- garbage --------------------------------------------------------------------------------------
def control(
    count: int = 1,
    number: int = 0,
    kind: int = Kind.BYE,
    records: int | None = None,
    version: int = frames.VERSION,
    frame: int = Kind.CONTROL,
) -> bytes:
    """A CONTROL message that says it has ``count`` records, and has ``records``; its checksum is right."""
    message = frame_codec.encode_control(number, [Record(Kind.BYE)] * (count if records is None else records), version)
    message[9] = frame
    message[10:12] = count.to_bytes(2, "little")
    if len(message) > frame_codec.HEADER_BYTES:
        message[frame_codec.HEADER_BYTES] = kind
    return bytes(frame_codec.sealed(message))


def sealed(data: bytes) -> bytes:
    """The bytes with the checksum that belongs to them."""
    return bytes(frame_codec.sealed(bytearray(data)))


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("byte", range(0, frame_codec.HEADER_BYTES + frame_codec.RECORD_BYTES, 11))
@asynchronous
async def test_one_bit_that_has_changed_in_a_request_ends_its_connection_and_its_claims(
    ring: SharedRingBuffer, byte: int
) -> None:
    ring.write_raw(SMALL)
    async with Stage(ring) as stage:
        peer = await stage.connected(takes=True)
        demand = Record(Kind.TAKE, slot=1, length=1 << 20, joined_most=1 << 20)
        number = peer.tell(demand)
        await peer.endpoint.receive(bytearray(1 << 17), frames.tag(peer.base, number))
        assert ring.native.depth(0)["claimed"] == 1
        message = frame_codec.encode_control(peer.number, [Record(Kind.RENEW)])
        message[byte] ^= 1 << byte % 8
        peer.send(message)
        await peer.task
        assert peer.closed
        depth = ring.native.depth(0)
        assert (depth["ready"], depth["claimed"]) == (1, 0)


@asynchronous
async def test_nothing_of_a_message_is_done_when_a_part_of_it_is_garbage(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    async with Stage(ring) as stage:
        peer = await stage.connected()
        peer.send(frame_codec.encode_control(1, [ack(ticket), read(ticket), Record(Kind.CONTROL)]))
        await peer.task
    assert states(ring) == READY
    assert (ring.statistics().pins, ring.statistics().consumes) == (0, 0)


@asynchronous
async def test_garbage_after_reading_gives_the_pin_back(
    ring: SharedRingBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    ticket = ring.write_raw(LARGE)
    async with Stage(ring) as stage:
        peer = await stage.connected()
        await peer.ask(read(ticket))
        peer.send(b"garbage")
        await peer.task
        assert (states(ring), pins(ring, ticket)) == (READY, 0)
    assert "ProtocolError: a control message has no header" in caplog.text


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """Bytes, or a message that is nearly right."""
    if draw(st.booleans()):
        return draw(st.binary(max_size=frame_codec.CONTROL_BYTES + 8))
    message = bytearray(control(count=draw(st.sampled_from([1, 2, 63])), number=1, kind=Kind.READ))
    for _ in range(draw(st.integers(0, 6))):
        message[draw(st.integers(0, len(message) - 1))] = draw(st.integers(0, 255))
    message = message[: draw(st.sampled_from([len(message), draw(st.integers(0, len(message)))]))]
    return sealed(message) if len(message) >= 8 and draw(st.booleans()) else bytes(message)


@pytest.mark.nightly
@given(st.lists(mutated(), min_size=1, max_size=4))
@examples(12)
def test_no_bytes_from_a_peer_harm_another(messages: list[bytes]) -> None:
    async def play(ring: SharedRingBuffer) -> None:
        ticket = ring.write_raw(SMALL)
        async with Stage(ring) as stage:
            other = await stage.connected()
            for message in messages:
                peer = await stage.connected()
                peer.send(message)
                with contextlib.suppress(ConnectionLostError):  # the first message may have been enough
                    peer.send(b"and the end of it", 2)
                await peer.task
            assert (await other.ask(read(ticket)))[0].joined == SMALL
            assert list(stage.listener._connections) == [other.connection]
        assert states(ring) == READY

    with SharedRingBuffer.create(slots=SLOTS, slot_bytes=1 << 16) as ring:
        run(play(ring))


ranks = st.sampled_from([0, 1, 2, 15, 16, 64, 255])
kinds = st.sampled_from([Kind.READ, Kind.ACK, Kind.DISCARD, Kind.STATE, Kind.BYE])


@given(
    st.lists(
        st.lists(
            st.tuples(kinds, st.integers(0, 4), ranks, st.booleans(), st.sampled_from([0, 1])), min_size=1, max_size=8
        ),
        max_size=6,
    ),
    st.booleans(),
)
@examples(15)
def test_whatever_a_peer_asks_every_pin_comes_back_and_no_rank_consumes_twice(
    messages: list[list[tuple[Kind, int, int, bool, int]]], hold: bool
) -> None:
    async def play(ring: SharedRingBuffer) -> None:
        tickets = [ring.write_raw(data, readers=readers) for data, readers in ((SMALL, 1), (LARGE, 2), (LARGE, 16))]
        strange = tickets[0]
        async with Stage(ring) as stage:
            peers = [await stage.connected(), await stage.connected()]
            peers[0].holds = hold
            for message in messages:
                records = []
                for kind, which, rank, right_key, _ in message:
                    ticket = tickets[which] if which < 3 else strange
                    records.append(record(kind, ticket, rank))
                    if which >= 3 or not right_key:
                        records[-1] = records[-1]._replace(key=0)
                peer = peers[message[0][4]]
                await peer.ask(*records, Record(Kind.BYE))
            for peer in peers:
                await peer.complete()
            statistics = ring.statistics()
            assert statistics.consumes <= 1 + 2 + 16
        assert all(ring.native.own_pins(slot) == 0 for slot in range(SLOTS))
        assert (ring.statistics().reading, ring.statistics().writing) == (0, 0)
        for ticket in tickets:  # what is not consumed or discarded is still there, unchanged
            for rank in range(ticket.readers):
                try:
                    with ring.read_raw(ticket, rank) as lease:
                        assert lease.view == (SMALL if ticket is tickets[0] else LARGE)
                except StaleSlotError:
                    pass

    with SharedRingBuffer.create(slots=SLOTS, slot_bytes=1 << 16) as ring:
        run(play(ring))


# --- message numbers ------------------------------------------------------------------------------
@asynchronous
async def test_a_connection_whose_numbers_are_used_up_is_closed(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "MESSAGE_NUMBERS", 3)
    async with Stage(ring) as stage:
        peer = await stage.peer()
        await peer.greet()
        for _ in range(3):
            await peer.settled()
        await peer.task
        assert peer.closed
