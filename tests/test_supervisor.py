"""Supervised listeners: whoever is killed or stopped, payloads stay readable, and in the end nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import SHM, Child, asynchronous, dead_port, eventually, is_running, listener_pids, noise, parent_of, until

from transport import SharedRingBuffer, Ticket, UCXXClient, UCXXServer
from transport.errors import RingNotFoundError
from transport.listener_process import ListenerConfig
from transport.settings import DEFAULTS, Settings
from transport.supervisor import Supervisor, SupervisorConfig
from transport.supervisor_lock import supervised
from transport.testing import run

pytestmark = pytest.mark.ucx

QUICK = msgspec.structs.replace(
    DEFAULTS,
    watchdog_s=1.5,
    heartbeat_s=0.3,
    read_timeout_s=1.0,
    attempts_per_read=10,
    port_quarantine_s=0.2,
    port_quarantine_most_s=0.4,
    linger_s=60.0,
)
LOCAL = ("127.0.0.1",)


@contextlib.contextmanager
def served(settings: Settings = QUICK, slots: int = 64) -> Iterator[tuple[SharedRingBuffer, UCXXServer]]:
    with (
        SharedRingBuffer.create(slots=slots, slot_bytes=50_000) as ring,
        UCXXServer(ring, (0, 0), addresses=LOCAL, settings=settings) as server,
    ):
        yield ring, server


async def read_all(client: UCXXClient, tickets: list[Ticket]) -> None:
    """Every payload, or the test fails."""
    async for ticket, payload, error in client.read_many(tickets):
        assert error is None
        assert payload is not None
        assert bytes(payload.data) == noise(ticket.size, ticket.metadata["seed"]).tobytes()


def write(ring: SharedRingBuffer, count: int, size: int = 20_000) -> list[Ticket]:
    return [ring.write_raw(noise(size, seed), metadata={"seed": seed}) for seed in range(count)]


# --- listeners -----------------------------------------------------------------------------------
@asynchronous
async def test_a_killed_listener_is_back_on_its_port_and_meanwhile_the_other_one_serves() -> None:
    with served() as (ring, server):
        before = listener_pids(ring)
        victim = server.ports[0]
        async with UCXXClient(wire={"tcp"}, settings=QUICK) as client:
            await read_all(client, write(ring, 10))
            os.kill(before[victim], signal.SIGKILL)
            await read_all(client, write(ring, 30))
            await until(lambda: listener_pids(ring).get(victim, before[victim]) != before[victim])
            await until(lambda: ring.statistics().free == ring.slot_count)
        assert set(server.ports) == before.keys()
        assert listener_pids(ring)[server.ports[1]] == before[server.ports[1]]
        async with UCXXClient(wire={"tcp"}, settings=QUICK) as client:
            await read_all(client, [msgspec.structs.replace(ticket, ports=(victim,)) for ticket in write(ring, 1)])


@asynchronous
async def test_a_stopped_listener_is_killed_by_the_watchdog_and_what_it_had_pinned_is_read_again() -> None:
    with served() as (ring, server):
        before = listener_pids(ring)
        async with UCXXClient(wire={"tcp"}, settings=QUICK, ack="manual") as client:
            tickets = write(ring, 4)
            held = [await client.read(ticket) for ticket in tickets]
            assert ring.statistics().reading == 4
            for pid in before.values():
                os.kill(pid, signal.SIGSTOP)
            await until(lambda: len(listener_pids(ring)) == 2 and not before.items() & listener_pids(ring).items())
            assert set(server.ports) == before.keys()
            await until(lambda: ring.statistics().ready == 4)
            del held
            await read_all(client, tickets)


def children_of(pid: int) -> list[int]:
    """Processes that it started and that are there."""
    with contextlib.suppress(FileNotFoundError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def silence_s(ring: SharedRingBuffer, pid: int) -> float:
    """Since the last heartbeat of a listener."""
    (beat,) = (owner.heartbeat_ns for owner in ring.native.owners() if owner.pid == pid)
    return (time.monotonic_ns() - beat) / 1e9


def test_adopting_keeps_the_order_of_the_ports() -> None:
    with served() as (ring, server):
        for ports in (server.ports, server.ports[::-1]):
            config = SupervisorConfig(
                ports=ports, listener=ListenerConfig(segment=ring.name, port=0, settings=QUICK), first=False
            )
            assert tuple(place.port for place in Supervisor(ring, config).places) == ports


def test_a_listener_that_has_moved_is_adopted_where_it_is() -> None:
    with served() as (ring, server):
        here, moved = server.ports
        with dead_port() as nobodys:
            config = SupervisorConfig(
                ports=(nobodys, here), listener=ListenerConfig(segment=ring.name, port=0, settings=QUICK), first=False
            )
            assert [place.port for place in Supervisor(ring, config).places] == [moved, here]


@asynchronous
async def test_a_supervisor_that_stood_still_itself_does_not_hold_it_against_its_listeners() -> None:
    with served() as (ring, server):
        before = listener_pids(ring)
        asleep, dead = before[server.ports[0]], before[server.ports[1]]
        supervisor = parent_of(asleep)
        for pid in (supervisor, asleep):
            os.kill(pid, signal.SIGSTOP)
        await until(lambda: silence_s(ring, asleep) > 1.5 * QUICK.watchdog_s)
        os.kill(dead, signal.SIGKILL)
        os.kill(supervisor, signal.SIGCONT)
        await until(lambda: set(children_of(supervisor)) - {asleep, dead}, "the supervisor has looked at its listeners")
        os.kill(asleep, signal.SIGCONT)
        await until(lambda: silence_s(ring, asleep) < QUICK.watchdog_s, "a heartbeat")
        await until(lambda: set(listener_pids(ring)) == set(before))
        assert listener_pids(ring)[server.ports[0]] == asleep


@pytest.mark.parametrize("victim", ["supervisor", "listener"])
def test_a_server_starts_although_what_it_starts_is_killed_once(victim: str) -> None:
    killed: list[int] = []
    over = threading.Event()
    own = set(children_of(os.getpid()))

    def kill_one() -> None:
        while not over.wait(0.001):
            for supervisor in set(children_of(os.getpid())) - own:
                for pid in [supervisor] if victim == "supervisor" else children_of(supervisor):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
                    return

    with SharedRingBuffer.create(slots=2, slot_bytes=10) as ring:
        killer = threading.Thread(target=kill_one)
        killer.start()
        try:
            with UCXXServer(ring, (0,), addresses=LOCAL, settings=QUICK) as server:
                assert killed
                assert set(listener_pids(ring)) == set(server.ports)
        finally:
            over.set()
            killer.join()


# --- the supervisor ------------------------------------------------------------------------------
@asynchronous
async def test_a_killed_supervisor_is_started_again_and_adopts_its_listeners() -> None:
    with served() as (ring, server):
        before = listener_pids(ring)
        first = parent_of(before[server.ports[0]])
        os.kill(first, signal.SIGKILL)
        async with UCXXClient(wire={"tcp"}, settings=QUICK) as client:
            await read_all(client, write(ring, 10))
            await until(lambda: not is_running(first) and supervised(ring.name))
            assert listener_pids(ring) == before
            victim = server.ports[1]
            os.kill(before[victim], signal.SIGKILL)
            await until(lambda: listener_pids(ring).get(victim, before[victim]) != before[victim])
            await read_all(client, write(ring, 10))
        assert listener_pids(ring)[server.ports[0]] == before[server.ports[0]]


class Watch:
    """Looks at a ring's port table all the time, and writes meanwhile; in a thread of its own."""

    def __init__(self, ring: SharedRingBuffer) -> None:
        self.tables: set[tuple[int, ...]] = set()
        self.error: BaseException | None = None
        self._ring = ring
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._over.wait(0.01):
                self.tables.add(self._ring.native.ports())
                self._ring.discard(self._ring.write_raw(b"x", timeout_s=1.0))
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@asynchronous
async def test_a_port_that_another_program_takes_meanwhile_does_not_cost_the_healthy_listener() -> None:
    with served() as (ring, server), socket.socket() as thief, Watch(ring) as watch:
        before = listener_pids(ring)
        victim, healthy = server.ports
        supervisor = parent_of(before[victim])
        os.kill(supervisor, signal.SIGKILL)
        os.kill(before[victim], signal.SIGKILL)
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await until(lambda: bound(thief, victim) and victim not in listener_pids(ring))
        thief.listen()
        async with UCXXClient(wire={"tcp"}, settings=QUICK) as client:
            while len(listener_pids(ring)) < 2:
                await read_all(client, write(ring, 5))
                assert listener_pids(ring)[healthy] == before[healthy]
                await asyncio.sleep(0.05)  # two cores: the supervisor needs one
        (other,) = listener_pids(ring).keys() - {healthy}
        assert other != victim
        await until(lambda: set(server.ports) == {healthy, other})
        async with UCXXClient(wire={"tcp"}, settings=QUICK) as client:
            await read_all(client, [msgspec.structs.replace(ticket, ports=(other,)) for ticket in write(ring, 3)])
        assert listener_pids(ring)[healthy] == before[healthy]
    assert watch.error is None
    assert all(0 not in table and healthy in table for table in watch.tables)
    assert {(victim, healthy), (healthy, other)} <= {*watch.tables, *(table[::-1] for table in watch.tables)}


