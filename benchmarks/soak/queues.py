"""The soak's queue: the rings themselves, or a Redis server that the soak starts and kills."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from plan import MAX_DELIVERIES, Plan

from transport._ring import MAX_ATTEMPTS
from transport.claims.places import OnThisHost
from transport.errors import QueueError
from transport.queue import FoundRings, RedisQueue
from transport.queue.base import Claim, DeliveryState, TicketQueue
from transport.storage.urls import RedisURL, parse_url

_FIRST_PORT = 6379  # below what the kernel gives away: nobody has it while the server is down
_PAUSE_S = 0.2  # between two starts of a server that does not stay, as on a full disk
_REWRITTEN_FROM = "8mb"  # of the append-only file: it is rewritten many times in a soak
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class SaidRings(FoundRings):
    """The rings as the queue, for one who says beforehand which claims it ends otherwise than by consuming.

    A ring keeps no claims that have ended, and a listener keeps no reasons: what a killed trainer asked for last is
    known only from itself.

    Attributes:
        ending: called with claims, how they are to end, and why.
        ended: called afterwards, with claims of which it is known whether they ended so.
    """

    ending: Callable[[Sequence[Claim], DeliveryState, str], None] | None = None
    ended: Callable[[Sequence[Claim], bool], None]

    def discard(self, claim: Claim, reason: str) -> bool:
        """See `TicketQueue.discard`."""
        if self.ending is None:
            return super().discard(claim, reason)
        self.ending([claim], DeliveryState.DISCARDED, reason)
        good = super().discard(claim, reason)
        self.ended([claim], good)
        return good


def open_queue(plan: Plan, patience_s: float = 10.0) -> TicketQueue:
    """The queue of the plan. QueueError if it cannot be had within ``patience_s``."""
    lease_s = plan.settings.claim_lease_s
    scheme, _, prefix = plan.queue.partition(":")
    if scheme == "rings":
        return SaidRings(OnThisHost(prefix), lease_s=lease_s, max_deliveries=min(MAX_DELIVERIES, MAX_ATTEMPTS))
    url = parse_url(plan.queue)
    assert isinstance(url, RedisURL)
    return RedisQueue(url, lease_s=lease_s, max_deliveries=MAX_DELIVERIES, patience_s=patience_s)


def opened_in_time(plan: Plan, said: Callable[[str], object]) -> TicketQueue:
    """The queue, however long its server or its disk is away."""
    while True:
        try:
            return open_queue(plan)
        except QueueError as error:
            said(str(error))
            time.sleep(_PAUSE_S)


class RedisServer:
    """One that keeps every answered write, as docs/CLUSTER.md demands; started again whenever it has ended.

    Args:
        directory: of its append-only file.
        log: what it says.
    """

    def __init__(self, directory: Path, log: Path) -> None:
        if shutil.which("redis-server") is None:
            raise SystemExit("redis-server is missing: apt-get install redis-server")
        self._directory = directory
        self._log = log
        self.port = _free_port()
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at = 0.0
        self._go_on_at = 0.0

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    @property
    def quiet(self) -> bool:
        """It runs, as far as anybody here has told it to."""
        return self._process is not None and not self._go_on_at

    def kill(self, seconds: float) -> None:
        """SIGKILL; it is started again after ``seconds``."""
        if self._process is not None:
            self._process.kill()
            self._start_at = time.monotonic() + seconds

    def stop(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after ``seconds``."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)
            self._go_on_at = time.monotonic() + seconds

    def tend(self) -> None:
        """Start it if it is due; let it go on. Call it often."""
        now = time.monotonic()
        if self._process is not None and self._process.poll() is not None:
            self._process = None
            self._go_on_at = 0.0
            self._start_at = max(self._start_at, now + (_PAUSE_S if self.starts else 0.0))
        if self._process is None and now >= self._start_at:
            self._start()
        if self._go_on_at and now >= self._go_on_at and self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._go_on_at = 0.0

    def end_faults(self) -> None:
        """Let it go on, or start it, now."""
        self._start_at = 0.0
        self._go_on_at = min(self._go_on_at, 1e-9)
        self.tend()

    def end(self) -> None:
        """SIGKILL, for good."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        options = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(self._directory),
            "logfile": str(self._log),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always",
            "auto-aof-rewrite-min-size": _REWRITTEN_FROM,
        }
        self.starts += 1
        self._process = subprocess.Popen(
            ["redis-server", *(word for name, value in options.items() for word in (f"--{name}", value))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ["PATH"]},  # of the machine's clock, and no member of the run
            preexec_fn=lambda: _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )


def _free_port() -> int:
    for port in range(_FIRST_PORT, _FIRST_PORT + 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise SystemExit("no port for redis-server")
