"""Floor of what plain Python does: a TCP socket per request under way, blocking, received into the buffer."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from in_threads import InThreads

if TYPE_CHECKING:
    from benchmarks.peers.reads.harness import Link
    from transport.bench.reads.content import Bytes, Content

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
    """A connection for each thread."""

    def __init__(self, port: int, buffers: Sequence[Bytes], concurrency: int) -> None:
        self._buffers = [buffer.data for buffer in buffers]
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(concurrency)]
        for each in self._sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._threads = InThreads(concurrency, self._read)
        self.fetch = self._threads.fetch

    def _read(self, thread: int, payload: int, at: int) -> None:
        connection = self._sockets[thread]
        connection.sendall(_REQUEST.pack(payload))
        target = self._buffers[at]
        if connection.recv_into(target, len(target), socket.MSG_WAITALL) != len(target):
            raise ConnectionError("the server closed the connection")

    def close(self) -> None:
        """Close the connections."""
        self._threads.close()
        for each in self._sockets:
            each.close()


def connect(content: Content, address: str, buffers: Sequence[Bytes], concurrency: int) -> Client:
    """``concurrency`` connections to the port."""
    return Client(int(address), buffers, concurrency)
