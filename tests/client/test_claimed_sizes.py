"""Tickets that claim more bytes than there is memory for: an error for that payload, and none for the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers import NETWORK_WIRE, asynchronous

from transport import BlockingClient, SharedRingBuffer, Ticket, UCXXClient, UCXXServer
from transport.errors import BufferUnsuitableError, LengthMismatchError, TransportError
from transport.joined import read_joined, with_parents
from transport.schema import MAX_BYTES, Schema, UpTo

pytestmark = pytest.mark.ucx

SCHEMA = Schema.of(x=("uint8", UpTo(MAX_BYTES)))
every_wire = pytest.mark.parametrize("wire", ["mapped", NETWORK_WIRE])


def enlarged(ticket: Ticket, size: int = MAX_BYTES) -> Ticket:
    """The ticket as somebody else would have it: of the right key, with a size that its ring does not have."""
    return msgspec.structs.replace(ticket, size=size, schema_fingerprint=SCHEMA.fingerprint, lengths=(size,))


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with (
        SharedRingBuffer.create(Schema.of(x=("uint8", UpTo(1 << 16))), slots=8) as made,
        UCXXServer(made, mode="thread"),
    ):
        yield made


def written(ring: SharedRingBuffer, count: int) -> list[Ticket]:
    return [ring.write({"x": np.full(at + 1, at, np.uint8)}) for at in range(count)]


@every_wire
@pytest.mark.parametrize("size", [MAX_BYTES, 1 << 39, (1 << 16) + 1])
def test_a_read_is_refused(ring: SharedRingBuffer, wire: Any, size: int) -> None:
    [ticket] = written(ring, 1)
    with BlockingClient(wire={wire}, schemas=[SCHEMA], ack="manual") as client:
        with pytest.raises((BufferUnsuitableError, LengthMismatchError)) as caught:
            client.read(enlarged(ticket, size))
        assert ticket.name in str(caught.value)
        with pytest.raises((BufferUnsuitableError, LengthMismatchError)):
            client.read(enlarged(ticket, size), fields=("x",))
        assert client.statistics().failed_reads == 2
        payload = client.read(ticket)
        assert payload.data.tolist() == [0]


@asynchronous
@every_wire
@pytest.mark.parametrize("fields", [None, ("x",)])
async def test_the_others_of_read_many_come(wire: Any, fields: Any) -> None:
    with (
        SharedRingBuffer.create(Schema.of(x=("uint8", UpTo(1 << 16))), slots=8) as ring,
        UCXXServer(ring, mode="thread"),
    ):
        tickets = written(ring, 6)
        asked = [enlarged(each) if at in (0, 3) else each for at, each in enumerate(tickets)]
        own = Schema.of(x=("uint8", UpTo(1 << 16)))
        async with UCXXClient(wire={wire}, schemas=[SCHEMA, own], ack="manual") as client:
            # Views of half of the slots keep mapped reads from being views; then they need memory, too.
            held = [await client.read(each) for each in tickets[4:]] if wire == "mapped" else []
            failed: dict[int, TransportError] = {}
            came = {}
            async for outcome in client.read_many(asked, fields=fields):
                if outcome.error is not None:
                    failed[outcome.index] = outcome.error
                elif outcome.payload is not None:
                    came[outcome.index] = outcome.payload["x"].tolist()
            assert came == {at: [at] * (at + 1) for at in (1, 2, 4, 5)}
            assert failed.keys() == {0, 3}
            assert all(isinstance(each, BufferUnsuitableError | LengthMismatchError) for each in failed.values())
            del held


@every_wire
def test_a_part_of_a_joined_payload_is_named(ring: SharedRingBuffer, wire: Any) -> None:
    [ticket] = written(ring, 1)
    with SharedRingBuffer.create(slots=1, slot_bytes=1 << 16) as children, UCXXServer(children, mode="thread"):
        child = children.write({"y": 1, **with_parents({}, [enlarged(ticket)])})
        with (
            BlockingClient(wire={wire}, schemas=[SCHEMA], ack="manual") as client,
            pytest.raises((BufferUnsuitableError, LengthMismatchError), match=f"its part {ticket.name}"),
        ):
            read_joined(client, child)
    assert ring.statistics().free == 7


def test_device_memory_that_is_not_to_be_had_is_an_error_of_ours(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class OutOfMemoryError(RuntimeError):
        """As torch's."""

    def short(*_: object, **__: object) -> None:
        raise OutOfMemoryError("Out of memory allocating 512 bytes")

    with SharedRingBuffer.create(slots=2, slot_bytes=4096) as ring, UCXXServer(ring, mode="thread"):
        tickets = [ring.write({"x": at}) for at in range(2)]
        for wire in ("mapped", NETWORK_WIRE):
            with BlockingClient(device="cupy", wire={wire}, ack="manual") as client:
                with monkeypatch.context() as patched:
                    patched.setattr(cupy, "empty", short)
                    with pytest.raises(BufferUnsuitableError, match="there is no memory for them here"):
                        client.read(tickets[0])
                    errors = [outcome.error for outcome in client.read_many(tickets)]
                    assert [type(error) for error in errors] == [BufferUnsuitableError] * 2
                assert [outcome.error for outcome in client.read_many(tickets)] == [None, None]
