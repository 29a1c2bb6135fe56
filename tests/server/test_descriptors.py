"""A listener that has few descriptors: strangers cannot take the last ones, and trainers keep their claims."""

from __future__ import annotations

import contextlib
import resource
import socket

import numpy as np
import pytest
from helpers import eventually, listener_pids, settings_with

from transport import BlockingClient, Schema, SharedRingBuffer, UCXXServer
from transport.errors import ConfigurationError

pytestmark = pytest.mark.ucx

LIMIT = 256
SCHEMA = Schema.of(x=("int64", 4))
ONE = {"x": np.arange(4)}


def limit(pid: int, files: int) -> None:
    """Let a process have so many open files, and no more."""
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (files, files))


def strangers(port: int, count: int) -> list[socket.socket]:
    """Connections that say one byte, or are about to be made."""
    made = []
    for _ in range(count):
        stranger = socket.socket()
        stranger.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            stranger.connect(("127.0.0.1", port))
        made.append(stranger)
    return made


def test_strangers_that_take_every_descriptor_leave_a_listener_to_its_trainers() -> None:
    with SharedRingBuffer.create(SCHEMA, slots=8) as ring:
        ring.write_many([ONE] * 4)
        with UCXXServer(ring, mode="process", settings=settings_with(watchdog_s=4.0)) as server:
            (port,) = server.ports
            (pid,) = listener_pids(ring).values()
            limit(pid, LIMIT)
            with BlockingClient(schemas=[SCHEMA], wire={"tcp"}) as trainer:
                held = trainer.take(f"127.0.0.1:{port}", 2)
                crowd = strangers(port, LIMIT + 100)
                try:
                    for _ in range(4):  # longer than the watchdog's patience
                        before = heartbeat(ring)
                        eventually(lambda before=before: heartbeat(ring) > before)
                        crowd += strangers(port, 50)
                    assert trainer.consume(held).all()
                finally:
                    for each in crowd:
                        each.close()
                assert len(trainer.take(f"127.0.0.1:{port}", 2, wait_s=10.0)) == 2
            with BlockingClient(schemas=[SCHEMA], wire={"tcp"}) as later:  # the port is open again
                assert later.warm(f"127.0.0.1:{port}") > 0
            assert list(listener_pids(ring).values()) == [pid]


def heartbeat(ring: SharedRingBuffer) -> int:
    """Of the only listener."""
    (beat,) = [owner.heartbeat_ns for owner in ring.native.owners() if owner.alive and owner.port]
    return beat


def test_a_process_that_may_open_too_few_files_is_told_before_it_serves() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with SharedRingBuffer.create(SCHEMA, slots=2) as ring:
        server = UCXXServer(ring)
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, before[1]))
        try:
            with pytest.raises(ConfigurationError, match="open files"):
                server.start()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
