"""A listener that receives nothing over shared memory is restarted; one that receives something is not."""

from __future__ import annotations

import time
from types import SimpleNamespace

import msgspec
import pytest
from helpers import asynchronous, listener_pids, until
from loopback import IPV6, LOOPBACK
from scripted_peer import Stage
from supervised import LOCAL, QUICK, read_all, write

from transport import SharedRingBuffer, UCXXClient, UCXXServer
from transport.server import listener as listener_module
from transport.server.listener import StallDetector
from transport.wire.ucx import Worker
from transport.wires import settings_for


def test_three_silent_connections_in_a_row_are_a_stall() -> None:
    detector = StallDetector()
    assert [detector.silent(began, began + 5.0, 0.0) for began in (10.0, 11.0, 12.0)] == [False, False, True]


def test_a_message_of_any_client_in_between_is_no_stall() -> None:
    detector = StallDetector()
    assert not detector.silent(10.0, 15.0, 0.0)
    assert not detector.silent(11.0, 16.0, 0.0)
    assert not detector.silent(12.0, 17.0, last_received=11.5)  # and only the third began after that
    assert not detector.silent(13.0, 18.0, last_received=11.5)
    assert detector.silent(14.0, 19.0, last_received=11.5)


def test_clients_that_leave_at_once_do_not_count() -> None:
    detector = StallDetector()
    assert not any(detector.silent(began, began + 0.9, 0.0) for began in range(10, 30))


@pytest.mark.ucx
@asynchronous
async def test_silent_connections_are_no_stall_while_an_admitted_client_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    restarts: list[str] = []
    with SharedRingBuffer.create(slots=1, slot_bytes=64) as ring:
        async with Stage(ring) as stage:
            listener = stage.listener
            listener._restart = restarts.append
            peer = await stage.connected()
            began = time.monotonic()
            await peer.settled()
            heard = time.monotonic()
            later = SimpleNamespace(monotonic=lambda: heard + 5.0)
            with monkeypatch.context() as patched:
                patched.setattr(listener_module, "time", later)
                for _ in range(3):
                    listener.silent(began)
                assert restarts == []
                for _ in range(3):
                    listener.silent(heard)
            assert len(restarts) == 1


@pytest.mark.ucx
@asynchronous
async def test_a_listener_that_receives_nothing_over_shared_memory_is_restarted_on_its_port() -> None:
    settings = msgspec.structs.replace(QUICK, handshake_timeout_s=1.1)
    with (
        SharedRingBuffer.create(slots=4, slot_bytes=50_000) as ring,
        UCXXServer(ring, (0,), addresses=LOCAL, settings=settings, log_level="CRITICAL") as server,
    ):
        (port,) = server.ports
        before = listener_pids(ring)[port]
        worker = Worker(settings_for(frozenset({"shm"}), ipv6=IPV6))
        try:
            for _ in range(3):
                await worker.connect(LOOPBACK, port)  # sends nothing, as if its messages did not arrive
            await until(lambda: listener_pids(ring).get(port, before) != before, "another listener on that port")
        finally:
            worker.close()
        async with UCXXClient(wire={"shm"}, settings=settings) as client:
            await read_all(client, write(ring, 2))
