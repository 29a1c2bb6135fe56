"""The directory: newer servers win, moved ones are found by old tickets, dead ones' tickets are lost within a bound."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from claimed import consumed
from helpers import PATIENCE_S, Child, dead_port, eventually, in_thread
from helpers import serving as ring_served
from store_proxy import HangingStore, StoreProxy

from transport import Schema, SharedRingBuffer, _ring
from transport.client.blocking import BlockingClient
from transport.client.client import UCXXClient
from transport.errors import (
    LinkError,
    PayloadLostError,
    RingError,
    StaleSlotError,
    StoreError,
    TransportError,
    UnreachableError,
    UsageError,
)
from transport.runtime.loop_thread import LoopThread
from transport.server.server import UCXXServer
from transport.settings import Settings
from transport.store import SQLiteStore
from transport.store.base import Change, Store
from transport.store.directory import Announcement, Directory, Finder, Found, Serving
from transport.store.memory import MemoryStore
from transport.testing import run
from transport.ticket import Ticket

RING = "ab" * 16
TICKET = Ticket(
    ring=RING, host="here", addresses=("127.0.0.1",), ports=(1,), slot=0, generation=1, key=7, size=4, created=0.0
)
NOWHERE = Found(None, lives=False)
FAST = Settings(
    connect_timeout_s=5.0, attempts_per_read=1, backoff_first_s=0.01, backoff_most_s=0.02, port_quarantine_s=0.05,
    port_quarantine_most_s=0.1, linger_s=0.5,
)  # fmt: skip


def serving(**changes: object) -> Serving:
    place = Serving(ring=RING, host="there", addresses=("10.0.0.1",), ports=(5000,))
    return msgspec.structs.replace(place, **changes)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteStore]:
    with SQLiteStore(tmp_path / "store.db") as opened:
        yield opened


# --- records -----------------------------------------------------------------------------------------
def test_a_ring_that_is_published_again_has_not_ended(store: SQLiteStore) -> None:
    directory = Directory(store)
    directory.publish(serving())
    directory.end(serving().ring, bytes(16))
    assert directory.ended().keys() == {serving().ring}
    directory.publish(serving())  # another writer has opened the file that it lies in
    assert directory.ended() == {}


def test_what_is_published_is_found_until_it_is_withdrawn(store: SQLiteStore) -> None:
    directory = Directory(store)
    assert directory.find(RING) == NOWHERE
    published = directory.publish(serving())
    assert directory.find(RING) == Found(serving(), lives=True)
    directory.withdraw(RING, published)
    assert directory.find(RING) == NOWHERE


def test_a_later_server_replaces_an_earlier_one_and_not_the_reverse(store: SQLiteStore) -> None:
    directory = Directory(store)
    old = directory.publish(serving())
    new = directory.publish(serving(ports=(6000,)))
    assert directory.publish_again(serving(), 0.0, old) is None
    assert not directory.renew(RING, 0.0, old)
    directory.withdraw(RING, old)
    assert directory.find(RING) == Found(serving(ports=(6000,)), lives=True)
    assert directory.publish_again(serving(ports=(6001,)), 0.0, new)
    assert directory.find(RING) == Found(serving(ports=(6001,)), lives=True)


def test_a_ring_outlives_the_record_of_its_writer_that_nobody_renews_by_its_linger_time(tmp_path: Path) -> None:
    now = 0.0
    with SQLiteStore(tmp_path / "store.db", clock=lambda: now) as store:
        directory = Directory(store, lease_s=30)
        published = directory.publish(serving(), 300)
        now = 29.0
        assert directory.renew(RING, 300, published)
        now = 58.0
        assert (directory.find(RING), directory.all()) == (Found(serving(), lives=True), [serving()])
        now = 59.0
        assert (directory.find(RING), directory.all()) == (Found(serving(), lives=False), [serving()])
        assert not directory.renew(RING, 300, published)
        now = 358.0
        assert directory.all() == [serving()]
        now = 359.0
        assert directory.all() == []


def test_a_server_whose_record_has_ended_withdraws_its_ring(store: SQLiteStore) -> None:
    directory = Directory(store)
    published = directory.publish(serving(), 300)
    store.delete(f"servers/{RING}")  # as its lease ends
    directory.withdraw(RING, published)
    assert directory.all() == []


def test_a_server_that_waits_for_its_last_readers_stays_published(
    store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, begun, drain = Directory(store, lease_s=0.3), threading.Event(), UCXXServer._drain
    monkeypatch.setattr(UCXXServer, "_drain", lambda *arguments: (begun.set(), drain(*arguments)))
    with SharedRingBuffer.create(Schema.of(x="int64"), slots=1) as ring:
        server = UCXXServer(ring, mode="thread").start()
        with Announcement(directory, ring, server):
            ring.write({"x": 1})
            _, draining = in_thread(lambda: server.close(60.0))
            assert begun.wait(60)
            for key in store.scan("servers/"):
                store.delete(key)  # as a lease ends
            eventually(lambda: directory.find(ring.ring_id).lives)
            assert draining.is_alive()
            assert consumed(ring, 1) == 1
            draining.join()


def test_a_server_that_moved_or_was_forgotten_is_published_again(store: SQLiteStore) -> None:
    directory = Directory(store, lease_s=0.3)
    server = SimpleNamespace(addresses=("10.0.0.1",), ports=(5000,), linger_s=0.0)
    with Announcement(directory, SimpleNamespace(ring_id=RING, name="", data_ended=False), server) as announcement:
        assert directory.find(RING).serving.ports == (5000,)
        server.ports = (5001, 5002)
        eventually(lambda: directory.find(RING).serving.ports == (5001, 5002))
        server.ports = ()  # it is being closed
        for key in store.scan("servers/"):
            store.delete(key)
        eventually(lambda: directory.find(RING).lives)
        assert directory.find(RING).serving.ports == (5001, 5002)
        if not (child := os.fork()):
            announcement.close()  # as a child does that leaves its parent's blocks
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert directory.find(RING).lives
    assert directory.find(RING) == NOWHERE


class HeldUp(StoreProxy):
    """Makes the first call of an announcement's thread when it is let go; ``written``: the changes of that thread."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.asked, self.goes_on = threading.Event(), threading.Event()
        self.written: list[Sequence[Change]] = []

    def call(self, call: Callable[[], Any], changes: Sequence[Change] | None = None) -> Any:
        if threading.current_thread().name == "transport directory":
            self.asked.set()
            assert self.goes_on.wait(PATIENCE_S)
            self.written += [changes] if changes else []
        return call()


