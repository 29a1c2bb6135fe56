"""Ways to run a server's listeners: as processes that a supervisor process keeps alive, or in a thread of this one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, wait

import msgspec

from transport import errors
from transport.decoders import json_decoder
from transport.errors import InternalError, TransportError
from transport.ring.buffer import SharedRingBuffer
from transport.runtime import threads
from transport.runtime.blocking_calls import started
from transport.runtime.forks import unforked
from transport.runtime.loop_thread import LoopThread
from transport.runtime.waits import Flag
from transport.server.ending import END_S, LOOK_S, SUPERVISOR, Ending, listeners_of
from transport.server.listener import Listener
from transport.server.starting import ListenerConfig, StartReport
from transport.server.supervisor import STOP_S, SupervisorConfig

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0
_STARTS = 3  # of a supervisor that ends before it reported
_STARTS_IF_KILLED = 10  # by SIGKILL from outside, which says nothing about the supervisor
_DIED = "died"  # stands for an error's name
_RESTART_PAUSE_S = 0.1  # doubled at each failure in a row
_RESTART_MOST_S = 10.0


def _raise_reported(name: str, message: str) -> None:
    """Raise an error that a child process reported, with its class."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, TransportError):
        raise kind(message)
    raise InternalError(f"the supervisor failed: {name}: {message}")


class Processes:
    """The supervisor process, and a thread that restarts it when it dies."""

    def __init__(
        self,
        ring: SharedRingBuffer,
        config: ListenerConfig,
        ports: tuple[int, ...],
    ) -> None:
        self._ring = ring
        self._config = SupervisorConfig(ports=ports, listener=config)
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = Flag()
        # Invariant: no process is spawned after stop() has begun. Held while one is spawned, not until it has reported.
        self._spawning = threading.RLock()
        self._watcher: threading.Thread | None = None
        self._starting: Future[StartReport] | None = None

    def start(self) -> tuple[int, ...]:
        # In a thread, where Ctrl-C is not raised: an interrupt between spawning and storing the process would leak it.
        self._starting = started(self._started)
        report = self._starting.result()
        if report.error:
            _raise_reported(report.error, report.message)
        # a restarted supervisor adopts the listeners on these ports
        self._config = msgspec.structs.replace(self._config, ports=report.ports, first=False)
        self._watcher = threading.Thread(target=self._watch, name="transport supervisor watch", daemon=True)
        threads.start(self._watcher)
        return report.ports

    def _started(self) -> StartReport:
        for starts in itertools.count(1):
            report = self._spawn()
            killed = self._process is not None and self._process.returncode == -signal.SIGKILL
            tries = _STARTS_IF_KILLED if killed else _STARTS
            if report.error != _DIED or starts >= tries or self._stopping.is_set:
                break
            log.warning("%s during its start; restarting it", report.message)
            self._stop_orphans()  # else its listeners would keep the ports of the next supervisor
        return report

    def _spawn(self) -> StartReport:
        with self._spawning, unforked:  # a forked child would keep the pipe open that is read to its end
            if self._stopping.is_set:
                return StartReport(error=_DIED, message="the server was stopped while it started")
            process = subprocess.Popen(
                # -P: not from the current directory, where any module could read the supervisor's secret
                [sys.executable, "-P", "-m", "transport.server.supervisor"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Where ours was closed, descriptor 2 may be a file of the program.
                stderr=subprocess.DEVNULL if sys.__stderr__ is None else None,
                start_new_session=True,  # Ctrl-C goes to the writer only, which stops its listeners gracefully
            )
            self._process = process
            if process.stdin is None or process.stdout is None:
                raise InternalError("the supervisor has no pipes")
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(msgspec.json.encode(self._config))
                process.stdin.close()
        try:
            report = self._reported(process)
        except BaseException:  # nobody knows whether it serves
            process.kill()
            raise
        if report.error:
            process.wait()
        return report

    @staticmethod
    def _reported(process: subprocess.Popen[bytes]) -> StartReport:
        assert process.stdout is not None
        with process.stdout:
            killer = threading.Timer(_START_TIMEOUT_S, process.kill)
            threads.start(killer)
            try:
                line = process.stdout.readline()
            finally:
                killer.cancel()
                killer.join()
        if line:
            return json_decoder(StartReport)(line)
        return StartReport(error=_DIED, message=f"the supervisor ended with status {process.wait()}")

    def _watch(self) -> None:
        pause_s = _RESTART_PAUSE_S
        while self._process is not None:
            begun = time.monotonic()
            status = self._process.wait()
            lived_s = time.monotonic() - begun
            pause_s = _RESTART_PAUSE_S if lived_s > _RESTART_MOST_S else min(2 * pause_s, _RESTART_MOST_S)
            if self._stopping.wait(pause_s):
                return
            log.warning("the supervisor ended with status %d; restarting it", status)
            try:
                report = self._spawn()
            except Exception as error:  # of whatever class: tried again
                report = StartReport(error=type(error).__name__, message=str(error))
            if report.error and not self._stopping.is_set:  # else `stop` has ended it
                log.error("the supervisor did not start: %s: %s", report.error, report.message)

    def stop(self) -> None:
        """SIGTERM; SIGKILL if the supervisor has not ended within the drain bound."""
        with self._spawning:
            self._stopping.set()
            process = self._process
        if process is not None:
            ending = Ending(f"the server of {self._ring.name}", STOP_S + 0.5, math.inf, SUPERVISOR)
            while process.poll() is None and ending.goes_on({process.pid}):
                time.sleep(LOOK_S)
        if self._starting is not None:
            wait([self._starting])
        if self._watcher is not None and self._watcher.is_alive():
            self._watcher.join()
        self._stop_orphans()

    def _stop_orphans(self) -> None:
        """End listeners whose supervisor was killed just before `stop`, so that no new one adopted them.

        Killed ones are waited for: while they hold their places, a writer that closes leaves the segment to them.
        """
        ending = Ending(f"the server of {self._ring.name}", END_S + 0.5, 2 * END_S + 3.0)
        while not self._ring.native.closed and ending.goes_on(*listeners_of(self._ring.native)):
            time.sleep(LOOK_S)


class OneThread:
    """Listeners on a loop in a thread of this process."""

    def __init__(self, ring: SharedRingBuffer, config: ListenerConfig, ports: tuple[int, ...]) -> None:
        self._ring = ring
        self._config = config
        self._ports = ports
        self._listeners: list[Listener] = []
        self._thread: LoopThread | None = None

    def start(self) -> tuple[int, ...]:
        self._thread = LoopThread("transport listeners")
        self._thread.closes(self._stop)
        return self._thread.run(self._start(), _START_TIMEOUT_S)

    async def _start(self) -> tuple[int, ...]:
        config = self._config
        for port in self._ports:
            listener = Listener(
                self._ring, settings=config.settings, secret=config.secret, wires=config.wires, bind=config.bind
            )
            listener.start(port)
            self._listeners.append(listener)
        return tuple(listener.port for listener in self._listeners)

    async def _stop(self) -> None:
        await asyncio.gather(*(listener.stop() for listener in self._listeners))

    def stop(self) -> None:
        """Close the listeners on their own loop, then end the thread. Idempotent; also called at the process's exit."""
        if self._thread is not None:
            self._thread.close()
