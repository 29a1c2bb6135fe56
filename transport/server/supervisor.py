"""Keeps one listener process per port alive: ``python -m transport.server.supervisor``, started by `UCXXServer`.

A place is one port's listener. What a supervisor knows stands in the segment (port table, owner table, kernel locks),
so one that starts anew adopts the listeners it finds:

    EMPTY ──spawn──► STARTING ──reported its port──► SERVING ──exit, or watchdog──► EMPTY
      ▲                  └──failed: back-off; after five times on a busy port, any port──┘

It stops on SIGTERM, or when the writer is gone and everything is consumed or linger_s is over (lifetime.py), or when
another writer took over the ring, whose own supervisor then starts listeners with its own secret and settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import sys
import time

import msgspec
import uvloop

from transport import _ring
from transport.errors import BusyPortError, RingNotFoundError, TransportError
from transport.ring.attachment import Attachment, attached
from transport.runtime.logs import handler
from transport.server.lifetime import Lifetime, Phase, Watchdog
from transport.server.process import (
    DRAIN_S,
    ListenerConfig,
    ListenerReport,
    answer,
    is_listener,
    keep_stdout_for_the_answer,
    send,
)
from transport.server.supervisor_lock import holding, supervised

log = logging.getLogger(__name__)

_TICK_S = 0.5
_START_TIMEOUT_S = 30.0
_BACKOFF_FIRST_S = 0.1
_BACKOFF_MOST_S = 5.0
_TRIES_ON_A_BUSY_PORT = 5
_TRIES_OF_A_START = 3  # of a listener that dies, or is silent, before it has said anything
_TRIES_IF_KILLED = 10  # from outside, by SIGKILL: nothing is wrong with itself
_SILENT = "no report"  # of such a one, in place of an error's name
_PREDECESSOR_S = DRAIN_S + 5.0  # longest wait for the supervisor of a writer that was before


class SupervisorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a supervisor is told: the ports (0: assigned) and what each listener gets.

    At the first start a port that cannot be had is an error; a supervisor that is started again makes do without, since
    the listeners it adopts must not suffer for it.
    """

    ports: tuple[int, ...]
    listener: ListenerConfig
    first: bool = True


class SupervisorReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a supervisor answers, once: every port, or the first reason why not."""

    ports: tuple[int, ...] = ()
    error: str = ""
    message: str = ""


class Place:
    """One port and whoever serves it.

    Args:
        port: where its listener is to be; 0: assigned.
        any_port: the port is only that of a dead writer's listener, and nobody has asked for it.
    """

    def __init__(self, port: int, *, any_port: bool = False) -> None:
        self.port = port
        self.any_port = any_port
        self.process: asyncio.subprocess.Process | None = None
        self.starting: asyncio.Task[None] | None = None
        self.failures = 0
        self.not_before = 0.0
        self.last_error = ListenerReport()
        self.killed = False  # its listener, from outside and before it had reported

    def __repr__(self) -> str:
        return f"<Place port {self.port} {'own' if self.process else 'none or adopted'} failures {self.failures}>"

    @property
    def refused(self) -> bool:
        """Whether its listener itself said why it cannot serve, and another start would end the same way."""
        if self.any_port and self.last_error.error == BusyPortError.__name__:
            return False
        return self.last_error.error != _SILENT

    def failed(self, now: float) -> None:
        """Back off before the next start; leave a port that somebody else keeps."""
        self.failures += 1
        self.not_before = now + min(_BACKOFF_FIRST_S * 2 ** (self.failures - 1), _BACKOFF_MOST_S)
        if self.last_error.error == BusyPortError.__name__ and self.failures >= _TRIES_ON_A_BUSY_PORT:
            log.warning("port %d is in use by another program; using a port that the system assigns", self.port)
            self.port = 0
            self.not_before = now


class Supervisor:
    """The places of one ring. Owned by the supervisor process's loop."""

    def __init__(self, ring: Attachment, config: SupervisorConfig) -> None:
        self._ring = ring
        self._config = config
        self._wake = asyncio.Event()
        self._told = False  # to stop, by a signal
        self._stop = False
        self._lifetime = Lifetime(config.listener.settings.linger_s)
        self._watchdog = Watchdog(config.listener.settings.watchdog_s, 2 * _TICK_S)
        self._watchers: set[asyncio.Task[None]] = set()
        self._writers = self._living_writers()
        # A ring that was taken over is served on its old ports, which are in the tickets of its unread payloads.
        known = [*ring.native.ports(), *config.ports[len(ring.native.ports()) :]]
        # what stands in shared memory may be anything by now
        known = [port if port <= 65535 else 0 for port in known]
        self.places = [
            Place(port or before, any_port=not port) for port, before in zip(config.ports, known, strict=False)
        ]
        if not config.first:
            self._adopt()

    def _adopt(self) -> None:
        """Give listeners that are there a place on the port they have, which may have moved since the first start.

        The others keep theirs: the order of the port table is what clients and `UCXXServer.ports` see.
        """
        living = self._living().keys()
        moved = sorted(living - {place.port for place in self.places})
        for place in self.places:
            if moved and place.port not in living:
                place.port = moved.pop(0)

    def request_stop(self) -> None:
        """Stop at the next look (signal handler)."""
        self._told = self._stop = True
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

    def _living_writers(self) -> set[tuple[int, int]]:
        owners = self._ring.native.owners()
        return {(each.pid, each.started_ns) for each in owners if each.alive and each.role == _ring.ROLE_WRITER}

    def _succeeded(self) -> bool:
        """Whether the ring is kept again, and all its writers are others than those this supervisor was started for."""
        writers = self._living_writers()
        return self._ring.native.keeper_alive and bool(writers) and not self._writers & writers

    def fill(self) -> None:
        """Begin to start a listener in every place that has none; a stopped one is killed first."""
        living = self._living()
        now = time.monotonic()
        self._watchdog.look(now)
        for place in self.places:
            pid, silent_s = living.get(place.port, (0, 0.0))
            if pid and self._watchdog.stopped(silent_s):
                log.warning("listener %d on port %d: no heartbeat for %.0f s; killing it", pid, place.port, silent_s)
                send(signal.SIGKILL, pid)
            elif not pid and place.process is None and place.starting is None and now >= place.not_before:
                place.starting = asyncio.create_task(self._start(place))
        self.tell_ports()

    async def filled(self) -> None:
        """Until no start is under way."""
        await asyncio.gather(*(place.starting for place in self.places if place.starting is not None))
        self.tell_ports()

    def unserved(self) -> list[Place]:
        """Places whose listener did not start, and whose port nobody else serves for this ring.

        A supervisor that was killed meanwhile may have left a listener that started after all.
        """
        living = self._living()
        return [place for place in self.places if place.last_error.error and place.port not in living]

    async def filled_at_first(self) -> None:
        """Until every place has a listener or the reason why it can have none; one that just died is tried again."""
        for tries in itertools.count(1):
            await self.filled()
            again = [place for place in self.unserved() if not place.refused]
            most = _TRIES_IF_KILLED if all(place.killed for place in again) else _TRIES_OF_A_START
            if not again or self._stop or tries > most:
                return
            for place in again:
                place.not_before = 0.0
                if place.last_error.error == BusyPortError.__name__:
                    place.port = 0
            self.fill()

    def tell_ports(self) -> None:
        """Put the places' ports into the ring's table, which new tickets take them from."""
        ports = tuple(place.port for place in self.places if place.port)
        if ports != self._ring.native.ports():
            self._ring.native.set_ports(ports)

    async def _start(self, place: Place) -> None:
        try:
            report = await self._started(place)
        except asyncio.CancelledError:  # stopped before it reported: nobody watches it, so it must not stay
            await self._kill(place)
            raise
        finally:
            place.starting = None
            self._wake.set()
        place.last_error = report
        process = place.process
        place.killed = process is not None and process.returncode == -signal.SIGKILL
        if report.error or process is None:
            log.warning("listener on port %d did not start: %s: %s", place.port, report.error, report.message)
            await self._kill(place)
            place.failed(time.monotonic())
            if report.error == RingNotFoundError.__name__:
                self.request_stop()  # somebody removed the segment: there is nothing left to serve
            return
        place.port = report.port
        place.failures = 0
        watcher = asyncio.create_task(self._watch(place, process))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _kill(self, place: Place) -> None:
        if place.process is not None:
            with contextlib.suppress(ProcessLookupError):
                place.process.kill()
            await place.process.wait()
            place.process = None

    async def _started(self, place: Place) -> ListenerReport:
        """Start the place's listener; its report, or why there is none."""
        try:
            place.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # without the current directory: it may hold anything, and the listener is told the secret
                "-m",
                "transport.server.process",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            async with asyncio.timeout(_START_TIMEOUT_S):
                config = msgspec.structs.replace(self._config.listener, port=place.port)
                report = await self._exchange(place.process, config)
                return report if report is not None else await self._last_words(place.process)
        except (TimeoutError, OSError, msgspec.MsgspecError) as error:
            return ListenerReport(error=_SILENT, message=f"the listener did not report ({error!r})")

    async def _exchange(self, process: asyncio.subprocess.Process, config: ListenerConfig) -> ListenerReport | None:
        if process.stdin is None or process.stdout is None:
            raise OSError("the listener has no pipes")
        with contextlib.suppress(RuntimeError):  # uvloop's, where the process has ended by now
            process.stdin.write(msgspec.json.encode(config))
            process.stdin.close()
        line = await process.stdout.readline()
        return msgspec.json.decode(line, type=ListenerReport) if line.endswith(b"\n") else None

    async def _last_words(self, process: asyncio.subprocess.Process) -> ListenerReport:
        """Of a listener that has ended, or is about to, without a report."""
        return ListenerReport(error=_SILENT, message=f"the listener ended with status {await process.wait()}")

    async def _watch(self, place: Place, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        place.process = None
        if not self._stop:
            log.warning("listener on port %d ended with status %d; restarting it", place.port, status)
        self._ring.reclaim()
        self._wake.set()

    # --- the run ------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Keep the places filled until told to stop, until nobody needs them, or until another writer has the ring.

        Stopping takes seconds, in which a writer may come and be killed. Whoever comes then has listeners stopped that
        it did not start, and its own supervisor may not be there yet: so the ring is served on.
        """
        while True:
            await self._serve()
            writer_was_there = await self._stop_listeners()
            if self._told or self._ring.native.keeper_alive or not writer_was_there:
                break
            log.warning("the writer that took over the ring has ended; continuing to serve")
            self._stop = False
            self._lifetime = Lifetime(self._config.listener.settings.linger_s)

    async def _serve(self) -> None:
        while not self._stop:
            self.fill()
            if not all(place.process for place in self.places):
                self._ring.reclaim()  # adopted listeners have no watcher
            _, _, ready, reading = self._ring.native.state_counts()
            writer_alive = self._ring.native.keeper_alive
            if self._lifetime.tick(time.monotonic(), writer_alive=writer_alive, unread=ready + reading) is Phase.STOP:
                log.info("the writer ended, and all payloads are consumed or linger_s is over; stopping")
                break
            if self._succeeded():
                log.info("another writer took over the ring; stopping")
                break
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._wake.wait()

    async def _stop_listeners(self) -> bool:
        """SIGTERM to own and adopted listeners; SIGKILL to those that do not go. True: a writer was seen meanwhile."""
        self._stop = True
        writer_was_there: bool = self._ring.native.keeper_alive
        for place in self.places:
            if place.starting is not None:
                place.starting.cancel()
        await asyncio.gather(*(each.starting for each in self.places if each.starting), return_exceptions=True)
        for pid in self._listener_pids():
            send(signal.SIGTERM, pid)
        give_up = time.monotonic() + DRAIN_S + 2.0
        while self._living() or any(place.process for place in self.places):
            if time.monotonic() > give_up:
                log.warning("listeners %s did not stop after SIGTERM; killing them", sorted(self._listener_pids()))
                for pid in self._listener_pids():
                    send(signal.SIGKILL, pid)
                give_up = time.monotonic() + 5.0
            await asyncio.sleep(0.02)
            writer_was_there = writer_was_there or self._ring.native.keeper_alive
        self._ring.reclaim()
        return writer_was_there

    def _listener_pids(self) -> set[int]:
        own = {place.process.pid for place in self.places if place.process is not None}
        return own | {pid for pid, _ in self._living().values()}


async def _supervise(config: SupervisorConfig) -> int:
    loop = asyncio.get_running_loop()
    for _ in range(int(_PREDECESSOR_S / 0.05)):
        if not supervised(config.listener.segment):
            break
        await asyncio.sleep(0.05)
    with attached(config.listener.segment, "observer") as ring, holding(ring.name):
        supervisor = Supervisor(ring, config)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, supervisor.request_stop)
        supervisor.fill()
        if config.first:
            await supervisor.filled_at_first()
        failed = supervisor.unserved()
        if failed:
            answer(SupervisorReport(error=failed[0].last_error.error, message=failed[0].last_error.message))
            await supervisor._stop_listeners()
            return 1
        answer(SupervisorReport(ports=ring.native.ports()))
        await supervisor.run()
        ring.native.unlink_if_last()  # lingering is over: what is still unread has had its time
    return 0


def main() -> int:
    """Entry point. Exit status 0 after an orderly stop, 1 when a listener could not start."""
    keep_stdout_for_the_answer()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=SupervisorConfig)
    logging.basicConfig(level=config.listener.log_level, handlers=[handler(config.listener.log_format, "supervisor")])
    try:
        return uvloop.run(_supervise(config))
    except TransportError as error:
        answer(SupervisorReport(error=type(error).__name__, message=str(error)))
        return 1


if __name__ == "__main__":
    sys.exit(main())
