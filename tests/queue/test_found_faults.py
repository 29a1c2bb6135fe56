"""FoundRings under faults, with real processes: nothing is lost, nothing consumed twice, no slot stays pinned."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from found_rings import LONG_S, some
from helpers import Child, dead_port, eventually, free, listener_pids, parent_of

from transport import Schema, SharedRingBuffer, UCXXServer
from transport.queue import Claim, DeliveryState, FoundRings, QueueDepth, open_queue
from transport.queue.demands import Place
from transport.queue.found_elsewhere import FoundElsewhere
from transport.queue.places import OnThisHost
from transport.settings import Settings

pytestmark = [pytest.mark.ucx, pytest.mark.slow]
NUMBERED = Schema.of(number=("int64",))
both = pytest.mark.parametrize("wire", ["mapped", "tcp"])

# Claims as many as it is told to, says how many, and consumes what it holds when it is told to.
TRAINER = """
import sys
from transport.queue import open_queue
with open_queue(sys.argv[1]) as queue:
    claims = []
    while len(claims) < int(sys.argv[2]):
        claims += queue.claim(int(sys.argv[2]) - len(claims), 30.0, consumer="child")
    print(len(claims), flush=True)
    sys.stdin.readline()
    print(len(queue.ack_many(claims)), flush=True)
"""

# Consumes until nothing has come for a second, and says the numbers of what was accepted.
GREEDY = """
import sys
from transport import Schema
from transport.packer.mixin import UCXXDataPackerMixin
from transport.queue import open_queue
class Packer(UCXXDataPackerMixin): ...
packer = Packer()
with open_queue(sys.argv[1]) as queue:
    packer.setup_ucxx_packer(schemas=[Schema.of(number=("int64",))], queue=queue)
    found = []
    while claims := packer.claim_tickets(7, 1.0 if found else 20.0):
        packer.start_prefetch(claims)
        found += [int(payload["number"].item()) for payload in packer.consume(packer.collect_prefetch())]
    packer.cleanup_ucxx_packer()
    print(*found, flush=True)
"""

# Writes numbered payloads into a ring of its own, then waits.
WRITER = """
import sys
import numpy as np
from transport import Schema
from transport.packer.rollout import UCXXRolloutMixin
from transport.packer.options import ServerOptions
from transport.queue import open_queue
from transport.settings import Settings
class Worker(UCXXRolloutMixin): ...
worker = Worker()
with open_queue(sys.argv[1]) as queue:
    worker.setup_ucxx(
        Schema.of(number=("int64",)), slots=64, queue=queue, settings=Settings(linger_s=20.0),
        server=ServerOptions(addresses=("127.0.0.1",)),
    )
    for number in range(int(sys.argv[2])):
        worker.write_to_buffer({"number": number})
    print("written", flush=True)
    sys.stdin.readline()
    worker.cleanup_ucxx(drain_s=20.0)
