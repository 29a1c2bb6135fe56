"""Received payloads for batches, natively: nothing outside their memory is read, whatever the rows and tickets say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from transport import Schema, SharedRingBuffer, _ring
from transport.errors import UsageError
from transport.ring.batch_shape import fields_of
from transport.schema import UpTo

SCHEMA = Schema.of(x=("uint8", UpTo(1 << 20)), y=("int64",))
COLUMNS = np.arange(len(_ring.BATCH_COLUMNS))[:, np.newaxis]


def made(payload: bytes, note: bytes, **changed: int) -> _ring.ReceivedPayloads:
    row = dict(zip(_ring.RECEIVED_ROWS, (0, 0, len(payload), 1, 0, len(note), _ring.checksum(payload), 0), strict=True))
    rows = np.array([[value] for value in (row | changed).values()], np.uint64)
    return _ring.ReceivedPayloads([payload, note], rows, COLUMNS)


@pytest.fixture(scope="module")
def one() -> tuple[bytes, bytes]:
    """A payload and its ticket."""
    with SharedRingBuffer.create(SCHEMA, slots=1) as ring:
        ticket = ring.write({"x": np.arange(5, dtype=np.uint8), "y": 7})
        return bytes(ring.native.payload(ticket.slot)[: ticket.size]), ticket.encode()


def targets(rows: int) -> tuple[list[np.ndarray], list[tuple[Any, int, int, bool, bytes]]]:
    arrays = [np.zeros(rows, np.uint8), np.zeros(8, np.uint8)]
    return arrays, [(arrays[0], rows, 0, True, b"\0"), (arrays[1], 8, 0, False, b"\0")]


def test_a_payload_is_gathered_by_its_tickets_lengths(one: tuple[bytes, bytes]) -> None:
    received = made(*one)
    fields, lengths = fields_of(SCHEMA), np.empty((1, 1), np.int64)
    assert received.measure(fields, lengths) == []
    assert lengths.tolist() == [[5]]
    arrays, places = targets(5)
    assert received.gather(fields, places, True) == []
    assert (arrays[0].tolist(), arrays[1].view(np.int64).tolist()) == ([0, 1, 2, 3, 4], [7])
    assert (received.strange(SCHEMA.fingerprint), received.strange("0" * 32)) == ([], [0])
    assert (received.marked(SCHEMA.fingerprint.encode()), received.marked(b"0" * 32)) == ([0], [])
    assert received.place(0)[0][:5] == bytes(range(5))
    columns = np.zeros_like(COLUMNS)
    received.columns(columns)
    assert columns.tolist() == COLUMNS.tolist()
    first = _ring.ReceivedPayloads(received, 1)
    assert (len(first), len(received), first.note(0)) == (1, 0, one[1])
    assert (first.measure(fields, lengths), first.place(0)[0][:5]) == ([], bytes(range(5)))
    first.columns(columns)
    assert columns.tolist() == COLUMNS.tolist()
    with pytest.raises(UsageError):
        _ring.ReceivedPayloads(first, 2)
    received = first
    received.leave(0)
    assert (len(received), received.strange("0" * 32), received.gather(fields, places, True)) == (0, [], [])


@pytest.mark.parametrize("rows", [b"", bytes(8), bytes(65)])
def test_rows_of_another_number_are_refused_or_empty(one: tuple[bytes, bytes], rows: bytes) -> None:
    if rows:
        with pytest.raises(UsageError, match="not a row of each kind"):
            _ring.ReceivedPayloads([*one], rows, COLUMNS)
    else:
        assert len(_ring.ReceivedPayloads([*one], rows, COLUMNS[:, :0])) == 0


def test_memory_is_kept_while_the_payloads_are_and_wrong_bytes_are_named(one: tuple[bytes, bytes]) -> None:
    payload = bytearray(one[0])
    received = made(payload, one[1])  # type: ignore[arg-type]
    with pytest.raises(BufferError):
        payload.extend(b"more")
    payload[0] ^= 1
    assert received.verify() == [0]
    fields = fields_of(SCHEMA)
    received.measure(fields, np.empty((1, 1), np.int64))
    arrays, places = targets(5)
    assert received.gather(fields, places, True) == [0]
    assert not arrays[0].any(), "a small payload is hashed before anything is written"
    assert received.gather(fields, places, False) == []
    del received
    payload.extend(b"more")
