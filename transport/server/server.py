"""UCXXServer: what a rollout worker starts so that its ring can be read from other hosts.

Two modes. "process" (default): a supervisor process with one listener process per port. The rollout worker's GIL and
crashes do not affect them, and its published payloads stay readable for ``linger_s`` after it ended.
"thread": one listener per port on one loop in a thread of this process, for tests and small uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Literal, NoReturn, Self

import msgspec
import uvloop

from transport import errors
from transport.errors import ClosedError, InternalError, TransportError, UsageError
from transport.ring.buffer import MAX_READERS, SharedRingBuffer
from transport.runtime.arguments import expect, seconds, several, whole
from transport.runtime.logs import LogFormat
from transport.runtime.loop_thread import AtExit, gone
from transport.server.after_writer import AfterWriter
from transport.server.listener import Listener
from transport.server.process import DRAIN_S, ListenerConfig, is_listener, send
from transport.server.supervisor import SupervisorConfig, SupervisorReport
from transport.settings import DEFAULTS, Settings
from transport.wire.addresses import advertised
from transport.wire.library import library
from transport.wires import Wire

log = logging.getLogger(__name__)

MAX_PORTS = MAX_READERS - 1  # each listener takes one of the ring's 16 owner numbers, the writer another

_START_TIMEOUT_S = 60.0
_STARTS = 3  # of a supervisor that ends before it reported
_STARTS_IF_KILLED = 10  # by SIGKILL from outside, which says nothing about the supervisor
_DIED = "died"  # stands for an error's name
_RESTART_PAUSE_S = 0.1  # doubled at each failure in a row
_RESTART_MOST_S = 10.0


class UCXXServer:
    """Serves a ring on ports of this host.

    Args:
        ring: the writer's ring.
        ports: one listener each; 0 is assigned by the system. `ports` reports the actual ones after `start`.
        addresses: what tickets advertise, best first; default: that of an RDMA interface if there is
            one, else that of the default route.
        bind: local IPv4 address the listeners listen on, and which tickets then advertise unless ``addresses`` says
            otherwise; "": all addresses of this host.
        secret: shared secret that clients must prove to have.
        wires: the wires UCX may use ("shm", "tcp", "rdma", "cuda"); None: UCX chooses.
        mode: "process" or "thread", see above.
        linger_s: how long listeners outlive a killed writer that left unread payloads; default from settings.
        after_writer: what the supervisor runs when the writer has ended without `close`; not with mode "thread".
        log_level, log_format: of what supervisor and listeners write to standard error.
    """

    def __init__(
        self,
        ring: SharedRingBuffer,
        ports: Sequence[int] = (0,),
        *,
        addresses: Sequence[str] | None = None,
        bind: str = "",
        settings: Settings = DEFAULTS,
        secret: bytes | None = None,
        wires: frozenset[Wire] | None = None,
        mode: Literal["process", "thread"] = "process",
        linger_s: float | None = None,
        log_level: str = "WARNING",
        log_format: LogFormat = "text",
        after_writer: AfterWriter | None = None,
    ) -> None:
        expect(ring, SharedRingBuffer, "ring of UCXXServer()", "a SharedRingBuffer")
        ports = several(ports, object, "ports", "several, in a tuple")
        ports = [whole(port, "ports") for port in ports]
        expect(settings, Settings, "settings", "Settings")
        expect(bind, str, "bind", "text, an IPv4 address of this host, or nothing for all")
        seconds(linger_s, "linger_s", none=True)
        if secret is not None:
            expect(secret, bytes, "secret", "bytes")
        if addresses is not None:
            addresses = several(addresses, str, "addresses", "several, in a tuple")
        if mode not in ("process", "thread"):
            raise UsageError(f"mode={mode!r}; choose 'process' or 'thread'")
        if not 1 <= len(ports) <= MAX_PORTS:
            raise UsageError(f"{len(ports)} ports; a ring is served on 1 to {MAX_PORTS}")
        for port in ports:
            if not 0 <= port <= 65535:
                raise UsageError(f"port {port} is not in 0..65535 (0: assigned by the system)")
        if len(set(filter(None, ports))) != len([port for port in ports if port]):
            raise UsageError(f"ports {tuple(ports)} name one port twice")
        if linger_s is not None:
            settings = msgspec.structs.replace(settings, linger_s=linger_s)
        self._ring = ring
        self._wanted = tuple(ports)
        if addresses is None:
            addresses = (bind,) if bind else advertised()
        self._addresses = tuple(addresses)
        self._mode = mode
        self._after_writer = after_writer
        self._config = ListenerConfig(
            segment=ring.name,
            port=0,
            settings=settings.validate(),
            secret=secret,
            wires=wires,
            bind=bind,
            log_level=log_level,
            log_format=log_format,
        )
        self._run: _Processes | _Thread | None = None
        self._closing = False

    def __reduce__(self) -> NoReturn:
        """Raises UsageError, for `pickle` and `copy`."""
        raise UsageError("a server is not pickled: a ticket is enough to read from it")

    def __repr__(self) -> str:
        return f"<UCXXServer {self._mode} ports {self.ports} of ring {self._ring.ring_id[:8]}>"

    @property
    def ports(self) -> tuple[int, ...]:
        """Ports that are listened on; empty before `start`."""
        return () if self._run is None or self._closing else self._ring.native.ports()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses that tickets advertise."""
        return self._addresses

    def start(self) -> Self:
        """Start listening and wait until every port answers.

        Raises:
            BusyPortError: another program has one of the ports; no listener is left running.
            MissingDependencyError: ucxx is not installed.
        """
        if self._run is not None:
            raise UsageError("this server has been started already")
        library()  # raises for a missing ucxx here instead of in a child's log
        self._ring.native.addresses = ",".join(self._addresses)
        run: _Processes | _Thread | None = None
        try:
            if self._mode == "process":
                run = _Processes(self._ring, self._config, self._wanted, self._after_writer)
            else:
                run = _Thread(self._ring, self._config)
            ports = run.start(self._wanted)
            self._run, self._closing = run, False
            self._ring.native.set_ports(ports)
            return self
        except BaseException:  # also for Ctrl-C: the caller has no object yet with which to stop the processes
            self._run = None
            if run is not None:
                run.stop()
            raise

    def close(self, drain_s: float = 0.0) -> None:
        """Stop listening. Idempotent. An interrupt ends the wait for readers; call again to finish an interrupted stop.

        Args:
            drain_s: wait this long for unread payloads to be consumed first. Payloads that are still unread afterwards
                stay in the ring, but no listener serves them.
        """
        run = self._run
        if run is None:
            return
        self._closing = True
        try:
            self._drain(drain_s)
        finally:
            self._stop(run)
        if not self._ring.native.closed:
            self._ring.native.set_ports(())
            self._ring.reclaim()

    def _stop(self, run: _Processes | _Thread) -> None:
        try:
            run.stop()
        except Exception:  # a second try would fail as well; after an interrupt the next `close` tries again
            self._run = None
            raise
        self._run = None

    def _drain(self, drain_s: float) -> None:
        give_up = time.monotonic() + drain_s
        native = self._ring.native
        while not native.closed and (left := give_up - time.monotonic()) > 0:
            seen = native.freed_event()
            free, writing, _, _ = native.state_counts()
            if free + writing == self._ring.slot_count:
                return
            native.wait_freed(seen, min(left, 1.0))

    def __enter__(self) -> Self:
        return self if self._run is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


