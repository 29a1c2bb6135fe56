"""Every setting does something: set by its variable in the environment, it changes what is observed here.

Each key has two values and what is seen with each, in decisions that have clocks and sizes as arguments, or in a
process with real endpoints. A key without an entry fails a test. `test_config.py` has which source of a value wins.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers import dead_port, noise, serving, settings_with, stalled
from memory_store import MemoryStore
from packers import Packer
from queue_waits import ticket as queued_ticket

from transport import BlockingClient, Schema, SharedRingBuffer, Ticket, UCXXClient, UCXXRolloutMixin, config
from transport.cli import run as command
from transport.client.connections.acknowledgements import Ack, AckLedger
from transport.client.connections.pool import EndpointPool
from transport.client.connections.routes import PortQuarantine
from transport.client.grouping import grouped
from transport.client.retry import backoff_ceiling
from transport.errors import ReadTimeoutError, RetriesExhaustedError
from transport.observe.metrics import configured_exporter
from transport.packer.claims import ClaimBook
from transport.packer.consumed_record import ConsumedRecord
from transport.queue import SQLiteQueue
from transport.queue.group import GroupQueue
from transport.runtime.logs import set_up_logging
from transport.server import listener
from transport.server.lifetime import Lifetime, Phase, Watchdog
from transport.storage.urls import SQLiteURL

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


@contextlib.contextmanager
def queue() -> Iterator[SQLiteQueue]:
    with (
        tempfile.TemporaryDirectory() as folder,
        SQLiteQueue(Path(folder) / "queue.db", clock=lambda: CLOCK[0]) as made,
    ):
        yield made


CLOCK = [0.0]


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
        return ClaimBook(made, 0, "trainer", "on_consumed", found.settings)._renew_s


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


def limit_of_a_connection(found: Configuration) -> float:
    """Connecting and shaking hands, together."""
    limits: list[float] = []
    real = asyncio.timeout

    def timeout(seconds: float | None) -> Any:
        if sys._getframe(1).f_globals["__name__"] == "transport.client.connections.connection":
            limits.append(seconds or 0.0)
        return real(seconds)

    with pytest.MonkeyPatch.context() as patch, serving() as (ring, _):
        patch.setattr(asyncio, "timeout", timeout)
        with BlockingClient(wire={"tcp"}, settings=found.settings) as client:
            client.read(ring.write_raw(noise(1)))
    return limits[0]


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
    with SharedRingBuffer.create(slots=1, slot_bytes=8) as ring, pytest.MonkeyPatch.context() as patch:
        patch.setattr(listener, "own_memory", lambda: 50 << 20)
        listener.Listener(ring, settings=found.settings, restart=reasons.append).sweep(0.0)
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
    """A connection of native code that has been idle, or unacknowledged, for a while."""

    def __init__(self, oldest: float | None) -> None:
        self.oldest, self.last_active, self.expired = oldest, 100.0, [0.0]
        self.waiting = 0  # demands that wait for a payload

    def end_consumed(self) -> None: ...

    def expire(self, before: float) -> int:
        self.expired.append(before)
        return 1


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
    return len(native.expired) > 1


def staging_pool(found: Configuration) -> int:
    from transport.client.device_reads import DeviceReads

    async def bound() -> int:
        return DeviceReads(None, "staged", found.settings.staging_bytes)._staging._most

    return asyncio.run(bound())


# --- what belongs to one host ---------------------------------------------------------------------------
def wire_of_a_payload(found: Configuration) -> str:
    worker, packer = Worker(), Packer()
    try:
        worker.setup_ucxx(SCHEMA, slots=2, mode="thread")
        packer.setup_ucxx_packer(schemas=[SCHEMA])
        packer.start_prefetch([worker.write_to_buffer({"step": 3})])
        batch = packer.collect_prefetch()
        assert batch is not None
        (payload,) = packer.consume(batch)
        payload.release()
        return payload.wire
    finally:
        packer.cleanup_ucxx_packer()
        worker.cleanup_ucxx()


def of_a_worker(look: Callable[[Worker], Any]) -> Callable[[Configuration], Any]:
    def seen(_: Configuration) -> Any:
        worker = Worker()
        try:
            worker.setup_ucxx(SCHEMA, slots=2, mode="thread")
            return look(worker)
        finally:
            worker.cleanup_ucxx()

    return seen


def server_of(worker: Worker) -> Any:
    assert worker._ucxx_server is not None
    return worker._ucxx_server._config


def address_of_metrics(found: Configuration) -> str | None:
    exporter = configured_exporter(found)
    if exporter is None:
        return None
    with exporter:
        return str(exporter._server.server_address[0])


def store_of_a_command(_: Configuration) -> int:
    """`transport cooldown status` finds the epochs of a store that is there, and refuses one that is not."""
    return command(["cooldown", "status"])


def logged(found: Configuration) -> tuple[int, bool]:
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    root.handlers.clear()
    try:
        set_up_logging(found)
        record = logging.LogRecord("x", logging.ERROR, "", 1, "said", None, None)
        text = root.handlers[0].format(record)
        with contextlib.suppress(json.JSONDecodeError):
            return root.level, isinstance(json.loads(text), dict)
        return root.level, False
    finally:
        root.level, root.handlers[:] = before[0], before[1]


Seen = Callable[[Configuration], Any]
# key → what is looked at; two values as text, each with what is seen; other settings that make it visible
EFFECTS: dict[str, tuple[Seen, dict[str, Any], dict[str, str]]] = {
    "read_timeout_s": (limit_of_a_small_read, {"0.1": "0.1 s", "0.3": "0.3 s"}, {"attempts_per_read": "1"}),
    "read_slowest_rate": (
        limit_of_a_large_read, {"1e7": "0.2 s", "1e9": "0.1 s"}, {"read_timeout_s": "0.1", "attempts_per_read": "1"}
    ),
    "connect_timeout_s": (limit_of_a_connection, {"3": 8.0, "4": 9.0}, {}),
    "handshake_timeout_s": (limit_of_a_connection, {"7": 12.0, "6": 11.0}, {}),
    "attempts_per_read": (attempts_at_a_dead_port, {"1": 1, "3": 3}, {"backoff_first_s": "0.001"}),
    "calls_per_ticket": (
        calls_and_rounds, {"1": (3, 3), "4": (12, 3)}, {"backoff_first_s": "0.001", "backoff_most_s": "0.002"}
    ),
    "rounds_per_batch": (
        calls_and_rounds, {"1": (2, 1), "2": (4, 2)}, {"backoff_first_s": "0.001", "backoff_most_s": "0.002"}
    ),
    "batch_deadline_s": (
        deadline_of_a_read, {"0.5": False, "100": True},
        {"attempts_per_read": "50", "backoff_first_s": "0.05", "backoff_most_s": "0.05", "read_timeout_s": "0.1"},
    ),
    "backoff_first_s": (waits, {"0.5": (0.5, 4.0), "1": (1.0, 4.0)}, {}),
    "backoff_most_s": (waits, {"2": (0.25, 2.0), "3": (0.25, 3.0)}, {}),
    "port_quarantine_s": (quarantined_for, {"10": (10, 240), "20": (20, 240)}, {}),
    "port_quarantine_most_s": (quarantined_for, {"60": (30, 60), "120": (30, 120)}, {}),
    "pool_endpoint_max_age_s": (expiry_of_an_idle_connection, {"50": 60.0, "20": 30.0}, {}),
    "pool_endpoints_per_port": (places_of_a_port, {"1": 1, "8": 2}, {}),
    "pool_endpoints_idle": (idle_connections, {"2": 2, "3": 3}, {"pool_endpoints_per_port": "2"}),
    "connections_per_listener": (turned_away, {"2": True, "3": False}, {}),
    "handshakes_per_host": (handshakes_admitted, {"2": 2, "4": 4}, {}),
    "listener_memory_bytes": (
        renewed_anew_by_memory,
        {str(40 << 20): ["its memory of 50 MiB exceeds listener_memory_bytes"], str(60 << 20): []}, {},
    ),
    "listener_idle_eviction_s": (idle_connection_is_closed, {"900": True, "1100": False}, {}),
    "ack_delay_s": (delay_of_an_ack, {"0.01": 0.01, "0.02": 0.02}, {}),
    "ack_timeout_s": (
        lambda found: (longest_pause_before_an_ack_is_sent_again(found), unacknowledged_attempts_end(found)),
        {"10": (10.0, True), "25": (25.0, False)}, {},
    ),
    "linger_s": (phase_of_a_server_without_its_writer, {"90": Phase.STOP, "110": Phase.LINGERING}, {}),
    "watchdog_s": (whether_a_silent_listener_counts_as_stopped, {"14": True, "16": False}, {}),
    "heartbeat_s": (pause_of_the_sweep, {"0.5": 0.5, "2": 2.0}, {}),
    "claim_lease_s": (whether_a_claim_is_somebody_elses_after, {"90": True, "110": False}, {}),
    "claim_renew_s": (pause_between_renewals, {"5": 5.0, "7": 7.0}, {}),
    "consumed_rings": (rings_remembered, {"2": 2, "4": 4}, {}),
    "staging_bytes": (staging_pool, {"1000000": 1_000_000, "2000000": 2_000_000}, {}),
    "inline_limit": (tickets_of_one_message, {"999": [1] * 8, "1000": [8]}, {}),
    "records_per_message": (tickets_of_one_message, {"8": [4, 4], "4": [2] * 4}, {}),
    "wires": (wire_of_a_payload, {"tcp": "tcp", "mapped,tcp": "mapped"}, {"addresses": "127.0.0.1"}),
    "bind": (of_a_worker(lambda worker: server_of(worker).bind), {"127.0.0.1": "127.0.0.1", "": ""}, {}),
    "addresses": (
        of_a_worker(lambda worker: worker.write_to_buffer({"step": 1}).addresses),
        {"10.0.0.7": ("10.0.0.7",), "10.0.0.7,10.0.0.8": ("10.0.0.7", "10.0.0.8")}, {},
    ),
    "secret_file": (
        of_a_worker(lambda worker: server_of(worker).secret), {"{folder}/secret": b"between us", "": None}, {}
    ),
    "metrics_port": (address_of_metrics, {"": None, "0": "127.0.0.1"}, {}),
    "metrics_bind": (
        address_of_metrics, {"127.0.0.2": "127.0.0.2", "127.0.0.1": "127.0.0.1"}, {"metrics_port": "0"}
    ),
    "store": (store_of_a_command, {"{store}": 0, "sqlite:/absent/store.db": 2}, {}),
    "run": (
        of_a_worker(lambda worker: worker.ring.name.rpartition("-")[0]),
        {"": "/transport-rollout", "seven": "/transport-run-seven"}, {},
    ),
    "log_level": (lambda found: logged(found)[0], {"INFO": logging.INFO, "ERROR": logging.ERROR}, {}),
    "log_format": (lambda found: logged(found)[1], {"json": True, "text": False}, {}),
}  # fmt: skip


@pytest.mark.ucx
@pytest.mark.parametrize("key", EFFECTS)
def test_a_setting_does_what_its_meaning_says(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, cases, others = EFFECTS[key]
    (tmp_path / "secret").write_bytes(b"between us\n")
    from transport.store import open_store

    store = SQLiteURL(tmp_path / "store.db").text
    open_store(store).close()
    monkeypatch.chdir(tmp_path)
    for other, value in others.items():
        monkeypatch.setenv(config.variable_of(other), value)
    assert len(set(map(repr, cases.values()))) == 2, "two values with one effect show nothing"
    for value, expected in cases.items():
        monkeypatch.setenv(config.variable_of(key), value.format(folder=tmp_path, store=store))
        found = config.configuration()
        found.settings.validate()
        assert seen(found) == expected, f"{config.variable_of(key)}={value}"


def test_every_setting_has_an_effect() -> None:
    assert list(EFFECTS) == list(Configuration.__struct_fields__)


# --- who takes them -------------------------------------------------------------------------------------
@pytest.mark.ucx
def test_the_operators_settings_reach_client_server_claims_and_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_LINGER_S", "250")
    monkeypatch.setenv("TRANSPORT_CONSUMED_RINGS", "2")
    monkeypatch.setenv("TRANSPORT_CLAIM_LEASE_S", "45")
    expected = settings_with(linger_s=250.0, consumed_rings=2, claim_lease_s=45.0)
    worker, packer = Worker(), Packer()
    with SQLiteQueue(tmp_path / "queue.db") as queue:
        try:
            worker.setup_ucxx(SCHEMA, slots=2, mode="thread", queue=queue)
            packer.setup_ucxx_packer(schemas=[SCHEMA], queue=queue)
            assert server_of(worker).settings == expected
            assert packer._packer.client._settings == packer._packer.settings == expected
            assert packer.consumed_record()._most_rings == 2
            assert packer._packer.claims._renew_s == 15.0  # a third of the queue's lease
        finally:
            packer.cleanup_ucxx_packer()
            worker.cleanup_ucxx()
        assert queue.lease_s == 45.0
        assert GroupQueue(queue, MemoryStore(), "group", 0, 2)._patience_s == 45.0


def test_a_lease_that_is_given_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSPORT_CLAIM_LEASE_S", "45")
    with SQLiteQueue(tmp_path / "queue.db", lease_s=3.0) as queue:
        assert queue.lease_s == 3.0
        assert GroupQueue(queue, MemoryStore(), "group", 0, 2, patience_s=4.0)._patience_s == 4.0
