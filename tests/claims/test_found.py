"""FoundRings: rings are found and followed, and their payloads taken where they are."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from found_rings import LONG_S, consume, contents, fill, ring_of, seen, some, take
from helpers import NETWORK, NETWORK_WIRE, Child, eventually, free
from loopback import LOOPBACK, lasting_port
from packers import SCHEMA, Worker, write

from transport import ClientOptions, FoundRings, Schema, SharedRingBuffer, Trainer, UCXXServer, _ring, open_rings
from transport._ring import MAX_OWNERS, ROLE_READER
from transport.claims.deliveries import QueueDepth
from transport.claims.mapped import RingsOfHost
from transport.claims.places import AtAddresses, OnThisHost, default_prefix
from transport.errors import (
    AuthenticationError,
    ClosedError,
    ConfigurationError,
    PayloadTooLargeError,
    RankError,
    UsageError,
)
from transport.ring.attached import AttachedRings
from transport.store import SQLiteStore
from transport.store.directory import Announcement, Directory
from transport.wire.addresses import host_port

pytestmark = pytest.mark.ucx
both = pytest.mark.parametrize("wire", ["mapped", NETWORK_WIRE])

SETTING_UP = """
import sys
from transport import SharedRingBuffer
ring = SharedRingBuffer.create(slots=2, slot_bytes=8, prefix=sys.argv[1], begins=False)
print(ring.name, flush=True)
sys.stdin.readline()
"""
ANNOUNCER = """
import sys
from transport import open_rings
with open_rings(f"rings:{sys.argv[1]}") as queue:
    print(queue.announce("policy", 1, b"first"), flush=True)
    sys.stdin.readline()
