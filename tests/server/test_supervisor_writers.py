"""Writers and trainers that are killed: what the supervisor and its listeners do then."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from frozen import frozen
from helpers import NETWORK, SHM, Child, asynchronous, eventually, is_running, listener_pids, parent_of
from loopback import FAMILY, LOOPBACK, at
from supervised import QUICK, bound, read_all

from transport import SharedRingBuffer, Ticket, UCXXClient, UCXXServer
from transport.errors import BusyPortError, RingNotFoundError
from transport.server import process
from transport.server.lifetime import Lifetime
from transport.server.starting import ListenerConfig
from transport.server.supervisor import Supervisor, SupervisorConfig
from transport.server.users import supervisor_of, users_of
from transport.settings import Settings
from transport.testing import run

pytestmark = pytest.mark.ucx


# --- the writer -----------------------------------------------------------------------------------
WRITER = """
import sys, msgspec
from frozen import frozen
from helpers import noise
from loopback import LOOPBACK
from transport import SharedRingBuffer, UCXXServer
from transport.settings import Settings
name, settings, count = sys.argv[1], msgspec.json.decode(sys.argv[2], type=Settings), int(sys.argv[3])
ports = (0,) * int(sys.argv[4])
ring = SharedRingBuffer.create(slots=8, slot_bytes=50_000, name=name)
server = UCXXServer(ring, ports, addresses=(LOOPBACK,), settings=settings).start()
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
            async with UCXXClient(wire=NETWORK, settings=QUICK) as client:
                await read_all(client, writer.tickets)

        run(reading())
    eventually(lambda: writer.gone(name))


@pytest.mark.nightly
def test_a_port_that_a_killed_writer_still_has_names_its_ring_and_the_ring_takes_it_over(name: str) -> None:
    writer = Writer(name, 2, ports=1)
    with writer.child as child:
        child.kill()
    [port] = writer.listeners
    with (
        SharedRingBuffer.create(slots=8, slot_bytes=50_000) as other,
        pytest.raises(BusyPortError, match=f"name='{name.removeprefix('/transport-')}'"),
    ):
        UCXXServer(other, (port,), addresses=(LOOPBACK,), settings=QUICK).start()
    with (
        SharedRingBuffer.create(slots=8, slot_bytes=50_000, name=name) as again,
        UCXXServer(again, (port,), addresses=(LOOPBACK,), settings=QUICK) as server,
    ):
        assert server.ports == (port,)
        with (
            SharedRingBuffer.create(slots=8, slot_bytes=50_000) as other,
            pytest.raises(BusyPortError, match=f"process {os.getpid()}"),
        ):
            UCXXServer(other, (port,), addresses=(LOOPBACK,), settings=QUICK).start()


@pytest.mark.guarantee("a rollout worker is killed later, also with its supervisor")
@pytest.mark.parametrize("linger_s", [0.5, 0.0])
def test_what_nobody_reads_of_a_killed_writer_vanishes_after_the_linger_time(name: str, linger_s: float) -> None:
    writer = Writer(name, 2, msgspec.structs.replace(QUICK, linger_s=linger_s))
    with writer.child as child:
        child.kill()
    eventually(lambda: writer.gone(name))


def test_sigterm_to_the_supervisor_of_a_dead_writer_ends_everything(name: str) -> None:
    writer = Writer(name, 2)
    with SharedRingBuffer.attach(name, role="observer") as ring:
        assert supervisor_of(ring) == writer.supervisor
        users = users_of(ring)
        assert all(f"listener {pid}" in users for pid in writer.listeners.values())
        assert f"writer {writer.child.process.pid}" in users and "kill" not in users
        with writer.child as child:
            child.kill()
        eventually(lambda: not ring.native.keeper_alive)
        users = users_of(ring)
        assert "writer " not in users.partition(";")[0] and f"`kill {writer.supervisor}`" in users
    os.kill(writer.supervisor, signal.SIGTERM)
    eventually(lambda: writer.gone(name))


TAKES_OVER = """
import sys
from transport import SharedRingBuffer
print("ready", flush=True)
sys.stdin.readline()
ring = SharedRingBuffer.create(slots=8, slot_bytes=50_000, name=sys.argv[1])
print(len(ring.tickets()), flush=True)
sys.stdin.readline()
"""


