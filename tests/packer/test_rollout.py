"""UCXXRolloutMixin: what is written can be claimed, nothing is left that nobody knows of, take-over, groups."""

from __future__ import annotations

import errno
import secrets
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from claimed import consumed
from helpers import Child, eventually
from interrupted_lines import at_each_line, interrupts
from packers import Worker

from transport import FoundRings, _ring, open_rings
from transport.errors import BusyPortError, ClosedError, RingFullError, SchemaError, StoreUnavailableError, UsageError
from transport.packer import rollout
from transport.packer.options import RingOptions, ServerOptions
from transport.ring.buffer import SharedRingBuffer
from transport.runtime import hurry
from transport.schema import Schema, UpTo
from transport.server.server import UCXXServer
from transport.store.directory import Directory
from transport.store.memory import MemoryStore

SCHEMA = Schema.of(obs=("float32", UpTo(16), 2))
VALUES = {"obs": np.ones((3, 2), np.float32)}

pytestmark = pytest.mark.ucx


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    worker.setup_ucxx(SCHEMA, slots=4, mode="thread", ring=RingOptions(overflow="error"))
    yield worker
    worker.cleanup_ucxx()


def test_a_written_trajectory_is_in_the_ring_by_its_ticket(worker: Worker) -> None:
    ticket = worker.write_to_buffer(VALUES, metadata={"reward": 2.5}, policy_version=7)
    (unread,) = worker.ring.unread()
    assert (unread.ticket, unread.policy_version) == (ticket, 7)
    assert ticket.metadata == {"reward": 2.5}
    assert len(ticket.ports) == 1
    assert ticket.addresses