def bound(mine: socket.socket, port: int) -> bool:
    """Have the port, as soon as the one who had it is gone."""
    with contextlib.suppress(OSError):
        mine.bind(("0.0.0.0", port))
    return mine.getsockname()[1] == port


def test_closing_right_after_the_supervisor_was_killed_leaves_nothing_running() -> None:
    with served() as (ring, server):
        pids = listener_pids(ring)
        os.kill(parent_of(pids[server.ports[0]]), signal.SIGKILL)
        server.close()
        eventually(lambda: listener_pids(ring) == {})


# --- the writer ------------------------------------------------------------------------------------
WRITER = """
import sys, msgspec
from support import noise
from transport import SharedRingBuffer, UCXXServer
from transport.settings import Settings
name, settings, count = sys.argv[1], msgspec.json.decode(sys.argv[2], type=Settings), int(sys.argv[3])
ports = (0,) * int(sys.argv[4])
ring = SharedRingBuffer.create(slots=8, slot_bytes=50_000, name=name)
server = UCXXServer(ring, ports, addresses=("127.0.0.1",), settings=settings).start()
print(len(ring.tickets()), flush=True)
for seed in range(count):
    print(ring.write_raw(noise(20_000, seed), metadata={"seed": seed}).to_text(), flush=True)
sys.stdin.readline()
server.close()
ring.close()
"""


