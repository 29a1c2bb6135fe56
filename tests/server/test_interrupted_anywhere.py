"""Interrupted at every line of this package in turn, a beginning leaves nothing, and an end is finished by the next."""

from __future__ import annotations

import gc
import linecache
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from helpers import segment_file

import transport
from transport import SharedRingBuffer, UCXXServer
from transport.client.blocking import BlockingClient
from transport.server.running import OneThread

# A coroutine that was made and not begun, and what an interrupted start of anything leaves to the collector.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{warning}")
    for warning in ("RuntimeWarning", "ResourceWarning", "pytest.PytestUnraisableExceptionWarning")
]
HERE = str(Path(transport.__file__).parent)


class Interrupted(BaseException):
    """As Ctrl-C."""


def interrupted(at: int, action: Callable[[], object]) -> bool:
    """Whether ``action`` came to its ``at``-th line, in whose place it was interrupted.

    Passed over are destructors, where an interrupt is lost, and a `with` that is left, where none can come between its
    block and its end.
    """
    seen = 0
    entered: set[tuple[int, int]] = set()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if not frame.f_code.co_filename.startswith(HERE) or frame.f_code.co_name == "__del__":
            return None
        place = (id(frame), frame.f_lineno)
        statement = linecache.getline(frame.f_code.co_filename, frame.f_lineno).split(maxsplit=1)[:1]
        if event == "line" and not (statement == ["with"] and place in entered):
            entered.add(place)
            seen += 1
            if seen == at:
                sys.settrace(None)
                raise Interrupted
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
    return False


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
        assert (at, threads()) == (at, set())
    assert at > 10


@pytest.mark.ucx
def test_a_start_that_cannot_write_its_ports_serves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = OneThread.start

    def start(run: OneThread, wanted: tuple[int, ...]) -> Any:
        begin(run, wanted)
        return ("none",)  # refused, as they are where another process was stopped while it wrote ports

    monkeypatch.setattr(OneThread, "start", start)
    with SharedRingBuffer.create(slots=2, slot_bytes=100) as ring:
        server = UCXXServer(ring, mode="thread")
        with pytest.raises(TypeError):
            server.start()
        assert (server.ports, threads()) == ((), set())
