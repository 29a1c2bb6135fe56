"""Supervised listeners, and their supervisor: whoever is killed or stopped, payloads stay readable."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from helpers import NETWORK, PATIENCE_S, asynchronous, eventually, listener_pids, parent_of, until
from loopback import FAMILY
from supervised import LOCAL, QUICK, bound, read_all, write

from transport import SharedRingBuffer, UCXXClient, UCXXServer
from transport.errors import BusyPortError
from transport.ring.attachment import attached
from transport.server import supervisor as supervising
from transport.server.starting import ListenerConfig, StartReport
from transport.server.supervisor import ServedPort, Supervisor, SupervisorConfig
from transport.settings import Settings

pytestmark = pytest.mark.ucx


@contextlib.contextmanager
def served(settings: Settings = QUICK, slots: int = 64) -> Iterator[tuple[SharedRingBuffer, UCXXServer]]:
    with (
        SharedRingBuffer.create(slots=slots, slot_bytes=50_000) as ring,
        UCXXServer(ring, (0, 0), addresses=LOCAL, settings=settings) as server,
    ):
        yield ring, server


def test_it_loads_no_numpy_and_a_listeners_numpy_has_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    for asked in ("1", "8"):
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", asked)
        with served() as (ring, _):
            listener, *_others = listener_pids(ring).values()
            threads.append(len(list(Path(f"/proc/{listener}/task").iterdir())))
            assert "numpy" not in Path(f"/proc/{parent_of(listener)}/maps").read_text()
    assert threads[0] == threads[1]


# --- listeners ------------------------------------------------------------------------------------
@pytest.mark.guarantee("a listener is killed, stopped or restarted")
@asynchronous
async def test_a_killed_listener_is_back_on_its_port_and_meanwhile_the_other_one_serves() -> None:
    with served() as (ring, server):
        before = listener_pids(ring)
        victim = server.ports[0]
        async with UCXXClient(wire=NETWORK, settings=QUICK) as client:
            await read_all(client, write(ring, 10))
            os.kill(before[victim], signal.SIGKILL)
            await read_all(client, write(ring, 30))
            await until(lambda: listener_pids(ring).get(victim, before[victim]) != before[victim])
            await until(lambda: ring.statistics().free == ring.slot_count)
        assert set(server.ports) == before.keys()
        assert listener_pids(ring)[server.ports[1]] == before[server.ports[1]]
        async with UCXXClient(wire=NETWORK, settings=QUICK) as client:
            await read_all(client, [msgspec.structs.replace(ticket, ports=(victim,)) for ticket in write(ring, 1)])


@pytest.mark.guarantee("a listener is killed, stopped or restarted")
@asynchronous
async def test_a_stopped_listener_is_killed_by_the_watchdog_and_what_it_had_pinned_is_read_again() -> None:
    with served() as (ring, server):
        before = listener_pids(ring)
        async with UCXXClient(wire=NETWORK, settings=QUICK, ack="manual") as client:
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
        of_threads = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
        return [int(child) for children in of_threads for child in children]
    return []


def silence_s(ring: SharedRingBuffer, pid: int) -> float:
    """Since the last heartbeat of a listener."""
    (beat,) = (owner.heartbeat_ns for owner in ring.native.owners() if owner.pid == pid)
    return (time.monotonic_ns() - beat) / 1e9


@pytest.mark.parametrize(
    ("ports", "adopted"), [((1, 2), (1, 2)), ((2, 1), (2, 1)), ((3, 1), (2, 1)), ((3, 4), (1, 2)), ((0, 2), (1, 2))]
)
def test_listeners_are_adopted_where_they_are_in_the_order_of_the_ports(
    ports: tuple[int, int], adopted: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "is_listener", lambda pid: pid == os.getpid())
    with SharedRingBuffer.create(slots=1, slot_bytes=64) as ring, contextlib.ExitStack() as stack:
        ring.native.set_ports((1, 2))
        for port in (1, 2):
            stack.enter_context(attached(ring.name, "listener")).native.set_own_port(port)
        config = SupervisorConfig(ports=ports, listener=ListenerConfig(segment=ring.name, port=0, settings=QUICK))
        again = Supervisor(ring, msgspec.structs.replace(config, first=False))
        assert tuple(served.port for served in again.served_ports) == adopted


def test_a_listener_that_fails_again_is_started_after_twice_the_time_up_to_a_bound() -> None:
    port = ServedPort(1)
    pauses = []
    for _ in range(20):
        port.failed(0.0)
        pauses.append(port.not_before)
    assert all(later in (2 * before, pauses[-1]) for before, later in itertools.pairwise(pauses))
    assert pauses[0] < pauses[-1] == pauses[-2]


def test_a_port_that_was_lost_stays_published_until_its_successor_is_known() -> None:
    with SharedRingBuffer.create(slots=1, slot_bytes=8) as ring:
        config = SupervisorConfig(
            ports=(7001, 7002), listener=ListenerConfig(segment=ring.name, port=0, settings=QUICK)
        )
        supervisor = Supervisor(ring, config)
        supervisor.publish_ports()
        lost = supervisor.served_ports[0]
        lost.last_error = StartReport(error=BusyPortError.__name__)
        while lost.port:
            lost.failed(0.0)
        supervisor.publish_ports()
        assert ring.native.ports() == (7001, 7002)
        lost.port = 7003
        supervisor.publish_ports()
        assert ring.native.ports() == (7003, 7002)


@pytest.mark.parametrize(
    ("living", "taken_over"), [({(1, 1)}, False), ({(1, 1), (2, 2)}, False), ({(2, 2)}, True), (set(), False)]
)
def test_another_writer_takes_the_ring_over_once_the_first_one_is_gone(
    living: set[tuple[int, int]], taken_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "_living_writers", lambda _: living)
    with SharedRingBuffer.create(slots=1, slot_bytes=64) as ring:
        config = SupervisorConfig(ports=(0,), listener=ListenerConfig(segment=ring.name, port=0, settings=QUICK))
        assert Supervisor(ring, config, {(1, 1)})._succeeded() is taken_over


@asynchronous
async def test_a_supervisor_whose_writer_was_killed_lets_go_of_its_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    left = asyncio.Event()
    monkeypatch.setattr(supervising.stacks, "leave_pipes", left.set)
    writer = SharedRingBuffer.create(slots=1, slot_bytes=64)
    writer.write_raw(b"unread")
    with attached(writer.name, "observer") as ring:
        writer.native.close()  # as if it had been killed
        config = SupervisorConfig(ports=(), listener=ListenerConfig(segment=ring.name, port=0, settings=QUICK))
        ending = Supervisor(ring, config)
        serving = asyncio.ensure_future(ending.run())
        async with asyncio.timeout(PATIENCE_S):
            await left.wait()
        ending.request_stop()
        await serving
        assert ending.remove_segment()


@pytest.mark.nightly
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


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("victim", ["supervisor", "listener"])
def test_a_server_starts_although_what_it_starts_is_killed_again_and_again(victim: str) -> None:
    killed: set[int] = set()
    over = threading.Event()
    own = set(children_of(os.getpid()))

    def kill_some() -> None:
        while not over.wait(0.001) and len(killed) < 5:
            for supervisor in set(children_of(os.getpid())) - own:
                for pid in [supervisor] if victim == "supervisor" else children_of(supervisor):
                    if pid not in killed:
                        os.kill(pid, signal.SIGKILL)
                        killed.add(pid)

    with SharedRingBuffer.create(slots=2, slot_bytes=10) as ring:
        killer = threading.Thread(target=kill_some)
        killer.start()
        try:
            with UCXXServer(ring, (0,), addresses=LOCAL, settings=QUICK) as server:
                assert len(killed) == 5
                assert set(listener_pids(ring)) == set(server.ports)
        finally:
            over.set()
            killer.join()


# --- the supervisor -------------------------------------------------------------------------------


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


@pytest.mark.nightly
@asynchronous
async def test_a_port_that_another_program_takes_meanwhile_does_not_cost_the_healthy_listener() -> None:
    with served() as (ring, server), socket.socket(FAMILY) as thief, Watch(ring) as watch:
        before = listener_pids(ring)
        victim, healthy = server.ports
        supervisor = parent_of(before[victim])
        os.kill(supervisor, signal.SIGKILL)
        os.kill(before[victim], signal.SIGKILL)
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        await until(lambda: bound(thief, victim) and victim not in listener_pids(ring))
        thief.listen()
        async with UCXXClient(wire=NETWORK, settings=QUICK) as client:
            while len(listener_pids(ring)) < 2:
                await read_all(client, write(ring, 5))
                assert listener_pids(ring)[healthy] == before[healthy]
                await asyncio.sleep(0.05)  # two cores: the supervisor needs one
        (other,) = listener_pids(ring).keys() - {healthy}
        assert other != victim
        await until(lambda: set(server.ports) == {healthy, other})
        async with UCXXClient(wire=NETWORK, settings=QUICK) as client:
            await read_all(client, [msgspec.structs.replace(ticket, ports=(other,)) for ticket in write(ring, 3)])
        assert listener_pids(ring)[healthy] == before[healthy]
    assert watch.error is None
    assert all(0 not in table and healthy in table for table in watch.tables)
    assert {(victim, healthy), (healthy, other)} <= {*watch.tables, *(table[::-1] for table in watch.tables)}


def test_closing_right_after_the_supervisor_was_killed_leaves_nothing_running() -> None:
    with served() as (ring, server):
        pids = listener_pids(ring)
        os.kill(parent_of(pids[server.ports[0]]), signal.SIGKILL)
        server.close()
        eventually(lambda: listener_pids(ring) == {})


BLOCKED = """
import os, pathlib, signal, sys
if "transport.server.supervisor" in sys.orig_argv:
    folder = pathlib.Path(os.environ["BLOCKS_SUPERVISORS"])
    if (folder / "now").exists():
        (folder / "blocked").write_text(str(os.getpid()))
        signal.pause()
