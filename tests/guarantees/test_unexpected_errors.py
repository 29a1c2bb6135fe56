"""Work that goes on as long as its owner: an error that nobody expects costs one turn of it, and is logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from found_rings import consume, fill, opened, ring_of, some
from helpers import NETWORK_WIRE, asynchronous, eventually, settings_with, until
from redis_server import needs_redis, redis_server
from redis_stores import place
from takes import LONG_S, addresses, remote, take

from transport import FoundRings, SharedRingBuffer, Trainer, UCXXServer
from transport.claims.connection import ClaimConnection
from transport.claims.network import NetworkSource, _Rank
from transport.claims.places import OnThisHost
from transport.claims.takers import Takers
from transport.cooldown import ShardedClient
from transport.cooldown.epochs.ledger import Ledger
from transport.cooldown.sharded import _Moved
from transport.runtime.logs import LoggedErrors
from transport.server.lifetime import Lifetime
from transport.server.listener import Listener
from transport.server.process import _stop_when_orphaned
from transport.store import ABSENT, RedisStore
from transport.store.directory import Announcement, Directory
from transport.store.memory import MemoryStore
from transport.weights.transfer.feed import Feed, Upstream

Calls = list[tuple[Any, ...]]
FailsOnce = Callable[[type, str], Calls]


@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(slots=2, slot_bytes=64) as made:
        yield made


@pytest.fixture
def fails_once(monkeypatch: pytest.MonkeyPatch) -> FailsOnce:
    """Have the first call of a method raise what nobody expects; all its calls."""

    def patched(owner: type, name: str) -> Calls:
        calls: Calls = []
        original = getattr(owner, name)

        def call(*arguments: Any, **named: Any) -> Any:
            calls.append(arguments)
            if len(calls) == 1:
                raise RuntimeError("which nobody expects")
            return original(*arguments, **named)

        monkeypatch.setattr(owner, name, call)
        return calls

    return patched


def test_an_error_of_one_turn_is_logged_and_a_cancellation_is_none(caplog: pytest.LogCaptureFixture) -> None:
    failures = LoggedErrors(logging.getLogger("transport.test"), "looking")
    for error in (RuntimeError("first"), OSError("second"), asyncio.CancelledError()):
        try:
            with failures:
                raise error
        except asyncio.CancelledError:
            assert isinstance(error, asyncio.CancelledError)
    assert "looking failed, and is tried again: " in caplog.text
    assert "first" in caplog.text and "second" not in caplog.text


@pytest.mark.ucx
def test_rings_are_followed(prefix: str, monkeypatch: pytest.MonkeyPatch, fails_once: FailsOnce) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", NETWORK_WIRE)
    calls = fails_once(Takers, "found")
    with ring_of(prefix) as ring, opened(prefix) as rings:
        fill(ring, 1)
        assert consume(some(rings, 1)) == [True]
    assert len(calls) > 1


@pytest.mark.ucx
@asynchronous
async def test_claims_of_connections_are_renewed(ring: SharedRingBuffer, fails_once: FailsOnce) -> None:
    calls = fails_once(ClaimConnection, "renew")
    ring.write_raw(b"one")
    with UCXXServer(ring, mode="thread"):
        async with remote(settings=settings_with(claim_lease_s=0.5)) as client:
            await take(client, addresses(ring)[0], 1, wait_s=LONG_S)
            await until(lambda: len(calls) > 2, "it is renewed")


@asynchronous
async def test_what_nobody_has_asked_for_goes_back() -> None:
    wanted = []

    def want(*what: object) -> None:
        wanted.append(what)
        if len(wanted) == 1:
            raise RuntimeError("which nobody expects")

    rank = _Rank()
    rank.wanted, rank.asked, rank.demands = (1, None), float("-inf"), SimpleNamespace(want=want)  # type: ignore[assignment]
    idling = asyncio.create_task(NetworkSource._give_back_when_idle(rank, 0.01))
    await until(lambda: rank.wanted is None, "nothing is wanted")
    idling.cancel()
    await asyncio.gather(idling, return_exceptions=True)
    assert wanted == 2 * [(0, 1, None)]


def test_a_trainer_says_that_it_lives(prefix: str, fails_once: FailsOnce) -> None:
    calls = fails_once(FoundRings, "heard")
    with FoundRings(OnThisHost(prefix), lease_s=0.03) as rings, Trainer(rings=rings):
        eventually(lambda: len(calls) > 2, "it says so")


@pytest.mark.ucx
@asynchronous
async def test_a_listener_has_heartbeats(ring: SharedRingBuffer, fails_once: FailsOnce) -> None:
    calls, beats = fails_once(Listener, "_on_alert"), fails_once(Listener, "sweep")
    listener = Listener(ring, settings=settings_with(heartbeat_s=0.01))
    listener.start(0)
    try:
        await until(lambda: len(calls) > 2 and len(beats) > 2, "it sweeps")
    finally:
        await listener.stop()


@asynchronous
async def test_a_listener_whose_writer_and_supervisor_have_ended_stops(
    ring: SharedRingBuffer, fails_once: FailsOnce
) -> None:
    fails_once(Lifetime, "tick")
    stop = asyncio.Event()
    settings = settings_with(heartbeat_s=0.01)
    native = SimpleNamespace(sequence=0, keeper_alive=False, supervised=False, pending=0)
    await _stop_when_orphaned(SimpleNamespace(native=native), Lifetime(0.0), settings, stop)  # type: ignore[arg-type]
    assert stop.is_set()


def test_a_published_ring_stays_published(fails_once: FailsOnce) -> None:
    renewed = fails_once(Directory, "renew")
    directory = Directory(MemoryStore(), lease_s=0.3)
    server = SimpleNamespace(addresses=("127.0.0.1",), ports=(1,), linger_s=0.0)
    with Announcement(directory, SimpleNamespace(ring_id="ab" * 16, name="", data_ended=False), server):  # type: ignore[arg-type]
        eventually(lambda: len(renewed) > 2, "it is renewed")


@asynchronous
async def test_a_parent_says_that_it_lives(fails_once: FailsOnce) -> None:
    feed = Feed(lambda _: None, 0.04)
    await feed.open("127.0.0.1")
    child = await Upstream.connect("p", "127.0.0.1", feed.port, feed.token, "a", LONG_S)
    try:
        await feed.joined(["a"])
        calls = fails_once(asyncio.StreamWriter, "write")
        await until(lambda: len(calls) > 2, "it says so")
    finally:
        child.close()
        await feed.close()


@asynchronous
async def test_an_upload_says_that_it_moves(fails_once: FailsOnce) -> None:
    calls = fails_once(Ledger, "beat")
    member = SimpleNamespace(_ledger=Ledger(MemoryStore(), "run"), _takeover_s=0.02)
    record: Any = SimpleNamespace(epoch=1)
    beating = asyncio.create_task(ShardedClient._beat(member, record, "a", 0, _Moved(lambda *_: None)))  # type: ignore[arg-type]
    await until(lambda: member._ledger.beats(1, "a"), "it says so")
    beating.cancel()
    await asyncio.gather(beating, return_exceptions=True)
    assert len(calls) > 1


@needs_redis
def test_a_store_hears_wake_ups(fails_once: FailsOnce) -> None:
    calls = fails_once(redis.client.PubSub, "subscribe")
    with redis_server() as server, RedisStore(place(server)) as store:
        store.watch("key", ABSENT, 0.01)
        eventually(lambda: len(calls) > 1, "it has subscribed")
