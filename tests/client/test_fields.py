"""Some fields of a payload: only their bytes are moved, each verified, and what is around them stays where it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frame_codec import Answer
from helpers import NETWORK, NETWORK_WIRE, asynchronous, eventually
from scripted_listener import INLINE, ScriptedListener
from scripted_listener import ticket as ticket_of

from transport import BlockingClient, Schema, SharedRingBuffer, StaleSlotError, Ticket, UCXXServer, UpTo, _ring
from transport.client.connections.connection import Want
from transport.errors import ChecksumError, SchemaError, UsageError
from transport.testing import LocalTransport
from transport.wire.frames import Kind

pytestmark = pytest.mark.ucx

SCHEMA = Schema.of(
    prompt=("text", UpTo(100)),
    tokens=("int32", UpTo(100_000)),
    image=("uint8", 300, 300),
    reward="float32",
    messages=("value", UpTo(4096)),
)


def sample(tokens: int = 1000) -> dict[str, Any]:
    return {
        "prompt": "hello",
        "tokens": np.arange(tokens, dtype=np.int32),
        "image": np.full((300, 300), 7, np.uint8),
        "reward": 2.5,
        "messages": [{"role": "user", "scores": np.arange(9.0)}],
    }


def served(ring: SharedRingBuffer) -> UCXXServer:
    return UCXXServer(ring, mode="thread")


def test_a_ticket_lists_its_fields_with_their_sizes() -> None:
    with SharedRingBuffer.create(SCHEMA, slots=1) as ring:
        ticket = Ticket.parse(ring.write(sample(5)).to_text())
        listed = {each.name: (each.kind or each.dtype.name, each.shape, each.nbytes) for each in ticket.fields(SCHEMA)}
        assert listed == {
            "prompt": ("text", (5,), 5),
            "tokens": ("int32", (5,), 20),
            "image": ("uint8", (300, 300), 90_000),
            "reward": ("float32", (), 4),
            "messages": ("value", (192,), 192),
        }
        with pytest.raises(SchemaError, match="contains no schema"):
            ticket.fields()


@pytest.mark.nightly(keep=4)
@pytest.mark.parametrize("wire", ["mapped", NETWORK_WIRE])
@pytest.mark.parametrize("schema", [SCHEMA, None], ids=["fixed", "open"])
@pytest.mark.parametrize("fields", [("reward", "tokens"), ("messages", "prompt"), ("image", "image")])
def test_the_fields_that_were_asked_for_and_no_others(
    wire: Any, schema: Schema | None, fields: tuple[str, ...]
) -> None:
    with (
        SharedRingBuffer.create(schema, slots=4, slot_bytes=None if schema else 1 << 20) as ring,
        served(ring),
        BlockingClient(schemas=[SCHEMA], wire={wire}, ack="manual") as client,
    ):
        values = sample()
        ticket = ring.write(values)
        payload = client.read(ticket, fields=fields)
        assert list(payload) == [name for name in SCHEMA.names if name in fields]
        for name in payload:
            if name == "messages":
                assert payload[name][0]["scores"].tolist() == list(range(9))
            else:
                np.testing.assert_array_equal(payload[name], values[name])
        with pytest.raises(KeyError):
            payload["other"]
        if wire == NETWORK_WIRE:
            wanted = sum(each.nbytes for each in ticket.fields(SCHEMA) if each.name in fields)
            assert client.statistics().bytes_by_wire == {NETWORK_WIRE: wanted}
            eventually(lambda: getattr(ring.statistics(), f"bytes_{NETWORK_WIRE}") == wanted)  # once UCX is through
        assert payload.ack()
        payload.release()


def test_a_part_acknowledges_the_whole_payload_and_frees_its_slot() -> None:
    with SharedRingBuffer.create(SCHEMA, slots=1) as ring, served(ring):
        for wire in ("mapped", NETWORK_WIRE):
            with BlockingClient(schemas=[SCHEMA], wire={wire}) as client:
                ticket = ring.write(sample())
                assert client.read(ticket, fields=("reward",))["reward"] == 2.5
                with pytest.raises(StaleSlotError):
                    client.read(ticket, fields=("reward",))
            assert ring.reserve({"prompt": 0, "tokens": 0, "messages": 64}, timeout_s=20).abort() is None


def test_more_fields_than_a_message_has_records() -> None:
    schema = Schema.of(**{f"f{at}": ("int64", UpTo(10)) for at in range(150)})
    with (
        SharedRingBuffer.create(schema, slots=1) as ring,
        served(ring),
        BlockingClient(schemas=[schema], wire=NETWORK) as client,
    ):
        ticket = ring.write({name: np.full(3, at) for at, name in enumerate(schema.names)})
        payload = client.read(ticket, fields=schema.names[::2] + schema.names[1:9:2])
        assert len(payload) == 79
        assert all((array == int(name[1:])).all() for name, array in payload.items())


def test_a_part_without_bytes_still_says_whether_the_payload_is_there() -> None:
    with (
        SharedRingBuffer.create(SCHEMA, slots=1) as ring,
        served(ring),
        BlockingClient(schemas=[SCHEMA], wire=NETWORK, ack="manual") as client,
    ):
        ticket = ring.write(sample(0))
        assert client.read(ticket, fields=("tokens",))["tokens"].shape == (0,)
        ring.discard(ticket)
        with pytest.raises(StaleSlotError):
            client.read(ticket, fields=("tokens",))


@pytest.mark.parametrize("wire", ["mapped", NETWORK_WIRE])
def test_what_cannot_be_asked_for_is_named(wire: Any) -> None:
    with (
        SharedRingBuffer.create(SCHEMA, slots=1) as ring,
        served(ring),
        BlockingClient(schemas=[SCHEMA], wire={wire}, ack="manual") as client,
        BlockingClient(wire={wire}, ack="manual") as stranger,
    ):
        ticket = ring.write(sample())
        with pytest.raises(SchemaError, match=r"no field 'rewards' in this schema; it has prompt, tokens, image"):
            client.read(ticket, fields=("rewards",))
        for wrong in ((), "tokens", 3, {"tokens"}):
            with pytest.raises(UsageError, match="give the names of one or more fields"):
                client.read(ticket, fields=wrong)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="out= is for whole payloads"):
            client.read(ticket, out=bytearray(ticket.size), fields=("tokens",))
        with pytest.raises(SchemaError, match="contains no schema"):
            stranger.read(ticket, fields=("tokens",))
        [outcome] = client.read_many([ticket], fields=("rewards",))
        assert isinstance(outcome.error, SchemaError)
        assert ring.statistics().pins == 0
        client.read(ticket).release()


@pytest.mark.parametrize("size", [50, 500])  # joined to the answer, and a message of its own
@asynchronous
async def test_wrong_bytes_of_a_range_are_found_by_the_checksum_of_its_answer(size: int) -> None:
    async with ScriptedListener() as listener:
        link, side = await listener.linked()
        data = bytes(range(size % 256)) * (size // (size % 256)) + bytes(size % (size % 256))
        for wrong in (0, 1):
            wanted = Want(ticket_of(1000), 0, bytearray(size), 0, 128)
            _, future = link.read([wanted], [])
            number, [asked] = await side.asked()
            assert (asked.kind, asked.joined_most, asked.length) == (Kind.READ_RANGE, 2, size)
            said = Answer(0, 0, size, _ring.checksum(data) ^ wrong)
            if size > INLINE:
                await side.status(number, said)
                await side.payload(number, 0, data)
            else:
                await side.status(number, said._replace(joined=memoryview(data)))
            [error] = link.outcomes([wanted], await future)
            assert isinstance(error, ChecksumError) == bool(wrong)
            assert bytes(wanted.destination) == data


@asynchronous
async def test_a_range_that_is_none_is_not_asked_for() -> None:
    async with ScriptedListener() as listener:
        link, _ = await listener.linked()
        for size, offset in ((1, 1000 // 64 * 64 + 64), (1000, 64), (1, 1), (1, -64), (1, 1 << 70)):
            with pytest.raises((ValueError, TypeError, RuntimeError)):
                link.read([Want(ticket_of(1000), 0, bytearray(size), None, offset)], [])
        assert (link.native.next_number, link.native.under_way) == (0, 0)


def test_parts_in_the_tests_own_transport() -> None:
    with LocalTransport(slots=2, slot_bytes=1 << 16) as local:
        ticket = local.write({"a": [1, 2], "b": np.arange(3), "c": "text"})
        assert dict(local.client.read(ticket, fields=("c", "a"))) == {"a": [1, 2], "c": "text"}