class Writer:
    """A rollout worker in a process of its own, its unread tickets, and whoever serves them."""

    def __init__(self, name: str, count: int, settings: Settings = QUICK, ports: int = 2) -> None:
        self.child = Child(WRITER, name, msgspec.json.encode(settings).decode(), count, ports)
        self.found = int(self.child.line())
        self.tickets = [Ticket.parse(self.child.line()) for _ in range(count)]
        with SharedRingBuffer.attach(name, role="observer") as ring:
            self.listeners = listener_pids(ring)
        self.supervisor = parent_of(next(iter(self.listeners.values())))

    def gone(self, name: str) -> bool:
        pids = [self.supervisor, *self.listeners.values()]
        return not any(map(is_running, pids)) and not (SHM / name.removeprefix("/")).exists()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """A ring's name; should the test fail, what serves it is killed."""
    unique = f"/transport-supervisor-{os.getpid()}-{abs(hash(request.node.nodeid)):x}"
    yield unique
    with contextlib.suppress(RingNotFoundError), SharedRingBuffer.attach(unique, role="observer") as ring:
        for pid in listener_pids(ring).values():
            for each in {parent_of(pid), pid} - {1, os.getpid()}:
                os.kill(each, signal.SIGKILL)
    (SHM / unique.removeprefix("/")).unlink(missing_ok=True)


def test_a_writers_orderly_end_takes_everything_with_it(name: str) -> None:
    writer = Writer(name, 2)
    with writer.child as child:
        child.tell()
        assert child.wait() == 0
    eventually(lambda: writer.gone(name))


def test_payloads_of_a_killed_writer_are_readable_until_consumed_then_all_vanishes(name: str) -> None:
    writer = Writer(name, 5)
    with writer.child as child:
        child.kill()

    async def reading() -> None:
        async with UCXXClient(wire={"tcp"}, settings=QUICK) as client:
            await read_all(client, writer.tickets[:3])
            assert all(map(is_running, writer.listeners.values()))
            await read_all(client, writer.tickets[3:])

    run(reading())
    eventually(lambda: writer.gone(name))


def test_a_listener_that_is_terminated_while_lingering_takes_no_payload_with_it(name: str) -> None:
    writer = Writer(name, 2, ports=1)
    with writer.child as child:
        child.kill()
    ((port, pid),) = writer.listeners.items()
    os.kill(pid, signal.SIGTERM)
    eventually(lambda: not is_running(pid))
    with SharedRingBuffer.attach(name, role="observer") as ring:
        assert ring.tickets() == writer.tickets
        eventually(lambda: port in listener_pids(ring))
        assert is_running(writer.supervisor)
        writer.listeners |= listener_pids(ring)

        async def reading() -> None:
            async with UCXXClient(wire={"tcp"}, settings=QUICK) as client:
                await read_all(client, writer.tickets)

        run(reading())
    eventually(lambda: writer.gone(name))


