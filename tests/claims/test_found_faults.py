"""FoundRings under faults, with real processes: nothing is lost, nothing consumed twice, no slot stays pinned."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import threading
from collections.abc import Collection, Mapping
from typing import Any

import pytest
from found_rings import LONG_S, TRAINER, fill, opened, ring_of, some
from helpers import NETWORK, NETWORK_WIRE, Child, dead_port, eventually, free, listener_pids, parent_of
from queue_waits import in_thread
from silent_server import silent_server
from supervised import bound

from transport import SharedRingBuffer, UCXXServer
from transport.claims.batch import Verdict
from transport.claims.looks import depth_of, failures_of, known_of
from transport.claims.network import NetworkSource
from transport.claims.places import Discovery, OnThisHost, RingAddress
from transport.errors import WrongRingError
from transport.queue import FoundRings, open_queue

pytestmark = [pytest.mark.ucx, pytest.mark.slow]


class Gone(OnThisHost):
    """Finds one ring, whose segment has gone since."""

    def __init__(self, prefix: str, port: int) -> None:
        super().__init__(prefix)
        self._port = port

    def served(self, mapped: Collection[str], names: Collection[str] = ()) -> Mapping[str, RingAddress]:
        """It."""
        return {"gone": RingAddress(("127.0.0.1",), (self._port,), "gone", f"/transport-{self.prefix}gone")}


@pytest.mark.parametrize("wire", ["mapped", NETWORK_WIRE])
def test_no_trainer_hoards(prefix: str, wire: str, over: None) -> None:
    with ring_of(prefix) as ring, opened(prefix) as slow, opened(prefix) as other:
        fill(ring, 32)
        held = some(slow, 4)
        claims = some(other, 32 - 4 - 12)  # three times a batch may lie unused at the slow one
        assert other.ack_many(claims) == claims
        assert slow.ack_many(held) == held


def test_a_trainer_that_is_killed_with_a_demand_that_waits_leaves_nothing(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", ",".join(NETWORK))
    with ring_of(prefix) as ring, opened(prefix) as queue:
        fill(ring, 1)
        with Child(TRAINER.replace('print(len(claims)', 'queue.claim(1, 0.2, consumer="child"); print(len(claims)'),
                   f"rings:{prefix}", 1) as trainer:  # fmt: skip
            assert trainer.line() == "1"
            trainer.kill()
        fill(ring, 3)
        claims = some(queue, 4)
        assert queue.ack_many(claims) == claims
        eventually(lambda: free(ring), "no slot is pinned")


def test_closing_while_a_first_claim_makes_its_connections_leaves_none(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", ",".join(NETWORK))
    started, begun, closing = NetworkSource._started, threading.Event(), threading.Event()

    async def later(self: NetworkSource, *arguments: Any) -> Any:
        begun.set()
        await asyncio.to_thread(closing.wait, 0.5)  # it is not set where closing waits
        return await started(self, *arguments)

    monkeypatch.setattr(NetworkSource, "_started", later)
    with ring_of(prefix) as ring:
        fill(ring, 1)
        queue = opened(prefix)
        ended: list[str] = []

        def claim() -> None:
            try:
                queue.claim(1, LONG_S, consumer="test")
            except Exception as error:
                ended.append(type(error).__name__)

        thread = threading.Thread(target=claim)
        thread.start()
        assert begun.wait(LONG_S)
        queue.close()
        closing.set()
        thread.join(LONG_S)
        assert ended == ["ClosedError"]
        assert queue._network._thread is None or queue._network._thread.closed


def test_a_demand_whose_connection_was_lost_before_it_was_made_is_made_again(
    prefix: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", ",".join(NETWORK))
    with ring_of(prefix) as ring, opened(prefix) as queue:
        fill(ring, 1)
        assert queue.ack_many(some(queue, 1))
        demands = queue._network._rank(0).demands
        ask = demands._ask

        def lost_at_once(*demand: Any) -> None:
            demands._ask = ask  # type: ignore[method-assign]
            for link in demands.connections:
                link.abort()
            ask(*demand)

        demands._ask = lost_at_once  # type: ignore[method-assign]
        fill(ring, 2)
        acked = 0
        while acked < 2:  # claims that came before the loss have ended with the connection, and come again
            acked += len(queue.ack_many(some(queue, 2 - acked)))
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_ring_that_went_before_it_was_connected_to_is_no_fault_of_the_wires_that_are_allowed(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", "shm")
    with dead_port() as port, FoundRings(Gone(prefix, port)) as queue:
        assert queue.claim(1, 0.1, consumer="test") == []
        eventually(lambda: queue._network._rank(0).demands.faults, "it was tried")
        assert queue.claim(1, 0.1, consumer="test") == []


def test_a_place_that_goes_while_it_is_connected_to_leaves_no_fault() -> None:
    class Told(Discovery):
        places: Mapping[str, RingAddress] = {}

        def served(self, mapped: Collection[str], names: Collection[str] = ()) -> Mapping[str, RingAddress]:
            return self.places

    told = Told()
    with FoundRings(told) as queue:
        with silent_server() as port:
            told.places = {"gone": RingAddress(("127.0.0.1",), (port,))}
            assert queue.claim(1, 0.1, consumer="test") == []
            demands = queue._network._rank(0).demands
            eventually(lambda: demands._takers._opening, "it is connected to")
            told.places = {}
            eventually(lambda: not demands._places, "it is not found any more")
        eventually(lambda: not demands._takers._places, "the connection has failed")
        assert demands.faults == {}


def test_a_trainer_whose_address_another_program_takes_goes_on_through_the_next_port_of_its_ring(prefix: str) -> None:
    with (
        ring_of(prefix, mode="process", ports=(0, 0)) as ring,
        socket.socket() as thief,
        open_queue(f"rings://127.0.0.1:{ring.native.ports()[0]}") as queue,
    ):
        fill(ring, 1)
        assert queue.ack_many(some(queue, 1))
        port = ring.native.ports()[0]
        listener = listener_pids(ring)[port]
        supervisor = parent_of(listener)
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        os.kill(supervisor, signal.SIGSTOP)
        try:
            os.kill(listener, signal.SIGKILL)
            eventually(lambda: bound(thief, port), "its port is taken")
            thief.listen()
            fill(ring, 2)
            claims = some(queue, 2)
            assert queue.ack_many(claims) == claims
        finally:
            os.kill(supervisor, signal.SIGCONT)


def test_a_port_that_has_another_ring_by_now_is_followed_only_where_it_is_the_address(prefix: str) -> None:
    with (
        SharedRingBuffer.create(slots=4, slot_bytes=64) as ring,
        SharedRingBuffer.create(slots=4, slot_bytes=64) as stranger,
        SharedRingBuffer.create(slots=4, slot_bytes=64) as successor,
        socket.socket() as kept,  # nobody else gets the address meanwhile
        contextlib.ExitStack() as stack,
    ):
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for each in (ring, stranger, successor):
            each.write_raw(b"one")
        with UCXXServer(ring, ports=(0, 0)):
            address, other = ring.native.ports()
            queue = stack.enter_context(open_queue(f"rings://127.0.0.1:{address}"))
            assert queue.ack_many(some(queue, 1))
        eventually(lambda: bound(kept, address), "the address is free")
        with UCXXServer(stranger, ports=(other,)):
            assert isinstance(queue, FoundRings)
            reached = queue._network.reached
            eventually(
                lambda: any(isinstance(fault, WrongRingError) for fault in reached(0, named=False).faults.values()),
                "it was refused",
            )
            assert queue.claim(1, 0.1, consumer="test") == []
            with UCXXServer(successor, ports=(address,)):
                [claim] = some(queue, 1)
                assert claim.ticket_id.startswith(successor.ring_id)
                assert queue.ack_many([claim])


def test_claims_of_several_rings_that_do_not_answer_are_given_back_at_once(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", ",".join(NETWORK))
    with contextlib.ExitStack() as stack:
        rings = [stack.enter_context(ring_of(prefix, mode="process")) for _ in range(3)]
        queue = stack.enter_context(opened(prefix))
        for ring in rings:
            fill(ring, 1)
        claims = some(queue, 3)
        listeners = [pid for ring in rings for pid in listener_pids(ring).values()]
        for pid in listeners:
            os.kill(pid, signal.SIGSTOP)
        try:
            returned, thread = in_thread(lambda: queue.retry_many(claims))
            eventually(lambda: all(claim.verdict == Verdict.ASKED for claim in claims), "every ring is asked")
        finally:
            for pid in listeners:
                os.kill(pid, signal.SIGCONT)
        thread.join(LONG_S)
        assert returned == [claims]
        assert {claim.attempts for claim in some(queue, 3)} == {2}


def test_a_ring_that_another_thread_closes_meanwhile_counts_nothing_and_disturbs_nothing() -> None:
    with (
        SharedRingBuffer.create(slots=1, slot_bytes=8) as open_,
        SharedRingBuffer.create(slots=1, slot_bytes=8) as gone,
    ):
        ticket = open_.write_raw(b"x")
        gone.close()
        rings = [gone, open_]
        assert depth_of(rings, None).ready == 1
        assert failures_of(rings, 10) == []
        assert known_of(rings, [f"{gone.ring_id}/0/1", ticket.id]).keys() == {ticket.id}
