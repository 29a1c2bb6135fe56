"""UCXXClient against real listeners over real UCX, and through shared memory; one behaviour for every wire."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from ml_dtypes import bfloat16
from support import (
    Child,
    asynchronous,
    cut_connections,
    dead_port,
    noise,
    on_loop,
    serving,
    stalled,
    until,
)

from transport import Schema, SharedRingBuffer, Ticket, UCXXClient, UCXXServer, UpTo
from transport.errors import (
    AuthenticationError,
    BufferUnsuitableError,
    ChecksumError,
    ClosedError,
    DeadlineExceededError,
    LengthMismatchError,
    PayloadLostError,
    RankError,
    ReadTimeoutError,
    RetriesExhaustedError,
    SchemaError,
    StaleSlotError,
    TransportError,
    UnreachableError,
    UsageError,
    WireNotAllowedError,
    WrongKeyError,
)
from transport.settings import DEFAULTS
from transport.wire import SlotFate

pytestmark = pytest.mark.ucx

INLINE = DEFAULTS.inline_limit
SIZES = (0, 1, INLINE - 1, INLINE, INLINE + 1, 64 << 10, 1 << 20, (16 << 20) + 3)
EPISODE = Schema.of(
    obs=("float32", UpTo(50), 4), logp=("bfloat16", UpTo(50)), done=("bool",), tokens=("int32", UpTo(9)), ver=("int64",)
)

every_wire = pytest.mark.parametrize("wire", ["tcp", "shm", "mapped"])
over_ucx = pytest.mark.parametrize("wire", ["tcp", "shm"])


def settings(**changed: Any) -> Any:
    return msgspec.structs.replace(DEFAULTS, **changed)


def free(ring: SharedRingBuffer) -> bool:
    """Whether every slot is; what only waits for the collector is not held."""
    gc.collect()
    return ring.statistics().free == ring.slot_count


def states(ring: SharedRingBuffer) -> tuple[int, int]:
    """How many slots are READY and READING."""
    look = ring.statistics()
    return look.ready, look.reading


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
@pytest.mark.parametrize("steps", [0, 1, 37, 50])
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


@asynchronous
async def test_a_payload_of_an_unknown_schema_is_readable_as_bytes_only() -> None:
    with serving(Schema.of(x=("uint8", 3))) as (ring, _):
        async with UCXXClient() as client:
            payload = await client.read(ring.write({"x": np.array([1, 2, 3], np.uint8)}))
            assert bytes(payload.data) == b"\1\2\3"
            with pytest.raises(SchemaError, match="schemas="):
                payload["x"]


# --- where it arrives ----------------------------------------------------------------------------
OUTS: dict[str, Callable[[int], Any]] = {
    "numpy": lambda size: np.full(size, 0xEE, np.uint8),
    "floats": lambda size: np.full(-(-size // 4), np.nan, np.float32),
    "bytearray": lambda size: bytearray(b"\xee" * size),
    "memoryview": lambda size: memoryview(bytearray(b"\xee" * (size + 9)))[4:],
}


@every_wire
@pytest.mark.parametrize("kind", OUTS)
@pytest.mark.parametrize("size", [100, 64 << 10])
@asynchronous
async def test_a_payload_is_put_where_the_caller_wants_it_and_nowhere_else(wire: Any, kind: str, size: int) -> None:
    out = OUTS[kind](size + 64)
    before = memoryview(out).cast("B")[size:].tobytes()
    with serving() as (ring, _):
        async with UCXXClient(wire={wire}) as client:
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
@pytest.mark.parametrize(
    "out",
    [read_only(100), bytes(100), np.zeros(200, np.uint8)[::2], np.zeros(99, np.uint8), bytearray(99), "text"],
    ids=["read-only", "bytes", "strided", "small", "small bytearray", "no memory"],
)
@asynchronous
async def test_an_unsuitable_destination_is_refused_and_nothing_is_consumed(wire: Any, out: Any) -> None:
    with serving() as (ring, _):
        ticket = ring.write_raw(noise(100))
        async with UCXXClient(wire={wire}) as client:
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
@every_wire
@asynchronous
async def test_on_arrival_frees_the_slot(wire: Any) -> None:
    with serving() as (ring, _):
        async with UCXXClient(wire={wire}) as client:
            payload = await client.read(ring.write_raw(noise(30_000)))
            del payload
            await until(lambda: free(ring))
            assert ring.statistics().consumes == 1


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
async def test_an_acknowledgement_by_ticket_frees_what_another_client_was_lent(wire: Any) -> None:
    with serving() as (ring, _):
        ticket = ring.write_raw(noise(10_000))
        async with UCXXClient(wire={wire}, ack="manual") as reader, UCXXClient(wire={wire}) as other:
            payload = await reader.read(ticket)
            with await other.read(ticket):  # both read, one consumes
                pass
            assert payload.ack() in (True, False)
            del payload
            await until(lambda: free(ring))
            assert ring.statistics().consumes == 1


@asynchronous
async def test_views_beyond_the_share_of_a_ring_become_copies() -> None:
    with serving(slots=4) as (ring, _):
        async with UCXXClient(wire={"mapped"}, ack="manual") as client:
            payloads = [await client.read(ring.write_raw(noise(5000, seed))) for seed in range(4)]
            assert states(ring) == (2, 2)
            for seed, payload in enumerate(payloads):
                assert payload.wire == "mapped"
                assert np.array_equal(payload["data"], noise(5000, seed))
                payload.ack()
                payload.release()
            del payload, payloads
            await until(lambda: free(ring))


# --- tickets that are no good ----------------------------------------------------------------------
def consumed(ring: SharedRingBuffer, ticket: Ticket) -> None:
    ring.read_raw(ticket).consume()


def overwritten(ring: SharedRingBuffer, ticket: Ticket) -> None:
    ring.write_raw(noise(ticket.size, 99))


def discarded(ring: SharedRingBuffer, ticket: Ticket) -> None:
    ring.discard(ticket)


@every_wire
@pytest.mark.parametrize("fate", [consumed, overwritten, discarded])
@pytest.mark.parametrize("size", [10, 50_000])
@asynchronous
async def test_a_payload_that_is_gone_is_stale_and_never_other_bytes(wire: Any, fate: Any, size: int) -> None:
    with serving(slots=1, overflow="overwrite") as (ring, _):
        ticket = ring.write_raw(noise(size))
        fate(ring, ticket)
        out = bytearray(size)
        async with UCXXClient(wire={wire}) as client:
            with pytest.raises(StaleSlotError):
                await client.read(ticket, out=out)
            assert not any(out)
            assert client.statistics().stale == 1
            assert client.statistics().retries == 0
            if tickets := ring.tickets():
                assert np.array_equal((await client.read(tickets[0]))["data"], noise(size, 99))


@every_wire
@pytest.mark.parametrize("hidden", [False, True], ids=["seen by the client", "seen where the payload is"])
@asynchronous
async def test_an_expired_payload_is_stale(wire: Any, hidden: bool) -> None:
    with serving() as (ring, _):
        ticket = ring.write_raw(noise(10), deadline_s=0.0)
        if hidden:
            ticket = msgspec.structs.replace(ticket, deadline=None)
        async with UCXXClient(wire={wire}) as client:
            with pytest.raises(StaleSlotError):
                await client.read(ticket)
            assert client.statistics().stale == 1


@every_wire
@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"key": 1}, WrongKeyError),
        ({"generation": 2}, WrongKeyError),
        ({"size": 11}, LengthMismatchError),
        ({"size": 20_000}, LengthMismatchError),
    ],
    ids=str,
)
@asynchronous
async def test_an_altered_ticket_is_refused(wire: Any, change: dict[str, Any], error: type[TransportError]) -> None:
    schema = Schema.of(x=("uint8", UpTo(20_000)))
    with serving(schema) as (ring, _):
        ticket = ring.write({"x": noise(10)})
        async with UCXXClient(wire={wire}, schemas=[schema]) as client:
            with pytest.raises(error):
                await client.read(msgspec.structs.replace(ticket, **change))
            await until(lambda: states(ring) == (1, 0))
            assert np.array_equal((await client.read(ticket))["x"], noise(10))


@asynchronous
async def test_a_ticket_of_a_ring_that_nobody_serves_any_more_is_lost() -> None:
    with serving(ports=(0, 0)) as (ring, _):
        foreign = msgspec.structs.replace(ring.write_raw(noise(10)), ring="ab" * 16)
        async with UCXXClient() as client:
            with pytest.raises(PayloadLostError):
                await client.read(foreign)
        async with UCXXClient(wire={"mapped"}) as client:
            with pytest.raises(WireNotAllowedError):
                await client.read(foreign)


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
            async for ticket, payload, error in client.read_many(tickets):
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


@every_wire
@asynchronous
async def test_leaving_read_many_early_ends_what_is_under_way_and_loses_nothing(wire: Any) -> None:
    with serving(slots=30, slot_bytes=50_000) as (ring, _):
        tickets = [ring.write_raw(noise(40_000, number)) for number in range(30)]
        async with UCXXClient(wire={wire}, ack="manual") as client:
            async with contextlib.aclosing(client.read_many(tickets, concurrency=4)) as outcomes:
                async for outcome in outcomes:
                    assert outcome.payload is not None
                    outcome.payload.ack()
                    first = outcome.ticket
                    break
            del outcome
            gc.collect()
            assert client.statistics().links_in_use == 0
            assert client.statistics().reads < len(tickets)
        await until(lambda: states(ring) == (29, 0))
        assert ring.tickets() == [ticket for ticket in tickets if ticket != first]


@asynchronous
async def test_read_many_reports_what_forbids_a_whole_batch_with_each_ticket() -> None:
    with serving(secret=b"right") as (ring, _):
        tickets = [ring.write_raw(noise(10, number)) for number in range(4)]
        async with UCXXClient(wire={"tcp"}, secret=b"wrong") as client:
            outcomes = [outcome async for outcome in client.read_many(tickets)]
        assert sorted(outcome.ticket.slot for outcome in outcomes) == sorted(ticket.slot for ticket in tickets)
        assert all(isinstance(outcome.error, AuthenticationError) for outcome in outcomes)


# --- time runs out -----------------------------------------------------------------------------------
IMPATIENT = settings(read_timeout_s=1.0, attempts_per_read=1)


@over_ucx
@pytest.mark.parametrize("size", [5000, 50_000, 4 << 20])
@asynchronous
async def test_a_timed_out_read_never_writes_its_buffer_afterwards(wire: Any, size: int) -> None:
    out = np.zeros(size, np.uint8)
    with serving(slot_bytes=size) as (ring, server):
        async with UCXXClient(wire={wire}, settings=IMPATIENT) as client:
            await client.read(ring.write_raw(noise(10)))
            ticket = ring.write_raw(noise(size))
            with stalled(server):
                with pytest.raises(RetriesExhaustedError) as caught:
                    await client.read(ticket, out=out)
                assert isinstance(caught.value.__cause__, ReadTimeoutError)
                out[:] = 0xEE
            assert np.array_equal((await client.read(ticket))["data"], noise(size))
        assert (out == 0xEE).all()


@over_ucx
@asynchronous
async def test_a_read_cancelled_while_it_arrives_never_writes_its_buffer_afterwards(wire: Any) -> None:
    size = 32 << 20
    data, out = noise(size) | 1, np.zeros(size, np.uint8)
    with serving(slot_bytes=size) as (ring, _):
        ticket = ring.write_raw(data)
        async with UCXXClient(wire={wire}, ack="manual") as client:
            reading = asyncio.create_task(client.read(ticket, out=out))
            await until(out.any, "the first bytes arrive")
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            out[:] = 0xEE
            assert np.array_equal((await client.read(ticket))["data"], data)
        assert (out == 0xEE).all()
        await until(lambda: states(ring) == (1, 0))


@asynchronous
async def test_the_callers_time_limit_is_kept_where_the_settings_would_allow_more() -> None:
    patient = settings(read_timeout_s=200.0, connect_timeout_s=200.0, handshake_timeout_s=200.0)
    with serving(ports=(0,)) as (ring, server):
        tickets = [ring.write_raw(noise(10, number)) for number in range(3)]
        async with UCXXClient(wire={"tcp"}, settings=patient) as client:
            with stalled(server):
                with pytest.raises((DeadlineExceededError, RetriesExhaustedError)):
                    await client.read(tickets[0], timeout=0.2)
                outcomes = [outcome async for outcome in client.read_many(tickets, timeout=0.2)]
                assert all(isinstance(outcome.error, DeadlineExceededError) for outcome in outcomes)
            assert len([outcome async for outcome in client.read_many(tickets) if outcome.payload]) == 3


# --- who may -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("servers", "clients", "reason"),
    [
        (b"s", b"s", None),
        (b"s", b"other", "does not have the shared secret"),
        (b"s", None, "given none"),
        (None, b"s", "did not prove"),
    ],
)
@asynchronous
async def test_both_sides_must_have_the_same_secret_or_both_none(servers: Any, clients: Any, reason: Any) -> None:
    with serving(secret=servers) as (ring, _):
        ticket = ring.write_raw(noise(10))
        async with UCXXClient(wire={"tcp"}, secret=clients) as client:
            if reason is None:
                assert np.array_equal((await client.read(ticket))["data"], noise(10))
            else:
                with pytest.raises(AuthenticationError, match=reason):
                    await client.read(ticket)
                assert client.statistics().retries == 0
                assert states(ring) == (1, 0)


@pytest.mark.parametrize(("allowed", "offered"), [("shm", "tcp"), ("rdma", "tcp")])
@asynchronous
async def test_a_wire_that_is_not_allowed_is_refused_by_name(allowed: Any, offered: Any) -> None:
    with serving(wires=frozenset({offered})) as (ring, _):
        ticket = ring.write_raw(noise(10))
        async with UCXXClient(wire={allowed}) as client:
            with pytest.raises(WireNotAllowedError, match=f"UCX chose {offered} .*allowed are .*{allowed}"):
                await client.read(ticket)
            assert client.statistics().links_in_use + client.statistics().links_idle == 0


def test_without_ucx_payloads_of_this_host_are_read_and_others_name_what_to_install() -> None:
    code = """