print("closed", flush=True)
sys.stdin.readline()
"""


@both
def test_every_ring_is_found_and_each_payload_consumed_once(prefix: str, wire: str, over: None) -> None:
    with ring_of(prefix) as first, ring_of(prefix) as second, open_rings(f"rings:{prefix}") as queue:
        for number in range(3):
            first.write_raw(bytes([number]))
            second.write_raw(bytes([10 + number]))
        parts = some(queue, 6)
        assert sorted(contents(parts)) == [bytes([n]) for n in (0, 1, 2, 10, 11, 12)]
        assert queue.depth() == QueueDepth(claimed=6)
        assert consume(parts) == [True] * 6
        assert queue.depth() == QueueDepth(done=6)
        assert take(queue, 1, 0.01) == []
        del parts
        eventually(lambda: free(first) and free(second), "every slot is free")


def test_trainers_that_map_a_ring_leave_places_to_its_listeners_and_to_a_writer_that_takes_it_over(prefix: str) -> None:
    with SharedRingBuffer.create(slots=1, slot_bytes=64, prefix=prefix) as ring, contextlib.ExitStack() as stack:
        for _ in range(MAX_OWNERS):
            queue = stack.enter_context(open_rings(f"rings:{prefix}"))
            assert take(queue, 1) == []
        readers = sum(owner.alive and owner.role == ROLE_READER for owner in ring.native.owners())
        assert readers > MAX_OWNERS / 2
        for role in ("listener", "writer"):
            stack.enter_context(SharedRingBuffer.attach(ring.name, role=role))  # type: ignore[arg-type]


@pytest.mark.nightly(keep=1)
@both
def test_rings_that_appear_and_vanish_are_followed(prefix: str, wire: str, over: None) -> None:
    with open_rings(f"rings:{prefix}") as queue:
        assert take(queue, 1, 0.01) == []
        for number in range(3):
            with ring_of(prefix) as ring:
                ring.write_raw(bytes([number]))
                parts = some(queue, 1)
                assert contents(parts) == [bytes([number])]
                assert consume(parts) == [True]
                del parts
                name = ring.name
            assert take(queue, 1, 0.3) == []
            with pytest.raises(Exception, match="No such file"):
                SharedRingBuffer.attach(name, role="observer")


def test_what_came_for_an_older_policy_is_discarded_when_it_is_taken(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", ",".join(NETWORK))
    with ring_of(prefix) as ring, FoundRings(OnThisHost(prefix)) as queue:
        for version in range(4):
            ring.write_many([{"data": np.zeros(10)}], policy_version=version)
        first = some(queue, 1, oldest_version=0)
        eventually(lambda: ring.native.depth(0)["claimed"] > 1, "more have come than were claimed")
        rest = some(queue, 1, oldest_version=3)
        assert seen([*first, *rest]).versions.tolist() == [0, 3]
        eventually(lambda: queue.depth().discarded == 2, "the older ones are discarded")
        assert consume([*first, *rest]) == [True] * 2


@both
def test_closing_ends_waits_and_gives_everything_back(prefix: str, wire: str, over: None) -> None:
    with ring_of(prefix) as ring:
        queue = FoundRings(OnThisHost(prefix))
        for _ in range(5):
            ring.write_raw(b"held")
        held = some(queue, 2)
        if wire == NETWORK_WIRE:
            eventually(lambda: ring.native.depth(0)["claimed"] > 2, "some have come beyond the claims")
        queue.close()
        del held
        eventually(lambda: ring.native.depth(0)["ready"] == 5, "all are anybody's")
        with pytest.raises(ClosedError):
            take(queue, 1)
        queue.close()


# --- where rings are found -----------------------------------------------------------------------------
def test_at_addresses() -> None:
    with ring_of("elsewhere-") as first, ring_of("elsewhere-") as second:
        text = ",".join(f"127.0.0.1:{ring.native.ports()[0]}" for ring in (first, second))
        with open_rings(f"rings://{text}") as queue:
            first.write_raw(b"a")
            second.write_raw(b"b")
            parts = some(queue, 2)
            assert sorted(contents(parts)) == [b"a", b"b"]
            assert queue.depth() == QueueDepth(claimed=2)
            assert consume(parts) == [True] * 2
            assert queue.depth() == QueueDepth(done=2)
            with pytest.raises(UsageError, match="no notices"):
                queue.announce("policy", 1)


def test_a_ring_that_one_trainer_refuses_is_mapped_for_another(prefix: str) -> None:
    mine, its = Schema.of(x=("int64",)), Schema.of(y=("int64",))
    with SharedRingBuffer.create(its, prefix=prefix, slots=4) as ring:
        here = RingsOfHost(OnThisHost(prefix), LONG_S, 5)
        for schema in (mine, its):
            here.look(frozenset({schema.fingerprint}))
        assert [found.ring_id for found in here.rings(frozenset({its.fingerprint}))] == [ring.ring_id]
        here.close()


def test_what_came_over_the_network_is_taken_though_its_ring_is_mapped_by_then(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a ring that could not be mapped yet when its listener could be asked."""
    with ring_of(prefix) as ring, open_rings(f"rings:{prefix}") as rings:
        monkeypatch.setattr(AttachedRings, "attach", lambda *_: None)
        fill(ring, 3)
        first = some(rings, 1)
        eventually(lambda: ring.native.depth(0)["claimed"] == 3, "the others have come")
        monkeypatch.undo()

        def mapped() -> bool:
            rings._look()
            return bool(rings._here.rings(frozenset())) and not rings._served()

        eventually(mapped, "it is mapped")
        assert sum(consume([*first, *some(rings, 2)])) == 3
        assert free(ring)


@both
def test_in_a_directory(tmp_path: Path, wire: str, over: None) -> None:
    url = f"sqlite://{tmp_path}/store.db"
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(SQLiteStore(tmp_path / "store.db"))
        queue = stack.enter_context(open_rings(f"rings+{url}"))
        ring = stack.enter_context(SharedRingBuffer.create(slots=4, slot_bytes=64))
        server = stack.enter_context(UCXXServer(ring, mode="thread", addresses=("127.0.0.1",)))
        stack.enter_context(Announcement(Directory(store), ring, server))
        ring.write_raw(b"published")
        parts = some(queue, 1)
        assert seen(parts).wire(0) == wire
        assert consume(parts) == [True]
        assert queue.announce("policy", 3, b"new")
        assert not queue.announce("policy", 3, b"again")
        notice = queue.latest("policy", 2)
        assert notice is not None
        assert (notice.version, notice.payload) == (3, b"new")
        assert queue.latest("policy", 3, 0.01) is None


