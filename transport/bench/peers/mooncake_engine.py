"""Mooncake Transfer Engine over TCP: the payloads' memory registered, read by address into registered buffers."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mooncake.engine import TransferEngine

if TYPE_CHECKING:
    from transport.bench.peers.harness import Bytes, Content, Link

_HOST = "127.0.0.1"


def _registered(arrays: Sequence[Bytes]) -> Any:
    engine = TransferEngine()
    if engine.initialize(_HOST, "P2PHANDSHAKE", "tcp", ""):
        raise ConnectionError("the transfer engine does not start")
    for array in arrays:
        if engine.register_memory(array.ctypes.data, array.nbytes):
            raise ConnectionError("the transfer engine does not register memory")
    return engine


def serve(content: Content, slots: int, link: Link) -> None:
    """Offer registered memory."""
    payloads = [content.payload(number).copy() for number in range(slots)]
    engine = _registered(payloads)
    places = [payload.ctypes.data for payload in payloads]
    link.ready(json.dumps({"engine": f"{_HOST}:{engine.get_rpc_port()}", "payloads": places}))
    link.wait()


class Client:
    """A blocking read, which releases the interpreter, by a thread for each that is under way."""

    def __init__(self, address: str, buffers: Sequence[Bytes], concurrency: int) -> None:
        offered = json.loads(address)
        self._engine = _registered(buffers)
        self._peer = offered["engine"]
        self._sources = offered["payloads"]
        self._targets = [buffer.ctypes.data for buffer in buffers]
        self._size = buffers[0].nbytes
        self._concurrency = concurrency

    def fetch(self, requests: Sequence[tuple[int, int]]) -> list[float]:
        """Each thread takes the next request when its last is done."""
        waiting = deque(requests)
        times: list[float] = []
        others = [threading.Thread(target=self._run, args=(waiting, times)) for _ in range(self._concurrency - 1)]
        for other in others:
            other.start()
        self._run(waiting, times)
        for other in others:
            other.join()
        if len(times) != len(requests):
            raise ConnectionError("a read failed")
        return times

    def _run(self, waiting: deque[tuple[int, int]], times: list[float]) -> None:
        while waiting:
            try:
                payload, at = waiting.popleft()
            except IndexError:  # another thread was faster
                return
            begun = time.perf_counter()
            if self._engine.transfer_sync_read(self._peer, self._targets[at], self._sources[payload], self._size):
                raise ConnectionError("the read failed")
            times.append(time.perf_counter() - begun)

    def close(self) -> None:
        """The engine ends with the process."""


def connect(content: Content, address: str, buffers: Sequence[Bytes], concurrency: int) -> Client:
    """To the other engine."""
    return Client(address, buffers, concurrency)
