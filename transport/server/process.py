"""A listener as a process of its own: ``python -m transport.server.process``, started by the supervisor.

The supervisor sends the configuration; the listener reports its port, or why it could not start (starting.py). It ends
within `END_S` after SIGTERM, and within `PART_S` where only a new process can repair it. Either way its clients are
asked to close first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
import time
from typing import NoReturn

import msgspec
import uvloop

from transport.decoders import json_decoder
from transport.errors import TransportError, UsageError
from transport.ring.attachment import Attachment, attached
from transport.runtime import stacks
from transport.runtime.logs import LoggedErrors, set_up_logging
from transport.server.ending import DRAIN_S, END_S
from transport.server.lifetime import Lifetime, ServingPhase
from transport.server.listener import Listener
from transport.server.starting import ListenerConfig, StartReport, answer, keep_stdout_for_the_answer
from transport.settings import Settings

log = logging.getLogger(__name__)

RESTART = 3  # exit status

_left_open: list[Listener] = []  # keeps UCX's objects until the process ends
EXIT_S = END_S + 3.0  # a listener that hangs ends then, with the stacks of all its threads


async def _stop_when_orphaned(ring: Attachment, lifetime: Lifetime, settings: Settings, stop: asyncio.Event) -> None:
    """Stop the listener when writer and supervisor have ended: no other process would end it or remove the segment."""
    failures = LoggedErrors(log, "looking for the writer of this listener's ring")
    while True:
        with failures:
            sequence = ring.native.sequence
            writer_alive = ring.native.keeper_alive
            if not writer_alive:
                stacks.leave_pipes()
            alive, now = writer_alive or ring.native.supervised, time.monotonic()
            pending = ring.native.pending
            if lifetime.tick(now, writer_alive=alive, pending=pending, sequence=sequence) is ServingPhase.STOP:
                stop.set()
                return
        await asyncio.sleep(settings.heartbeat_s)


async def _serve(config: ListenerConfig) -> int:
    stop = asyncio.Event()
    status, drain_s = 0, DRAIN_S
    loop = asyncio.get_running_loop()

    def end() -> None:
        if not stop.is_set():
            stop.set()
            stacks.exit_at(EXIT_S)

    def restart(reason: str) -> None:
        nonlocal status, drain_s
        if not stop.is_set():
            log.error("the listener restarts: %s", reason)
            status, drain_s = RESTART, 0.0  # readers outlast the second without a listener, not a drain as well
            end()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    try:
        ring = attached(config.segment, "listener")
    except TransportError as error:
        answer(StartReport.of(error))
        return 1
    with ring:
        listener = Listener(
            ring,
            settings=config.settings,
            secret=config.secret,
            wires=config.wires,
            bind=config.bind,
            restart=restart,
        )
        try:
            port = listener.start(config.port)
        except TransportError as error:
            answer(StartReport.of(error))
            return 1
        ring.native.set_own_port(port)
        lifetime = Lifetime(config.settings.linger_s)
        orphaned = loop.create_task(_stop_when_orphaned(ring, lifetime, config.settings, stop))
        try:
            _left_open.append(listener)
            answer(StartReport(ports=(port,)))
            await stop.wait()
        finally:
            await listener.stop(drain_s, exiting=True)
            orphaned.cancel()  # no effect if it has finished
        if orphaned.done() and not orphaned.cancelled() and not ring.native.supervised:
            ring.native.unlink_if_last(gives_up_to=lifetime.gives_up_to)  # what is unread then, if linger_s is over
    return status


def main() -> NoReturn:
    """Entry point. Exit status 0 after a graceful stop, `RESTART` to be started again, 1 when it could not start."""
    keep_stdout_for_the_answer()
    stacks.enable()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the usual 1024 are too few for 1024 connections
    try:
        config = json_decoder(ListenerConfig)(sys.stdin.buffer.read())
    except msgspec.MsgspecError as error:  # the package was replaced under a running supervisor
        message = f"listener and supervisor are of different builds ({error}); restart the server"
        answer(StartReport.of(UsageError(message)))
        sys.exit(1)
    set_up_logging(config.log_level, config.log_format, "listener")
    status = uvloop.run(_serve(config))
    logging.shutdown()
    os._exit(status)  # the kernel frees UCX's resources: see Listener.stop


if __name__ == "__main__":
    main()
