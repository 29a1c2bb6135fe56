"""Interrupted at every line of this package in turn, a beginning leaves nothing, and an end is finished by the next."""

from __future__ import annotations

import gc
import threading

import pytest
from helpers import eventually, segment_file
from interrupted_lines import interrupted

from transport import SharedRingBuffer, Trainer, UCXXServer
from transport.client.blocking import BlockingClient
from transport.queue import open_queue

# A coroutine that was made and not begun, and what an interrupted start of anything leaves to the collector.
pytestmark = [
    pytest.mark.nightly,
    *(
        pytest.mark.filterwarnings(f"ignore::{warning}")
        for warning in ("RuntimeWarning", "ResourceWarning", "pytest.PytestUnraisableExceptionWarning")
    ),
]


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("transport")}


def test_a_ring_whose_close_is_interrupted_is_closed_by_the_next() -> None:
    at, went_on = 0, True
    while went_on:
        at += 1
        ring = SharedRingBuffer.create(slots=2, slot_bytes=100)
        ring.write_raw(b"x")
        went_on = interrupted(at, ring.close)
        ring.close()
        assert (at, ring.native.closed, segment_file(ring).exists()) == (at, True, False)
    assert at > 10


def test_a_ring_whose_close_is_interrupted_for_good_is_closed_when_it_is_forgotten() -> None:
    at, went_on = 0, True
    while went_on:
        at += 1
        ring = SharedRingBuffer.create(slots=2, slot_bytes=100)
        name = segment_file(ring)
        went_on = interrupted(at, ring.close)
        del ring
        gc.collect()
        assert (at, name.exists()) == (at, False)


def test_an_interrupted_read_in_place_keeps_no_pin() -> None:
    at, went_on = 0, True
    with SharedRingBuffer.create(slots=2, slot_bytes=100) as ring:
        ticket = ring.write_raw(b"x")
        while went_on:
            at += 1
            went_on = interrupted(at, lambda: ring.read_raw(ticket).release())
            gc.collect()
            assert (at, ring.native.info(ticket.slot).pins) == (at, 0)
    assert at > 5


@pytest.mark.ucx
def test_a_server_in_a_thread_whose_close_is_interrupted_is_closed_by_the_next() -> None:
    at, went_on = 0, True
    while went_on:
        at += 1
        with SharedRingBuffer.create(slots=2, slot_bytes=100) as ring:
            server = UCXXServer(ring, mode="thread").start()
            went_on = interrupted(at, server.close)
            server.close()
            assert (at, server.ports, threads()) == (at, (), set())
    assert at > 10


@pytest.mark.ucx
def test_an_interrupted_start_of_a_server_leaves_no_thread() -> None:
    at, went_on = 0, True
    while went_on:
        at += 1
        with SharedRingBuffer.create(slots=2, slot_bytes=100) as ring:
            server = UCXXServer(ring, mode="thread")
            went_on = interrupted(at, server.start)
            server.close()
            assert (at, threads()) == (at, set())
    assert at > 10


@pytest.mark.ucx
def test_an_interrupted_start_of_a_blocking_client_leaves_no_thread() -> None:
    at, made = 0, list[BlockingClient]()
    while not made:
        at += 1
        interrupted(at, lambda: made.append(BlockingClient(wire={"tcp"})))
        if made:
            made[0].close()
        gc.collect()
        eventually(lambda: not threads(), f"no thread is left of a start that was interrupted at line {at}")
    assert at > 10


@pytest.mark.ucx
def test_a_trainer_whose_close_is_interrupted_has_no_connection_after_the_next() -> None:
    at, went_on = 0, True
    with SharedRingBuffer.create(slots=2, slot_bytes=100) as ring, UCXXServer(ring, mode="thread") as server:
        listening = threads()
        while went_on:
            at += 1
            ticket = ring.write_raw(b"x")
            with open_queue(f"rings://127.0.0.1:{server.ports[0]}") as queue:
                trainer = Trainer(queue=queue, wire={"tcp"})
                trainer.start_prefetch(trainer.claim_tickets(1, 30.0))
                client = trainer._packer.client
                went_on = interrupted(at, trainer.close)
                trainer.close()
                assert (at, client._closed, client._claims._open, threads()) == (at, True, set(), listening)
                eventually(lambda: not ring.native.depth(0)["claimed"], f"its claims are back at line {at}")
            assert ring.discard(ticket)
    assert at > 10
