"""Whatever a listener answers to TAKE, and whatever a client asks it: nothing of it is believed that does not fit, and
no slot stays held by it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from frame_codec import Answer, sealed
from helpers import asynchronous, until
from scripted_listener import ScriptedListener, Side, ticket
from scripted_peer import LARGE, Peer, Stage
from takes import consume, contents, seen

from transport import Schema, SharedRingBuffer, UpTo
from transport.claims.batch import TAKEN, Verdict
from transport.claims.connection import ClaimConnection, ClaimConnections
from transport.claims.outcomes import Outcomes
from transport.claims.taken_part import TakenPart
from transport.client.connections.acknowledgements import AckLedger
from transport.client.connections.connection import Link
from transport.client.connections.routes import PortQuarantine, Routes
from transport.devices.buffers import BufferPool
from transport.errors import LinkError, ProtocolError, TicketError, UnreachableError
from transport.ring.batch_shape import fields_of
from transport.settings import DEFAULTS
from transport.ticket import Ticket
from transport.wire import frames
from transport.wire.frames import Kind, Record
from transport.wire.library import engine

pytestmark = pytest.mark.ucx

JOINED = 1
SLOTS = 6
SEEDS = range(8)
SCHEMA = Schema.of(x=("uint8", UpTo(1 << 10)))


def aligned(size: int) -> int:
    return (size + 63) // 64 * 64


def answered(
    number: int, items: list[tuple[bytes, bytes, bool]], lengths: dict[int, int] | None = None
) -> bytes:  # (ticket, payload, joined)
    """An answer to TAKE. ``lengths`` lie about the payloads at some positions."""
    rows, notes, payloads = b"", b"", b""
    for at, (note, data, joined) in enumerate(items):
        length = (lengths or {}).get(at, len(data))
        row = np.zeros((), TAKEN)
        row["slot"], row["generation"], row["flags"], row["attempts"] = at, 7, JOINED if joined else 0, 1
        row["note_bytes"], row["length"], row["checksum"], row["sequence"] = len(note), length, 5, at
        rows += row.tobytes()
        notes += note
        if joined:
            payloads = payloads.ljust(aligned(len(payloads)), b"\0") + data
    code = engine().MORE_TO_COME << 8
    head = bytes(8) + struct.pack("<BBHIII", frames.VERSION, Kind.STATUS, len(items), number, len(payloads), code)
    head += rows + notes
    return bytes(sealed(bytearray(head.ljust(aligned(len(head)), b"\0") if payloads else head))) + payloads


async def taken(listener: ScriptedListener, message: bytes, most: int = 4) -> TakenPart:
    """What a client makes of this answer. A listener that is asked for more goes away."""
    link, side = await listener.linked()
    connections = ClaimConnections(listener, DEFAULTS, BufferPool())  # type: ignore[arg-type]
    takes = ClaimConnection(link, connections)

    async def listen(side: Side) -> None:
        number, _ = await side.asked()
        await side.status_bytes(number, message)
        await side.asked()
        side.endpoint.abort()

    listening = asyncio.create_task(listen(side))
    try:
        return await takes.demand(most, most_bytes=200, verify=False)[1]
    finally:
        takes.abort()
        connections.close()
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        side.endpoint.abort()


GOOD = ticket(300, slot=0).encode()


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize(
    ("note", "length"),
    [
        (GOOD, 299),
        (GOOD, 301),
        (GOOD, 1 << 60),
        (GOOD, (1 << 64) - 1),
        (ticket(300, slot=1).encode(), 300),
        (msgspec.structs.replace(ticket(300, slot=0), generation=8).encode(), 300),
    ],
    ids=["shorter", "longer", "endless", "most", "other slot", "other generation"],
)
@asynchronous
async def test_a_payload_to_be_read_apart_whose_ticket_contradicts_its_row_is_an_error_of_the_protocol(
    note: bytes, length: int
) -> None:
    async with ScriptedListener() as listener:
        with pytest.raises(ProtocolError):
            await taken(listener, answered(0, [(note, b"", False)], {0: length}))


@asynchronous
async def test_an_answer_of_more_bytes_than_were_asked_for_gets_no_memory() -> None:
    apart = [(ticket(150, slot).encode(), b"", False) for slot in range(2)]
    async with ScriptedListener() as listener:
        with pytest.raises(ProtocolError):
            await taken(listener, answered(0, apart, {0: 150, 1: 150}))


@pytest.mark.parametrize("length", [0, 150])
@pytest.mark.parametrize("note", [b"", b"no ticket"], ids=["none", "garbage"])
@asynchronous
async def test_a_payload_to_be_read_apart_whose_ticket_cannot_be_decoded_has_no_bytes_and_leaves_the_others(
    note: bytes, length: int
) -> None:
    async with ScriptedListener() as listener:
        batch = await taken(listener, answered(0, [(GOOD, b"one", True), (note, b"", False)], {1: length}))
        assert contents(batch) == [b"one", b""]
        with pytest.raises(TicketError):
            _ = seen(batch)[1].ticket
        assert 1 in batch.measure(fields_of(SCHEMA), np.empty((2, 1), np.int64))  # not in a batch in place


class OnlyPort(ScriptedListener):
    """No other port of its ring can be asked."""

    routes = Routes(PortQuarantine(), AckLedger())

    async def open_apart(self, port: object, ring: str) -> Link:
        raise UnreachableError(f"nobody asks {port} about {ring}")


async def two_taken(connection: ClaimConnection, side: Side) -> TakenPart:
    """What a demand brings that the scripted listener answers with two payloads."""
    _, taken = connection.demand(2, most_bytes=200, verify=False)
    number, _ = await side.asked()
    await side.status_bytes(number, answered(number, [(GOOD, b"one", True), (GOOD, b"two", True)]))
    return await taken


@pytest.mark.parametrize("codes", [1, 3], ids=["fewer", "more"])
@pytest.mark.parametrize(
    ("end", "verdict"),
    [(TakenPart.finish, Verdict.IN_QUESTION), (TakenPart.release, Verdict.GIVEN_BACK)],
    ids=["FINISH", "GIVE_BACK"],
)
@asynchronous
async def test_an_answer_with_more_or_fewer_codes_than_claims_were_ended_ends_the_connection(
    end: Callable[[TakenPart], None], verdict: Verdict, codes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Outcomes, "patience_s", 0.0)
    async with OnlyPort() as listener:
        link, side = await listener.linked()
        connections = ClaimConnections(listener, DEFAULTS, BufferPool())  # type: ignore[arg-type]
        connection = ClaimConnection(link, connections)
        batch = await two_taken(connection, side)
        end(batch)
        number, records = await side.asked()
        assert len(records) == 2
        await side.status(number, *(Answer(0, at) for at in range(codes)))
        await until(lambda: connection.lost and batch.claims.answered(batch.positions), "both have ended")
        assert batch.claims.verdicts[batch.positions].tolist() == [verdict] * 2
        connections.close()


@asynchronous
async def test_claims_end_with_the_last_message_numbers_of_their_connection() -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        connections = ClaimConnections(listener, DEFAULTS, BufferPool())  # type: ignore[arg-type]
        connection = ClaimConnection(link, connections)
        batch = await two_taken(connection, side)
        link.native.next_number = side.number = frames.MESSAGE_NUMBERS - 2
        assert connection.spent
        for position in range(2):
            ending = asyncio.create_task(consume(batch, [position]))
            number, _ = await side.asked()
            await side.status(number, Answer(0, 0))
            assert (await ending).tolist() == [True]
        assert not connection.lost
        connections.close()


def undecodable(note: bytes) -> bool:
    try:
        Ticket.decode(note)
    except TicketError:
        return True
    return False


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("seed", SEEDS)
@asynchronous
async def test_any_answer_to_a_take_fits_or_is_an_error_of_the_link(seed: int) -> None:
    rng = random.Random(seed)
    async with ScriptedListener() as listener:
        for _ in range(12):
            items = [
                (GOOD[: rng.choice((len(GOOD), 0, 3))], rng.randbytes(rng.choice((0, 1, 64, 65))), rng.random() < 0.8)
                for _ in range(rng.randrange(4))
            ]
            message = bytearray(answered(0, items))
            for _ in range(rng.choice((0, 1, 1, 2))):
                message[rng.choice((2, 4, 8, 12, *range(16, max(17, min(len(message), 160))))) % len(message)] = (
                    rng.choice((0, 1, 2, 255, rng.randrange(256)))
                )
            del message[rng.choice((len(message), len(message), rng.randrange(len(message)))) :]
            try:
                batch = await taken(listener, bytes(message))
            except LinkError:
                continue
            except Exception as error:
                if getattr(error, "status", 0):  # a refusal, which it may say
                    continue
                raise
            for row, payload in zip(batch.rows, seen(batch), strict=True):
                if not row["flags"] & JOINED and undecodable(payload.encoded):
                    assert len(payload.data) == 0
                else:
                    assert len(payload.data) == row["length"]
                assert len(payload.encoded) == row["note_bytes"]


def anything(rng: random.Random, numbers: list[int]) -> Record:
    """A record that may or may not fit what is held."""
    kind = rng.choice(
        (
            Kind.TAKE,
            Kind.TAKE,
            Kind.FINISH,
            Kind.FINISH,
            Kind.GIVE_BACK,
            Kind.CANCEL_TAKE,
            Kind.RENEW,
            Kind.OUTCOME,
            Kind.END,
            Kind.STATE,
        )
    )
    if kind is Kind.TAKE:
        return Record(
            kind,
            slot=rng.choice((1, 2, 256)),
            generation=rng.choice((0, 0, 20)),
            rank=rng.choice((0, 0, 0, 1)),
            length=rng.choice((0, 100, 1 << 20)),
            attempts=rng.choice((0, 0, 3)),
            joined_most=rng.choice((0, 1 << 20)),
        )
    if kind is Kind.CANCEL_TAKE:
        return Record(kind, slot=rng.choice(numbers or [0]))
    return Record(
        kind,
        joined_most=rng.choice((1, 2)) if kind is Kind.END else rng.choice((0, 1)),
        slot=rng.choice((*range(SLOTS), SLOTS, (1 << 32) - 1)),
        generation=rng.choice((1, 1, 2, 3, 0)),
        rank=rng.choice((0, 0, 0, 1, 255)),
        attempts=rng.choice((1, 1, 2, 3, 0)),
        length=rng.choice((0, 0, 1, (1 << 64) - 1)) if kind is Kind.GIVE_BACK else 0,
        key=rng.getrandbits(64) if kind is Kind.OUTCOME else 0,
    )


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("seed", SEEDS)
@asynchronous
async def test_whatever_is_asked_of_a_listener_no_slot_stays_held_when_the_askers_are_gone(seed: int) -> None:
    rng = random.Random(seed)
    with SharedRingBuffer.create(slots=SLOTS, slot_bytes=1 << 16, overflow="error") as ring:
        async with Stage(ring) as stage:
            peers: list[Peer] = [await stage.connected(takes=True) for _ in range(3)]
            numbers: list[int] = []
            for _ in range(120):
                if rng.random() < 0.3:
                    with contextlib.suppress(Exception):  # full
                        ring.write_raw(rng.choice((b"", b"small", LARGE)), readers=rng.choice((1, 1, 2)))
                peer = rng.choice(peers)
                if rng.random() < 0.03 or peer.task.done():
                    await peer.gone()
                    peers[peers.index(peer)] = await stage.connected(takes=True)
                    continue
                record = anything(rng, numbers)
                records = [record] if record.kind is Kind.TAKE else [record, *([record] * rng.choice((0, 0, 1)))]
                numbers.append(peer.tell(*records))
                if rng.random() < 0.3:
                    await asyncio.sleep(0)
            for peer in peers:
                await peer.gone()
            service = stage.listener._service
            assert service is not None
            await until(lambda: service.attempts == service.waiting == 0, "nothing is held")
            assert [ring.native.own_pins(slot) for slot in range(SLOTS)] == [0] * SLOTS
            assert ring.native.depth(0)["claimed"] == ring.native.depth(1)["claimed"] == 0
            look = ring.statistics()
            assert look.free + look.ready == SLOTS
