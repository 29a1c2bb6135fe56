"""A redis-server for one repetition: `python benchmarks/job/redis_service.py`. It ends with this process's input.

On a free port of the loopback, without persistence: what is measured is the way of the payloads, not a disk.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from transport.errors import LinkError, MissingDependencyError
from transport.wire.addresses import LOOPBACK

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.job.work import Job, main

PROGRAM = "redis-server"
_START_S = 20.0
_LOOK_S = 0.02


def check() -> None:
    """Raise MissingDependencyError where there is no redis-server."""
    if shutil.which(PROGRAM) is None:
        raise MissingDependencyError(f"{PROGRAM} is not installed; run: apt-get install {PROGRAM}")


@contextlib.contextmanager
def serving(_: Job) -> Iterator[str]:
    """host:port of the server, which is gone when the block ends."""
    check()
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="bench-job-redis-") as folder:
        options = {"bind": LOOPBACK, "port": str(port), "dir": folder, "save": "", "appendonly": "no"}
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        server = subprocess.Popen(
            [PROGRAM, *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            _wait_for(port, server)
            yield f"{LOOPBACK}:{port}"
        finally:
            server.kill()
            server.wait()


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + _START_S
    while time.monotonic() < give_up and server.poll() is None:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection((LOOPBACK, port)):
            return
        time.sleep(_LOOK_S)
    raise LinkError(f"{PROGRAM} is unreachable on {LOOPBACK}:{port}; status {server.poll()}")


if __name__ == "__main__":
    sys.exit(main("service", serving))
