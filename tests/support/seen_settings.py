"""What each setting is seen to do, for test_setting_effects.py: in decisions, or in a process with real endpoints."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import Any

import msgspec
import pytest
from helpers import dead_port, noise, serving, stalled
from packers import Packer
from queue_waits import ticket as queued_ticket

from transport import BlockingClient, Schema, SharedRingBuffer, Ticket, UCXXClient, UCXXRolloutMixin, config
from transport.client.connections import links
from transport.client.connections.acknowledgements import Ack, AckLedger
from transport.client.connections.pool import EndpointPool
from transport.client.connections.routes import PortQuarantine
from transport.client.grouping import grouped
from transport.client.retry import backoff_ceiling
from transport.errors import ReadTimeoutError, RetriesExhaustedError
from transport.packer.claims import ClaimBook
from transport.packer.consumed_record import ConsumedRecord
from transport.server import listener
from transport.server.lifetime import Lifetime, Phase, Watchdog
from transport.testing import MemoryQueue
from transport.wire import probing

Configuration = config.Configuration
PORT, OTHER = ("127.0.0.1", 1), ("127.0.0.1", 2)
SCHEMA = Schema.of(step=("int64",))


class Worker(UCXXRolloutMixin): ...


# --- what is seen ---------------------------------------------------------------------------------------
def quarantined_for(found: Configuration) -> tuple[float, float]:
    """Seconds after the first and after many failures in a row."""
    ports = PortQuarantine(found.settings)
    ports.failed(PORT, 0.0)
    first = next(at for at in range(10_000) if not ports.is_quarantined(PORT, float(at)))
    now = float(first)
    for _ in range(9):
        ports.begin(PORT, now)
        ports.failed(PORT, now)
        most = next(at for at in range(10_000) if not ports.is_quarantined(PORT, now + at))
        now += most
    return first, most


def pool_of(found: Configuration) -> EndpointPool[str]:
    pool: EndpointPool[str] = EndpointPool(found.settings)
    for number, port in enumerate((PORT, PORT, OTHER)):
        if pool.may_open(port):
            pool.begin_open(port)
            pool.opened(port, f"connection {number}")
    return pool


def places_of_a_port(found: Configuration) -> int:
    return pool_of(found).counts(PORT).total


def idle_connections(found: Configuration) -> int:
    pool = pool_of(found)
    for number in range(3):
        pool.checkin(f"connection {number}", float(number))
    return pool.counts().idle


def expiry_of_an_idle_connection(found: Configuration) -> float | None:
    pool = pool_of(found)
    pool.checkin("connection 0", 10.0)
    return pool.next_expiry()


def ack(slot: int) -> Ack:
    return Ack("ab" * 16, slot, 1, 0, 5)


def delay_of_an_ack(found: Configuration) -> float | None:
    ledger = AckLedger(found.settings)
    ledger.add(ack(0), 100.0)
    due = ledger.next_due()
    return None if due is None else round(due - 100.0, 6)


def longest_pause_before_an_ack_is_sent_again(found: Configuration) -> float:
    ledger = AckLedger(found.settings)
    ledger.add(ack(0), 0.0)
    now = 0.0
    for _ in range(40):
        ledger.unreachable(ack(0).ring, now)
        due = ledger.next_due()
        assert due is not None
        now, pause = due, due - now
    return pause


def rings_remembered(found: Configuration) -> int:
    record = ConsumedRecord(found.settings)
    for number in range(5):
        record.accept(f"{number:032x}", 0, 1, 0)
    return sum(record.contains(f"{number:032x}", 0, 1, 0) for number in range(5))


def tickets_of_one_message(found: Configuration) -> list[int]:
    with SharedRingBuffer.create(slots=8, slot_bytes=1000) as ring:
        tickets = [ring.write_raw(noise(1000)) for _ in range(8)]
        return [len(group) for group in grouped(tickets, found.settings)]


def phase_of_a_server_without_its_writer(found: Configuration) -> Phase:
    lifetime = Lifetime(found.settings.linger_s)
    lifetime.tick(0.0, writer_alive=False, unread=1, sequence=1)
    return lifetime.tick(100.0, writer_alive=False, unread=1, sequence=1)


def whether_a_silent_listener_counts_as_stopped(found: Configuration) -> bool:
    watchdog = Watchdog(found.settings.watchdog_s, 1.0)
    for now in range(20):
        watchdog.look(float(now))
    return watchdog.stopped(15.0)


CLOCK = [0.0]


def queue() -> MemoryQueue:
    return MemoryQueue(clock=lambda: CLOCK[0])


def whether_a_claim_is_somebody_elses_after(found: Configuration) -> bool:
    """100 s without renewal: the queue is made without any argument, as `open_queue` does."""
    with queue() as made:
        CLOCK[0] = 0.0
        made.publish(queued_ticket(0))
        made.claim(1, consumer="first")
        CLOCK[0] = 100.0
        return bool(made.claim(1, consumer="second"))


def pause_between_renewals(found: Configuration) -> float:
    with queue() as made:
        return ClaimBook(made, 0, "trainer", found.settings)._renew_s


def read_error(found: Configuration, size: int) -> str:
    """Of a server that has stopped."""
    with serving(slot_bytes=size) as (ring, server), BlockingClient(wire={"tcp"}, settings=found.settings) as client:
        client.read(ring.write_raw(noise(1)))
        ticket = ring.write_raw(noise(size))
        with stalled(server), pytest.raises(RetriesExhaustedError) as caught:
            client.read(ticket)
    assert isinstance(caught.value.__cause__, ReadTimeoutError)
    return str(caught.value.__cause__).partition("within ")[2]


def limit_of_a_small_read(found: Configuration) -> str:
    return read_error(found, 1000)


def limit_of_a_large_read(found: Configuration) -> str:
    return read_error(found, 1 << 20)


def limits_of_a_connection(found: Configuration) -> tuple[float, int]:
    """Of the probe that comes first, and of everything until hands are shaken: probe, connecting and handshake."""
    probes: list[float] = []
    took: list[float] = []
    limits: list[float] = []
    real, real_probe = asyncio.timeout, probing.probe

    def timeout(seconds: float | None) -> Any:
        if sys._getframe(1).f_globals["__name__"] == "transport.client.connections.connection":
            limits.append(seconds or 0.0)
        return real(seconds)

    async def probe(address: str, port: int, timeout_s: float) -> None:
        began = time.monotonic()
        await real_probe(address, port, timeout_s)
        probes.append(timeout_s)
        took.append(time.monotonic() - began)

    with pytest.MonkeyPatch.context() as patch, serving() as (ring, _):
        patch.setattr(asyncio, "timeout", timeout)
        patch.setattr(links, "probe", probe)
        with BlockingClient(wire={"tcp"}, settings=found.settings) as client:
            client.read(ring.write_raw(noise(1)))
    return probes[0], round(limits[0] + took[0])


def attempts_at_a_dead_port(found: Configuration) -> int:
    with serving() as (ring, _), dead_port() as port, BlockingClient(wire={"tcp"}, settings=found.settings) as client:
        ticket = msgspec.structs.replace(ring.write_raw(noise(1)), ports=(port,))
        with pytest.raises(RetriesExhaustedError) as caught:
            client.read(ticket)
    return caught.value.attempts


def calls_and_rounds(found: Configuration) -> tuple[int, int]:
    """Of the packer, for a ticket whose reads all fail retryably."""
    packer, calls = Packer(), []
    with serving() as (ring, _):
        ticket = ring.write_raw(noise(1))

        async def read(self: UCXXClient, ticket: Ticket, *_: Any, **__: Any) -> Any:
            calls.append(ticket)
            raise RetriesExhaustedError("tried")

        async def read_many(self: UCXXClient, tickets: list[Ticket], **_: Any) -> Any:
            from transport.client.payload import ReadOutcome

            for each in tickets:
                calls.append(each)
                yield ReadOutcome(0, each, None, RetriesExhaustedError("tried"))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(UCXXClient, "read", read)
            patch.setattr(UCXXClient, "read_many", read_many)
            packer.setup_ucxx_packer()  # configured by the environment
            try:
                packer.start_prefetch([ticket])
                batch = packer.collect_prefetch()
            finally:
                packer.cleanup_ucxx_packer()
    assert batch is not None
    return len(calls), batch.rounds


def deadline_of_a_read(found: Configuration) -> bool:
    """Whether a read without ``timeout`` ends before its attempts are over."""
    with serving() as (ring, _), dead_port() as port, BlockingClient(wire={"tcp"}, settings=found.settings) as client:
        ticket = msgspec.structs.replace(ring.write_raw(noise(1)), ports=(port,))
        try:
            client.read(ticket)
        except RetriesExhaustedError as error:
            return error.attempts == 50
        except TimeoutError:
            return False
    raise AssertionError


def waits(found: Configuration) -> tuple[float, float]:
    return backoff_ceiling(1, found.settings), backoff_ceiling(99, found.settings)


def renewed_anew_by_memory(found: Configuration) -> list[str]:
    reasons: list[str] = []

    async def sweep(ring: SharedRingBuffer) -> None:
        one = listener.Listener(ring, settings=found.settings, restart=reasons.append)
        one.sweep(0.0)
        await one.stop()

    with SharedRingBuffer.create(slots=1, slot_bytes=8) as ring, pytest.MonkeyPatch.context() as patch:
        patch.setattr(listener.OwnMemory, "size", lambda _: 50 << 20)
        asyncio.run(sweep(ring))
    return reasons


def turned_away(found: Configuration) -> bool:
    with SharedRingBuffer.create(slots=1, slot_bytes=8) as ring:
        one = listener.Listener(ring, settings=found.settings)
        one._connections = dict.fromkeys(map(str, range(3)))  # type: ignore[assignment]
        return one.refuses_connections


def handshakes_admitted(found: Configuration) -> int:
    class Endpoint:
        name = "stranger"

    class Connection:
        host, opened = "10.0.0.1", False

        def __init__(self, *_: Any) -> None: ...

        def close(self) -> None: ...

        async def serve(self) -> None: ...

    async def accept() -> int:
        with SharedRingBuffer.create(slots=1, slot_bytes=8) as ring, pytest.MonkeyPatch.context() as patch:
            patch.setattr(listener, "Connection", Connection)
            one = listener.Listener(ring, settings=found.settings)
            for _ in range(5):
                one._accept(Endpoint())  # type: ignore[arg-type]
            await asyncio.gather(*one._connections.values())
            return len(one._connections)

    return asyncio.run(accept())


def pause_of_the_sweep(found: Configuration) -> float:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        raise asyncio.CancelledError

    async def sweep(ring: SharedRingBuffer) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await listener.Listener(ring, settings=found.settings)._sweep()

    with SharedRingBuffer.create(slots=1, slot_bytes=8) as ring, pytest.MonkeyPatch.context() as patch:
        patch.setattr("transport.server.listener.asyncio.sleep", sleep)
        asyncio.run(sweep(ring))
    return pauses[0]


class Silent:
    """A connection of native code that has been idle, or has had an unacknowledged read by ticket, for a while."""

    def __init__(self, oldest: float | None) -> None:
        self.oldest, self.last_active, self.ended = oldest, 100.0, 0
        self.attempts = 0 if oldest is None else 1
        self.waiting = 0  # demands that wait for a payload

    def end_consumed(self) -> None: ...

    def expire(self, before: float) -> int:
        self.ended += self.oldest is not None and self.oldest < before
        return self.ended


def swept(found: Configuration, native: Silent, now: float) -> bool:
    from transport.server.connection import Connection

    class Swept(Connection):
        def __init__(self) -> None:
            self.closed = False
            self._native, self._wire_settled = native, True  # type: ignore[assignment]
            self._listener = type("Listener", (), {"settings": found.settings})()

        def __repr__(self) -> str:
            return "a connection"

        def close(self) -> None:
            self.closed = True

    connection = Swept()
    connection.sweep(now)
    return connection.closed


def idle_connection_is_closed(found: Configuration) -> bool:
    return swept(found, Silent(None), 100.0 + 1000.0)


def unacknowledged_attempts_end(found: Configuration) -> bool:
    native = Silent(100.0)
    swept(found, native, 100.0 + 20.0)
    return native.ended > 0


def staging_pool(found: Configuration) -> int:
    from transport.client.device_reads import DeviceReads

    async def bound() -> int:
        return DeviceReads(None, "staged", found.settings.staging_bytes)._staging._most

    return asyncio.run(bound())
