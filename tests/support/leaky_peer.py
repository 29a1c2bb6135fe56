"""A peer of benchmarks/job for tests: payloads over a plain socket, but one of them is lost and another comes twice."""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from typing import Any

LOST = 21
TWICE = 23


class Writer:
    helpers: Sequence[int] = ()

    def __init__(self, job: Any) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._connection: socket.socket | None = None
        self._number = 0
        self.address = str(self._listener.getsockname()[1])

    def prepare(self, body: bytes) -> bytes:
        return body

    def write_many(self, payloads: Sequence[tuple[bytes, bytes]]) -> None:
        if self._connection is None:
            self._connection, _ = self._listener.accept()
        for payload in payloads:
            times = {LOST: 0, TWICE: 2}.get(self._number, 1)
            self._connection.sendall(b"".join(payload) * times)
            self._number += 1

    def close(self) -> None:
        self._listener.close()
        if self._connection is not None:
            self._connection.close()


class Trainer:
    def __init__(self, job: Any) -> None:
        self._size = job.size_bytes
        self._socket = socket.create_connection(("127.0.0.1", int(job.addresses[0])))

    def claim(self, n: int, timeout_s: float) -> bytes | None:
        if not select.select([self._socket], [], [], timeout_s)[0]:
            return None
        return self._socket.recv(self._size, socket.MSG_WAITALL) or None

    def consume(self, batch: bytes) -> Sequence[tuple[bytes, bytes]]:
        return [(batch[:32], batch[32:])]

    def close(self) -> None:
        self._socket.close()
