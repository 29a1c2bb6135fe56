"""Rings of killed rollouts in a directory: what they left is asked for while it is served, and ends nobody's wait."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from found_rings import LONG_S
from helpers import NETWORK, NETWORK_WIRE, Child, dead_port, eventually
from loopback import LOOPBACK

from transport import FoundRings, Schema, SharedRingBuffer, Trainer, UCXXServer, _ring
from transport.claims.places import InDirectory
from transport.claims.waiting import Why
from transport.settings import DEFAULTS
from transport.store import SQLiteStore
from transport.store.directory import Announcement, Directory, Serving
from transport.ticket import host_identity, memory_identity
from transport.wires import Wire

pytestmark = pytest.mark.ucx

LEASE_S = 0.3
SCHEMA = Schema.of(x="int64")
ROLLOUT = """
import sys
from transport import FoundRings, Rollout, Schema
from transport.claims.places import InDirectory
from transport.store import SQLiteStore
from transport.store.directory import Directory
store = SQLiteStore(sys.argv[1])
with FoundRings(InDirectory(Directory(store, lease_s=float(sys.argv[2]))), store=store) as rings:
    rollout = Rollout(Schema.of(x="int64"), rings, slots=8)
    for x in range(6):
        rollout.write({"x": x})
    print(rollout.ring.ring_id, rollout.ring.name, flush=True)
    sys.stdin.readline()
"""
# Serves a file again, from a container of the same node.
ELSEWHERE = """
import sys
from mounts import own_shared_memory
print(own_shared_memory(), flush=True)
from transport import SharedRingBuffer, UCXXServer
from transport.store import SQLiteStore
from transport.store.directory import Announcement, Directory
with (
    SQLiteStore(sys.argv[1]) as store,
    SharedRingBuffer.create(slots=4, slot_bytes=64, file=sys.argv[2]) as ring,
    UCXXServer(ring, mode="thread", addresses=(sys.argv[3],)) as server,
    Announcement(Directory(store), ring, server),
):
    ring.write_raw(b"x")
    sys.stdin.readline()