"""


def test_closing_ends_a_supervisor_that_hangs_while_it_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    monkeypatch.setenv("BLOCKS_SUPERVISORS", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with served() as (ring, server):
        (tmp_path / "now").touch()
        killed = server._run._process  # type: ignore[union-attr]
        os.kill(parent_of(next(iter(listener_pids(ring).values()))), signal.SIGKILL)
        eventually(lambda: (tmp_path / "blocked").exists() and (tmp_path / "blocked").read_text())
        eventually(lambda: server._run._process is not killed)  # type: ignore[union-attr]
        restarted = server._run._process  # type: ignore[union-attr]
        assert restarted is not None
        server.close()
        assert restarted.returncode == -signal.SIGTERM  # not the SIGKILL at the end of its time to start
        assert not listener_pids(ring)


@asynchronous
async def test_a_listener_whose_start_fails_in_any_way_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with SharedRingBuffer.create(slots=1, slot_bytes=64) as ring:
        config = SupervisorConfig(ports=(0,), listener=ListenerConfig(segment=ring.name, port=0, settings=QUICK))
        supervisor = Supervisor(ring, config)
        exchange = Supervisor._exchange

        async def failing(*_: object) -> None:
            monkeypatch.setattr(Supervisor, "_exchange", exchange)
            raise ValueError("Separator is not found, and chunk exceed the limit")

        monkeypatch.setattr(Supervisor, "_exchange", failing)
        supervisor.fill()
        await supervisor.filled_at_first()
        assert supervisor.unserved() == [] and supervisor.served_ports[0].port
        await supervisor._stop_listeners()
