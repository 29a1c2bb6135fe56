"""`write_many`: what comes out is what as many `write` give, byte for byte; what is refused leaves nothing behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import NoReturn

import ml_dtypes
import numpy as np
import pytest
from claimed import claim_each
from helpers import eventually
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from transport import Schema, SharedRingBuffer, TensorSpec
from transport.errors import PayloadTooLargeError, RingFullError, SchemaError, TicketError, UsageError
from transport.ring.writes import PlannedWrite, Tickets, terms_of
from transport.ticket import Ticket, encoded_metadata

SCHEMA = Schema(
    (
        TensorSpec("tokens", "int32", (100,), ragged=True),
        TensorSpec("weights", "bfloat16", (3, 5)),
        TensorSpec("reward", "float32", ()),
    )
)


def payload(number: int, length: int | None = None) -> dict[str, object]:
    return {
        "tokens": np.arange(number, number + (number % 100 if length is None else length), dtype=np.int32),
        "weights": np.full((3, 5), number, dtype=ml_dtypes.bfloat16),
        "reward": np.array(number / 2, dtype=np.float32),
    }


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(SCHEMA, slots=8) as made:
        yield made


def content(ring: SharedRingBuffer, ticket: Ticket) -> bytes:
    with ring.read_raw(ticket) as lease:
        return bytes(lease.view)


def test_tickets_are_those_of_single_writes(ring: SharedRingBuffer) -> None:
    ring.native.set_ports((5000, 5001))
    ring.native.addresses = "10.0.0.1,10.0.0.2"
    tickets = ring.write_many(
        [payload(number) for number in range(4)],
        readers=2,
        metadata=[{"number": number} if number else None for number in range(4)],
        deadline_s=100,
    )
    assert [ticket.metadata for ticket in tickets] == [{}, {"number": 1}, {"number": 2}, {"number": 3}]
    for number, (ticket, encoded) in enumerate(zip(tickets, tickets.encoded, strict=True)):
        assert ticket.encode() == encoded == ring.native.note(ticket.slot, ticket.generation)
        single = ring.write(payload(number), readers=2, metadata=ticket.metadata, deadline_s=100)
        assert content(ring, ticket) == content(ring, single)
        for name in ("ring", "segment", "host", "addresses", "ports", "size", "checksum", "readers", "lengths"):
            assert getattr(ticket, name) == getattr(single, name)
        assert ticket.layout(SCHEMA) == single.layout(SCHEMA)
    assert ring.tickets()[:4] == list(tickets)


@pytest.mark.parametrize(
    ("values", "casting"),
    [
        (payload(7) | {"tokens": np.arange(40, dtype=np.int32)[::2]}, "safe"),
        (payload(7) | {"tokens": np.arange(20, dtype=np.int16)}, "safe"),
        (payload(7) | {"tokens": np.arange(20, dtype=">i4")}, "safe"),
        (payload(7) | {"tokens": np.arange(20.0)}, "unsafe"),
        (payload(7) | {"reward": 3.5}, "safe"),
        (payload(7) | {"weights": np.asfortranarray(np.ones((3, 5), dtype=ml_dtypes.bfloat16))}, "safe"),
        (payload(7, 0), "safe"),
    ],
)
def test_what_is_not_plain_is_converted_as_a_single_write_does(
    ring: SharedRingBuffer, values: dict[str, object], casting: str
) -> None:
    first, odd, last = ring.write_many([payload(1), values, payload(2)], casting=casting)  # type: ignore[arg-type]
    single = ring.write(values, casting=casting)  # type: ignore[arg-type]
    assert (odd.size, odd.checksum, odd.lengths) == (single.size, single.checksum, single.lengths)
    assert content(ring, odd) == content(ring, single)
    assert (first.lengths, last.lengths) == ((1,), (2,))


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 4096, 300_000, 9_000_000])
def test_a_ring_without_a_schema_takes_any_size(size: int) -> None:
    with SharedRingBuffer.create(slots=4, slot_bytes=10_000_000) as ring:
        values = {"a": np.arange(size, dtype=np.uint8), "b": np.arange(5, dtype=np.int64)}
        (ticket,) = ring.write_many([values])
        single = ring.write(values)
        assert (ticket.schema, ticket.checksum) == (single.schema, single.checksum)
        assert ticket.encode() == ring.native.note(ticket.slot, ticket.generation)
        assert content(ring, ticket) == content(ring, single)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"tokens": np.zeros(3, dtype=np.int32)}, SchemaError),
        (payload(1) | {"tokens": np.zeros(101, dtype=np.int32)}, SchemaError),
        (payload(1) | {"weights": np.zeros((3, 5))}, SchemaError),
        (payload(1) | {"reward": "high"}, SchemaError),
    ],
)
def test_what_is_refused_leaves_nothing_behind(ring: SharedRingBuffer, bad: dict[str, object], error: type) -> None:
    with pytest.raises(error):
        ring.write_many([payload(1), bad, payload(2)])
    assert ring.native.state_counts() == (8, 0, 0, 0)
    assert ring.native.counters()["takes"] == 0


def test_terms_are_looked_at_first(ring: SharedRingBuffer) -> None:
    with pytest.raises(UsageError, match="readers=17"):
        ring.write_many([payload(1)], readers=17)
    with pytest.raises(UsageError, match="1 mappings of metadata for 2 payloads"):
        ring.write_many([payload(1), payload(2)], metadata=[{}])
    with pytest.raises(TicketError, match="metadata"):
        ring.write_many([payload(1)], metadata={"a": object()})
    with pytest.raises(TicketError, match="metadata"):
        ring.write_many([payload(1)], metadata=["text"])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="timeout_s"):
        ring.write_many([payload(1)], timeout_s=float("nan"))
    with pytest.raises(UsageError, match="policy_version"):
        ring.write_many([payload(1)], policy_version=1 << 63)
    with SharedRingBuffer.create(slots=2, slot_bytes=100) as small, pytest.raises(PayloadTooLargeError, match="101"):
        small.write_many([{"data": np.zeros(100, np.uint8)}, {"data": np.zeros(101, np.uint8)}])
    with (
        SharedRingBuffer.create(slots=2, slot_bytes=9000) as small,
        pytest.raises(UsageError, match="a ticket of up to"),
    ):
        small.write_many([{f"{'x' * 100}{number}": np.zeros(1, np.uint8) for number in range(20)}])
    assert ring.native.counters()["takes"] == 0


def test_nothing_is_written_of_nothing(ring: SharedRingBuffer) -> None:
    assert len(ring.write_many([])) == 0


def test_a_full_ring_tells_what_was_written_before(ring: SharedRingBuffer) -> None:
    ring.overflow = "error"
    with pytest.raises(RingFullError) as caught:
        ring.write_many([payload(number) for number in range(10)])
    written = caught.value.written
    assert isinstance(written, Tickets)
    assert [ticket.lengths for ticket in written] == [(number,) for number in range(8)]
    assert ring.native.state_counts() == (0, 0, 8, 0)
    ring.overflow = "block"
    with pytest.raises(RingFullError) as caught:
        ring.write_many([payload(1)], timeout_s=0.01)
    assert len(caught.value.written) == 0
    ring.overflow = "overwrite"
    assert len(ring.write_many([payload(number) for number in range(10)])) == 10


def test_a_batch_larger_than_the_ring_waits_for_its_readers(ring: SharedRingBuffer) -> None:
    def consume() -> None:
        left = 100
        while left:
            left -= sum(ring.native.claim_batch(3, 30.0).finish())

    reader = threading.Thread(target=consume)
    reader.start()
    tickets = ring.write_many([payload(number) for number in range(100)])
    reader.join()
    assert [ticket.lengths for ticket in tickets] == [(number,) for number in range(100)]


def test_a_deadline_counts_from_when_there_is_room(ring: SharedRingBuffer) -> None:
    first = ring.write_many([payload(number) for number in range(8)])
    written: list[Ticket] = []
    writer = threading.Thread(target=lambda: written.extend(ring.write_many([payload(8)], deadline_s=100)))
    writer.start()
    eventually(lambda: ring.statistics().full_waits)
    freed_at = time.time()
    ring.discard(first[0])
    writer.join()
    [ticket] = written
    assert ticket.deadline is not None
    assert ticket.deadline >= freed_at + 100


def test_the_policy_version_is_the_claims(ring: SharedRingBuffer) -> None:
    ring.write_many([payload(1)], policy_version=7)
    ring.write(payload(2), policy_version=8)
    ring.write(payload(3))
    versions = [claim.payload.version for claim in claim_each(ring, 9)]
    assert versions == [7, 8, None]


def test_arrays_are_let_go_afterwards(ring: SharedRingBuffer) -> None:
    data = bytearray(400)
    values = payload(1) | {"tokens": np.frombuffer(data, dtype=np.int32)}
    ring.write_many([values])
    del values
    data.append(1)  # BufferError if anything still exported it


@examples(20)
@given(
    lengths=st.lists(st.integers(0, 100), min_size=1, max_size=5),
    readers=st.integers(1, 16),
    metadata=st.dictionaries(st.text(max_size=8), st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=20)),
    ports=st.lists(st.integers(1, 65535), max_size=16),
)
def test_any_ticket_is_encoded_as_ticket_py_does(
    lengths: list[int], readers: int, metadata: dict[str, object], ports: list[int]
) -> None:
    assert encoded_metadata(metadata)
    with SharedRingBuffer.create(SCHEMA, slots=5) as ring:
        ring.native.set_ports(tuple(ports))
        for ticket, encoded in zip(
            tickets := ring.write_many([payload(1, n) for n in lengths], readers=readers, metadata=metadata),
            tickets.encoded,
            strict=True,
        ):
            assert ticket.encode() == encoded
            assert ticket.metadata == metadata


def test_an_interrupt_behind_the_taking_of_a_slot_gives_the_slot_back() -> None:
    schema = Schema.of(x=("int64", 4))
    with SharedRingBuffer.create(schema, slots=1) as ring:
        ticket = ring.write({"x": np.arange(4)})

        def taken_and_interrupted(_: float | None) -> NoReturn:
            ring.discard(ticket)
            assert ring.native.take(10.0) is not None
            raise KeyboardInterrupt

        given = [({"x": np.arange(4)}, None)]
        batch = PlannedWrite(ring, "safe", terms_of(1, None), given, taken_and_interrupted, lambda *_: ticket)
        with pytest.raises(KeyboardInterrupt):
            batch.write(None)
        assert ring.native.state_counts() == (1, 0, 0, 0)