"""


class Gone(OnThisHost):
    """Finds one ring, whose segment has gone since."""

    def __init__(self, prefix: str, port: int) -> None:
        super().__init__(prefix)
        self._port = port

    def served(self, mapped: Collection[str]) -> Mapping[str, Place]:
        """It."""
        return {"gone": Place(("127.0.0.1",), (self._port,), "gone", f"/transport-{self.prefix}gone")}


@contextlib.contextmanager
def ring_of(prefix: str, settings: Settings | None = None, **arguments: object) -> Iterator[SharedRingBuffer]:
    with (
        SharedRingBuffer.create(NUMBERED, prefix=prefix, slots=32) as ring,
        UCXXServer(ring, settings=settings or Settings(), addresses=("127.0.0.1",), **arguments),  # type: ignore[arg-type]
    ):
        yield ring


def fill(ring: SharedRingBuffer, count: int) -> None:
    ring.write_many([{"number": np.int64(number)} for number in range(count)], timeout_s=LONG_S)


def opened(prefix: str) -> FoundRings:
    queue = open_queue(f"rings:{prefix}")
    assert isinstance(queue, FoundRings)
    return queue


@both
def test_a_killed_trainers_claims_are_anothers(prefix: str, wire: str, over: None) -> None:
    with ring_of(prefix, mode="thread") as ring, opened(prefix) as queue:
        fill(ring, 5)
        with Child(TRAINER, f"rings:{prefix}", 5) as trainer:
            assert trainer.line() == "5"
            trainer.kill()
        claims = some(queue, 5)
        assert {claim.attempts for claim in claims} == {2}
        assert queue.ack_many(claims) == claims
        eventually(lambda: free(ring), "no slot is pinned")


@both
def test_a_stopped_trainers_claims_are_anothers_and_it_is_refused(
    prefix: str, wire: str, over: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_CLAIM_LEASE_S", "1.0")
    monkeypatch.setenv("TRANSPORT_CLAIM_RENEW_S", "0.3")
    settings = Settings(ack_timeout_s=1.0, heartbeat_s=0.2)
    with ring_of(prefix, settings, mode="thread") as ring, opened(prefix) as queue:
        fill(ring, 3)
        with Child(TRAINER, f"rings:{prefix}", 3) as trainer:
            assert trainer.line() == "3"
            os.kill(trainer.process.pid, signal.SIGSTOP)
            claims = some(queue, 3)
            # a demand of the stopped one that waits at a listener may take them once more before it is found silent
            assert {claim.attempts for claim in claims} <= {2, 3}
            assert queue.ack_many(claims) == claims
            os.kill(trainer.process.pid, signal.SIGCONT)
            trainer.tell()
            assert trainer.line() == "0"
            assert trainer.wait() == 0
        assert ring.native.depth(0)["done"] == 3
        eventually(lambda: free(ring), "no slot is pinned")


def test_a_trainer_that_holds_for_long_keeps_its_claims(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", "tcp")
    monkeypatch.setenv("TRANSPORT_ACK_TIMEOUT_S", "1.0")
    with (
        ring_of(prefix, Settings(ack_timeout_s=1.0, heartbeat_s=0.1), mode="thread") as ring,
        opened(prefix) as queue,
        opened(prefix) as other,
    ):
        fill(ring, 2)
        claims = some(queue, 2)
        assert other.claim(1, 3.0, consumer="other") == []  # the time that passes is what is tested
        assert queue.ack_many(claims) == claims


@both
def test_a_trainer_that_ends_between_claim_and_consume_leaves_them_to_others(
    prefix: str, wire: str, over: None
) -> None:
    with ring_of(prefix, mode="thread") as ring, opened(prefix) as queue:
        fill(ring, 5)
        with Child(TRAINER.replace("sys.stdin.readline()", "sys.exit(3)"), f"rings:{prefix}", 5) as trainer:
            assert trainer.line() == "5"
            assert trainer.wait() == 3
        claims = some(queue, 5)
        assert queue.ack_many(claims) == claims
        eventually(lambda: free(ring), "no slot is pinned")


def test_a_listener_that_is_killed_while_a_demand_waits_there_comes_back_and_is_asked_again(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", "tcp")
    with ring_of(prefix) as ring, opened(prefix) as queue:
        fill(ring, 1)
        assert queue.ack_many(some(queue, 1))
        assert queue.claim(1, 0.1, consumer="test") == []  # a demand waits
        [doomed] = listener_pids(ring).values()
        os.kill(doomed, signal.SIGKILL)
        fill(ring, 4)
        claims = some(queue, 4)
        assert queue.ack_many(claims) == claims
        eventually(lambda: free(ring), "no slot is pinned")


def test_claims_held_through_a_listener_that_is_killed_are_refused_and_come_again(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", "tcp")
    with ring_of(prefix) as ring, opened(prefix) as queue:
        fill(ring, 4)
        claims = some(queue, 4)
        [doomed] = listener_pids(ring).values()
        os.kill(doomed, signal.SIGKILL)
        again = some(queue, 4)
        assert {claim.attempts for claim in again} == {2}
        assert queue.ack_many(claims) == []
        assert queue.ack_many(again) == again
        eventually(lambda: free(ring), "no slot is pinned")


@both
def test_a_writer_that_is_killed_leaves_what_it_wrote(prefix: str, wire: str, over: None) -> None:
    with opened(prefix) as queue, Child(WRITER, f"rings:{prefix}", 20) as writer:
        assert writer.line() == "written"
        first = some(queue, 5)
        writer.kill()
        rest = some(queue, 15)
        assert queue.ack_many([*first, *rest]) == [*first, *rest]
        assert queue.claim(1, 0.1, consumer="test") == []
        eventually(lambda: not queue.places.segments() or not queue.claim(1, 0.1, consumer="test"), "its ring has gone")


@both
def test_trainers_that_claim_at_once_get_every_payload_once(prefix: str, wire: str, over: None) -> None:
    text, each = f"rings:{prefix}", 200
    with contextlib.ExitStack() as stack:
        trainers = [stack.enter_context(Child(GREEDY, text)) for _ in range(3)]
        writers = [stack.enter_context(Child(WRITER, text, each)) for _ in range(2)]
        for writer in writers:
            assert writer.line() == "written"
        found = [int(number) for trainer in trainers for number in trainer.process.stdout.readline().split()]  # type: ignore[union-attr]
        assert sorted(found) == sorted([*range(each), *range(each)])
        for writer in writers:
            writer.tell()
            assert writer.wait() == 0
        for trainer in trainers:
            assert trainer.wait() == 0


@both
def test_no_trainer_hoards(prefix: str, wire: str, over: None) -> None:
    with ring_of(prefix, mode="thread") as ring, opened(prefix) as slow, opened(prefix) as other:
        fill(ring, 32)
        held = some(slow, 4)
        claims = some(other, 32 - 4 - 12)  # three times a batch may lie unused at the slow one
        assert other.ack_many(claims) == claims
        assert slow.ack_many(held) == held


@both
def test_what_had_arrived_at_a_killed_trainer_is_lost_and_reported(prefix: str, wire: str, over: None) -> None:
    trainer = TRAINER.replace(
        "print(len(claims), flush=True)", "print(len(queue.ack_many(claims, trained=False)), flush=True)"
    )
    with ring_of(prefix, mode="thread") as ring, opened(prefix) as queue:
        fill(ring, 5)
        with Child(trainer, f"rings:{prefix}", 5) as child:
            assert child.line() == "5"
            assert queue.depth().arrived == 5
            child.kill()
        assert queue.claim(1, 0.5, consumer="test") == []
        eventually(lambda: queue.depth() == QueueDepth(lost=5), "they are counted as lost")
        [failure] = queue.failures()
        assert (failure.state, failure.rank) == (DeliveryState.LOST, 0)
        assert "5 had arrived at a consumer" in failure.reason
        eventually(lambda: free(ring), "no slot is pinned")


def test_what_had_arrived_through_a_killed_listener_is_done_when_its_trainer_says_so(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", "tcp")
    with ring_of(prefix) as ring, opened(prefix) as queue:
        fill(ring, 4)
        claims = some(queue, 4)
        assert queue.ack_many(claims, trained=False) == claims
        [doomed] = listener_pids(ring).values()
        os.kill(doomed, signal.SIGKILL)
        eventually(lambda: ring.native.reclaim() or queue.depth().lost == 4, "the listener's count is lost")
        assert queue.finish(claims) == claims
        fill(ring, 1)
        assert queue.ack_many(some(queue, 1))
        eventually(lambda: queue.depth() == QueueDepth(done=5), "the next listener has heard of it")


def test_a_trainer_that_is_killed_with_a_demand_that_waits_leaves_nothing(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", "tcp")
    with ring_of(prefix, mode="thread") as ring, opened(prefix) as queue:
        fill(ring, 1)
        with Child(TRAINER.replace('print(len(claims)', 'queue.claim(1, 0.2, consumer="child"); print(len(claims)'),
                   f"rings:{prefix}", 1) as trainer:  # fmt: skip
            assert trainer.line() == "1"
            trainer.kill()
        fill(ring, 3)
        claims = some(queue, 4)
        assert queue.ack_many(claims) == claims
        eventually(lambda: free(ring), "no slot is pinned")


def test_a_claim_that_waits_in_a_thread_ends_with_the_queue(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", "tcp")
    with ring_of(prefix, mode="thread"):
        queue = opened(prefix)
        ended: list[str] = []

        def wait() -> None:
            try:
                queue.claim(1, LONG_S, consumer="test")
            except Exception as error:
                ended.append(type(error).__name__)

        thread = threading.Thread(target=wait)
        thread.start()
        eventually(lambda: "1 places" in repr(queue._elsewhere.rank(0).demands), "its demand is made")
        queue.close()
        thread.join(LONG_S)
        assert ended == ["ClosedError"]


def test_what_was_consumed_is_told_by_a_listener_that_has_another_port_by_then(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", "tcp")
    with (
        SharedRingBuffer.create(NUMBERED, prefix=prefix, slots=32) as ring,
        contextlib.ExitStack() as later,
        UCXXServer(ring, addresses=("127.0.0.1",)) as server,
        opened(prefix) as queue,
    ):
        fill(ring, 3)
        claims = some(queue, 3)
        [link] = {queue._elsewhere._held[claim.token].brought.link for claim in claims}
        outcome, [before] = link._outcome, ring.native.ports()

        async def lost(future: Any, limit_s: float, what: str) -> Any:
            if what != "the end of claims":
                return await outcome(future, limit_s, what)
            link._outcome = outcome  # type: ignore[method-assign]
            eventually(lambda: free(ring), "the ring has consumed them")
            server.close()
            taken = later.enter_context(socket.socket())
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("0.0.0.0", before))
            taken.listen()
            later.enter_context(UCXXServer(ring, addresses=("127.0.0.1",)))
            assert before not in ring.native.ports()
            link.link.abort()
            return await outcome(future, limit_s, what)

        link._outcome = lost  # type: ignore[method-assign]
        assert queue.ack_many(claims) == claims


def test_what_was_consumed_is_told_by_a_ring_that_nobody_serves(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", "tcp")
    with opened(prefix) as queue, Child(WRITER, f"rings:{prefix}", 3) as writer:
        assert writer.line() == "written"
        claims = some(queue, 3)
        [name] = queue.places.segments()
        [link] = {queue._elsewhere._held[claim.token].brought.link for claim in claims}
        outcome = link._outcome

        async def lost(future: Any, limit_s: float, what: str) -> Any:
            if what != "the end of claims":
                return await outcome(future, limit_s, what)
            link._outcome = outcome  # type: ignore[method-assign]
            eventually(lambda: free(ring), "the ring has consumed them")
            listeners = list(listener_pids(ring).values())
            os.kill(parent_of(listeners[0]), signal.SIGKILL)
            writer.kill()
            for each in listeners:
                os.kill(each, signal.SIGKILL)
            link.link.abort()
            return await outcome(future, limit_s, what)

        link._outcome = lost  # type: ignore[method-assign]
        with SharedRingBuffer.attach(name, role="observer") as ring:
            assert queue.ack_many(claims) == claims


def test_a_demand_whose_connection_was_lost_before_it_was_made_is_made_again(
    prefix: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", "tcp")
    with ring_of(prefix, mode="thread") as ring, opened(prefix) as queue:
        fill(ring, 1)
        assert queue.ack_many(some(queue, 1))
        demands = queue._elsewhere.rank(0).demands
        start = demands._task

        def lost_at_once(work: Any) -> None:
            start(work)
            if work.__name__ == "_ask":
                demands._task = start  # type: ignore[method-assign]
                for link in list(demands._links.values()):
                    link.abort()
                demands._turn()

        demands._task = lost_at_once  # type: ignore[method-assign]
        fill(ring, 2)
        assert queue.ack_many(some(queue, 2))
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_ring_that_went_before_it_was_connected_to_is_no_fault_of_the_wires_that_are_allowed(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", "shm")
    with dead_port() as port, FoundRings(Gone(prefix, port)) as queue:
        assert queue.claim(1, 0.1, consumer="test") == []
        eventually(lambda: queue._elsewhere.rank(0).demands.faults, "it was tried")
        assert queue.claim(1, 0.1, consumer="test") == []


@pytest.mark.parametrize("wire", ["tcp"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_consuming_that_was_interrupted_is_repeated_with_the_same_answer(
    prefix: str, wire: str, over: None, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = FoundElsewhere._settle

    def interrupted(*arguments: Any) -> Any:
        monkeypatch.setattr(FoundElsewhere, "_settle", settle)
        if when == "after":  # the ring has consumed them, and nobody was told
            settle(*arguments)
        raise KeyboardInterrupt

    with ring_of(prefix, mode="thread") as ring, opened(prefix) as queue:
        fill(ring, 3)
        claims = some(queue, 3)
        monkeypatch.setattr(FoundElsewhere, "_settle", interrupted)
        with pytest.raises(KeyboardInterrupt):
            queue.ack_many(claims)
        assert queue.ack_many(claims) == claims
        assert queue.depth().done == 3
        eventually(lambda: free(ring), "every slot is free")


def test_a_consume_asks_all_rings_at_once_and_waits_for_none_before_it_asks_the_next(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", "tcp")
    settings = Settings(watchdog_s=60.0)
    with ring_of(prefix, settings) as one, ring_of(prefix, settings) as two, opened(prefix) as queue:
        fill(one, 1)
        fill(two, 1)
        claims = some(queue, 2)
        first, second = (one, two) if claims[0].ticket_id.startswith(one.ring_id) else (two, one)
        [stopped] = listener_pids(first).values()
        os.kill(stopped, signal.SIGSTOP)
        accepted: list[Claim] = []
        thread = threading.Thread(target=lambda: accepted.extend(queue.ack_many(claims)))
        thread.start()
        try:
            eventually(lambda: free(second), "the ring that answers has heard that its payload is consumed")
        finally:
            os.kill(stopped, signal.SIGCONT)
            thread.join()
        assert accepted == claims
        eventually(lambda: free(first), "the other one has, too, when it goes on")


def test_all_rings_hear_at_once_that_what_had_arrived_was_used(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", "tcp")
    monkeypatch.setenv("TRANSPORT_READ_TIMEOUT_S", "60")
    settings = Settings(watchdog_s=60.0)
    with ring_of(prefix, settings) as one, ring_of(prefix, settings) as two, opened(prefix) as queue:
        fill(one, 1)
        fill(two, 1)
        claims = some(queue, 2)
        assert queue.ack_many(claims, trained=False) == claims
        first, second = (one, two) if claims[0].ticket_id.startswith(one.ring_id) else (two, one)
        [stopped] = listener_pids(first).values()
        os.kill(stopped, signal.SIGSTOP)
        thread = threading.Thread(target=lambda: queue.finish(claims))
        thread.start()
        try:
            eventually(lambda: second.native.depth(0)["done"] == 1, "the ring that answers has counted it")
        finally:
            os.kill(stopped, signal.SIGCONT)
            thread.join()
        eventually(lambda: first.native.depth(0)["done"] == 1, "the other one has, too, when it goes on")