def has_pending(pid: int, number: signal.Signals) -> bool:
    """Whether a stopped process has been sent this signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pending = sum(int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd")))
    return bool(pending >> (number - 1) & 1)


def test_a_successor_killed_while_the_old_supervisor_ends_takes_no_payload_with_it(name: str) -> None:
    writer = Writer(name, 3, msgspec.structs.replace(QUICK, watchdog_s=60.0), ports=1)  # it is frozen, and not killed
    (listener,) = writer.listeners.values()
    with Child(TAKES_OVER, name) as successor, writer.child as child, frozen(listener):
        assert successor.line() == "ready"
        child.kill()
        successor.tell()
        assert successor.line() == "3"
        eventually(lambda: has_pending(listener, signal.SIGTERM))  # and the supervisor waits for it
        successor.kill()  # before it has a supervisor of its own
    eventually(lambda: not is_running(listener))

    async def reading() -> None:
        async with UCXXClient(wire=NETWORK, settings=QUICK) as client:
            await read_all(client, writer.tickets)

    run(reading())
    eventually(lambda: writer.gone(name))


@pytest.mark.nightly
def test_a_listener_that_does_not_hear_that_its_writer_was_killed_is_killed_and_the_ring_goes(name: str) -> None:
    writer = Writer(name, 0, msgspec.structs.replace(QUICK, watchdog_s=60.0), ports=1)  # it is not taken for stopped
    (listener,) = writer.listeners.values()
    with writer.child as child, frozen(listener):
        child.kill()
        eventually(lambda: not is_running(listener))
    eventually(lambda: writer.gone(name))


TRAINER = """
import asyncio, sys
from takes import consume, remote, take
async def main():
    async with remote() as client:
        batch = await take(client, sys.argv[1], 1)
        print((await consume(batch)).all(), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
asyncio.run(main())
"""


@pytest.mark.nightly
@pytest.mark.parametrize("killed", ["listener", "trainer"])
def test_an_orphaned_listener_waits_for_no_trainer_that_cannot_ask_any_more(name: str, killed: str) -> None:
    writer = Writer(name, 1, msgspec.structs.replace(QUICK, linger_s=1000.0), ports=2)
    first, _ = writer.listeners
    with (
        writer.child as child,
        Child(TRAINER, at(first)) as trainer,
        SharedRingBuffer.attach(name, role="observer") as ring,
    ):
        assert trainer.line() == "True"
        with SharedRingBuffer.attach(name, role="writer") as other:
            other.end_data()
        child.kill()
        os.kill(writer.supervisor, signal.SIGKILL)
        assert ring.native.pending == 1  # it lives, and is yet to hear the end
        if killed == "trainer":
            trainer.kill()
        else:
            os.kill(writer.listeners[first], signal.SIGKILL)
        eventually(lambda: writer.gone(name))


@asynchronous
async def test_a_listener_that_ends_removes_no_ring_that_another_writer_took_over_meanwhile(name: str) -> None:
    first = SharedRingBuffer.create(slots=2, slot_bytes=100, name=name)
    ticket = first.write_raw(b"unread")
    with SharedRingBuffer.attach(name, role="listener") as ring:
        first.native.close()  # as if it had been killed
        settings = msgspec.structs.replace(QUICK, linger_s=0.0)
        stop, lifetime = asyncio.Event(), Lifetime(settings.linger_s)
        await process._stop_when_orphaned(ring, lifetime, settings, stop)
        assert stop.is_set()  # the listener drains, which takes up to seconds
        SharedRingBuffer.create(slots=2, slot_bytes=100, name=name).native.close()  # a successor that is killed as well
        assert not ring.native.unlink_if_last(gives_up_to=lifetime.gives_up_to)
        with SharedRingBuffer.create(slots=2, slot_bytes=100, name=name) as second:
            assert second.tickets() == [ticket]


def test_a_supervisor_that_was_stopped_at_its_end_removes_no_ring_that_another_writer_has_filled(name: str) -> None:
    first = SharedRingBuffer.create(slots=2, slot_bytes=100, name=name)
    first.write_raw(b"given up")
    with SharedRingBuffer.attach(name, role="observer") as ring:
        listener = ListenerConfig(segment=name, port=0, settings=QUICK, secret=None, wires=None)
        supervisor = Supervisor(ring, SupervisorConfig(ports=(0,), listener=listener))
        first.native.close()  # as if it had been killed
        supervisor.request_stop()
        second = SharedRingBuffer.create(slots=2, slot_bytes=100, name=name)
        tickets = [*second.tickets(), second.write_raw(b"unread")]
        second.native.close()
        assert not supervisor.remove_segment()
        with SharedRingBuffer.create(slots=2, slot_bytes=100, name=name) as third:
            assert third.tickets() == tickets


def test_a_supervisor_told_to_stop_leaves_the_payloads_of_a_writer_that_was_alive_then(name: str) -> None:
    writer = SharedRingBuffer.create(slots=2, slot_bytes=100, name=name)
    ticket = writer.write_raw(b"unread")
    with SharedRingBuffer.attach(name, role="observer") as ring:
        listener = ListenerConfig(segment=name, port=0, settings=QUICK, secret=None, wires=None)
        supervisor = Supervisor(ring, SupervisorConfig(ports=(0,), listener=listener))
        supervisor.request_stop()
        writer.native.close()  # killed while it stops its server
        assert not supervisor.remove_segment()
        with SharedRingBuffer.create(slots=2, slot_bytes=100, name=name) as successor:
            assert successor.tickets() == [ticket]


def test_a_restarted_writer_whose_old_port_is_another_programs_by_now_is_served_on_a_new_one(name: str) -> None:
    first = Writer(name, 2, ports=1)
    ((port, _),) = first.listeners.items()
    with first.child as child:
        child.kill()
    for pid in (first.supervisor, *first.listeners.values()):
        os.kill(pid, signal.SIGKILL)
    with socket.socket(FAMILY) as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        eventually(lambda: bound(thief, port))
        thief.listen()
        second = Writer(name, 1, ports=1)
        assert port not in second.listeners

        async def reading() -> None:
            async with UCXXClient(wire=NETWORK, settings=QUICK) as client:
                new_ports = second.tickets[0].ports
                await read_all(client, [msgspec.structs.replace(each, ports=new_ports) for each in first.tickets])
                await read_all(client, second.tickets)

        run(reading())
    with second.child as child:
        child.tell()
        assert child.wait() == 0
    eventually(lambda: second.gone(name))


# --- the trainer ----------------------------------------------------------------------------------


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
        process = supervisor.served_ports[0].process
        assert process is not None
        await supervisor._stop_listeners()
        assert supervisor.served_ports[0].process is None
        assert process.returncode == -signal.SIGKILL
