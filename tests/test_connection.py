"""The listener's side: what its connections do to the slots of a real ring, whatever the peer does."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_endpoint import ScriptedEndpoint, ScriptedWorker, scenario

from transport import connection as connection_module
from transport import wire
from transport.authentication import proof
from transport.connection import Connection
from transport.errors import StaleSlotError
from transport.link import Link, Want
from transport.listener import Listener
from transport.ring import SharedRingBuffer
from transport.settings import Settings
from transport.testing import run
from transport.ticket import Ticket
from transport.wire import Answer, Challenge, Hello, Kind, Proof, Record, SlotFate, Welcome

SLOTS = 4
SMALL = b"small payload" * 10  # rides in the answer
LARGE = bytes(range(256)) * 100  # does not
NONCE = bytes(range(16))
STALE, WRONG_KEY, WRONG_RING, VERSION, SECRET, RANK, LENGTH, BUSY, PROTOCOL = range(1, 10)


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(slots=SLOTS, slot_bytes=1 << 16) as made:
        yield made


def states(ring: SharedRingBuffer) -> dict[str, int]:
    """Slots that are not free, by state."""
    free, writing, ready, reading = ring.native.state_counts()
    assert free + writing + ready + reading == SLOTS
    counts = {"writing": writing, "ready": ready, "reading": reading}
    return {name: count for name, count in counts.items() if count}


READY = {"ready": 1}
READING = {"reading": 1}
FREE: dict[str, int] = {}


def record(kind: Kind, ticket: Ticket, rank: int = 0, **changes: int) -> Record:
    length = ticket.size if kind is Kind.READ else 0
    return Record(kind, ticket.slot, ticket.generation, rank, ticket.key, length)._replace(**changes)


def read(ticket: Ticket, rank: int = 0, **changes: int) -> Record:
    return record(Kind.READ, ticket, rank, **changes)


def ack(ticket: Ticket, rank: int = 0, **changes: int) -> Record:
    return record(Kind.ACK, ticket, rank, **changes)


class Peer:
    """A client, as far as the listener can tell."""

    _bases = itertools.count(0xABCD0000)

    def __init__(self, listener: Listener, name: str = "peer") -> None:
        self.listener = listener
        self.endpoint = ScriptedEndpoint(name)
        self.base = next(self._bases)
        self.number = 0
        listener._accept(self.endpoint)  # type: ignore[arg-type]
        self.connection, self.task = list(listener._connections.items())[-1]
        self.welcome: Any = None

    def hello(self, **changes: Any) -> Hello:
        fields = {"oldest": 1, "newest": 1, "ring": self.listener.ring.ring_id, "tag_base": self.base, "nonce": NONCE}
        return Hello(**{**fields, **changes})

    async def greet(self, **changes: Any) -> Any:
        self.endpoint.say(self.hello(**changes))
        self.welcome = await self.endpoint.heard(Welcome)
        return self.welcome

    def tell(self, *records: Record) -> int:
        """Send a message; its number."""
        number, self.number = self.number, self.number + 1
        self.endpoint.deliver(wire.tag(self.welcome.tag_base, number), wire.encode_control(number, list(records)))
        return number

    async def ask(self, *records: Record) -> list[Answer]:
        """Send a message and return what the answer says."""
        number = self.tell(*records)
        answered, answers = wire.decode_status(await self.endpoint.arrival(wire.tag(self.base, number)))
        assert answered == number
        return answers

    async def settled(self) -> None:
        """Everything that was sent before has been dealt with."""
        await self.ask(Record(Kind.BYE))

    def payload(self, part: int, number: int | None = None) -> Any:
        """What was sent as a message of its own, last or in answer to ``number``."""
        return self.endpoint.sent.get(wire.tag(self.base, self.number - 1 if number is None else number, part))

    def hold_payloads(self) -> None:
        """Payloads stay under way until `complete`."""
        self.endpoint.hold = lambda tag: tag & 0xFF != 0

    async def complete(self) -> None:
        """UCX has sent the payloads."""
        self.endpoint.release()
        await self.settled()

    async def refused(self) -> None:
        """The listener has said no. It must not close first: UCX would drop what is still on its way."""
        for _ in range(5):
            await asyncio.sleep(0)
        assert not self.endpoint.aborted
        assert not self.task.done()
        await self.gone()

    async def gone(self) -> None:
        """The connection breaks."""
        self.endpoint.lose()
        await self.task
        assert self.endpoint.aborted


async def connected(listener: Listener, name: str = "peer") -> Peer:
    peer = Peer(listener, name)
    assert (await peer.greet()).code == 0
    await peer.settled()
    return peer


def pins(ring: SharedRingBuffer, ticket: Ticket) -> int:
    return ring.native.own_pins(ticket.slot)


# --- handshake -------------------------------------------------------------------------------------
@scenario
async def test_a_client_is_welcomed_with_what_it_needs(ring: SharedRingBuffer) -> None:
    ring.native.set_ports((13337, 13338))
    listener = Listener(ring, settings=Settings(inline_limit=777))
    peer = Peer(listener, "somebody")
    assert repr(peer.connection) == "<Connection somebody handshake, 0 attempts>"
    welcome = await peer.greet()
    assert welcome == Welcome(
        version=1,
        ring=ring.ring_id,
        tag_base=peer.connection.tag_base,
        ports=(13337, 13338),
        inline_limit=777,
    )
    await peer.settled()
    assert repr(peer.connection) == "<Connection somebody open, 0 attempts>"
    # a request may come as soon as the welcome is read: its receive stood before
    posted = peer.endpoint.log.index(("receive", wire.tag(welcome.tag_base, 0)))
    assert posted < peer.endpoint.log.index(("send_stream",))
    await listener.stop()
    assert repr(peer.connection) == "<Connection somebody closed, 0 attempts>"
    assert peer.endpoint.aborted


@scenario
async def test_a_client_that_names_no_ring_is_told_which_one_it_found(ring: SharedRingBuffer) -> None:
    listener = Listener(ring)
    assert (await Peer(listener).greet(ring="")).ring == ring.ring_id
    await listener.stop()


@scenario
async def test_connections_have_tag_bases_of_their_own(ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch) -> None:
    bases = iter([5, 5, 6, 5])
    monkeypatch.setattr("transport.listener.random_tag_base", lambda: next(bases))
    listener = Listener(ring)
    first, second = await connected(listener), await connected(listener)
    assert (first.welcome.tag_base, second.welcome.tag_base) == (5, 6)
    await first.gone()
    assert (await connected(listener)).welcome.tag_base == 5
    await listener.stop()


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"ring": "0" * 32}, WRONG_RING), ({"oldest": 2, "newest": 3}, VERSION), ({"newest": 0}, VERSION)],
)
@scenario
async def test_a_client_that_cannot_be_served_is_told_why(
    ring: SharedRingBuffer, changes: dict[str, Any], code: int
) -> None:
    listener = Listener(ring)
    peer = Peer(listener)
    welcome = await peer.greet(**changes)
    assert welcome.code == code
    assert welcome.reason
    assert welcome.ports == ()
    await peer.refused()
    assert not listener._connections


async def challenged(listener: Listener) -> tuple[Peer, Challenge]:
    peer = Peer(listener)
    peer.endpoint.say(peer.hello())
    return peer, await peer.endpoint.heard(Challenge)


@scenario
async def test_both_sides_prove_the_secret(ring: SharedRingBuffer) -> None:
    listener = Listener(ring, secret=b"secret")
    peer, challenge = await challenged(listener)
    assert len(challenge.nonce) == 16
    assert challenge.proof == proof(b"secret", "listener", NONCE, challenge.nonce)
    peer.endpoint.say(Proof(proof(b"secret", "client", NONCE, challenge.nonce)))
    peer.welcome = await peer.endpoint.heard(Welcome)
    assert peer.welcome.code == 0
    await peer.settled()
    other, again = await challenged(listener)
    assert again.nonce != challenge.nonce
    await listener.stop()
    assert other.endpoint.aborted


@pytest.mark.parametrize("how", ["another secret", "mirrored", "replayed", "empty"])
@scenario
async def test_a_client_that_does_not_prove_is_refused(ring: SharedRingBuffer, how: str) -> None:
    listener = Listener(ring, secret=b"secret")
    peer, challenge = await challenged(listener)
    peer.endpoint.say(
        Proof(
            {
                "another secret": proof(b"other", "client", NONCE, challenge.nonce),
                "mirrored": challenge.proof,
                "replayed": proof(b"secret", "client", NONCE, bytes(16)),
                "empty": b"",
            }[how]
        )
    )
    assert (await peer.endpoint.heard(Welcome)).code == SECRET
    await peer.refused()
    assert wire.tag(peer.connection.tag_base, 0) not in peer.endpoint.posted


@pytest.mark.parametrize(
    "said",
    [
        wire.encode_handshake(Proof(b"")),
        wire.encode_handshake(Welcome(1, "", 1)),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x01\x01\0\0\xff\xff\xff\xff",
        b"\x01\x01\0\0\x03\0\0\0\xff\xff\xff",
        b"\x01\x01\0\0\0\0\0\0",
        wire.encode_handshake(Hello(1, 1, "ab", 1, NONCE)).replace(b"\xa2ab", b"\xa2\xff\xff"),
        wire.encode_handshake(Hello(1, 1, "", 0xFFFFFFFF, NONCE)).replace(b"\xce\xff\xff\xff\xff", b"\xcd\xff\xff")[
            :-2
        ],
    ],
    ids=["proof", "welcome", "http", "too long", "garbage", "empty", "not UTF-8", "cut off"],
)
@scenario
async def test_garbage_in_the_handshake_closes_that_connection_only(ring: SharedRingBuffer, said: bytes) -> None:
    ticket = ring.write_raw(SMALL)
    listener = Listener(ring, settings=Settings(handshake_timeout_s=0.05))
    other = await connected(listener)
    peer = Peer(listener)
    peer.endpoint.feed(said)
    await peer.task  # raises what is not handled
    assert peer.endpoint.aborted
    assert list(listener._connections) == [other.connection]
    assert (await other.ask(read(ticket)))[0].inline == SMALL
    await listener.stop()


@pytest.mark.parametrize(("first", "code"), [(2, VERSION), (0, VERSION), (1, PROTOCOL)])
@scenario
async def test_a_first_message_that_is_no_hello_of_this_version_is_refused_by_name(
    ring: SharedRingBuffer, first: int, code: int
) -> None:
    listener = Listener(ring)
    peer = Peer(listener)
    peer.endpoint.feed(bytes((first,)) + wire.encode_handshake(Proof(b""))[1:])
    assert (await peer.endpoint.heard(Welcome)).code == code
    await peer.refused()


@scenario
async def test_a_refused_client_that_stays_is_closed(ring: SharedRingBuffer) -> None:
    listener = Listener(ring, settings=Settings(handshake_timeout_s=0.01))
    peer = Peer(listener)
    assert (await peer.greet(ring="0" * 32)).code == WRONG_RING
    await peer.task
    assert peer.endpoint.aborted
    assert not listener._connections


@scenario
async def test_a_client_that_says_nothing_is_closed(ring: SharedRingBuffer) -> None:
    listener = Listener(ring, settings=Settings(handshake_timeout_s=0.01))
    peer = Peer(listener)
    await peer.task
    assert peer.endpoint.aborted
    assert not listener._connections


@scenario
async def test_a_client_that_does_not_answer_the_challenge_is_closed(ring: SharedRingBuffer) -> None:
    listener = Listener(ring, secret=b"secret", settings=Settings(handshake_timeout_s=0.01))
    peer, _ = await challenged(listener)
    await peer.task
    assert peer.endpoint.aborted


@scenario
async def test_connections_are_limited_and_a_place_that_is_free_is_given(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(SMALL)
    listener = Listener(ring, settings=Settings(connections_per_listener=2))
    first, second = await connected(listener), await connected(listener)
    third = Peer(listener)
    assert (await third.greet()).code == BUSY
    await third.refused()
    assert (await first.ask(read(ticket)))[0].inline == SMALL
    await second.gone()
    await connected(listener)
    await listener.stop()


# --- reading and acknowledging -----------------------------------------------------------------------
@scenario
async def test_reading_a_small_payload_pins_it_and_answers_with_its_bytes(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(SMALL)
    listener = Listener(ring)
    peer = await connected(listener)
    [answer] = await peer.ask(read(ticket))
    assert (answer.code, answer.length, answer.checksum, answer.inline) == (0, len(SMALL), ticket.checksum, SMALL)
    assert peer.payload(1) is None
    assert (states(ring), pins(ring, ticket)) == (READING, 1)
    assert repr(peer.connection) == "<Connection peer open, 1 attempts>"
    assert repr(listener) == "<Listener port 0 1 connections, 1 reads>"
    statistics = ring.statistics()
    assert (statistics.pins, statistics.bytes_read) == (1, len(SMALL))
    await listener.stop()


@scenario
async def test_a_large_payload_is_sent_from_the_slot_itself(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    peer = await connected(listener)
    [answer] = await peer.ask(read(ticket))
    assert (answer.code, answer.length, answer.checksum, answer.inline) == (0, len(LARGE), ticket.checksum, None)
    sent = peer.payload(1)
    assert sent == LARGE
    assert np.shares_memory(np.asarray(sent), np.asarray(ring.native.payload(ticket.slot)))
    assert (states(ring), pins(ring, ticket)) == (READING, 1)
    await listener.stop()


@pytest.mark.parametrize(("size", "inline"), [(0, True), (1, True), (8192, True), (8193, False)])
@scenario
async def test_the_limit_decides_what_rides_in_the_answer(ring: SharedRingBuffer, size: int, inline: bool) -> None:
    data = b"x" * size
    ticket = ring.write_raw(data) if size else ring.write({"nothing": np.empty(0, np.uint8)})
    listener = Listener(ring)
    peer = await connected(listener)
    [answer] = await peer.ask(read(ticket))
    assert (answer.inline is not None) == inline
    assert (answer.inline if inline else peer.payload(1)) == data
    await peer.ask(ack(ticket), Record(Kind.BYE))
    assert states(ring) == FREE
    await listener.stop()


@pytest.mark.parametrize("data", [SMALL, LARGE])
@scenario
async def test_an_acknowledgement_consumes_and_unpins(ring: SharedRingBuffer, data: bytes) -> None:
    ticket = ring.write_raw(data)
    listener = Listener(ring)
    peer = await connected(listener)
    await peer.ask(read(ticket))
    peer.tell(ack(ticket))
    await peer.settled()
    assert (states(ring), pins(ring, ticket)) == (FREE, 0)
    statistics = ring.statistics()
    assert (statistics.consumes, statistics.late_finalises) == (1, 0)
    assert repr(listener) == "<Listener port 0 1 connections, 0 reads>"
    await listener.stop()
    assert ring.statistics().late_finalises == 0


@scenario
async def test_an_acknowledgement_said_twice_changes_nothing(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(SMALL)
    listener = Listener(ring)
    peer = await connected(listener)
    await peer.ask(read(ticket))
    await peer.ask(ack(ticket), ack(ticket), Record(Kind.BYE))
    later = ring.write_raw(SMALL)
    await peer.ask(ack(ticket), Record(Kind.BYE))
    assert states(ring) == READY
    assert ring.statistics().consumes == 1
    assert ring.tickets() == [later]
    await listener.stop()


@scenario
async def test_an_acknowledgement_rides_with_the_next_request(ring: SharedRingBuffer) -> None:
    first, second = ring.write_raw(LARGE), ring.write_raw(LARGE[::-1])
    listener = Listener(ring)
    peer = await connected(listener)
    await peer.ask(read(first))
    [answer] = await peer.ask(ack(first), read(second))
    assert answer.position == 1
    assert peer.payload(2) == LARGE[::-1]  # part 1 + its place in the message
    assert peer.payload(1) is None
    assert states(ring) == READING
    await listener.stop()


@scenario
async def test_one_message_reads_many_and_each_has_its_own_answer(ring: SharedRingBuffer) -> None:
    tickets = [ring.write_raw(data) for data in (SMALL, LARGE, SMALL[::-1])]
    listener = Listener(ring)
    peer = await connected(listener)
    answers = await peer.ask(*[read(ticket) for ticket in tickets], read(tickets[0], key=1))
    assert [answer.code for answer in answers] == [0, 0, 0, WRONG_KEY]
    assert [answer.position for answer in answers] == [0, 1, 2, 3]
    assert (answers[0].inline, peer.payload(2), answers[2].inline) == (SMALL, LARGE, SMALL[::-1])
    assert states(ring) == {"reading": 3}
    await listener.stop()
    assert states(ring) == {"ready": 3}


@scenario
async def test_requests_may_be_sent_ahead_and_are_answered_in_order(ring: SharedRingBuffer) -> None:
    tickets = [ring.write_raw(bytes([index]) * 50) for index in range(SLOTS)]
    listener = Listener(ring)
    peer = Peer(listener)
    await peer.greet()
    numbers = [peer.tell(read(ticket)) for ticket in tickets]
    for number, index in zip(numbers, range(SLOTS), strict=True):
        _, [answer] = wire.decode_status(await peer.endpoint.arrival(wire.tag(peer.base, number)))
        assert answer.inline == bytes([index]) * 50
    await listener.stop()


@scenario
async def test_reading_after_acknowledging_is_stale_in_the_same_message_too(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(SMALL)
    listener = Listener(ring)
    peer = await connected(listener)
    await peer.ask(read(ticket))
    [answer] = await peer.ask(ack(ticket), read(ticket))
    assert answer.code == STALE
    assert states(ring) == FREE
    await listener.stop()


@scenario
async def test_each_rank_reads_once_and_the_last_frees_the_slot(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE, readers=2)
    listener = Listener(ring)
    peer, other = await connected(listener), await connected(listener)
    await peer.ask(read(ticket, 0))
    await other.ask(read(ticket, 1))
    assert pins(ring, ticket) == 2
    await peer.ask(ack(ticket, 0), Record(Kind.BYE))
    assert (states(ring), pins(ring, ticket)) == (READING, 1)
    assert [answer.code for answer in await peer.ask(read(ticket, 0))] == [STALE]
    await other.ask(ack(ticket, 1), Record(Kind.BYE))
    assert states(ring) == FREE
    assert ring.statistics().consumes == 2
    await listener.stop()


# --- acknowledgements that take another way ----------------------------------------------------------
@scenario
async def test_an_acknowledgement_counts_on_another_connection(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    reader, other = await connected(listener), await connected(listener)
    await reader.ask(read(ticket))
    await other.ask(ack(ticket), Record(Kind.BYE))
    assert (states(ring), pins(ring, ticket)) == (FREE, 0)
    assert repr(reader.connection) == "<Connection peer open, 0 attempts>"
    await listener.stop()
    assert ring.statistics().late_finalises == 0


@scenario
async def test_an_acknowledgement_counts_without_an_attempt(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    reader = await connected(listener)
    await reader.ask(read(ticket))
    await reader.gone()
    other = await connected(listener)
    await other.ask(ack(ticket), Record(Kind.BYE))
    assert states(ring) == FREE
    assert ring.statistics().consumes == 1
    await listener.stop()


@scenario
async def test_an_acknowledgement_while_sending_keeps_the_memory_until_ucx_is_done(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    peer, other = await connected(listener), await connected(listener)
    peer.hold_payloads()
    await peer.ask(read(ticket))
    await other.ask(ack(ticket), Record(Kind.BYE))
    info = ring.native.info(ticket.slot)
    assert (states(ring), info.done, pins(ring, ticket)) == (READING, 0xFFFF, 1)
    await peer.complete()
    assert (states(ring), pins(ring, ticket)) == (FREE, 0)
    assert (ring.statistics().consumes, ring.statistics().late_finalises) == (1, 0)
    await listener.stop()
    assert ring.statistics().late_finalises == 0


@pytest.mark.parametrize("data", [SMALL, LARGE])
@scenario
async def test_reading_and_acknowledging_in_one_message_sends_nothing_unpinned(
    ring: SharedRingBuffer, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = ring.write_raw(data)
    listener = Listener(ring)
    peer = await connected(listener)
    peer.hold_payloads()
    while_copied = []
    encode = wire.encode_status

    def encode_status(number: int, answers: list[Answer]) -> bytearray:
        while_copied.append(states(ring))
        return encode(number, answers)

    monkeypatch.setattr(wire, "encode_status", encode_status)
    [answer] = await peer.ask(read(ticket), ack(ticket))
    assert while_copied == [READING]
    assert (answer.inline or peer.payload(1)) == data
    assert states(ring) == (FREE if data is SMALL else READING)
    await peer.complete()
    assert states(ring) == FREE
    assert ring.statistics().consumes == 1
    await listener.stop()
    assert ring.statistics().late_finalises == 0


@scenario
async def test_two_attempts_for_one_rank_are_both_served_and_consumed_once(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    first, second = await connected(listener), await connected(listener)
    for peer in (first, second):
        await peer.ask(read(ticket))
        assert peer.payload(1) == LARGE
    assert pins(ring, ticket) == 2
    await second.ask(ack(ticket), Record(Kind.BYE))
    assert (states(ring), pins(ring, ticket)) == (FREE, 0)
    await first.ask(ack(ticket), Record(Kind.BYE))
    assert ring.statistics().consumes == 1
    assert ring.statistics().late_finalises <= 1  # the second acknowledgement
    await listener.stop()


@scenario
async def test_two_attempts_of_which_one_still_sends_keep_the_memory(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    slow, fast = await connected(listener), await connected(listener)
    slow.hold_payloads()
    await slow.ask(read(ticket))
    await fast.ask(read(ticket))
    await fast.ask(ack(ticket), Record(Kind.BYE))
    assert (states(ring), pins(ring, ticket)) == (READING, 1)
    await slow.complete()
    assert (states(ring), pins(ring, ticket)) == (FREE, 0)
    await listener.stop()


@scenario
async def test_an_attempt_that_consumed_elsewhere_ends_is_unpinned(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    peer = await connected(listener)
    await peer.ask(read(ticket))
    assert ring.native.consume(ticket.slot, ticket.generation, 0)  # through another listener's port
    assert states(ring) == READING
    await peer.ask(ack(ticket), Record(Kind.BYE))
    assert (states(ring), pins(ring, ticket)) == (FREE, 0)
    await listener.stop()


# --- connections that end ----------------------------------------------------------------------------
@pytest.mark.parametrize("data", [SMALL, LARGE])
@scenario
async def test_a_lost_connection_makes_its_payload_ready_again(ring: SharedRingBuffer, data: bytes) -> None:
    ticket = ring.write_raw(data)
    listener = Listener(ring)
    peer = await connected(listener)
    await peer.ask(read(ticket))
    await peer.gone()
    assert (states(ring), pins(ring, ticket)) == (READY, 0)
    other = await connected(listener)
    assert [answer.code for answer in await other.ask(read(ticket))] == [0]
    await listener.stop()
    assert ring.statistics().late_finalises == 0


@scenario
async def test_a_lost_connection_keeps_the_pin_until_ucx_is_out_of_the_slot(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    peer = await connected(listener)
    peer.hold_payloads()
    await peer.ask(read(ticket))
    before_abort: list[dict[str, int]] = []
    peer.endpoint.on_abort = lambda: before_abort.append(states(ring))
    await peer.gone()
    assert before_abort == [READING]
    assert (states(ring), pins(ring, ticket)) == (READY, 0)


@scenario
async def test_losing_one_of_two_attempts_keeps_the_other(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    first, second = await connected(listener), await connected(listener)
    await first.ask(read(ticket))
    await second.ask(read(ticket))
    await first.gone()
    assert (states(ring), pins(ring, ticket)) == (READING, 1)
    await second.ask(ack(ticket), Record(Kind.BYE))
    assert states(ring) == FREE
    assert ring.statistics().late_finalises == 0
    await listener.stop()


@scenario
async def test_a_connection_lost_after_an_early_acknowledgement_frees_the_slot(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    peer, other = await connected(listener), await connected(listener)
    peer.hold_payloads()
    await peer.ask(read(ticket))
    await other.ask(ack(ticket), Record(Kind.BYE))
    await peer.gone()
    assert (states(ring), pins(ring, ticket)) == (FREE, 0)
    await listener.stop()


@scenario
async def test_an_endpoint_that_breaks_while_it_is_answered_leaves_no_pin(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    peer = await connected(listener)
    peer.endpoint.on_send = lambda tag, data: peer.endpoint.abort()  # between status and payload
    peer.tell(read(ticket))
    await peer.task
    assert (states(ring), pins(ring, ticket)) == (READY, 0)


@scenario
async def test_stopping_ends_every_connection_and_gives_every_pin_back(ring: SharedRingBuffer) -> None:
    tickets = [ring.write_raw(LARGE) for _ in range(2)]
    listener = Listener(ring)
    peers = [await connected(listener) for _ in tickets]
    handshaking = Peer(listener)
    peers[0].hold_payloads()
    for peer, ticket in zip(peers, tickets, strict=True):
        await peer.ask(read(ticket))
    await listener.stop()
    assert states(ring) == {"ready": 2}
    for peer in (*peers, handshaking):
        assert peer.endpoint.aborted
        assert peer.task.done()
    assert repr(listener) == "<Listener port 0 0 connections, 0 reads>"


@scenario
async def test_draining_waits_for_reads_under_way_and_refuses_new_clients(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    peer = await connected(listener)
    await peer.ask(read(ticket))
    stopping = asyncio.ensure_future(listener.stop(drain_s=20))
    await peer.settled()
    late = Peer(listener)
    assert (await late.greet()).code == BUSY
    assert not stopping.done()
    peer.tell(ack(ticket))
    await stopping
    assert states(ring) == FREE
    assert peer.endpoint.aborted


@scenario
async def test_draining_ends_in_time_when_nobody_acknowledges(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    peer = await connected(listener)
    await peer.ask(read(ticket))
    await listener.stop(drain_s=0.01)
    assert (states(ring), pins(ring, ticket)) == (READY, 0)
    assert peer.endpoint.aborted


# --- time -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("data", [SMALL, LARGE])
@scenario
async def test_an_attempt_that_nobody_acknowledges_ends(ring: SharedRingBuffer, data: bytes) -> None:
    ticket = ring.write_raw(data)
    listener = Listener(ring, settings=Settings(ack_timeout_s=30))
    peer = await connected(listener)
    await peer.ask(read(ticket))
    await peer.settled()  # the payload has been sent
    started = peer.connection.oldest_attempt()
    assert started is not None
    listener.sweep(started + 30)
    assert states(ring) == READING
    listener.sweep(started + 30.5)
    assert (states(ring), pins(ring, ticket)) == (READY, 0)
    await peer.settled()  # the connection goes on
    assert not peer.endpoint.aborted
    # late, but it is true: the payload is not to be delivered again
    await peer.ask(ack(ticket), Record(Kind.BYE))
    assert states(ring) == FREE
    await listener.stop()
    assert ring.statistics().late_finalises == 0


@scenario
async def test_only_attempts_that_are_late_end(ring: SharedRingBuffer) -> None:
    old, new = ring.write_raw(SMALL), ring.write_raw(SMALL)
    listener = Listener(ring, settings=Settings(ack_timeout_s=30))
    peer = await connected(listener)
    await peer.ask(read(old))
    for attempt in peer.connection._attempts:
        attempt.sent_by -= 20
    await peer.ask(read(new))
    listener.sweep(peer.connection.last_active + 15)
    assert states(ring) == {"ready": 1, "reading": 1}
    assert pins(ring, new) == 1
    await listener.stop()


@scenario
async def test_a_connection_that_takes_no_bytes_is_closed(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    peer, other = await connected(listener), await connected(listener)
    peer.hold_payloads()
    await peer.ask(read(ticket))
    listener.sweep(peer.connection.last_active + listener.settings.ack_timeout_s + 1)
    assert peer.endpoint.aborted
    await peer.task
    assert (states(ring), pins(ring, ticket)) == (READY, 0)
    assert list(listener._connections) == [other.connection]
    await listener.stop()


@scenario
async def test_a_large_payload_has_the_time_that_its_client_waits(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    # at this rate the payload takes 256 s, and the client's own limit for it is as long
    listener = Listener(ring, settings=Settings(read_slowest_rate=100.0))
    peer = await connected(listener)
    peer.hold_payloads()
    await peer.ask(read(ticket))
    started = peer.connection.last_active
    listener.sweep(started + listener.settings.read_timeout(len(LARGE)))
    assert not peer.endpoint.aborted
    listener.sweep(started + listener.settings.read_timeout(len(LARGE)) + 31)
    assert peer.endpoint.aborted
    await peer.task
    assert states(ring) == READY


@scenario
async def test_an_idle_connection_is_closed_and_a_busy_one_is_not(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(SMALL)
    listener = Listener(ring, settings=Settings(listener_idle_eviction_s=120, ack_timeout_s=1000))
    idle, reading, handshaking = await connected(listener), await connected(listener), Peer(listener)
    await reading.ask(read(ticket))
    listener.sweep(idle.connection.last_active + 119.5)
    assert not idle.endpoint.aborted
    listener.sweep(max(idle.connection.last_active, reading.connection.last_active) + 121)
    assert [peer.endpoint.aborted for peer in (idle, reading, handshaking)] == [True, False, False]
    await idle.task
    await reading.settled()
    await listener.stop()


@scenario
async def test_each_sweep_is_a_heartbeat(ring: SharedRingBuffer) -> None:
    listener = Listener(ring)

    def heartbeat() -> int:
        return next(owner.heartbeat_ns for owner in ring.native.owners() if owner.index == ring.native.owner)

    before = heartbeat()
    listener.sweep(0.0)
    assert heartbeat() > before


# --- refusals ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"key": 1}, WRONG_KEY),
        ({"generation": 2}, WRONG_KEY),
        ({"slot": 1}, WRONG_KEY),
        ({"slot": SLOTS}, WRONG_KEY),
        ({"slot": 2**32 - 1, "generation": 2**32 - 1}, WRONG_KEY),
        ({"rank": 1}, RANK),
        ({"rank": 15}, RANK),
        ({"rank": 16}, RANK),
        ({"rank": 255}, RANK),
        ({"length": len(LARGE) - 1}, LENGTH),
        ({"length": 0}, LENGTH),
        ({"length": 2**64 - 1}, LENGTH),
    ],
)
@scenario
async def test_a_wrong_request_is_refused_and_nothing_is_pinned(
    ring: SharedRingBuffer, changes: dict[str, int], code: int
) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    peer = await connected(listener)
    [answer] = await peer.ask(read(ticket, **changes))
    assert (answer.code, answer.inline) == (code, None)
    assert peer.payload(1) is None
    assert (states(ring), pins(ring, ticket)) == (READY, 0)
    assert [again.code for again in await peer.ask(read(ticket))] == [0]
    await listener.stop()


@scenario
async def test_what_is_gone_is_stale(ring: SharedRingBuffer) -> None:
    consumed, discarded, replaced = (ring.write_raw(SMALL) for _ in range(3))
    ring.native.consume(consumed.slot, consumed.generation, 0)
    ring.discard(discarded)
    ring.discard(replaced)
    while ring.write_raw(LARGE).slot != replaced.slot:
        pass
    listener = Listener(ring)
    peer = await connected(listener)
    answers = await peer.ask(read(consumed), read(discarded), read(replaced))
    assert [answer.code for answer in answers] == [STALE] * 3
    assert ring.statistics().reading == 0
    await listener.stop()


@scenario
async def test_a_payload_whose_deadline_has_passed_is_discarded(ring: SharedRingBuffer) -> None:
    ticket, other = ring.write_raw(SMALL, deadline_s=-1), ring.write_raw(SMALL, deadline_s=1000)
    listener = Listener(ring)
    peer = await connected(listener)
    answers = await peer.ask(read(ticket), read(other))
    assert [answer.code for answer in answers] == [STALE, 0]
    assert (states(ring), ring.statistics().discards) == (READING, 1)
    await listener.stop()
    assert ring.tickets() == [other]


@scenario
async def test_reads_that_are_never_acknowledged_are_limited(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_MOST_ATTEMPTS", 2)
    tickets = [ring.write_raw(SMALL) for _ in range(3)]
    listener = Listener(ring)
    peer, other = await connected(listener), await connected(listener)
    answers = await peer.ask(*map(read, tickets))
    assert [answer.code for answer in answers] == [0, 0, BUSY]
    assert states(ring) == {"ready": 1, "reading": 2}
    assert [answer.code for answer in await other.ask(read(tickets[2]))] == [0]  # the limit is the connection's
    [answer] = await peer.ask(ack(tickets[0]), read(tickets[2]))
    assert answer.code == 0
    await listener.stop()


@scenario
async def test_a_client_that_asks_and_takes_no_answers_is_held_up(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_MOST_UNSENT", 8)
    ticket = ring.write_raw(SMALL)
    listener = Listener(ring)
    flood, other = await connected(listener), await connected(listener)
    flood.endpoint.hold = lambda tag: True
    numbers = [flood.tell(record(Kind.STATE, ticket)) for _ in range(100)]

    def answered() -> int:
        return sum(wire.tag(flood.base, number) in flood.endpoint.sent for number in numbers)

    taken = 0
    while taken < len(numbers):
        for _ in range(5):
            await other.settled()  # others are served meanwhile
        assert answered() == min(taken + 9, len(numbers))
        taken = answered()
        flood.endpoint.release()  # it takes what was sent
    await flood.gone()
    await listener.stop()


@scenario
async def test_a_client_that_is_held_up_and_then_lost_is_forgotten(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "_MOST_UNSENT", 8)
    ticket = ring.write_raw(SMALL)
    listener = Listener(ring)
    flood, other = await connected(listener), await connected(listener)
    flood.endpoint.hold = lambda tag: True
    for _ in range(20):
        flood.tell(record(Kind.STATE, ticket))
    for _ in range(5):
        await other.settled()
    assert flood.number - len(flood.endpoint.sent) > 0
    await flood.gone()
    assert list(listener._connections) == [other.connection]
    await listener.stop()


@scenario
async def test_a_read_while_draining_is_told_that_the_listener_is_busy(ring: SharedRingBuffer) -> None:
    first, second = ring.write_raw(SMALL), ring.write_raw(SMALL)
    listener = Listener(ring)
    peer = await connected(listener)
    assert (await peer.ask(read(first)))[0].code == 0
    stopping = asyncio.create_task(listener.stop(10.0))
    await asyncio.sleep(0)
    assert [answer.code for answer in await peer.ask(read(second))] == [BUSY]
    assert pins(ring, second) == 0
    peer.tell(ack(first))
    await stopping
    assert states(ring) == READY


# --- discard and state ----------------------------------------------------------------------------------
@scenario
async def test_a_discarded_payload_is_freed_for_all_ranks(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(SMALL, readers=3)
    listener = Listener(ring)
    peer = await connected(listener)
    [answer] = await peer.ask(record(Kind.DISCARD, ticket), record(Kind.STATE, ticket))
    assert (answer.position, answer.value) == (1, SlotFate.GONE)
    assert (states(ring), ring.statistics().discards) == (FREE, 1)
    await listener.stop()


@scenario
async def test_discarding_while_a_payload_is_sent_frees_it_afterwards(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    reader, other = await connected(listener), await connected(listener)
    await reader.ask(read(ticket))
    await other.ask(record(Kind.DISCARD, ticket), Record(Kind.BYE))
    assert states(ring) == READING
    await reader.ask(ack(ticket), Record(Kind.BYE))
    assert (states(ring), pins(ring, ticket)) == (FREE, 0)
    await listener.stop()


@pytest.mark.parametrize("kind", [Kind.ACK, Kind.DISCARD])
@pytest.mark.parametrize("changes", [{"key": 1}, {"generation": 2}, {"slot": SLOTS}, {"slot": 2**32 - 1}])
@scenario
async def test_without_the_key_nothing_is_consumed_or_discarded(
    ring: SharedRingBuffer, kind: Kind, changes: dict[str, int]
) -> None:
    ticket = ring.write_raw(SMALL)
    listener = Listener(ring)
    peer = await connected(listener)
    await peer.ask(record(kind, ticket, **changes), Record(Kind.BYE))
    assert states(ring) == READY
    assert (ring.statistics().consumes, ring.statistics().discards) == (0, 0)
    await listener.stop()


@pytest.mark.parametrize("kind", [Kind.ACK, Kind.STATE])
@pytest.mark.parametrize("rank", [1, 15, 16, 63, 64, 255])
@scenario
async def test_ranks_that_do_not_exist_change_nothing(ring: SharedRingBuffer, kind: Kind, rank: int) -> None:
    ticket = ring.write_raw(SMALL)
    listener = Listener(ring)
    peer = await connected(listener)
    peer.tell(record(kind, ticket, rank))
    await peer.settled()  # the connection goes on
    assert states(ring) == READY
    await listener.stop()


@scenario
async def test_state_says_what_became_of_a_payload(ring: SharedRingBuffer) -> None:
    ticket, gone = ring.write_raw(SMALL, readers=2), ring.write_raw(SMALL)
    ring.discard(gone)
    listener = Listener(ring)
    peer = await connected(listener)

    async def fates() -> list[int]:
        asked = [record(Kind.STATE, ticket, 0), record(Kind.STATE, ticket, 1), record(Kind.STATE, gone)]
        answers = await peer.ask(*asked, record(Kind.STATE, ticket, key=1))
        assert [answer.code for answer in answers] == [0, 0, 0, WRONG_KEY]
        return [answer.value for answer in answers[:3]]

    assert await fates() == [SlotFate.READABLE, SlotFate.READABLE, SlotFate.GONE]
    await peer.ask(read(ticket, 0))
    assert await fates() == [SlotFate.READABLE, SlotFate.READABLE, SlotFate.GONE]
    await peer.ask(ack(ticket, 0), Record(Kind.BYE))
    assert await fates() == [SlotFate.CONSUMED, SlotFate.READABLE, SlotFate.GONE]
    await peer.ask(ack(ticket, 1), Record(Kind.BYE))
    assert await fates() == [SlotFate.GONE, SlotFate.GONE, SlotFate.GONE]
    await listener.stop()


@scenario
async def test_a_farewell_is_answered_after_the_acknowledgements_in_front_of_it(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(SMALL)
    listener = Listener(ring)
    peer = await connected(listener)
    await peer.ask(read(ticket))
    [answer] = await peer.ask(ack(ticket), Record(Kind.BYE))
    assert (answer.code, answer.position) == (0, 1)
    assert states(ring) == FREE
    assert not peer.endpoint.aborted  # the client closes first
    await listener.stop()


# --- garbage -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"garbage",
        b"\xff" * wire.CONTROL_BYTES,
        b"x" * (wire.CONTROL_BYTES + 1),
        bytes(wire.encode_control(1, [Record(Kind.BYE)])),
        bytes(wire.encode_control(2**24 + 1, [Record(Kind.BYE)])),
        bytes(wire.encode_status(0, [])),
        bytes(wire.encode_control(0, [Record(Kind.BYE)]))[:-33] + b"\0",
        bytes(wire.encode_control(0, [Record(Kind.CONTROL)])),
    ],
    ids=["empty", "text", "ones", "too long", "other number", "number too large", "status", "cut off", "kind"],
)
@scenario
async def test_garbage_closes_that_connection_only(ring: SharedRingBuffer, message: bytes) -> None:
    mine, others = ring.write_raw(LARGE), ring.write_raw(SMALL)
    listener = Listener(ring)
    other = await connected(listener)
    peer = Peer(listener)
    await peer.greet()
    peer.endpoint.deliver(wire.tag(peer.welcome.tag_base, 0), message)
    await peer.task  # raises what is not handled
    assert peer.endpoint.aborted
    assert list(listener._connections) == [other.connection]
    assert [answer.code for answer in await other.ask(read(mine), read(others))] == [0, 0]
    await listener.stop()


@scenario
async def test_garbage_after_reading_gives_the_pin_back(ring: SharedRingBuffer) -> None:
    ticket = ring.write_raw(LARGE)
    listener = Listener(ring)
    peer = await connected(listener)
    await peer.ask(read(ticket))
    peer.endpoint.deliver(wire.tag(peer.welcome.tag_base, peer.number), b"garbage")
    await peer.task
    assert (states(ring), pins(ring, ticket)) == (READY, 0)


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
@settings(max_examples=60)
def test_whatever_a_peer_asks_every_pin_comes_back_and_no_rank_consumes_twice(
    messages: list[list[tuple[Kind, int, int, bool, int]]], hold: bool
) -> None:
    async def play(ring: SharedRingBuffer) -> None:
        tickets = [ring.write_raw(data, readers=readers) for data, readers in ((SMALL, 1), (LARGE, 2), (LARGE, 16))]
        strange = tickets[0]
        listener = Listener(ring)
        peers = [await connected(listener, "one"), await connected(listener, "two")]
        if hold:
            peers[0].hold_payloads()
        for message in messages:
            records = []
            for kind, which, rank, right_key, _ in message:
                ticket = tickets[which] if which < 3 else strange
                records.append(record(kind, ticket, rank))
                if which >= 3 or not right_key:
                    records[-1] = records[-1]._replace(key=0)
            peer = peers[message[0][4]]
            peer.tell(*records)
            await peer.settled()
        for peer in peers:
            await peer.complete()
        statistics = ring.statistics()
        assert statistics.consumes <= 1 + 2 + 16
        await listener.stop()
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


# --- message numbers ------------------------------------------------------------------------------------------
@scenario
async def test_a_connection_whose_numbers_are_used_up_is_closed(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MESSAGE_NUMBERS", 3)
    listener = Listener(ring)
    peer = Peer(listener)
    await peer.greet()
    for _ in range(3):
        await peer.settled()
    await peer.task
    assert peer.endpoint.aborted
    base = peer.welcome.tag_base
    received = {entry[1] for entry in peer.endpoint.log if entry[0] == "receive"}
    assert received == {wire.tag(base, number) for number in range(3)}  # a fourth would be another connection's tag


def test_keys_are_the_rings_and_remembered_within_a_bound(
    ring: SharedRingBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transport.listener._KEYS_CACHED", 8)
    listener = Listener(ring)
    for generation in range(1, 30):
        for _ in range(2):
            assert listener.key(1, generation) == ring.key(1, generation)
        assert len(listener._keys) <= 8


# --- both sides together -------------------------------------------------------------------------------------
def joined() -> tuple[ScriptedEndpoint, ScriptedEndpoint]:
    """Two endpoints of one connection."""
    one, other = ScriptedEndpoint("listener"), ScriptedEndpoint("client")
    for here, there in ((one, other), (other, one)):
        here.on_stream = there.feed
        here.on_send = there.deliver
        here.on_abort = there.lose
    return one, other


@pytest.mark.parametrize("secret", [None, b"secret"])
@scenario
async def test_link_and_connection_understand_each_other(ring: SharedRingBuffer, secret: bytes | None) -> None:
    data = [SMALL, LARGE, b"x", LARGE[::-1]]
    tickets = [ring.write_raw(each) for each in data]
    listener = Listener(ring, secret=secret)
    clients, listeners = joined()
    listener._accept(listeners)  # type: ignore[arg-type]
    link = await Link.open(
        ScriptedWorker(clients),  # type: ignore[arg-type]
        "host",
        1,
        ring=ring.ring_id,
        tag_base=5,
        secret=secret,
        settings=Settings(),
    )
    wants = [Want(ticket, 0, memoryview(bytearray(ticket.size))) for ticket in tickets]
    _, results = await link.read(wants[:3], [])
    assert [bytes(want.destination) for want in wants[:3]] == data[:3]
    assert [result.checksum for result in results if isinstance(result, Answer)] == [t.checksum for t in tickets[:3]]
    number, results = await link.read([wants[3], wants[0]], [ack(ticket) for ticket in tickets[:3]])
    assert number == 1
    assert wants[3].destination == data[3]
    assert isinstance(results[1], StaleSlotError)
    link.tell([ack(tickets[3])])
    _, answer = await link.ask(record(Kind.STATE, tickets[3]))
    assert answer.value == SlotFate.GONE
    assert states(ring) == FREE
    assert ring.statistics().consumes == 4
    link.abort()
    await asyncio.gather(*listener._connections.values())
    assert listeners.aborted
    await listener.stop()


def test_a_connection_that_ends_in_an_ordinary_way_is_not_logged_as_trouble(
    ring: SharedRingBuffer, caplog: pytest.LogCaptureFixture
) -> None:
    async def play() -> None:
        listener = Listener(ring)
        peer = await connected(listener)
        await peer.gone()
        await listener.stop()

    with caplog.at_level(logging.INFO, logger=Connection.__module__):
        run(play())
    assert not caplog.records
