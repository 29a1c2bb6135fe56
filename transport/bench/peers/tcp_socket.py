"""Floor of what plain Python does: a TCP socket per request under way, blocking, received into the buffer."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transport.bench.peers.harness import Bytes, Content, Link

_REQUEST = struct.Struct("<Q")


def serve(content: Content, slots: int, link: Link) -> None:
    """A thread for each connection."""
    payloads = [content.payload(number).copy() for number in range(slots)]
    listening = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        request = bytearray(_REQUEST.size)
        while connection.recv_into(request, _REQUEST.size, socket.MSG_WAITALL) == _REQUEST.size:
            connection.sendall(payloads[_REQUEST.unpack(request)[0]])

    def accept() -> None:
        while True:
            threading.Thread(target=answer, args=(listening.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    link.ready(str(listening.getsockname()[1]))
    link.wait()


class Client:
    """A connection for each read under way, and beyond the first a thread for each."""

    def __init__(self, port: int, buffers: Sequence[Bytes], concurrency: int) -> None:
        self._buffers = [buffer.data for buffer in buffers]
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(concurrency)]
        for each in self._sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fetch(self, requests: Sequence[tuple[int, int]]) -> list[float]:
        """Each connection takes the next request when it has answered its last."""
        waiting = deque(requests)
        times: list[float] = []
        others = [threading.Thread(target=self._run, args=(each, waiting, times)) for each in self._sockets[1:]]
        for other in others:
            other.start()
        self._run(self._sockets[0], waiting, times)
        for other in others:
            other.join()
        return times

    def _run(self, connection: socket.socket, waiting: deque[tuple[int, int]], times: list[float]) -> None:
        while waiting:
            try:
                payload, at = waiting.popleft()
            except IndexError:  # another thread was faster
                return
            begun = time.perf_counter()
            connection.sendall(_REQUEST.pack(payload))
            target = self._buffers[at]
            if connection.recv_into(target, len(target), socket.MSG_WAITALL) != len(target):
                raise ConnectionError("the server closed the connection")
            times.append(time.perf_counter() - begun)

    def close(self) -> None:
        """Close the connections."""
        for each in self._sockets:
            each.close()


def connect(content: Content, address: str, buffers: Sequence[Bytes], concurrency: int) -> Client:
    """``concurrency`` connections to the port."""
    return Client(int(address), buffers, concurrency)
