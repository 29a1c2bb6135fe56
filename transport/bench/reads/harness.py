"""What all peers share: the payloads, the server's process, the clock and the verification. A program of its own.

    python harness.py SCRIPT SIZE CONCURRENCY SECONDS SLOTS      prints one JSON line: a `Tally.sample`

It needs numpy only, since it runs in environments that do not have this package. SCRIPT, in benchmarks/peers/reads, has
two functions:

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
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_END_S = 10.0
_STEP = 64  # a cache line: every payload is as aligned as any other
_PAYLOADS = 4096
_MOST_SHARE = 4  # of the clock's seconds; verifying takes longer than reading where no bytes are moved


class Content:
    """What is in payload ``number`` of ``size`` bytes: known on both sides from the number, and random.

    Payloads are windows into one random block, so that two of them differ at nearly every byte, and expecting a
    thousand of them costs the memory of one.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        block = np.random.default_rng(size).bytes(size + _STEP * _PAYLOADS)
        self._block = np.frombuffer(block, np.uint8)

    def payload(self, number: int) -> Bytes:
        """The bytes of one payload, read-only; numbers repeat after 4096."""
        begin = _STEP * (number % _PAYLOADS)
        return self._block[begin : begin + self.size]

    def verify(self, number: int, data: Bytes) -> None:
        """Raise ValueError unless ``data`` is all of this payload."""
        if not np.array_equal(data, self.payload(number)):
            raise ValueError(f"content mismatch: payload {number} of {self.size} bytes differs from what was written")


class Tally:
    """Times of single reads, and how long all of them took together, after some batches of warm-up."""

    def __init__(self, seconds: float, warm_up_batches: int = 2) -> None:
        self._seconds = seconds
        self._to_skip = warm_up_batches
        self._begun = 0.0
        self.times_s: list[float] = []
        self.busy_s = 0.0
        self.bytes = 0

    def enough(self) -> bool:
        """Whether reads have taken the seconds that were asked for, or all else has taken a multiple of them."""
        if not self.times_s:
            return False
        return self.busy_s >= self._seconds or time.perf_counter() - self._begun >= _MOST_SHARE * self._seconds

    def add(self, times_s: Sequence[float], busy_s: float, size: int) -> None:
        """A batch of reads that moved ``size`` bytes in ``busy_s`` seconds."""
        if self._to_skip:
            self._to_skip -= 1
            self._begun = time.perf_counter()
            return
        self.times_s.extend(times_s)
        self.busy_s += busy_s
        self.bytes += size

    def sample(self) -> dict[str, float]:
        """GB/s, microseconds per read, and how many times that is of."""
        times = sorted(self.times_s)
        return {
            "gb_per_s": self.bytes / self.busy_s / 1e9,
            "us_p50": statistics.median(times) * 1e6,
            "us_p99": percentile(times, 0.99) * 1e6,
            "reads": len(times),
        }


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` (0 to 1) of the ordered values do not exceed."""
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


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