"""


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Directory]:
    with SQLiteStore(tmp_path / "store.db") as store:
        yield Directory(store, lease_s=LEASE_S)


@pytest.mark.guarantee("a rollout worker is killed later, also with its supervisor")
@pytest.mark.parametrize("wire", ["mapped", NETWORK_WIRE])
def test_what_a_killed_rollout_left_is_found_for_as_long_as_it_is_served(
    directory: Directory, tmp_path: Path, wire: Wire
) -> None:
    with Child(ROLLOUT, tmp_path / "store.db", LEASE_S) as rollout:
        ring, segment = rollout.line().split()
        rollout.kill()
    eventually(lambda: not directory.find(ring).lives, "its record lapses")
    with FoundRings(InDirectory(directory)) as rings, Trainer(SCHEMA, rings, wire={wire}) as trainer:
        assert trainer.rings.segments_here() == [segment]
        for _ in range(6):
            batch = trainer.take(1, LONG_S)
            assert batch is not None
            batch.consume()
            assert batch.accepted.all()
        del batch
        eventually(
            lambda: trainer.take(1, 0.05) is None and segment not in _ring.segments(),
            "the ring goes with its last payload",
        )
        assert not rings.not_counted(), "nobody serves it, and a snapshot lacks nothing"


def test_a_killed_rollout_that_is_not_reached_any_more_is_not_waited_for(directory: Directory) -> None:
    with (
        dead_port() as port,
        FoundRings(InDirectory(directory)) as rings,
        Trainer(SCHEMA, rings, wire=NETWORK) as trainer,
    ):
        killed = Serving(ring="1" * 32, host=host_identity(), addresses=(LOOPBACK,), ports=(port,))
        directory.publish(killed, 1000 * LONG_S)
        directory.end("2" * 32, bytes.fromhex(SCHEMA.fingerprint))
        eventually(
            lambda: trainer.take(1, 0.05) is None and trainer.rings.finished(1), "the other one's end is all there is"
        )
        assert not trainer.rings.finished()
        assert not trainer.rings.finished(2)


def test_a_killed_rollout_of_another_host_that_is_not_reached_any_more_is_missing_nowhere(
    directory: Directory, tmp_path: Path
) -> None:
    with (
        dead_port() as port,
        FoundRings(InDirectory(directory)) as rings,
        Trainer(SCHEMA, rings, wire=NETWORK) as trainer,
        SQLiteStore(tmp_path / "store.db") as store,
    ):
        killed = Serving(ring="1" * 32, host="another", addresses=(LOOPBACK,), ports=(port,))
        living = msgspec.structs.replace(killed, ring="2" * 32)
        directory.publish(killed, 1000 * LONG_S)
        Directory(store, lease_s=1000 * LONG_S).publish(living)
        eventually(
            lambda: trainer.take(1, 0.05) is None and rings.not_counted().keys() == {living.ring},
            "a snapshot need not have it",
        )


def test_a_ring_that_came_and_went_between_two_looks_is_missing_nowhere(directory: Directory) -> None:
    here = Serving(
        ring="1" * 32,
        host=host_identity(),
        addresses=(LOOPBACK,),
        ports=(1,),
        memory=memory_identity(),
        segment="/transport-that-is-gone",
    )
    elsewhere = msgspec.structs.replace(here, ring="2" * 32, memory="of another container of the node")
    for each in (here, elsewhere):
        directory.publish(each, 1000 * LONG_S)
    with FoundRings(InDirectory(directory)) as rings:
        assert rings.not_counted().keys() == {elsewhere.ring}


def test_a_ring_that_goes_while_threads_look_is_left_by_one_at_a_time(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FoundRings(InDirectory(directory)) as rings, SharedRingBuffer.create(SCHEMA, slots=1) as ring:
        goes, leave = threading.Barrier(2, ring.close), threading.Barrier(2)
        lost, close = FoundRings._lost, SharedRingBuffer.close

        def looks(found: FoundRings) -> set[str]:
            goes.wait()
            return lost(found)

        def closes(each: SharedRingBuffer) -> None:
            if each is not ring:
                with contextlib.suppress(threading.BrokenBarrierError):  # no other thread leaves it meanwhile
                    leave.wait(0.2)
            close(each)

        here = Serving(
            ring=ring.ring_id,
            host=host_identity(),
            addresses=(LOOPBACK,),
            ports=(1,),
            memory=memory_identity(),
            segment=ring.name,
        )
        elsewhere = msgspec.structs.replace(here, ring="2" * 32, host="another", memory="")
        for each in (here, elsewhere):
            directory.publish(each, 1000 * LONG_S)
        assert rings.segments_here() == [ring.name]
        monkeypatch.setattr(FoundRings, "_lost", looks)
        monkeypatch.setattr(SharedRingBuffer, "close", closes)
        with ThreadPoolExecutor() as pool:
            for look in [pool.submit(rings.not_counted) for _ in range(2)]:
                assert look.result().keys() == {elsewhere.ring}


def test_a_rollout_whose_listeners_admit_no_other_trainer_is_not_taken_for_a_killed_one(directory: Directory) -> None:
    full = msgspec.structs.replace(DEFAULTS, connections_per_listener=1)
    with (
        SharedRingBuffer.create(SCHEMA, slots=8) as ring,
        UCXXServer(ring, mode="thread", addresses=(LOOPBACK,), settings=full) as server,
        Announcement(directory, ring, server),
        FoundRings(InDirectory(directory)) as rings,
        FoundRings(InDirectory(directory)) as others,
        Trainer(SCHEMA, others, wire=NETWORK) as other,
        dead_port() as port,
        Trainer(SCHEMA, rings, wire=NETWORK) as trainer,
    ):

        def fails(ring: str) -> bool:
            assert trainer.take(1, 0.05) is None
            return ring in trainer.rings._network.reached(0, named=False, met=False).faults

        eventually(lambda: other.take(1, 0.05) is None and other.rings.slots(), "the other one is connected")
        eventually(lambda: fails(ring.ring_id), "this one is refused")
        killed = Serving(ring="1" * 32, host="another", addresses=(LOOPBACK,), ports=(port,))
        directory.publish(killed, 1000 * LONG_S)
        directory.end("2" * 32, bytes.fromhex(SCHEMA.fingerprint))
        eventually(lambda: fails(killed.ring), "nobody is there")
        eventually(lambda: fails(killed.ring) and not rings.not_counted(), "and for a lease's time")
        assert not trainer.rings.finished(1)


@pytest.mark.parametrize("joined", [False, True])
def test_a_ring_of_other_payloads_on_another_host_is_none_of_the_trainers(
    directory: Directory, monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    monkeypatch.setattr("transport.claims.demands.is_loopback", lambda _: False)  # by which this one is reached
    other = Schema.of(other="float32")
    with (
        SharedRingBuffer.create(other, slots=4) as ring,
        UCXXServer(ring, mode="thread", addresses=(LOOPBACK,)) as server,
        FoundRings(InDirectory(directory)) as rings,
        Trainer(SCHEMA, rings, wire=NETWORK, joined=[other] if joined else False) as trainer,
    ):
        ring.write({"other": 1.0})
        serving = Serving(ring=ring.ring_id, host="another", addresses=(LOOPBACK,), ports=tuple(server.ports))
        directory.publish(serving, 1000 * LONG_S)

        def foreign() -> bool:
            assert trainer.take(1, 0.05) is None
            reason = trainer.rings.why_nothing(0)
            return reason is not None and reason.why is Why.OTHER_SCHEMA

        eventually(foreign, "it is met")
        directory.end("2" * 32, bytes.fromhex(SCHEMA.fingerprint))
        eventually(lambda: trainer.take(1, 0.05) is None and trainer.finished(), "the end")
        assert foreign()


def test_the_ring_of_a_file_that_went_here_is_found_when_another_container_of_the_node_serves_it(
    directory: Directory, tmp_path: Path
) -> None:
    with FoundRings(InDirectory(directory)) as rings, Trainer(rings=rings, wire=NETWORK) as trainer:
        with (
            SharedRingBuffer.create(slots=4, slot_bytes=64, file=tmp_path / "ring") as ring,
            UCXXServer(ring, mode="thread", addresses=(LOOPBACK,)) as server,
        ):
            record = Announcement(directory, ring, server)._serving()
            directory.publish(record, 1000 * LONG_S)  # as of a killed rollout
            eventually(lambda: rings.segments_here() == [ring.name], "it is seen")
        eventually(lambda: not rings.segments_here() and not rings.not_counted(), "it is gone")
        with Child(ELSEWHERE, tmp_path / "store.db", tmp_path / "ring", LOOPBACK) as container:
            if container.line() != "True":
                pytest.skip("this system does not allow a /dev/shm of one's own")
            batch = trainer.take(1, LONG_S)
            assert batch is not None
            batch.consume()
            assert batch.accepted.all()
            container.tell()
            assert container.wait() == 0