import sys
sys.modules["ucxx"] = None
import uvloop
from transport import Ticket, UCXXClient
async def main():
    async with UCXXClient() as client:
        ticket = Ticket.parse(input())
        print(bytes((await client.read(ticket))["data"]).hex())
    async with UCXXClient(wire={"tcp"}) as client:
        try:
            await client.read(ticket)
        except ImportError as error:
            print(type(error).__name__, error)
uvloop.run(main())
"""
    with serving() as (ring, _), Child(code) as child:
        child.tell(ring.write_raw(noise(10), readers=2).to_text())
        assert child.line() == noise(10).tobytes().hex()
        assert child.line().startswith("MissingDependencyError ucxx is not installed")
        assert child.wait() == 0


# --- trouble on the way ------------------------------------------------------------------------------
@contextlib.contextmanager
def corrupted(ring: SharedRingBuffer, ticket: Ticket) -> Iterator[None]:
    """One bit of the payload is another, as memory may have it."""
    memory = ring.native.payload(ticket.slot)
    memory[5] ^= 4
    yield
    memory[5] ^= 4


@over_ucx
@pytest.mark.parametrize("size", [100, 50_000, 9 << 20])
@asynchronous
async def test_changed_bytes_are_read_again_and_then_reported(wire: Any, size: int) -> None:
    with serving(slot_bytes=size) as (ring, _):
        ticket = ring.write_raw(noise(size), readers=2)
        async with UCXXClient(wire={wire}) as client:
            with corrupted(ring, ticket):
                with pytest.raises(RetriesExhaustedError) as caught:
                    await client.read(ticket)
                assert isinstance(caught.value.__cause__, ChecksumError)
                assert client.statistics().checksum_failures == DEFAULTS.attempts_per_read
                async with UCXXClient(wire={wire}, verify=False) as careless:
                    assert not np.array_equal((await careless.read(ticket, rank=1))["data"], noise(size))
            assert np.array_equal((await client.read(ticket))["data"], noise(size))


@asynchronous
async def test_an_unreachable_port_is_named() -> None:
    with serving() as (ring, _), dead_port() as port:
        ticket = msgspec.structs.replace(ring.write_raw(noise(10)), ports=(port,))
        async with UCXXClient(wire={"tcp"}) as client:
            with pytest.raises(RetriesExhaustedError, match=f"127.0.0.1:{port}"):
                await client.read(ticket)
            assert client.statistics().quarantined_ports == (f"127.0.0.1:{port}",)
            assert client.statistics().failed_reads == 1


@asynchronous
async def test_a_ticket_without_ports_is_unreachable() -> None:
    with SharedRingBuffer.create(slots=1, slot_bytes=10) as ring:
        async with UCXXClient(wire={"tcp"}) as client:
            with pytest.raises(UnreachableError, match="being served"):
                await client.read(ring.write_raw(b"x"))


@asynchronous
async def test_a_broken_port_is_avoided_while_another_one_serves() -> None:
    with serving() as (ring, server), dead_port() as port:
        async with UCXXClient(wire={"tcp"}) as client:
            for seed in range(10):
                ticket = msgspec.structs.replace(ring.write_raw(noise(10_000, seed)), ports=(port, *server.ports))
                assert np.array_equal((await client.read(ticket))["data"], noise(10_000, seed))
            assert client.statistics().retries == 1
            assert client.statistics().quarantined_ports == (f"127.0.0.1:{port}",)


@asynchronous
async def test_a_port_that_is_back_is_used_again_when_its_quarantine_is_over() -> None:
    brief = settings(port_quarantine_s=0.05, port_quarantine_most_s=0.1)
    with serving() as (ring, server), contextlib.ExitStack() as stack:
        with dead_port() as port:
            tickets = (msgspec.structs.replace(ring.write_raw(b"x"), ports=(port, *server.ports)) for _ in range(1000))
            client = UCXXClient(wire={"tcp"}, settings=brief)
            while not client.statistics().retries:
                await client.read(next(tickets))
        again = UCXXServer(ring, (port,), addresses=("127.0.0.1",), mode="thread")
        stack.enter_context(again)
        while not on_loop(again, lambda: again._run._listeners[0]._connections):
            await client.read(next(tickets))
        assert client.statistics().failed_reads == 0
        await client.close()


@over_ucx
@pytest.mark.parametrize("again", [True, False], ids=["with another read", "while idle"])
@asynchronous
async def test_an_acknowledgement_lost_with_its_connection_is_sent_again(wire: Any, again: bool) -> None:
    delayed = settings(ack_delay_s=0.05)
    with serving() as (ring, server):
        async with UCXXClient(wire={wire}, settings=delayed) as client:
            await client.read(ring.write_raw(noise(20_000)))
            with stalled(server, then=lambda: cut_connections(server)):
                await until(lambda: client.statistics().acks_unconfirmed == 1)
            if again:
                await client.read(ring.write_raw(noise(20_000, 1)))
            await until(lambda: free(ring))
            assert ring.statistics().consumes == 1 + again
            assert client.statistics().acks_dropped == 0


@over_ucx
@asynchronous
async def test_a_connection_cut_while_idle_costs_no_read(wire: Any) -> None:
    with serving() as (ring, server):
        async with UCXXClient(wire={wire}) as client:
            for seed in range(3):
                payload = await client.read(ring.write_raw(noise(20_000, seed)))
                assert np.array_equal(payload["data"], noise(20_000, seed))
                on_loop(server, lambda: cut_connections(server))
            assert client.statistics().failed_reads == 0


@asynchronous
async def test_closing_ends_reads_under_way() -> None:
    with serving() as (ring, server):
        client = UCXXClient(wire={"tcp"})
        await client.read(ring.write_raw(noise(10)))
        with stalled(server):
            reading = asyncio.create_task(client.read(ring.write_raw(noise(10, 1))))
            await until(lambda: client.statistics().links_in_use == 1)
            closing = asyncio.create_task(client.close())
            with pytest.raises(ClosedError):
                await reading
        await closing
        await client.close()


# --- misuse ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arguments", [{"wire": {"pigeon"}}, {"wire": set()}, {"ack": "never"}])
@asynchronous
async def test_unknown_wires_and_modes_are_refused(arguments: Any) -> None:
    with pytest.raises(UsageError):
        UCXXClient(**arguments)


@asynchronous
async def test_statistics_tell_what_was_read_and_what_is_open() -> None:
    with serving() as (ring, server):
        async with UCXXClient(wire={"tcp"}) as client:
            await client.read(ring.write_raw(noise(100)))
            await until(lambda: client.statistics().acks_unconfirmed == 1)
            look = client.statistics()
            assert (look.reads, look.bytes_by_wire, look.links_opened, look.links_idle) == (1, {"tcp": 100}, 1, 1)
            assert (look.retries, look.stale, look.failed_reads, look.acks_pending) == (0, 0, 0, 0)
            await client.read(ring.write_raw(noise(200)))
            assert client.statistics().reads == 2
            assert "1 idle" in repr(client)
    assert isinstance(server, UCXXServer)
