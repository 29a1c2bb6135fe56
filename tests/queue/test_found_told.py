"""What was consumed, or used, is told to its ring by whichever connection there is, and all rings are told at once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from typing import Any

import pytest
from found_processes import NUMBERED, TRAINER, WRITER, fill, opened, ring_of
from found_rings import some
from helpers import Child, eventually, free, listener_pids, parent_of

from transport import SharedRingBuffer, UCXXServer
from transport.queue import Claim, DeliveryState, QueueDepth
from transport.queue.found_elsewhere import FoundElsewhere
from transport.settings import Settings

pytestmark = [pytest.mark.ucx, pytest.mark.slow]
both = pytest.mark.parametrize("wire", ["mapped", "tcp"])


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