def test_the_time_of_a_call_that_writes_many_is_that_of_all_of_them(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, left = 100.0, []
    monkeypatch.setattr(rollout, "time", SimpleNamespace(monotonic=lambda: now))
    written = worker._written

    def slowly(write: Any, timeout_s: float | None) -> Any:
        nonlocal now
        left.append(timeout_s)
        now += 4.0
        for ticket in worker.ring.tickets():
            worker.ring.acknowledge(ticket)
        return written(write, timeout_s)

    monkeypatch.setattr(worker, "_written", slowly)
    assert len(worker.write_many_to_buffer([VALUES] * (2 * worker.ring.slot_count), timeout_s=10.0)) == 8
    assert left == [10.0, 6.0]


def test_one_payload_that_does_not_fit_writes_none_of_its_call(worker: Worker) -> None:
    slots = worker.ring.slot_count
    with pytest.raises(SchemaError):
        worker.write_many_to_buffer([*[VALUES] * slots, {"obs": np.ones((17, 2), np.float32)}])
    assert (worker.ring_statistics().ready, worker.ring_statistics().free) == (0, slots)


def test_a_sample_names_its_group_in_its_ticket(worker: Worker) -> None:
    one = worker.write_to_buffer(VALUES, metadata={"reward": 2.5}, group="p1", of=8, tokens=3)
    assert one.group == ("p1", 8, 3) and one.ends_group is None
    assert one.users_metadata == {"reward": 2.5}
    two = worker.write_many_to_buffer([VALUES] * 2, metadata=[{"at": 0}, None], group="p2", of=2, tokens=[5, 7])
    assert [each.group for each in two] == [("p2", 2, 5), ("p2", 2, 7)]
    assert [each.users_metadata for each in two] == [{"at": 0}, {}]
    end = worker.end_group("p1")
    assert (end.ends_group, end.group, end.size, end.fields(SCHEMA)) == (("p1", None, 1), None, 0, ())
    assert worker.ring.tickets() == [one, *two, end]


@pytest.mark.parametrize(
    "wrong",
    [
        {"of": 8},
        {"tokens": 3},
        {"group": ""},
        {"group": "é" * 101},
        {"group": 7},
        {"group": "p", "of": 0},
        {"group": "p", "of": 1.5},
        {"group": "p", "tokens": -1},
        {"group": "p", "of": 1 << 63},
    ],
)
def test_a_group_that_makes_no_sense_writes_nothing(worker: Worker, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        worker.write_to_buffer(VALUES, **wrong)
    each = {name: [value] if name == "tokens" else value for name, value in wrong.items()}
    with pytest.raises(UsageError):
        worker.write_many_to_buffer([VALUES], **each)
    assert worker.ring.tickets() == []


def test_the_weights_of_a_group_are_as_many_as_its_samples(worker: Worker) -> None:
    with pytest.raises(UsageError, match="1 numbers of tokens for 2 payloads"):
        worker.write_many_to_buffer([VALUES] * 2, group="p", tokens=[3])
    with pytest.raises(UsageError):
        worker.end_group("é" * 101)
    assert worker.ring.tickets() == []


def test_the_end_of_a_group_waits_for_a_slot_as_a_write_does() -> None:
    worker = Worker()
    worker.setup_ucxx(SCHEMA, slots=1, mode="thread")
    try:
        worker.write_to_buffer(VALUES, group="p")
        with pytest.raises(RingFullError):
            worker.end_group("p", timeout_s=0.0)
        consumed(worker.ring, 1)
        assert worker.end_group("p").ends_group == ("p", None, 1)
    finally:
        worker.cleanup_ucxx()


def test_before_setup_and_after_cleanup_writing_is_refused() -> None:
    worker = Worker()
    worker.cleanup_ucxx()
    with pytest.raises(ClosedError, match="setup_ucxx"):
        worker.write_to_buffer(VALUES)
    worker.setup_ucxx(SCHEMA, slots=2, mode="thread")
    worker.cleanup_ucxx()
    worker.cleanup_ucxx()
    with pytest.raises(ClosedError, match="setup_ucxx"):
        worker.write_to_buffer(VALUES)


def test_a_port_in_use_leaves_no_ring_behind() -> None:
    with SharedRingBuffer.create(SCHEMA, slots=2) as ring, UCXXServer(ring, mode="thread") as server:
        worker = Worker()
        with pytest.raises(BusyPortError, match=str(server.ports[0])):
            worker.setup_ucxx(SCHEMA, slots=2, mode="thread", server=ServerOptions(ports=server.ports))
        with pytest.raises(ClosedError):
            _ = worker.ring


WRITER = """
    import sys
    import numpy as np
    from transport.packer.rollout import UCXXRolloutMixin
    from transport.schema import Schema, UpTo
    worker = UCXXRolloutMixin()
    worker.setup_ucxx(Schema.of(obs=("float32", UpTo(16), 2)), slots=4, name=sys.argv[1], mode="thread")
    for step in range(2):
        worker.write_to_buffer({"obs": np.full((3, 2), step, np.float32)})
    print("written", flush=True)
    sys.stdin.read()
"""


def ring_of_a_killed_writer(name: str) -> str:
    """The ring's id; it has two unread payloads, of four slots."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "written\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()
    with SharedRingBuffer.attach(f"/transport-{name}", role="observer") as ring:
        return ring.ring_id


def test_a_drain_ends_when_the_time_behind_a_signal_is_over() -> None:
    with SharedRingBuffer.create(slots=1, slot_bytes=64) as ring:
        server = UCXXServer(ring, mode="thread").start()
        ring.write_raw(b"unread")
        hurry.begin(0.0)
        try:
            server.close(1e6, told_s=0.0)
        finally:
            hurry.over()
        assert ring.statistics().ready == 1


def test_a_cleanup_that_is_interrupted_as_it_drains_is_finished_by_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    worker = Worker()
    ring = worker.setup_ucxx(SCHEMA, slots=2, mode="thread")
    server = worker._ucxx_server
    assert server is not None
    with monkeypatch.context() as patch:
        patch.setattr(UCXXServer, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            worker.cleanup_ucxx()
    worker.cleanup_ucxx()
    assert server._run is None, "it serves no more"
    assert ring.native.closed


@pytest.mark.nightly
def test_a_ring_taken_over_keeps_its_payloads() -> None:
    name = f"rollout-test-{secrets.token_hex(4)}"
    ring_id = ring_of_a_killed_writer(name)
    worker = Worker()
    assert worker.setup_ucxx(SCHEMA, slots=4, name=name, mode="thread").ring_id == ring_id
    assert worker.ring_statistics().ready == 2
    worker.cleanup_ucxx()


@pytest.mark.nightly
@at_each_line
def test_a_cleanup_that_is_interrupted_at_any_line_is_finished_by_the_next_one(first: int) -> None:
    of = ("transport.packer", "transport.server", "transport.ring.buffer", "transport.ring.attachment")
    for interrupt in interrupts(first, of):
        worker = Worker()
        ring = worker.setup_ucxx(SCHEMA, slots=2, mode="thread")
        with SharedRingBuffer.attach(ring.name, role="observer") as seen:
            with interrupt:
                worker.cleanup_ucxx()
            worker.cleanup_ucxx()
            assert seen.native.ended, interrupt.at
            assert ring.native.closed and ring.name not in _ring.segments(), interrupt.at


@pytest.mark.nightly
@at_each_line
@pytest.mark.parametrize("place", ["host", "given", "directory"])
@pytest.mark.parametrize("wires", ["mapped", "tcp"])
def test_a_set_up_that_is_interrupted_at_any_line_was_never_a_rollout(
    wires: str, place: str, first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers that have looked meanwhile do not wait for its end."""
    monkeypatch.setenv("TRANSPORT_WIRES", wires)
    url = f"rings:set-up-{secrets.token_hex(4)}-" if place != "directory" else f"rings+sqlite:///{tmp_path}/store"
    seen: list[FoundRings] = []

    def meets() -> bool:
        return seen[-1].take_parts(1, 0.05, consumer="a trainer") == [] and seen[-1].has_met_rings()

    for interrupt in interrupts(first, ("transport.packer.rollout", "transport.store.directory"), meets):
        worker = Worker()
        with open_rings(url) as rings:
            seen.append(rings)
            with interrupt:
                worker.setup_ucxx(SCHEMA, rings if place == "given" else url, slots=2, mode="thread")
            if worker.ports:  # behind the last line that may fail
                eventually(meets, "a trainer meets it")
                worker.cleanup_ucxx()
                break
            assert not meets(), interrupt.at


def test_a_set_up_that_fails_leaves_a_ring_that_it_took_over_with_its_end() -> None:
    name = f"rollout-test-{secrets.token_hex(4)}"
    with SharedRingBuffer.create(SCHEMA, slots=2, name=name) as ring:
        ring.write(VALUES)
        ring.end_data()
        ring.close(keep_unread=True)
    with SharedRingBuffer.attach(ring.name, role="observer") as seen:
        with pytest.raises(UsageError):
            Worker().setup_ucxx(SCHEMA, slots=2, name=name, mode="thread", server=ServerOptions(ports=(0, 0) * 20))
        assert seen.native.ended and seen.native.unread == 1
        worker = Worker()
        worker.setup_ucxx(SCHEMA, slots=2, name=name, mode="thread")
        assert not seen.native.ended
        worker.cleanup_ucxx()


def test_a_cleanup_that_cannot_say_the_end_closes_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(ring: SharedRingBuffer) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    worker = Worker()
    ring = worker.setup_ucxx(SCHEMA, slots=2, mode="thread")
    monkeypatch.setattr(SharedRingBuffer, "end_data", failing)
    with pytest.raises(OSError, match="no space"):
        worker.cleanup_ucxx()
    assert ring.native.closed and ring.name not in _ring.segments()
    assert not [each for each in threading.enumerate() if each.name == "transport listeners"]


@pytest.mark.parametrize("signalled", [False, True])
def test_an_end_hurries_its_store_once_it_has_drained(monkeypatch: pytest.MonkeyPatch, signalled: bool) -> None:
    until: dict[str, float] = {}
    monkeypatch.setattr(UCXXServer, "_drain", lambda *_: until.update(draining=hurry.until()))
    monkeypatch.setattr(Directory, "withdraw", lambda *_: until.update(drained=hurry.until()))
    with MemoryStore() as store:
        worker = Worker()
        server = ServerOptions(directory=Directory(store))
        worker.setup_ucxx(SCHEMA, slots=2, mode="thread", server=server)
        if signalled:
            hurry.begin(0.0)
        worker.cleanup_ucxx()
        hurry.over()
    assert signalled or until["draining"] == float("inf")
    assert signalled == (until["drained"] > until["draining"])


def test_a_set_up_that_fails_before_there_is_a_ring_closes_the_rings_that_it_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[FoundRings] = []
    monkeypatch.setattr(rollout, "open_rings", lambda text: (opened.append(open_rings(text)), opened[-1])[1])

    def away(directory: Directory) -> str:
        raise StoreUnavailableError("the store does not answer")

    monkeypatch.setattr(Directory, "run", away)
    with pytest.raises(StoreUnavailableError):
        Worker().setup_ucxx(SCHEMA, slots=2, name="w", rings=f"rings+sqlite:///{tmp_path}/store", mode="thread")
    [rings] = opened
    with pytest.raises(ClosedError):
        rings.depth()


KILLED = """
import os, signal, sys
from transport import Schema, Trainer, UpTo
with Trainer(Schema.of(obs=("float32", UpTo(16), 2)), sys.argv[1], wire={"mapped"}) as trainer:
    batch = trainer.take(2, 60.0)
    batch.consume()
    os.kill(os.getpid(), signal.SIGKILL)  # what the batch has lies in its slots until the next take
"""


def test_the_slots_of_a_trainer_that_is_killed_behind_its_consume_count_as_free() -> None:
    url = f"rings:killed-{secrets.token_hex(4)}-"
    worker = Worker()
    worker.setup_ucxx(SCHEMA, url, slots=4, mode="thread")
    try:
        for _ in range(2):
            worker.write_to_buffer(VALUES)
        with Child(KILLED, url) as trainer:
            assert trainer.wait() == -signal.SIGKILL
        look = worker.ring_statistics()
        assert (look.consumes, look.free) == (2, 4)
    finally:
        worker.cleanup_ucxx()
