"""Supervisor of one listener process per port: ``python -m transport.server.supervisor``, started by `UCXXServer`.

All state of a supervisor is in the segment (port table, owner table, kernel locks), so a restarted supervisor adopts
the listeners that it finds. The states of one `ServedPort`:

    EMPTY ──spawn──► STARTING ──reported its port──► SERVING ──exit, or watchdog──► EMPTY
      ▲                  └──failed: back-off; after five times on a busy port, any port──┘

It stops on SIGTERM, or when the writer has ended and nothing is pending or linger_s is over (lifetime.py), or when
another writer took over the ring. The supervisor of that writer starts listeners with its own secret and settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import sys
import time

import msgspec
import uvloop

from transport import _ring
from transport.decoders import json_decoder
from transport.errors import BusyPortError, RingBusyError, RingNotFoundError, TransportError
from transport.ring.attachment import Attachment, attached
from transport.runtime import stacks
from transport.runtime.logs import set_up_logging
from transport.server.ending import END_S, LOOK_S, Ending, is_listener, listeners_of, send
from transport.server.lifetime import Lifetime, ServingPhase, Watchdog
from transport.server.starting import ListenerConfig, StartReport, answer, keep_stdout_for_the_answer
from transport.server.users import supervisor_of

log = logging.getLogger(__name__)

_TICK_S = 0.5
_BACKOFF_FIRST_S = 0.1
_BACKOFF_MOST_S = 5.0
_TRIES_ON_A_BUSY_PORT = 5
SILENT = "no report"  # stands for an error's name when a listener did not report
_START_TIMEOUT_S = 30.0
_TRIES_OF_A_START = 3  # of a listener that ends, or does not report in time
_TRIES_IF_KILLED = 10  # by SIGKILL from outside, which says nothing about the listener
_PREDECESSOR_S = END_S + 5.0  # longest wait for the supervisor of the previous writer
_LISTENERS_S = END_S + 0.5  # then listeners that have not ended are killed
_KILLED_S = 2.0  # then killed ones are left to the kernel: they are in a system call that does not end
STOP_S = _LISTENERS_S + 0.5  # longest time from SIGTERM to the end of a supervisor, as a rule
_EXIT_S = STOP_S + 4.0  # a supervisor that hangs ends then, with the stacks of all its threads


class ServedPort:
    """One port and the listener process that serves it.

    Args:
        port: the port to listen on; 0: assigned.
        any_port: the port was taken over from a dead writer's listener; the user did not ask for it.
    """

    def __init__(self, port: int, *, any_port: bool = False) -> None:
        self.port = port
        self.published = port  # where it was last served; tickets name it until its successor is known
        self.any_port = any_port
        self.process: asyncio.subprocess.Process | None = None
        self.starting: asyncio.Task[None] | None = None
        self.failures = 0
        self.not_before = 0.0
        self.last_error = StartReport()
        self.killed = False  # its listener, from outside and before it had reported

    def __repr__(self) -> str:
        return f"<ServedPort {self.port} {'own' if self.process else 'none or adopted'} failures {self.failures}>"

    @property
    def refused(self) -> bool:
        """True if the listener reported an error that another start would repeat."""
        if self.any_port and self.last_error.error == BusyPortError.__name__:
            return False
        return self.last_error.error != SILENT

    def failed(self, now: float) -> None:
        """Back off before the next start; give up a port that another program keeps."""
        self.failures += 1
        self.not_before = now + min(_BACKOFF_FIRST_S * 2 ** (self.failures - 1), _BACKOFF_MOST_S)
        if self.last_error.error == BusyPortError.__name__ and self.failures >= _TRIES_ON_A_BUSY_PORT:
            log.warning("port %d is in use by another program; using a port that the system assigns", self.port)
            self.port = 0
            self.not_before = now


class SupervisorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Configuration of a supervisor: the ports (0: assigned) and the configuration of each listener.

    At the first start a port that is not available is an error. A restarted supervisor (``first=False``) continues
    without it, because an error would also end the listeners that it adopts.
    """

    ports: tuple[int, ...]
    listener: ListenerConfig
    first: bool = True


