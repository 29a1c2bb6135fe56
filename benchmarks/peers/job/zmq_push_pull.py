"""ZeroMQ PUSH/PULL over TCP: every trainer is connected to every writer. Nothing is acknowledged or given again.

Payloads of less than 64 KiB are one frame, which is faster. Larger ones are two, header and body, and the body is
neither copied into ZeroMQ nor out of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq

_TWO_FRAMES_BYTES = 64 << 10
_HEADER = 32
_LOOK_MS = 500
_LINGER_MS = 0


class Writer:
    """A PUSH socket; its high-water mark and that of the PULL sockets are the window."""

    helpers: Sequence[int] = ()

    def __init__(self, job: Any) -> None:
        self._job = job
        self._two_frames = job.size_bytes >= _TWO_FRAMES_BYTES
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.sndhwm = max(1, job.window // 2 // job.trainers)
        self._socket.sndtimeo = _LOOK_MS
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"

    def prepare(self, body: bytes) -> bytes:
        """As it is."""
        return body

    def write_many(self, payloads: Sequence[tuple[bytes, bytes]]) -> None:
        """A message each; waits at the high-water mark."""
        for payload in payloads:
            while True:
                try:
                    if self._two_frames:
                        self._socket.send_multipart(payload, copy=False)
                    else:
                        self._socket.send(b"".join(payload))
                    break
                except zmq.Again:
                    self._job.check()

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=_LINGER_MS)


class Trainer:
    """A PULL socket."""

    def __init__(self, job: Any) -> None:
        self._two_frames = job.size_bytes >= _TWO_FRAMES_BYTES
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.rcvhwm = max(1, job.window // 2 // job.trainers)
        for address in job.addresses:
            self._socket.connect(address)

    def claim(self, n: int, timeout_s: float) -> list[Any] | None:
        """The first message that comes, and what has come besides."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        messages: list[Any] = []
        try:
            while len(messages) < n:
                if self._two_frames:
                    messages.append(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
                else:
                    messages.append(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            pass
        return messages

    def consume(self, batch: list[Any]) -> Sequence[Any]:
        """There is nobody to tell."""
        if self._two_frames:
            return [(header.buffer, body.buffer) for header, body in batch]
        return [(message[:_HEADER], memoryview(message)[_HEADER:]) for message in batch]

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=_LINGER_MS)
