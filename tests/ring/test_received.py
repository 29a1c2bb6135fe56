"""Received payloads for batches, natively: nothing outside their memory is read, whatever the rows and tickets say."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transport import Schema, SharedRingBuffer, _ring
from transport.ring.batch_shape import fields_of
from transport.schema import UpTo

SCHEMA = Schema.of(x=("uint8", UpTo(1 << 20)), y=("int64",))
U64 = (1 << 64) - 1


def made(payload: bytes, note: bytes, **changed: int) -> _ring.ReceivedPayloads:
    row = dict(zip(_ring.RECEIVED_ROWS, (0, 0, len(payload), 1, 0, len(note), _ring.checksum(payload), 0), strict=True))
    rows = np.array([[value] for value in (row | changed).values()], np.uint64)
    return _ring.ReceivedPayloads([payload, note], rows)


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
    assert received.schemas() == [SCHEMA.fingerprint]
    assert received.place(0)[0][:5] == bytes(range(5))
    received.drop(0)
    assert (len(received), received.schemas(), received.gather(fields, places, True)) == (0, [], [])


@pytest.mark.parametrize(
    "changed",
    [
        {"piece": 2},
        {"piece": U64},
        {"offset": 1},
        {"offset": U64},
        {"length": U64},
        {"offset": U64, "length": 2},
        {"note_piece": 2},
        {"note_offset": 1},
        {"note_length": U64},
        {"note_offset": U64, "note_length": 1},
    ],
)
def test_rows_outside_the_memory_are_refused(one: tuple[bytes, bytes], changed: dict[str, int]) -> None:
    with pytest.raises(_ring.RingFault, match="outside the memory"):
        made(*one, **changed)


@pytest.mark.parametrize("rows", [b"", bytes(8), bytes(65)])
def test_rows_of_another_number_are_refused_or_empty(one: tuple[bytes, bytes], rows: bytes) -> None:
    if rows:
        with pytest.raises(_ring.RingFault, match="not a row of each kind"):
            _ring.ReceivedPayloads([*one], rows)
    else:
        assert len(_ring.ReceivedPayloads([*one], rows)) == 0


@settings(max_examples=200)
@given(seed=st.integers(0, 1 << 30), cut=st.integers(0, 400))
def test_tickets_that_are_cut_or_changed_fit_or_are_left_out(one: tuple[bytes, bytes], seed: int, cut: int) -> None:
    payload, note = one
    random = np.random.default_rng(seed)
    changed = bytearray(note)
    for at in random.integers(0, len(note), 3).tolist():
        changed[at] = int(random.integers(0, 256))
    received = made(payload, bytes(changed[: len(note) - cut]) if cut < len(note) else b"")
    lengths = np.empty((1, 1), np.int64)
    [found] = received.schemas()
    assert found in ("", SCHEMA.fingerprint) or len(found) == 32
    if received.measure(fields_of(SCHEMA), lengths) == []:
        assert found
        assert SCHEMA.layout((int(lengths[0, 0]),)).total == len(payload)


def test_memory_that_is_too_small_and_payloads_that_were_not_measured_are_refused(one: tuple[bytes, bytes]) -> None:
    received = made(*one)
    fields = fields_of(SCHEMA)
    _, places = targets(5)
    with pytest.raises(_ring.RingFault, match="not measured by these fields"):
        received.gather(fields, places, True)
    with pytest.raises(_ring.RingFault, match="not room for the lengths"):
        received.measure(fields, np.empty((2, 1), np.int64))
    received.measure(fields, np.empty((1, 1), np.int64))
    arrays, _ = targets(5)
    for wrong in (
        (arrays[0][:4], 4, 0, True, b"\0"),
        (arrays[0], 5, 1, True, b"\0"),
        (arrays[0], 5, U64, True, b"\0"),
        (arrays[0], 4, 0, False, b"\0"),
        (arrays[0], U64, 0, False, b"\0"),
        (arrays[0], 5, 0, True, b""),
    ):
        with pytest.raises(_ring.RingFault, match=r"too small for the batch|at least one byte"):
            received.gather(fields, [wrong, places[1]], True)
    with pytest.raises(_ring.RingFault, match="no such payload"):
        received.note(1)
    with pytest.raises(_ring.RingFault, match="no such payload"):
        received.drop(1)


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


def test_another_thread_is_refused_while_one_gathers() -> None:
    schema = Schema.of(x=("uint8", UpTo(1 << 26)))
    fields = fields_of(schema)
    with SharedRingBuffer.create(schema, slots=1) as ring:
        ticket = ring.write({"x": np.ones(1 << 26, np.uint8)})
        note = ticket.encode()
        rows = np.array([[0], [0], [ticket.size], [1], [0], [len(note)], [ticket.checksum or 0], [0]], np.uint64)
        received = _ring.ReceivedPayloads([ring.native.payload(ticket.slot), note], rows)
        received.measure(fields, np.empty((1, 1), np.int64))
        places: list[tuple[Any, int, int, bool, bytes]] = [(np.zeros(1 << 26, np.uint8), 1 << 26, 0, True, b"\0")]
        refused: list[str] = []

        def gather(batch: _ring.ReceivedPayloads) -> None:
            while not refused:
                try:
                    batch.gather(fields, places, True)
                except _ring.RingFault as fault:
                    refused.append(str(fault))

        threads = [threading.Thread(target=gather, args=(received,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert "another thread is gathering" in refused[0]
        del received
