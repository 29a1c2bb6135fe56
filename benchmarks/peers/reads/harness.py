"""What all peers share: the payloads, the server's process, the clock and the verification. A program of its own.

    python harness.py SCRIPT SIZE CONCURRENCY SECONDS SLOTS      prints one JSON line: a `Tally.sample`

It needs numpy only, since it runs in environments that do not have this package. SCRIPT, beside this file, has two
functions:

    serve(content, slots, link)        in the server's process: offer payloads 0..slots-1, call link.ready(address),
                                       and answer until link.ended() or link.wait() says that it is over
    connect(content, address, buffers, concurrency) -> client with
        fetch([(payload, buffer)…]) -> seconds of each, at most ``concurrency`` under way at any time; every payload is
                                       asked for, and is complete in buffers[buffer] when its time ends
        close()

The same work for all: request → payload in the consumer's own buffer. A batch reads as many payloads as there are
slots, each into a buffer of its own; the clock stands while they are compared with what was to be read.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[3] / "transport" / "bench" / "reads"))

from content import Content, Tally

_END_S = 10.0


class Link:
    """The server's side of its pipes to the measuring process."""

    def __init__(self) -> None:
        self._over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        sys.stdin.read()
        self._over.set()
        time.sleep(_END_S)
        os._exit(1)  # something of the peer's hangs

    def ready(self, address: str) -> None:
        """Say under which address the payloads are offered."""
        print(f"ready {address}", flush=True)

    def ended(self) -> bool:
        """Whether the measurement is over."""
        return self._over.is_set()

    def wait(self) -> None:
        """Until the measurement is over."""
        self._over.wait()


class Client(Protocol):
    """What `connect` of a peer returns."""

    def fetch(self, requests: Sequence[tuple[int, int]]) -> list[float]: ...
    def close(self) -> None: ...


class ServerProcess:
    """A peer's server in a process of its own, in a group that ends with it."""

    def __init__(self, name: str, size: int, slots: int) -> None:
        command = [sys.executable, __file__, "--serve", name, str(size), str(slots)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def address(self) -> str:
        """Where it serves; lines that the peer's library prints before are passed over."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, _, address = line.rstrip("\n").partition(" ")
            if word == "ready":
                return address
        raise RuntimeError(f"the server ended with status {self._process.wait()} before it was ready")

    def stop(self) -> None:
        """Ask it to end, and end what is left of its group."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S + 1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def measure(peer: Any, name: str, size: int, concurrency: int, seconds: float, slots: int) -> dict[str, Any]:
    """Run batches until reads have taken ``seconds``, and verify each."""
    content = Content(size)
    buffers = [np.ones(size, np.uint8) for _ in range(slots)]
    tally = Tally(seconds)
    server = ServerProcess(name, size, slots)
    try:
        client: Client = peer.connect(content, server.address(), buffers, concurrency)
        batch = 0
        while not tally.enough():
            # Turned by one every other time: a buffer that nothing was read into holds another payload.
            requests = [((at + batch % 2) % slots, at) for at in range(slots)]
            begun = time.perf_counter()
            times_s = client.fetch(requests)
            busy_s = time.perf_counter() - begun
            for payload, at in requests:
                content.verify(payload, buffers[at])
            tally.add(times_s, busy_s, size * slots)
            batch += 1
        client.close()
    finally:
        server.stop()
    return {**tally.sample(), "verified": True}


def main() -> None:
    """The measuring process, or with --serve the server's."""
    arguments = sys.argv[1:]
    serving = arguments[0] == "--serve"
    name, size, *rest = arguments[serving:]
    sys.path.insert(0, str(Path(name).parent))
    peer = importlib.import_module(Path(name).stem)
    if serving:
        peer.serve(Content(int(size)), int(rest[0]), Link())
        return
    concurrency, seconds, slots = int(rest[0]), float(rest[1]), int(rest[2])
    print(json.dumps(measure(peer, name, int(size), concurrency, seconds, slots)), flush=True)


if __name__ == "__main__":
    main()
