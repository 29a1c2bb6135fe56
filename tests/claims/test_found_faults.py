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

import msgspec
import pytest
from found_rings import LONG_S, TRAINER, consume, fill, names, opened, ring_of, some, take
from helpers import NETWORK, NETWORK_WIRE, Child, dead_port, eventually, free, listener_pids, parent_of
from silent_server import silent_server
from supervised import bound

from transport import FoundRings, SharedRingBuffer, UCXXServer, open_rings
from transport.claims.looks import depth_of, failures_of
from transport.claims.network import NetworkSource
from transport.claims.places import Discovery, OnThisHost, RingAddress
from transport.config import Configuration, configuration
from transport.errors import WrongRingError

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
        parts = some(other, 32 - 4 - 12)  # three times a batch may lie unused at the slow one
        assert all(consume(parts)) and all(consume(held))


def test_a_trainer_that_is_killed_with_a_demand_that_waits_leaves_nothing(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", ",".join(NETWORK))
    with ring_of(prefix) as ring, opened(prefix) as queue:
        fill(ring, 1)
        with Child(TRAINER.replace("    print", "    rings.take_parts(1, 0.2, consumer='child')\n    print", 1),
                   f"rings:{prefix}", 1) as trainer:  # fmt: skip
            assert trainer.line() == "1"
            trainer.kill()
        fill(ring, 3)
        assert consume(some(queue, 4)) == [True] * 4
        eventually(lambda: free(ring), "no slot is pinned")


def test_closing_while_a_first_take_makes_its_connections_leaves_none(
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
                take(queue, 1, LONG_S)
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
        assert consume(some(queue, 1)) == [True]
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
        while acked < 2:  # payloads that came before the loss have ended with the connection, and come again
            acked += sum(consume(some(queue, 2 - acked)))
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_a_ring_that_went_before_it_was_connected_to_is_no_fault_of_the_wires_that_are_allowed(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", "shm")
    with dead_port() as port, FoundRings(Gone(prefix, port)) as queue:
        assert take(queue, 1, 0.1) == []
        eventually(lambda: queue._network._rank(0).demands.faults, "it was tried")
        assert take(queue, 1, 0.1) == []


def test_a_place_that_goes_while_it_is_connected_to_leaves_no_fault() -> None:
    class Told(Discovery):
        places: Mapping[str, RingAddress] = {}

        def served(self, mapped: Collection[str], names: Collection[str] = ()) -> Mapping[str, RingAddress]:
            return self.places

    told = Told()
    with FoundRings(told) as queue:
        with silent_server() as port:
            told.places = {"gone": RingAddress(("127.0.0.1",), (port,))}
            assert take(queue, 1, 0.1) == []
            demands = queue._network._rank(0).demands
            eventually(lambda: demands._takers._opening, "it is connected to")
            told.places = {}
            eventually(lambda: not demands._places, "it is not found any more")
        eventually(lambda: not demands._takers._places, "the connection has failed")
        assert demands.faults == {}


@pytest.mark.nightly
def test_a_trainer_whose_address_another_program_takes_goes_on_through_the_next_port_of_its_ring(prefix: str) -> None:
    with (
        ring_of(prefix, mode="process", ports=(0, 0)) as ring,
        socket.socket() as thief,
        open_rings(f"rings://127.0.0.1:{ring.native.ports()[0]}") as queue,
    ):
        fill(ring, 1)
        assert consume(some(queue, 1)) == [True]
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
            assert consume(some(queue, 2)) == [True] * 2
        finally:
            os.kill(supervisor, signal.SIGCONT)


@pytest.mark.nightly
def test_a_port_that_has_another_ring_by_now_is_followed_only_where_it_is_the_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    brief = msgspec.structs.replace(configuration().settings, port_quarantine_s=0.1, port_quarantine_most_s=0.2)
    monkeypatch.setattr(Configuration, "settings", brief)
    with (
        SharedRingBuffer.create(slots=4, slot_bytes=64) as ring,
        SharedRingBuffer.create(slots=4, slot_bytes=64) as stranger,
        SharedRingBuffer.create(slots=4, slot_bytes=64) as successor,
        socket.socket() as kept,  # nobody else gets the ports meanwhile
        socket.socket() as kept_too,
        contextlib.ExitStack() as stack,
    ):
        for each in (kept, kept_too):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for made in (ring, stranger, successor):
            made.write_raw(b"one")
        with UCXXServer(ring, ports=(0, 0)):
            address, other = ring.native.ports()
            queue = stack.enter_context(open_rings(f"rings://127.0.0.1:{address}"))
            assert consume(some(queue, 1)) == [True]
        eventually(lambda: bound(kept, address) and bound(kept_too, other), "the ports are free")
        with UCXXServer(stranger, ports=(other,)):
            reached = queue._network.reached
            eventually(
                lambda: any(
                    isinstance(fault, WrongRingError) for fault in reached(0, named=False, met=False).faults.values()
                ),
                "it was refused",
            )
            assert take(queue, 1, 0.1) == []
            with UCXXServer(successor, ports=(address,)):
                parts = some(queue, 1)
                assert names(parts)[0].startswith(successor.ring_id)
                assert consume(parts) == [True]


def test_a_ring_that_another_thread_closes_meanwhile_counts_nothing_and_disturbs_nothing() -> None:
    with (
        SharedRingBuffer.create(slots=1, slot_bytes=8) as open_,
        SharedRingBuffer.create(slots=1, slot_bytes=8) as gone,
    ):
        open_.write_raw(b"x")
        gone.close()
        rings = [gone, open_]
        assert depth_of(rings, None).ready == 1
        assert failures_of(rings, 10) == []