@pytest.mark.parametrize("text", ["rings:a/b", "rings:a b", "rings://", "rings://host", "rings://host:0", "rings:?x=1"])
def test_a_text_that_names_no_rings_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError):
        open_rings(text)


@pytest.mark.parametrize("text", ["ring:run-1", "tcp://host:7450", "host:7450", ""])
def test_a_text_of_another_kind_is_refused_with_the_forms_for_rings(text: str) -> None:
    with pytest.raises(ConfigurationError, match="rings://host:port"):
        open_rings(text)


def test_a_text_without_a_name_is_what_rollouts_and_trainers_do_without_a_text() -> None:
    with open_rings("rings:") as queue, FoundRings() as default:
        assert queue.places.prefix == default.places.prefix == "rollout-"


# --- trainers ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("of", ["a run", "the default"])
def test_a_ring_with_a_name_is_found_by_the_trainers_of_its_run(
    prefix: str, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_RUN", prefix)
    url = f"rings:{prefix}" if of == "a run" else None
    beginning = prefix if url else default_prefix()
    worker = Worker()
    for name in ("mine", f"{beginning}mine", f"/transport-{beginning}mine"):
        ring = worker.setup_ucxx(SCHEMA, slots=4, mode="thread", rings=url, name=name)
        assert ring.name == f"/transport-{beginning}mine"
    try:
        with Trainer(SCHEMA, url) as trainer:
            write(worker, 0)
            assert trainer.take(1, LONG_S) is not None
    finally:
        worker.cleanup_ucxx()


@pytest.mark.parametrize("wrong", ["secret", "consumer"])
def test_what_every_address_refuses_is_raised_at_once(wrong: str) -> None:
    secret = b"no listener has it" if wrong == "secret" else None
    with (
        ring_of("elsewhere-", consumers={"train": 1}) as ring,
        FoundRings(AtAddresses(f"127.0.0.1:{ring.native.ports()[0]}")) as queue,
        Trainer(None, queue, rank="train" if secret else "other", client=ClientOptions(secret=secret)) as trainer,
        pytest.raises(AuthenticationError if secret else RankError) as raised,
    ):
        trainer.take(1, float("inf"))
    assert raised.value.__cause__ is None or raised.value.__cause__.__traceback__ is None
    assert len(raised.traceback) < 8  # from the call, none of the connection's


def test_an_address_where_nobody_answers_yet_is_waited_for_beside_one_that_refuses() -> None:
    with (
        ring_of("elsewhere-", secret=b"of another start") as ring,
        contextlib.ExitStack() as stack,
    ):
        port = lasting_port()
        addresses = ",".join(host_port(LOOPBACK, each) for each in (ring.native.ports()[0], port))
        queue = stack.enter_context(FoundRings(AtAddresses(addresses)))
        trainer = stack.enter_context(Trainer(None, queue))
        taken = stack.enter_context(ThreadPoolExecutor(1)).submit(trainer.take, 1, LONG_S)
        eventually(
            lambda: len(trainer.rings._network.reached(0, named=False, met=False).faults) == 2, "both were tried"
        )
        stack.enter_context(ring_of("later-", ports=(port,))).write_raw(b"one")
        batch = taken.result()
        assert batch is not None
        batch.consume()


# --- notices of one host -----------------------------------------------------------------------------
def test_notices_of_one_host_are_seen_by_all_and_end_with_the_announcer(prefix: str) -> None:
    with open_rings(f"rings:{prefix}") as reader:
        assert reader.latest("policy") is None
        with open_rings(f"rings:{prefix}") as announcer, open_rings(f"rings:{prefix}") as second:
            for version in range(1, 9):
                assert (announcer if version % 2 else second).announce("policy", version, bytes([version]))
            assert not announcer.announce("policy", 8)
            notice = reader.latest("policy", 7)
            assert notice is not None
            assert (notice.version, notice.payload) == (8, b"\x08")
            timer = threading.Timer(0.1, announcer.announce, ["policy", 9, b"late"])
            timer.start()
            late = reader.latest("policy", 8, LONG_S)
            assert late is not None
            assert late.payload == b"late"
            timer.join()
            with pytest.raises(UsageError, match="topic"):
                announcer.announce("a/b", 1)
            with pytest.raises(TypeError):
                announcer.announce("policy", 10, "text")  # type: ignore[arg-type]
            with pytest.raises(PayloadTooLargeError, match="policy"):
                announcer.announce("policy", 10, bytes(1 << 17))
            assert announcer.announce("policy", 10, b"bytes")
        assert not OnThisHost(f"notices-{prefix}").segments()
        assert reader.latest("policy") is None


def test_a_notice_is_announced_though_the_other_announcer_goes_at_that_moment(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_rings(f"rings:{prefix}") as first, open_rings(f"rings:{prefix}") as second:
        assert first.announce("policy", 1)

        def attach(name: str, *, role: Literal["writer", "observer"]) -> SharedRingBuffer:
            first.close()
            return real(name, role=role)

        real = SharedRingBuffer.attach
        monkeypatch.setattr(SharedRingBuffer, "attach", attach)
        assert second.announce("policy", 2, b"second")
        monkeypatch.undo()
        notice = second.latest("policy")
        assert notice is not None and notice.payload == b"second"


def test_a_notice_of_one_host_ends_with_a_killed_announcer(prefix: str) -> None:
    with open_rings(f"rings:{prefix}") as reader:
        with Child(ANNOUNCER, prefix) as first:
            assert first.line() == "True"
            assert reader.latest("policy") is not None
            first.kill()
        assert reader.latest("policy") is None
        with open_rings(f"rings:{prefix}") as restarted:
            assert restarted.announce("policy", 0, b"restarted")
            notice = reader.latest("policy")
            assert notice is not None
            assert (notice.version, notice.payload) == (0, b"restarted")
        with Child(ANNOUNCER, prefix) as second:
            assert second.line() == "True"
            second.kill()
    assert not OnThisHost(f"notices-{prefix}").segments()


def test_a_run_hears_that_the_notice_of_an_earlier_one_stands_in_its_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"rings+sqlite://{tmp_path}/directory.sqlite"
    with open_rings(url) as killed:
        assert killed.announce("policy", 50)
        assert not killed.announce("policy", 49)
    assert caplog.messages == []
    with open_rings(url) as restarted:
        for version in (40, 41):
            assert not restarted.announce("policy", version)
        [said] = caplog.messages
        assert "'policy'" in said
        assert "50" in said


def test_a_notice_that_cannot_be_read_is_none_and_is_replaced(tmp_path: Path) -> None:
    with SQLiteStore(tmp_path / "directory.sqlite") as store:
        store.put("notices/policy", b"\xff")
    with open_rings(f"rings+sqlite://{tmp_path}/directory.sqlite") as queue:
        assert queue.latest("policy") is None
        assert queue.announce("policy", 1, b"one")
        assert queue.latest("policy").payload == b"one"


@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
def test_notices_of_one_host_outlive_an_announcer_while_another_lives(prefix: str, killed: bool) -> None:
    with open_rings(f"rings:{prefix}") as reader:
        with Child(ANNOUNCER, prefix) as first, open_rings(f"rings:{prefix}") as second:
            assert first.line() == "True"
            assert second.announce("policy", 2, b"second")
            if killed:
                first.kill()
            else:
                first.tell("close")
                assert first.line() == "closed"
            for queue in (reader, second):
                notice = queue.latest("policy")
                assert notice is not None
                assert notice.payload == b"second"
            with open_rings(f"rings:{prefix}") as third:
                assert not third.announce("policy", 1)
                assert third.announce("policy", 3, b"third")
            assert not second.announce("policy", 3)
        assert not OnThisHost(f"notices-{prefix}").segments()
        assert reader.latest("policy") is None


def test_the_ring_of_a_rollout_that_was_killed_in_its_set_up_goes_where_a_trainer_finds_it(prefix: str) -> None:
    with open_rings(f"rings:{prefix}") as rings, Child(SETTING_UP, prefix) as rollout:
        segment = rollout.line()
        assert not take(rings, 1) and segment in _ring.segments()
        rollout.kill()
        eventually(lambda: not take(rings, 1) and segment not in _ring.segments(), "it is removed")