@pytest.mark.parametrize("moves", [True, False])  # else the lease is renewed
def test_what_a_store_does_behind_a_close_that_has_not_waited_for_it_leaves_no_record(
    monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    monkeypatch.setattr("transport.store.directory._JOIN_S", 0.0)
    server = SimpleNamespace(addresses=("10.0.0.1",), ports=(5000,), linger_s=300.0)
    written = SimpleNamespace(name="/transport-a", ring_id=RING, data_ended=True, fingerprint=bytes(16))
    with MemoryStore() as inner:
        store = HeldUp(inner)
        directory = Directory(store, lease_s=0.3)
        with Announcement(directory, written, server) as announcement:
            if moves:
                server.ports = (5001,)
            assert store.asked.wait(PATIENCE_S)
        store.goes_on.set()
        announcement._thread.join()
        assert directory.all() == [] and directory.ended().keys() == {RING}
        assert moves or store.written == []  # the process may end before what is written is withdrawn


def test_a_record_that_is_none_is_an_error_and_no_answer(store: SQLiteStore) -> None:
    store.put(f"rings/{RING}", b"\xc1")
    with pytest.raises(StoreError, match=f"rings/{RING}"):
        Directory(store).find(RING)


def test_a_record_that_cannot_be_read_hides_itself_alone(store: SQLiteStore) -> None:
    directory = Directory(store)
    other = "cd" * 16
    directory.publish(Serving(ring=other, host="h", addresses=("10.0.0.1",), ports=(7001,)))
    directory.end("ef" * 16, b"f" * 16)
    for key in (f"rings/{RING}", f"ended/{RING}"):
        store.put(key, b'"\xff"')
    assert [serving.ring for serving in directory.all()] == [other]
    assert list(directory.ended()) == ["ef" * 16]


# --- decisions ---------------------------------------------------------------------------------------
def test_a_moved_server_is_tried_first_from_then_on() -> None:
    finder = Finder(Directory(MemoryStore()), grace_s=10)
    assert finder.current(TICKET) is TICKET
    moved = finder.found(TICKET, Found(serving(), lives=True), 0.0)
    assert moved is not None
    assert (moved.host, moved.addresses, moved.ports) == ("there", ("10.0.0.1",), (5000,))
    assert (moved.identity, moved.key) == (TICKET.identity, TICKET.key)
    assert finder.current(TICKET) == moved
    assert finder.found(moved, Found(serving(), lives=True), 1.0) is None  # the same place: the failure stands


def test_an_absent_server_is_lost_after_the_grace_and_not_before() -> None:
    finder = Finder(Directory(MemoryStore()), grace_s=10)
    assert finder.found(TICKET, NOWHERE, 100.0) is None
    assert finder.found(TICKET, NOWHERE, 109.9) is None
    with pytest.raises(PayloadLostError, match="no server of its ring for 10 s"):
        finder.found(TICKET, NOWHERE, 110.0)


def test_a_ring_is_asked_for_where_it_is_served_also_when_its_writer_is_dead() -> None:
    finder = Finder(Directory(MemoryStore()), grace_s=10)
    left = Found(serving(), lives=False)
    moved = finder.found(TICKET, left, 100.0)
    assert moved is not None and moved.ports == serving().ports
    assert finder.found(moved, left, 100.0) is None
    assert finder.current(TICKET) == moved
    with pytest.raises(PayloadLostError):
        finder.found(moved, left, 110.0)


def test_a_store_that_fails_loses_nothing(store: SQLiteStore) -> None:
    finder = Finder(Directory(store), grace_s=0)
    failure = UnreachableError("nobody there")
    store.put(f"rings/{RING}", b"\xc1")
    assert run(finder.after(TICKET, failure)) is None
    store.delete(f"rings/{RING}")
    with pytest.raises(PayloadLostError) as lost:
        run(finder.after(TICKET, failure))
    assert lost.value.__cause__ is failure


@pytest.mark.ucx
def test_only_a_failure_to_reach_anybody_asks_the_directory(
    store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = Directory(store)
    asked: list[str] = []
    monkeypatch.setattr(directory, "find", lambda ring: asked.append(ring) or NOWHERE)
    with (
        ring_served(slots=2, slot_bytes=100) as (ring, _),
        dead_port() as dead,
        BlockingClient(wire={"tcp"}, settings=FAST, directory=directory) as client,
    ):
        consumed, elsewhere = ring.write_raw(b"x"), ring.write_raw(b"y")
        ring.discard(consumed)
        with pytest.raises(LinkError):
            client.read(msgspec.structs.replace(elsewhere, ports=(dead,)))
        assert asked == [ring.ring_id]
        with pytest.raises(StaleSlotError):
            client.read(consumed)
        assert asked == [ring.ring_id]


@pytest.mark.ucx
@pytest.mark.guarantee("a rollout worker is killed later, also with its supervisor")
def test_an_old_ticket_finds_what_outlives_its_writer(store: SQLiteStore) -> None:
    directory = Directory(store)
    with (
        ring_served(slots=1, slot_bytes=100) as (ring, server),
        dead_port() as dead,
        BlockingClient(wire={"tcp"}, settings=FAST, directory=directory) as client,
    ):
        old = msgspec.structs.replace(ring.write_raw(b"x"), ports=(dead,))
        directory.publish(serving(ring=ring.ring_id, addresses=server.addresses, ports=server.ports), 300.0)
        store.delete(f"servers/{ring.ring_id}")  # as its lease ends
        with client.read(old) as payload:
            assert bytes(payload["data"]) == b"x"


@pytest.mark.ucx
def test_a_read_ends_in_its_time_where_the_store_of_the_directory_hangs() -> None:
    store = HangingStore(MemoryStore())
    store.hangs = True
    with dead_port() as dead, BlockingClient(wire={"tcp"}, settings=FAST, directory=Directory(store)) as client:
        with pytest.raises(LinkError):
            client.read(msgspec.structs.replace(TICKET, ports=(dead,)), timeout=0.5)
        assert not store.gave_up
        store.close()


def test_reads_of_a_ring_wait_for_one_lookup_where_the_store_of_the_directory_hangs() -> None:
    store = HangingStore(MemoryStore())
    finder = Finder(Directory(store), grace_s=10)
    failure = UnreachableError("nobody there")

    async def read_twice(most_s: float) -> list[Ticket | None]:
        return await asyncio.gather(*(finder.after(TICKET, failure, most_s) for _ in range(2)))

    async def reads() -> None:
        store.hangs = True
        for _ in range(2):
            assert await read_twice(0.0) == [None, None]
        assert sum("find" in thread.name for thread in threading.enumerate()) == 1
        store.hangs = False
        store.close()
        eventually(lambda: not any("find" in thread.name for thread in threading.enumerate()), "it answers")
        Directory(store).publish(serving())
        moved = await read_twice(PATIENCE_S)
        assert [each.ports for each in moved if each is not None] == [serving().ports] * 2
        finder.end()

    run(reads())


# --- real processes ----------------------------------------------------------------------------------
HANGS = """
from helpers import eventually
from store_proxy import HangingStore, StoreProxy
from transport import ClientOptions, UCXXDataPackerMixin
from transport.client.blocking import BlockingClient
from transport.errors import TransportError
from transport.settings import Settings
from transport.store.directory import Directory
from transport.store.memory import MemoryStore
from transport.ticket import Ticket

class Hangs(HangingStore):
    patience_s = None
    hung = 0

    def call(self, *arguments):
        self.hung += self.hangs
        return super().call(*arguments)

of = dict(ring="ab" * 16, host="", addresses=("127.0.0.1",), ports=(1,))
ticket = Ticket(**of, slot=0, generation=1, key=7, size=4, created=0.0)
store, packer = Hangs(MemoryStore()), UCXXDataPackerMixin()
directory = Directory(store, lease_s=0.01)
with BlockingClient(wire={"tcp"}, settings=Settings(attempts_per_read=1), directory=directory) as client:
    try:
        client.read(ticket)  # whose ring is looked for from now on
    except TransportError:
        store.hangs = True
    packer.setup_ucxx_packer(client=ClientOptions(directory=directory))  # which looks for rings to connect to
    eventually(lambda: store.hung == 2, "both look")
packer.cleanup_ucxx_packer()
print("over", flush=True)
"""


def test_a_process_ends_while_the_store_of_the_directory_hangs() -> None:
    with Child(HANGS) as reader:
        assert reader.line() == "over"
        assert reader.wait() == 0


WORKER = textwrap.dedent("""
    import signal, sys, numpy as np
    from transport.store.directory import Directory
    from transport.packer.options import RingOptions, ServerOptions
    from transport.packer.rollout import UCXXRolloutMixin
    from transport.settings import Settings
    from transport.store import SQLiteStore
    with SQLiteStore(sys.argv[1]) as store:
        worker = UCXXRolloutMixin()
        worker.setup_ucxx(
            slots=4, name=sys.argv[2], mode="thread", ring=RingOptions(slot_bytes=4096),
            server=ServerOptions(
                addresses=["127.0.0.1"], directory=Directory(store, lease_s=float(sys.argv[3]))
            ),
        )
        tickets = worker.ring.tickets() or [
            worker.write_to_buffer({"x": np.arange(5, dtype=np.int32)}) for _ in range(2)
        ]
        for ticket in tickets:
            print(ticket.to_text(), flush=True)
        sys.stdin.readline()
        worker.cleanup_ucxx()
""")


class Worker:
    def __init__(self, path: Path, ring: str, lease_s: float = 600.0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(path), ring, str(lease_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline().strip() for _ in range(2)]
        if not all(lines):
            self.end(kill=True)
            pytest.fail("the worker did not start")
        self.tickets = [Ticket.parse(line) for line in lines]

    def end(self, *, kill: bool) -> None:
        with self.process:
            if kill:
                self.process.kill()


@pytest.fixture
def ring_name() -> Iterator[str]:
    name = f"/transport-rollout-test-{secrets.token_hex(8)}"  # as `setup_ucxx` names it
    yield name
    with contextlib.suppress(RingError):  # a worker that ended in order has removed it
        _ring.Ring.unlink_if_dead(name)


@pytest.mark.ucx
@pytest.mark.slow
def test_an_old_ticket_finds_the_server_that_was_restarted_elsewhere(store: SQLiteStore, ring_name: str) -> None:
    first = Worker(store.path, ring_name)
    old = first.tickets
    first.end(kill=True)
    second = Worker(store.path, ring_name)  # takes the ring over, with its unread payloads
    try:
        assert {ticket.identity for ticket in second.tickets} == {ticket.identity for ticket in old}
        published = Directory(store).find(old[0].ring).serving
        assert published is not None
        dead = [msgspec.structs.replace(ticket, ports=(1,)) for ticket in old]  # as if the old port was another's
        with BlockingClient(wire={"tcp"}, settings=FAST, directory=Directory(store)) as client:
            for ticket in dead:
                with client.read(ticket) as payload:
                    assert payload["x"].tolist() == [0, 1, 2, 3, 4]
                    assert payload.ticket.ports == published.ports
            assert client.statistics().failed_reads == 0
    finally:
        second.end(kill=False)
    assert Directory(store).find(old[0].ring) == NOWHERE  # withdrawn


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.slow
def test_a_dead_servers_tickets_are_lost_once_its_lease_has_ended(store: SQLiteStore, ring_name: str) -> None:
    worker = Worker(store.path, ring_name, lease_s=2.0)
    ticket = worker.tickets[0]
    directory = Directory(store, lease_s=2.0)
    thread = LoopThread("test")
    try:
        client = thread.run(_client(directory))
        try:
            worker.end(kill=True)
            failures: list[type[TransportError]] = []
            while PayloadLostError not in failures:  # retryable until then
                with pytest.raises(TransportError) as failed:
                    thread.run(client.read(ticket, timeout=30))
                failures.append(type(failed.value))
                assert failed.value.retryable or failed.value.unreadable
            assert all(issubclass(kind, LinkError) for kind in failures[:-1])
            assert client.statistics().failed_reads == len(failures)
        finally:
            thread.run(client.close())
    finally:
        thread.close()


async def _client(directory: Directory) -> UCXXClient:
    return UCXXClient(wire={"tcp"}, settings=FAST, directory=directory)


@pytest.mark.parametrize("lease_s", [0, -1, float("nan"), float("inf")])
def test_a_lease_is_above_zero(store: SQLiteStore, lease_s: float) -> None:
    with pytest.raises(UsageError, match="lease_s"):
        Directory(store, lease_s=lease_s)
