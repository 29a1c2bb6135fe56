"""A trainer that gets nothing learns why: by the log, from `why_nothing`, by `transport queue`, and in metrics."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from found_rings import TRAINER, consume, fill, opened, ring_of, seen, some, take
from helpers import NETWORK, NETWORK_WIRE, Child, dead_port, eventually

from transport import FoundRings, Schema, SharedRingBuffer, Trainer, UCXXServer, UpTo, _ring, open_rings
from transport.claims import places, waiting
from transport.claims.waiting import Holder, Known, NoPayloadReason, Why, reason
from transport.cli import run
from transport.client.status_socket import clients
from transport.observe import overview
from transport.ring.attachment import remove_dead
from transport.runtime import logs
from transport.store import SQLiteStore
from transport.store.directory import Announcement, Directory

pytestmark = pytest.mark.ucx
both = pytest.mark.parametrize("wire", ["mapped", NETWORK_WIRE])
ROLLOUTS = Schema.of(tokens=("int32", UpTo(64)), reward=("float32",))
TRAINERS = Schema.of(tokens=("int64", UpTo(64)), reward=("float32",))
KEEPS_A_RING = """
import sys
from transport import SharedRingBuffer
with SharedRingBuffer.create(slots=1, slot_bytes=8, prefix=sys.argv[1]) as ring:
    print(ring.name, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LOOK_S", 0.2)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """The lines that claims have logged about a reason."""
    with caplog.at_level(logging.WARNING, "transport.claims.rings"):
        yield lambda: [each.getMessage() for each in caplog.records if each.name == "transport.claims.rings"]


@pytest.mark.parametrize(
    ("silent_s", "left_s", "suspended", "stopped"),
    [(29.0, 31.0, False, False), (31.0, 29.0, False, True), (1e6, None, False, False), (0.0, None, True, True)],
)
def test_a_holder_that_is_silent_for_half_of_its_lease_counts_as_stopped(
    silent_s: float, left_s: float | None, suspended: bool, stopped: bool
) -> None:
    holder = Holder(ring="r", pid=1, port=0, payloads=1, silent_s=silent_s, left_s=left_s, suspended=suspended)
    assert holder.stopped is stopped


def reason_of(queue: FoundRings, why: Why) -> NoPayloadReason:
    """The reason, once it is found by taking."""
    found: list[NoPayloadReason | None] = []

    def looked() -> bool:
        take(queue, 1, 0.05)
        found.append(queue.why_nothing(0))
        return found[-1] is not None and found[-1].why is why and bool(queue.reasons().get(why.value))

    eventually(looked, f"the reason is {why}")
    assert found[-1] is not None
    return found[-1]


def test_a_trainer_of_another_run_hears_which_runs_are_there(
    prefix: str, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_NAMED", 1000)  # also beside the rings of other tests
    with (
        Child(KEEPS_A_RING, f"{prefix}killed-") as killed,
        Child(KEEPS_A_RING, prefix) as living,
        SharedRingBuffer.create(slots=1, slot_bytes=8, prefix=f"{prefix}own-"),
        SharedRingBuffer.create(slots=1, slot_bytes=8) as of_no_run,
        opened(prefix) as announcing,
        opened("nothing-here") as queue,
    ):
        segment = killed.line()
        living.line()
        announcing.announce("weights", 1)
        assert f"rings:{prefix}killed-" in queue.places.others()
        killed.kill()
        try:
            found = reason_of(queue, Why.NO_RING)
        finally:
            remove_dead(f"{prefix}killed-")
        assert segment not in _ring.segments()
        assert f"rings:{prefix}" in found.text
        for other in (f"{prefix}killed-", f"{prefix}own-", "notices-", of_no_run.name):
            assert other not in found.text
        reason_of(queue, Why.NO_RING)
        assert len(said()) == 1
        living.tell()
        living.wait()


@both
def test_a_trainer_with_another_schema_hears_ring_field_and_fingerprints(
    prefix: str, wire: str, over: None, said: Any
) -> None:
    with ring_of(prefix, schema=ROLLOUTS) as ring, Trainer(TRAINERS, f"rings:{prefix}") as trainer:
        ring.write({"tokens": [1], "reward": 1.0})

        def heard() -> bool:
            assert trainer.take(1, 0.05) is None
            return bool(said())

        eventually(heard, "it is said")
        [line] = said()
        for each in (ring.name, "tokens int32", "tokens int64", ROLLOUTS.fingerprint, TRAINERS.fingerprint):
            assert each in line
        assert ring.statistics().ready == 1


def test_a_trainer_with_another_schema_at_an_address_hears_the_same_and_top_shows_it(
    said: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ring_of("rings-", schema=ROLLOUTS) as ring:
        [port] = ring.native.ports()
        with Trainer(TRAINERS, f"rings://127.0.0.1:{port}", wire=NETWORK) as trainer:

            def heard() -> bool:
                assert trainer.take(1, 0.05) is None
                return bool(said())

            eventually(heard, "it is said")
            for each in (ring.ring_id[:8], "tokens int32", "tokens int64", ROLLOUTS.fingerprint, TRAINERS.fingerprint):
                assert each in said()[0]
            monkeypatch.setattr(logs, "LOOK_S", 60.0)  # so long is the last look's reason shown
            assert [each.nothing for each in clients() if each.pid == os.getpid()] == [said()[0].partition(" s: ")[2]]
            assert run(["top", "--once", "--interval", "0.1"]) == 0
            assert f"(process {os.getpid()}) gets nothing: " in capsys.readouterr().out


@both
def test_a_trainer_whose_rank_no_payload_is_for_hears_so(prefix: str, wire: str, over: None) -> None:
    with ring_of(prefix, schema=ROLLOUTS) as ring, Trainer(ROLLOUTS, f"rings:{prefix}", rank=2) as trainer:
        own = trainer.rings

        def heard() -> bool:
            assert trainer.take(1, 0.05) is None
            return bool(own.reasons().get(Why.OTHER_RANK))

        assert not heard()
        ring.write({"tokens": [1], "reward": 1.0}, readers=2)
        eventually(heard, "it is said")
        found = own.why_nothing(2)
        assert found is not None
        assert "readers=2" in found.text
        assert own.why_nothing(1) is None
        ring.write({"tokens": [1], "reward": 1.0}, readers=3)
        assert trainer.take(1, 30.0) is not None


def test_a_place_that_does_not_answer_is_named() -> None:
    with dead_port() as port, open_rings(f"rings://127.0.0.1:{port}") as queue:
        assert str(port) in reason_of(queue, Why.UNREACHABLE).text


def test_a_stopped_trainer_that_holds_everything_is_named_at_once_and_one_that_was_killed_as_dead(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", "mapped")
    monkeypatch.setenv("TRANSPORT_CLAIM_LEASE_S", "600")
    with ring_of(prefix) as ring, opened(prefix) as queue:
        ring.write_raw(b"x")
        with Child(TRAINER, f"rings:{prefix}", "1") as trainer:
            trainer.line()
            os.kill(trainer.process.pid, signal.SIGSTOP)
            try:
                assert f"process {trainer.process.pid}" in reason_of(queue, Why.HELD).text
                [view] = overview.look([ring.name]).rings
                assert [each.pid for each in view.stopped] == [trainer.process.pid]
            finally:
                os.kill(trainer.process.pid, signal.SIGKILL)
            trainer.process.wait()
            assert [(each.pid, each.dead) for each in queue.holders()] == [(trainer.process.pid, True)]
            assert queue.why_nothing() is None  # whoever claims next has what it held


def test_a_ring_of_another_host_that_names_loopback_is_not_looked_for_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listener of this host may have the same port, and another ring."""
    with (
        SQLiteStore(tmp_path / "store.db") as store,
        SharedRingBuffer.create(slots=1, slot_bytes=8) as ring,
        UCXXServer(ring, mode="thread", addresses=("127.0.0.1",)) as server,
        Announcement(Directory(store), ring, server),
        open_rings(f"rings+sqlite://{tmp_path}/store.db") as queue,
    ):
        monkeypatch.setattr(places, "host_identity", lambda: "another host")
        found = reason_of(queue, Why.UNREACHABLE).text
        assert ring.ring_id[:8] in found
        assert "TRANSPORT_ADDRESSES" in found


def test_a_rollout_that_was_killed_is_told_with_the_number_of_ends_that_were_expected() -> None:
    found = reason(Known("rings:run", 0, lost=["a" * 32], ends=2, expected=3))
    assert found is not None
    assert "expected_rollouts=3" in found.text


def test_rings_without_unread_payloads_are_no_reason(prefix: str) -> None:
    with ring_of(prefix), opened(prefix) as queue:
        assert take(queue, 1, 0.5) == []
        assert queue.why_nothing(0) is None
        assert queue.reasons() == {}


@both
def test_a_trainer_that_holds_every_slot_hears_that_it_does(prefix: str, wire: str, over: None) -> None:
    with ring_of(prefix, slots=2) as ring, opened(prefix) as queue:
        fill(ring, 2)
        held = some(queue, 2)
        assert "holds 2 payloads" in reason_of(queue, Why.FULL).text
        assert consume(held) == [True] * 2
        del held
        assert queue.why_nothing(0) is None


def test_a_payload_that_is_looked_at_after_its_end_is_held(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", "mapped")
    with ring_of(prefix, slots=1) as ring, opened(prefix) as queue:
        fill(ring, 1)
        parts = some(queue, 1)
        view = seen(parts)[0].data
        assert consume(parts) == [True]
        del parts
        assert "holds 1 payload:" in reason_of(queue, Why.FULL).text
        del view
        assert queue.why_nothing(0) is None


@both
def test_a_full_ring_names_the_ranks_that_have_not_read(prefix: str, wire: str, over: None) -> None:
    with ring_of(prefix, slots=1, consumers={"first": 1, "train": 2}) as ring, opened(prefix) as queue:
        ring.write_raw(b"x", readers=3)
        assert consume(some(queue, 1)) == [True]
        assert "train:0, train:1" in reason_of(queue, Why.FULL).text
