"""A redis-server of a run's own, which is killed, stopped, and started again."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from processes import die_with_parent

_FIRST_PORT = 6379  # below what the kernel gives away: nobody has it while the server is down
_PAUSE_S = 0.2  # between two starts of a server that does not stay, as on a full disk
_REWRITTEN_FROM = "8mb"  # of the append-only file: it is rewritten many times in a soak


def command(directory: Path, log: Path, port: int, bind: str = "127.0.0.1", **more: str) -> list[str]:
    """A server that keeps every answered write, as docs/CLUSTER.md demands. SystemExit: it is not installed."""
    if shutil.which("redis-server") is None:
        raise SystemExit("redis-server is missing: apt-get install redis-server")
    options = {
        "bind": bind, "port": str(port), "dir": str(directory), "logfile": str(log), "save": "", "appendonly": "yes",
        "appendfsync": "always", "auto-aof-rewrite-min-size": _REWRITTEN_FROM, **more,
    }  # fmt: skip
    return ["redis-server", *(word for name, value in options.items() for word in (f"--{name}", value))]


class RedisServer:
    """Started by `tend`, and again whenever it has ended.

    Args:
        directory: of its append-only file.
        log: what it says.
    """

    def __init__(self, directory: Path, log: Path) -> None:
        self.port = _free_port()
        self._command = command(directory, log, self.port)
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at = self._go_on_at = 0.0

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
            self._process, self._go_on_at = None, 0.0
            self._start_at = max(self._start_at, now + _PAUSE_S)
        if self._process is None and now >= self._start_at:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PATH": os.environ["PATH"]},  # of the machine's clock, and no member of the run
                preexec_fn=die_with_parent,
            )
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
            self._process.kill()
            self._process.wait()
            self._process = None


def _free_port() -> int:
    for port in range(_FIRST_PORT, _FIRST_PORT + 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise SystemExit("no port for redis-server")
