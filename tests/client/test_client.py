"""UCXXClient against real listeners over real UCX, and through shared memory; one behaviour for every wire."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import (
    NETWORK,
    asynchronous,
    every_wire,
    free,
    noise,
    serving,
    states,
    until,
)
from ml_dtypes import bfloat16

from transport import Schema, UCXXClient, UpTo
from transport.errors import (
    AuthenticationError,
    BufferUnsuitableError,
    ClosedError,
    RankError,
    SchemaError,
    StaleSlotError,
    UsageError,
)
from transport.settings import DEFAULTS
from transport.wire.frames import SlotFate

pytestmark = pytest.mark.ucx

INLINE = DEFAULTS.inline_limit
SIZES = (0, 1, INLINE - 1, INLINE, INLINE + 1, 64 << 10, 1 << 20, (16 << 20) + 3)
EPISODE = Schema.of(
    obs=("float32", UpTo(50), 4), logp=("bfloat16", UpTo(50)), done=("bool",), tokens=("int32", UpTo(9)), ver=("int64",)
)


# --- what arrives --------------------------------------------------------------------------------
@every_wire
@asynchronous
async def test_read_returns_the_bytes_that_were_written(wire: Any) -> None:
    with serving(slots=2, slot_bytes=max(SIZES)) as (ring, _):
        async with UCXXClient(wire={wire}) as client:
            for number, size in enumerate(SIZES):
                data = noise(size)
                payload = await client.read(ring.write_raw(data, metadata={"number": number}))
                assert np.array_equal(payload["data"], data), size
                assert (payload.wire, payload.metadata, payload.rank) == (wire, {"number": number}, 0)
                del payload
                await until(lambda: free(ring))
            assert client.statistics().bytes_by_wire == {wire: sum(SIZES)}


@every_wire
@pytest.mark.parametrize("steps", [0, 37])
@asynchronous
async def test_read_returns_every_tensor_as_it_was_with_its_length(wire: Any, steps: int) -> None:
    values = {
        "obs": noise(steps * 16).view(np.float32).reshape(steps, 4),
        "logp": np.linspace(-3, 0, steps).astype(bfloat16),
        "done": np.array(True),
        "tokens": np.arange(steps % 9, dtype=np.int32),
        "ver": np.array(-(2**62)),
    }
    with serving(EPISODE) as (ring, _):
        async with UCXXClient(wire={wire}, schemas=[EPISODE]) as client:
            payload = await client.read(ring.write(values))
            assert list(payload) == list(values)
            for name, array in payload.items():
                assert array.dtype == values[name].dtype
                assert array.shape == values[name].shape
                assert array.tobytes() == values[name].tobytes(), name
                assert not array.flags.writeable


@every_wire
@asynchronous
async def test_a_payload_of_a_ring_without_schema_describes_itself(wire: Any) -> None:
    with serving() as (ring, _):
        async with UCXXClient(wire={wire}) as client:
            for shape in [(3, 5), (), (0, 2)]:
                array = np.full(shape, 1.5)
                payload = await client.read(ring.write({"x": array, "y": 7}))
                assert np.array_equal(payload["x"], array)
                assert payload["x"].shape == shape
                assert payload["y"] == 7


@every_wire
@asynchronous
async def test_a_payload_of_an_unknown_schema_is_not_consumed_and_readable_as_bytes(wire: Any) -> None:
    with serving(Schema.of(x=("uint8", 3))) as (ring, _):
        ticket, out = ring.write({"x": np.array([1, 2, 3], np.uint8)}, readers=2), bytearray(3)
        async with UCXXClient(wire={wire}) as client:
            with pytest.raises(SchemaError, match="schemas="):
                await client.read(ticket)
            (outcome,) = [each async for each in client.read_many([ticket])]
            assert isinstance(outcome.error, SchemaError)
            await client.read(ticket, out)
            assert out == b"\1\2\3"
        async with UCXXClient(wire={wire}, ack="manual") as client:
            payload = await client.read(ticket, rank=1)
            assert bytes(payload.data) == b"\1\2\3"
            with pytest.raises(SchemaError, match="schemas="):
                payload["x"]
            del payload


# --- where it arrives ----------------------------------------------------------------------------
OUTS: dict[str, Callable[[int], Any]] = {
    "numpy": lambda size: np.full(size, 0xEE, np.uint8),
    "floats": lambda size: np.full(-(-size // 4), np.nan, np.float32),
    "bytearray": lambda size: bytearray(b"\xee" * size),
    "memoryview": lambda size: memoryview(bytearray(b"\xee" * (size + 9)))[4:],
}


@pytest.mark.nightly(keep=3)
@every_wire
@pytest.mark.parametrize("size", [100, 64 << 10])
@asynchronous
async def test_a_payload_is_put_where_the_caller_wants_it_and_nowhere_else(wire: Any, size: int) -> None:
    with serving() as (ring, _):
        async with UCXXClient(wire={wire}) as client:
            for out in (make(size + 64) for make in OUTS.values()):
                before = memoryview(out).cast("B")[size:].tobytes()
                payload = await client.read(ring.write_raw(noise(size)), out=out)
                assert payload.data is out
                assert payload.wire == wire
                assert memoryview(out).cast("B")[:size] == memoryview(noise(size))
                assert memoryview(out).cast("B")[size:] == before
                await until(lambda: free(ring))


def read_only(size: int) -> np.ndarray:
    array = np.zeros(size, np.uint8)
    array.flags.writeable = False
    return array


@every_wire
@asynchronous
async def test_an_unsuitable_destination_is_refused_and_nothing_is_consumed(wire: Any) -> None:
    unsuitable = (
        *(read_only(100), bytes(100), np.zeros(200, np.uint8)[::2], np.zeros(99, np.uint8), bytearray(99)),
        "text",
    )
    with serving() as (ring, _):
        ticket = ring.write_raw(noise(100))
        async with UCXXClient(wire={wire}) as client:
            for out in unsuitable:
                with pytest.raises(BufferUnsuitableError):
                    await client.read(ticket, out=out)
            assert ring.statistics().pins == 0
            assert np.array_equal((await client.read(ticket))["data"], noise(100))


@every_wire
@asynchronous
async def test_memory_goes_back_to_the_pool_with_the_last_array_and_is_not_reused_before(wire: Any) -> None:
    with serving(slots=2) as (ring, _):
        async with UCXXClient(wire={wire}) as client:
            for size in (100, 64 << 10):
                kept = (await client.read(ring.write_raw(noise(size, 1))))["data"][10:]
                for seed in range(2, 5):
                    payload = await client.read(ring.write_raw(noise(size, seed)))
                    assert np.array_equal(payload["data"], noise(size, seed))
                    del payload
                assert np.array_equal(kept, noise(size, 1)[10:])
                del kept
            await until(lambda: free(ring))
            assert client._buffers.lent == 0


@every_wire
@asynchronous
async def test_arrays_stay_valid_after_the_client_is_closed(wire: Any) -> None:
    with serving() as (ring, _):
        async with UCXXClient(wire={wire}) as client:
            array = (await client.read(ring.write_raw(noise(20_000))))["data"]
        for _ in range(ring.slot_count - 1):
            ring.write_raw(bytes(20_000))
        assert np.array_equal(array, noise(20_000))
        with pytest.raises(ClosedError):
            await client.read(ring.tickets()[0])
        del array


# --- acknowledgements ------------------------------------------------------------------------------


@pytest.mark.nightly(keep=3)
@every_wire
@pytest.mark.parametrize("mode", ["manual", "on_consumed"])
@asynchronous
async def test_an_unacknowledged_payload_is_held_and_read_again_by_another_client(wire: Any, mode: Any) -> None:
    with serving() as (ring, _):
        ticket = ring.write_raw(noise(30_000))
        async with UCXXClient(wire={wire}, ack=mode) as client:
            payload = await client.read(ticket)
            assert states(ring) == (0, 1)
        del payload
        await until(lambda: states(ring) == (1, 0))
        async with UCXXClient(wire={wire}, ack=mode) as client:
            payload = await client.read(ticket)
            assert np.array_equal(payload["data"], noise(30_000))
            assert payload.ack()
            assert not payload.ack()
            del payload
            await until(lambda: free(ring))


@every_wire
@asynchronous
async def test_the_end_of_a_with_block_acknowledges_and_an_exception_in_it_does_not(wire: Any) -> None:
    with serving() as (ring, _):
        done, failed = (ring.write_raw(noise(size)) for size in (100, 30_000))
        async with UCXXClient(wire={wire}, ack="manual") as client:
            with await client.read(done) as payload:
                assert payload.ticket is done
            with contextlib.suppress(KeyError), await client.read(failed) as payload:
                payload["absent"]
            with pytest.raises(ClosedError):
                payload.data  # noqa: B018
            await until(lambda: ring.statistics().consumes == 1)
        await until(lambda: states(ring) == (1, 0))
        assert ring.tickets() == [failed]


@every_wire
@asynchronous
async def test_each_rank_reads_once_and_the_last_one_frees_the_slot(wire: Any) -> None:
    with serving() as (ring, _):
        ticket = ring.write_raw(noise(10_000), readers=2)
        async with UCXXClient(wire={wire}) as first, UCXXClient(wire={wire}) as second:
            for rank in (2, -1, 16, True):
                with pytest.raises(RankError):
                    await first.read(ticket, rank=rank)
            assert ring.statistics().pins == 0
            for client, rank in ((first, 1), (second, 0)):
                assert not free(ring)
                with await client.read(ticket, rank=rank) as payload:
                    assert np.array_equal(payload["data"], noise(10_000))
                del payload
                with pytest.raises(StaleSlotError):
                    await client.read(ticket, rank=rank)
            await until(lambda: free(ring))


@every_wire
@asynchronous
async def test_discard_frees_for_every_rank_and_state_says_what_became_of_a_payload(wire: Any) -> None:
    with serving() as (ring, _):
        ticket = ring.write_raw(noise(10), readers=2)
        async with UCXXClient(wire={wire}) as client:
            assert await client.state(ticket) is SlotFate.READABLE
            with await client.read(ticket, rank=1):
                pass
            gc.collect()
            await until(lambda: ring.statistics().consumes == 1)
            assert await client.state(ticket, rank=1) is SlotFate.CONSUMED
            assert await client.state(ticket, rank=0) is SlotFate.READABLE
            assert await client.discard(ticket)
            assert not await client.discard(ticket)
            assert await client.state(ticket) is SlotFate.GONE
            await until(lambda: free(ring))


# --- many ------------------------------------------------------------------------------------------
@every_wire
@asynchronous
async def test_read_many_gives_each_ticket_its_payload_or_its_error(wire: Any) -> None:
    sizes = [10, 20_000, 3000, 0, 70_000, 8192, 500, 8193] * 5
    with serving(slots=len(sizes), slot_bytes=70_000) as (ring, _):
        tickets = [ring.write_raw(noise(size, number)) for number, size in enumerate(sizes)]
        stale = set(tickets[1::7])
        for ticket in stale:
            ring.discard(ticket)
        async with UCXXClient(wire={wire}) as client:
            seen = []
            async for _, ticket, payload, error in client.read_many(tickets):
                seen.append(ticket)
                if ticket in stale:
                    assert payload is None
                    assert isinstance(error, StaleSlotError)
                else:
                    assert error is None
                    assert payload is not None
                    assert np.array_equal(payload["data"], noise(ticket.size, tickets.index(ticket)))
            del payload
            assert sorted(seen, key=tickets.index) == tickets
            assert client.statistics().stale == len(stale)
            assert client.statistics().reads == len(tickets) - len(stale)
            await until(lambda: free(ring))


@asynchronous
async def test_read_many_reports_what_forbids_a_whole_batch_with_each_ticket() -> None:
    with serving(secret=b"right") as (ring, _):
        tickets = [ring.write_raw(noise(10, number)) for number in range(4)]
        async with UCXXClient(wire=NETWORK, secret=b"wrong") as client:
            outcomes = [outcome async for outcome in client.read_many(tickets)]
        assert sorted(outcome.ticket.slot for outcome in outcomes) == sorted(ticket.slot for ticket in tickets)
        assert all(isinstance(outcome.error, AuthenticationError) for outcome in outcomes)


@pytest.mark.parametrize("arguments", [{"wire": {"pigeon"}}, {"wire": set()}, {"ack": "never"}, {"secret": "text"}])
@asynchronous
async def test_senseless_arguments_are_refused(arguments: Any) -> None:
    with pytest.raises(UsageError):
        UCXXClient(**arguments)