def test_what_nobody_reads_of_a_killed_writer_vanishes_after_the_linger_time(name: str) -> None:
    writer = Writer(name, 2, msgspec.structs.replace(QUICK, linger_s=0.5))
    with writer.child as child:
        child.kill()
    eventually(lambda: writer.gone(name))


def test_without_writer_and_supervisor_the_listeners_serve_on_and_remove_the_segment(name: str) -> None:
    writer = Writer(name, 2)
    with writer.child as child:
        child.kill()
    os.kill(writer.supervisor, signal.SIGKILL)

    async def reading() -> None:
        async with UCXXClient(wire={"tcp"}, settings=QUICK) as client:
            await read_all(client, writer.tickets)

    run(reading())
    eventually(lambda: writer.gone(name))


def test_sigterm_to_the_supervisor_of_a_dead_writer_ends_everything(name: str) -> None:
    writer = Writer(name, 2)
    with writer.child as child:
        child.kill()
    os.kill(writer.supervisor, signal.SIGTERM)
    eventually(lambda: writer.gone(name))


def test_a_restarted_writer_takes_its_ring_over_and_old_and_new_payloads_are_served(name: str) -> None:
    first = Writer(name, 3)
    with first.child as child:
        child.kill()
    second = Writer(name, 2)
    assert second.found == 3
    assert second.tickets[0].ring == first.tickets[0].ring

    async def reading() -> None:
        async with UCXXClient(wire={"tcp"}, settings=QUICK) as client:
            await read_all(client, first.tickets + second.tickets)

    run(reading())
    with second.child as child:
        child.tell()
        assert child.wait() == 0
    eventually(lambda: first.gone(name) and second.gone(name))


def test_a_restarted_writer_whose_old_port_is_another_programs_by_now_is_served_on_a_new_one(name: str) -> None:
    first = Writer(name, 2, ports=1)
    ((port, _),) = first.listeners.items()
    with first.child as child:
        child.kill()
    for pid in (first.supervisor, *first.listeners.values()):
        os.kill(pid, signal.SIGKILL)
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        eventually(lambda: bound(thief, port))
        thief.listen()
        second = Writer(name, 1, ports=1)
        assert port not in second.listeners

        async def reading() -> None:
            async with UCXXClient(wire={"tcp"}, settings=QUICK) as client:
                new_ports = second.tickets[0].ports
                await read_all(client, [msgspec.structs.replace(each, ports=new_ports) for each in first.tickets])
                await read_all(client, second.tickets)

        run(reading())
    with second.child as child:
        child.tell()
        assert child.wait() == 0
    eventually(lambda: second.gone(name))


# --- the trainer ---------------------------------------------------------------------------------
READER = """
import sys, uvloop
from transport import Ticket, UCXXClient
async def main():
    async with UCXXClient(wire={sys.argv[1]}, ack="manual") as client:
        payload = await client.read(Ticket.parse(sys.argv[2]))
        print("read", flush=True)
        sys.stdin.readline()
uvloop.run(main())
"""


@pytest.mark.parametrize("wire", ["tcp", "shm", "mapped"])
def test_what_a_killed_trainer_has_not_acknowledged_is_read_again(wire: Any) -> None:
    with (
        SharedRingBuffer.create(slots=2, slot_bytes=50_000) as ring,
        UCXXServer(ring, addresses=LOCAL, mode="thread"),
    ):
        (ticket,) = write(ring, 1)
        with Child(READER, wire, ticket.to_text()) as child:
            assert child.line() == "read"
            assert ring.statistics().reading == 1
            child.kill()
        eventually(lambda: ring.reclaim() or ring.statistics().ready == 1)

        async def reading() -> None:
            async with UCXXClient(wire={wire}) as client:
                await read_all(client, [ticket])

        run(reading())


@asynchronous
async def test_stopping_in_the_middle_of_a_start_ends_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    told = asyncio.Event()

    async def never_told(*_: object) -> None:
        told.set()
        await asyncio.Event().wait()  # the listener waits for its configuration meanwhile

    monkeypatch.setattr(Supervisor, "_exchange", never_told)
    with SharedRingBuffer.create(slots=2, slot_bytes=10) as ring:
        config = SupervisorConfig(ports=(0,), listener=ListenerConfig(segment=ring.name, port=0, settings=QUICK))
        supervisor = Supervisor(ring, config)
        supervisor.fill()
        await told.wait()
        process = supervisor.places[0].process
        assert process is not None
        await supervisor._stop_listeners()
        assert supervisor.places[0].process is None
        assert process.returncode == -signal.SIGKILL
