"""pyzmq: a DEALER asks a ROUTER over TCP, as many requests under way as wanted; received into the buffer."""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import zmq

if TYPE_CHECKING:
    from benchmarks.peers.reads.harness import Link
    from transport.bench.reads.content import Bytes, Content

_REQUEST = struct.Struct("<Q")
_POLL_MS = 100


def serve(content: Content, slots: int, link: Link) -> None:
    """Payloads are sent from where they are, without a copy by Python."""
    payloads = [content.payload(number).copy() for number in range(slots)]
    router = zmq.Context().socket(zmq.ROUTER)
    router.set_hwm(0)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    link.ready(str(port))
    while not link.ended():
        if router.poll(_POLL_MS):
            identity, request = router.recv_multipart()
            router.send(identity, zmq.SNDMORE)
            router.send(payloads[_REQUEST.unpack(request)[0]], copy=False)


class Client:
    """One socket; answers come in the order of the requests."""

    def __init__(self, port: int, buffers: Sequence[Bytes], concurrency: int) -> None:
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.set_hwm(0)
        self._dealer.connect(f"tcp://127.0.0.1:{port}")
        self._buffers = buffers
        self._concurrency = concurrency

    def fetch(self, requests: Sequence[tuple[int, int]]) -> list[float]:
        """Ask ahead, and for one more with each answer."""
        times = []
        begun: deque[float] = deque()
        ahead = iter(requests)

        def ask() -> None:
            if (request := next(ahead, None)) is not None:
                begun.append(time.perf_counter())
                self._dealer.send(_REQUEST.pack(request[0]))

        for _ in range(self._concurrency):
            ask()
        for _, at in requests:
            if self._dealer.recv_into(self._buffers[at]) != self._buffers[at].nbytes:
                raise ConnectionError("size mismatch of the answer")
            times.append(time.perf_counter() - begun.popleft())
            ask()
        return times

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)


def connect(content: Content, address: str, buffers: Sequence[Bytes], concurrency: int) -> Client:
    """To the router's port."""
    return Client(int(address), buffers, concurrency)