def _raise_reported(name: str, message: str) -> None:
    """Raise an error that a child process reported, with its class."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, TransportError):
        raise kind(message)
    raise InternalError(f"the supervisor failed: {name}: {message}")


class _Processes:
    """The supervisor process, and a thread that restarts it when it dies."""

    def __init__(
        self,
        ring: SharedRingBuffer,
        config: ListenerConfig,
        ports: tuple[int, ...],
        after_writer: AfterWriter | None,
    ) -> None:
        self._ring = ring
        self._config = SupervisorConfig(ports=ports, listener=config, after_writer=after_writer)
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        # Invariant: no process is spawned after stop() has begun. Held while one is spawned, not until it has reported.
        self._spawning = threading.RLock()
        self._watcher: threading.Thread | None = None
        self._starting: threading.Thread | None = None

    def start(self, _: tuple[int, ...]) -> tuple[int, ...]:
        # In a thread, where Ctrl-C is not raised: an interrupt between spawning and storing the process would leak it.
        reported: Future[SupervisorReport] = Future()
        self._starting = threading.Thread(
            target=self._report_to, args=(reported,), name="transport supervisor start", daemon=True
        )
        self._starting.start()
        report = reported.result()
        self._starting.join()
        if report.error:
            _raise_reported(report.error, report.message)
        # a restarted supervisor adopts the listeners on these ports
        self._config = msgspec.structs.replace(self._config, ports=report.ports, first=False)
        self._watcher = threading.Thread(target=self._watch, name="transport supervisor watch", daemon=True)
        self._watcher.start()
        return report.ports

    def _report_to(self, reported: Future[SupervisorReport]) -> None:
        try:
            reported.set_result(self._started())
        except BaseException as error:
            reported.set_exception(error)

    def _started(self) -> SupervisorReport:
        for starts in itertools.count(1):
            report = self._spawn()
            killed = self._process is not None and self._process.returncode == -signal.SIGKILL
            tries = _STARTS_IF_KILLED if killed else _STARTS
            if report.error != _DIED or starts >= tries or self._stopping.is_set():
                break
            log.warning("%s during its start; restarting it", report.message)
            self._stop_orphans()  # else its listeners would keep the ports of the next supervisor
        return report

    def _spawn(self) -> SupervisorReport:
        with self._spawning:
            if self._stopping.is_set():
                return SupervisorReport(error=_DIED, message="the server was stopped while it started")
            process = subprocess.Popen(
                # -P: not from the current directory, where any module could read the supervisor's secret
                [sys.executable, "-P", "-m", "transport.server.supervisor"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C goes to the writer only, which stops its listeners gracefully
            )
            self._process = process
        if process.stdin is None or process.stdout is None:
            raise InternalError("the supervisor has no pipes")
        killer = threading.Timer(_START_TIMEOUT_S, process.kill)
        killer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(msgspec.json.encode(self._config))
                process.stdin.close()
            line = process.stdout.readline()
        finally:
            killer.cancel()
            killer.join()
            process.stdout.close()
        if not line:
            process.wait()
            return SupervisorReport(error=_DIED, message=f"the supervisor ended with status {process.returncode}")
        report = msgspec.json.decode(line, type=SupervisorReport)
        if report.error:
            process.wait()
        return report

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
            except (OSError, msgspec.MsgspecError) as error:  # cannot start a process now; tried again
                report = SupervisorReport(error=type(error).__name__, message=str(error))
            if report.error and not self._stopping.is_set():  # else `stop` has ended it
                log.error("the supervisor did not start: %s: %s", report.error, report.message)

    def stop(self) -> None:
        """SIGTERM; SIGKILL if the supervisor has not ended within the drain bound."""
        with self._spawning:
            self._stopping.set()
            process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(DRAIN_S + 10.0)
            except subprocess.TimeoutExpired:
                log.error("the supervisor did not stop within %.0f s; killing it", DRAIN_S + 10.0)
                process.kill()
                process.wait()
        for thread in (self._starting, self._watcher):
            if thread is not None and thread.is_alive():
                thread.join()
        self._stop_orphans()

    def _stop_orphans(self) -> None:
        """End listeners whose supervisor was killed just before `stop`, so that no new one adopted them."""
        give_up = time.monotonic() + DRAIN_S + 2.0
        signalled: set[int] = set()
        while not self._ring.native.closed:
            orphans = {owner.pid for owner in self._ring.native.owners() if owner.alive and is_listener(owner.pid)}
            if not orphans:
                return
            late = time.monotonic() > give_up
            for pid in orphans if late else orphans - signalled:
                send(signal.SIGKILL if late else signal.SIGTERM, pid)
            signalled |= orphans
            time.sleep(0.02)


class _Thread:
    """Listeners on a loop in a thread of this process."""

    def __init__(self, ring: SharedRingBuffer, config: ListenerConfig) -> None:
        self._ring = ring
        self._config = config
        self._listeners: list[Listener] = []
        self._stopping = threading.Lock()  # Invariant: its holder has seen the thread end, or ends it
        self._stopped = False  # on the loop, which has nothing more to do
        self._pid = os.getpid()
        self._at_exit: AtExit | None = None
        self._thread = threading.Thread(target=self._run, name="transport listeners", daemon=True)
        self._loop = uvloop.new_event_loop()  # last: it has descriptors until it is closed

    def _run(self) -> None:
        self._loop.run_forever()

    def _call(self, coroutine: Coroutine[Any, Any, tuple[int, ...]]) -> tuple[int, ...]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_START_TIMEOUT_S)

    def start(self, ports: tuple[int, ...]) -> tuple[int, ...]:
        self._thread.start()
        self._at_exit = AtExit(self.stop)
        return self._call(self._start(ports))

    async def _start(self, ports: tuple[int, ...]) -> tuple[int, ...]:
        config = self._config
        for port in ports:
            listener = Listener(
                self._ring, settings=config.settings, secret=config.secret, wires=config.wires, bind=config.bind
            )
            listener.start(port)
            self._listeners.append(listener)
        return tuple(listener.port for listener in self._listeners)

    async def _stop(self) -> tuple[int, ...]:
        await asyncio.gather(*(listener.stop() for listener in self._listeners))
        self._listeners.clear()
        self._stopped = True
        return ()

    def stop(self) -> None:
        """Close the listeners on their own loop, then end the thread. Idempotent; also called at the process's exit.

        Raises ClosedError in a forked child: the listeners belong to the parent, which continues to serve.
        """
        if os.getpid() != self._pid:
            raise ClosedError("this server belongs to the process that forked this one")
        if gone(self._pid):
            return
        with self._stopping:
            if self._loop.is_closed():
                return
            if self._thread.is_alive() and not self._stopped:  # else an earlier call was interrupted behind it
                self._call(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            if self._thread.ident is not None:  # else it was interrupted before it began
                self._thread.join()
            self._loop.close()
        if self._at_exit is not None:
            self._at_exit.cancel()