class Supervisor:
    """Supervisor of one ring's listeners: start, watch and stop. Belongs to the loop of the supervisor process."""

    def __init__(self, ring: Attachment, config: SupervisorConfig, writers: set[tuple[int, int]] | None = None) -> None:
        self._ring = ring
        self._config = config
        self._wake = asyncio.Event()
        self._signalled = False  # to stop
        self._gives_up_to = 0  # of the ring's sequence: unread payloads that end with the segment
        self._stop = False
        self._answered = not config.first  # the writer knows whether the first start succeeded
        self._lifetime = Lifetime(config.listener.settings.linger_s)
        self._watchdog = Watchdog(config.listener.settings.watchdog_s, 2 * _TICK_S)
        self._watchers: set[asyncio.Task[None]] = set()
        self._writers = _living_writers(ring) if writers is None else writers
        # A ring that was taken over keeps its old ports, because the tickets of its unread payloads name them.
        known = [*ring.native.ports(), *config.ports[len(ring.native.ports()) :]]
        # shared memory may contain any value
        known = [port if port <= 65535 else 0 for port in known]
        self.served_ports = [
            ServedPort(port or before, any_port=not port) for port, before in zip(config.ports, known, strict=False)
        ]
        if not config.first:
            self._adopt()

    def _adopt(self) -> None:
        """Adopt the running listeners on their ports, which may differ from those of the first start.

        Other ports keep their index: clients and `UCXXServer.ports` see the order of the port table.
        """
        living = self._living().keys()
        moved = sorted(living - {served.port for served in self.served_ports})
        for served in self.served_ports:
            if moved and served.port not in living:
                served.port = moved.pop(0)

    def request_stop(self) -> None:
        """Stop at the next iteration (signal handler)."""
        self._signalled = self._stop = True
        if not self._ring.native.keeper_alive:  # else the writer decides what becomes of unread payloads
            self._gives_up_to = self._ring.native.sequence
        self._wake.set()

    # --- the listeners ------------------------------------------------------------------------------
    def _living(self) -> dict[int, tuple[int, float]]:
        """pid and seconds since the last heartbeat of each living listener, by port."""
        now = time.monotonic_ns()
        return {
            owner.port: (owner.pid, (now - owner.heartbeat_ns) / 1e9)
            for owner in self._ring.native.owners()
            if owner.alive and 0 < owner.port <= 65535 and is_listener(owner.pid)
        }

    def _succeeded(self) -> bool:
        """Return whether other writers have taken over the ring: it has a keeper, and no original writer is left."""
        writers = _living_writers(self._ring)
        return self._ring.native.keeper_alive and bool(writers) and not self._writers & writers

    def fill(self) -> None:
        """Start a listener for every port that has none; kill listeners without a heartbeat."""
        living = self._living()
        now = time.monotonic()
        self._watchdog.look(now)
        for served in self.served_ports:
            pid, silent_s = living.get(served.port, (0, 0.0))
            if pid and self._watchdog.stopped(silent_s):
                log.warning("listener %d on port %d: no heartbeat for %.0f s; killing it", pid, served.port, silent_s)
                send(signal.SIGKILL, pid)
            elif not pid and served.process is None and served.starting is None and now >= served.not_before:
                served.starting = asyncio.create_task(self._start(served))
        self.publish_ports()

    async def filled(self) -> None:
        """Wait until no start is in progress."""
        await asyncio.gather(*(served.starting for served in self.served_ports if served.starting is not None))
        self.publish_ports()

    def unserved(self) -> list[ServedPort]:
        """Ports whose listener did not start and that no other listener of this ring serves.

        A listener that a killed supervisor had started may serve the port.
        """
        living = self._living()
        return [served for served in self.served_ports if served.last_error.error and served.port not in living]

    async def filled_at_first(self) -> None:
        """Wait until every port has a listener or a final error; a listener that died is started again."""
        for tries in itertools.count(1):
            await self.filled()
            again = [served for served in self.unserved() if not served.refused]
            most = _TRIES_IF_KILLED if all(served.killed for served in again) else _TRIES_OF_A_START
            if not again or self._stop or tries > most:
                return
            for served in again:
                served.not_before = 0.0
                if served.last_error.error == BusyPortError.__name__:
                    served.port = 0
            self.fill()

    def publish_ports(self) -> None:
        """Write the ports to the ring's port table, from which new tickets take them."""
        for served in self.served_ports:
            served.published = served.port or served.published
        ports = tuple(served.published for served in self.served_ports if served.published)
        if ports != self._ring.native.ports():
            self._ring.native.set_ports(ports)

    async def _start(self, served: ServedPort) -> None:
        try:
            report = await self._started(served)
        except asyncio.CancelledError:  # stopped before the listener reported: no task watches it, so it must not stay
            await self._kill(served)
            raise
        finally:
            served.starting = None
            self._wake.set()
        served.last_error = report
        process = served.process
        served.killed = process is not None and process.returncode == -signal.SIGKILL
        if report.error or process is None:
            # a start that the writer waits for is reported to it, and said there
            level = logging.WARNING if self._answered or not served.refused else logging.INFO
            log.log(level, "listener on port %d did not start: %s: %s", served.port, report.error, report.message)
            await self._kill(served)
            served.failed(time.monotonic())
            if report.error == RingNotFoundError.__name__:
                self.request_stop()  # the segment was removed: there is nothing left to serve
            return
        [served.port] = report.ports
        served.failures = 0
        watcher = asyncio.create_task(self._watch(served, process))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _kill(self, served: ServedPort) -> None:
        if served.process is not None:
            with contextlib.suppress(ProcessLookupError):
                served.process.kill()
            await served.process.wait()
            served.process = None

    async def _started(self, served: ServedPort) -> StartReport:
        """Start the listener of the port; its report, or the reason why there is none."""
        try:
            served.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # not from the current directory, where any module could read the listener's secret
                "-m",
                "transport.server.process",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                # ucxx imports numpy, whose OpenBLAS would start a thread for each core
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )
            async with asyncio.timeout(_START_TIMEOUT_S):
                config = msgspec.structs.replace(self._config.listener, port=served.port)
                report = await self._exchange(served.process, config)
                if report is not None:
                    return report
                status = await served.process.wait()
                return StartReport(error=SILENT, message=f"the listener ended with status {status}")
        except Exception as error:  # of whatever class: it is started again
            return StartReport(error=SILENT, message=f"the listener did not report ({error!r})")

    async def _exchange(self, process: asyncio.subprocess.Process, config: ListenerConfig) -> StartReport | None:
        if process.stdin is None or process.stdout is None:
            raise OSError("the listener has no pipes")
        with contextlib.suppress(RuntimeError):  # uvloop raises it when the process has ended
            process.stdin.write(msgspec.json.encode(config))
            process.stdin.close()
        line = await process.stdout.readline()
        return json_decoder(StartReport)(line) if line.endswith(b"\n") else None

    async def _watch(self, served: ServedPort, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        served.process = None
        if not self._stop:
            log.warning("listener on port %d ended with status %d; restarting it", served.port, status)
        self._ring.reclaim()
        self._wake.set()

    # --- the run ------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Keep every port served until a signal, until there is nothing left to serve, or another writer has the ring.

        Stopping takes seconds. A writer that takes over the ring in that time and is killed may not have started its
        own supervisor yet, so this one continues to serve.
        """
        self._answered = True
        while True:
            await self._serve()
            writer_was_there = await self._stop_listeners()
            self._gives_up_to = max(self._gives_up_to, self._lifetime.gives_up_to)
            if self._signalled or self._ring.native.keeper_alive:
                break
            if not writer_was_there and self._ring.native.sequence <= self._gives_up_to:
                break
            log.warning("the writer that took over the ring has ended; continuing to serve")
            self._stop = False
            self._gives_up_to = 0
            self._lifetime = Lifetime(self._config.listener.settings.linger_s)

    async def _serve(self) -> None:
        while not self._stop:
            self.fill()
            if not all(served.process for served in self.served_ports):
                self._ring.reclaim()  # no task watches adopted listeners
            sequence = self._ring.native.sequence
            pending = self._ring.native.pending
            alive = self._ring.native.keeper_alive
            if not alive:
                stacks.leave_pipes()  # before another process inherits them
            now = time.monotonic()
            if self._lifetime.tick(now, writer_alive=alive, pending=pending, sequence=sequence) is ServingPhase.STOP:
                log.info("the writer ended, and nothing is pending or linger_s is over; stopping")
                break
            if self._succeeded():
                log.info("another writer took over the ring; stopping")
                break
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._wake.wait()

    async def _stop_listeners(self) -> bool:
        """SIGTERM to own and adopted listeners, SIGKILL to those that stay. True: a writer was alive meanwhile."""
        self._stop = True
        writer_was_there: bool = self._ring.native.keeper_alive
        for served in self.served_ports:
            if served.starting is not None:
                served.starting.cancel()
        await asyncio.gather(*(each.starting for each in self.served_ports if each.starting), return_exceptions=True)
        ending = Ending(f"the supervisor of {self._ring.name}", _LISTENERS_S, _LISTENERS_S + _KILLED_S)
        while ending.goes_on(*self._listener_pids()):
            await asyncio.sleep(LOOK_S)
            writer_was_there = writer_was_there or self._ring.native.keeper_alive
        self._ring.reclaim()
        return writer_was_there

    def remove_segment(self) -> bool:
        """Remove the ring's name, if no other owner is left. Unread payloads only when they are given up."""
        return self._ring.native.unlink_if_last(gives_up_to=self._gives_up_to)

    def _listener_pids(self) -> tuple[set[int], set[int]]:
        """Return the listeners, own and adopted, and processes that are ending, as `listeners_of` does."""
        own = {served.process.pid for served in self.served_ports if served.process is not None}
        listeners, ending = listeners_of(self._ring.native)
        return own | listeners, ending


def _living_writers(ring: Attachment) -> set[tuple[int, int]]:
    owners = ring.native.owners()
    return {(each.pid, each.started_ns) for each in owners if each.alive and each.role == _ring.ROLE_WRITER}


async def _supervise(config: SupervisorConfig) -> int:
    loop = asyncio.get_running_loop()
    with attached(config.listener.segment, "observer") as ring:
        own_writers = _living_writers(ring)  # a writer that starts while we wait has its own supervisor
        give_up = time.monotonic() + _PREDECESSOR_S
        while not ring.native.supervise():
            if time.monotonic() > give_up:
                who = f", process {pid}" if (pid := supervisor_of(ring)) else ""
                raise RingBusyError(f"another supervisor serves {ring.name}{who}")
            await asyncio.sleep(0.05)
        supervisor = Supervisor(ring, config, own_writers)

        def on_signal() -> None:
            stacks.exit_at(_EXIT_S)
            supervisor.request_stop()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        supervisor.fill()
        if config.first:
            await supervisor.filled_at_first()
        failed = supervisor.unserved()
        if failed:
            answer(failed[0].last_error)
            await supervisor._stop_listeners()
            return 1
        answer(StartReport(ports=ring.native.ports()))
        await supervisor.run()
        supervisor.remove_segment()
    return 0


def main() -> int:
    """Entry point. Exit status 0 after a graceful stop, 1 when a listener could not start."""
    keep_stdout_for_the_answer()
    stacks.enable()
    config = json_decoder(SupervisorConfig)(sys.stdin.buffer.read())
    set_up_logging(config.listener.log_level, config.listener.log_format, "supervisor")
    try:
        return uvloop.run(_supervise(config))
    except TransportError as error:
        answer(StartReport.of(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
