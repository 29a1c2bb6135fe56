"""Mooncake Transfer Engine over TCP: the payloads' memory registered, read by address into registered buffers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from in_threads import InThreads
from mooncake.engine import TransferEngine

if TYPE_CHECKING:
    from benchmarks.peers.reads.harness import Link
    from transport.bench.reads.content import Bytes, Content

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
    """Blocking reads, which release the interpreter."""

    def __init__(self, address: str, buffers: Sequence[Bytes], concurrency: int) -> None:
        offered = json.loads(address)
        self._engine = _registered(buffers)
        self._peer = offered["engine"]
        self._sources = offered["payloads"]
        self._targets = [buffer.ctypes.data for buffer in buffers]
        self._size = buffers[0].nbytes
        self._threads = InThreads(concurrency, self._read)
        self.fetch = self._threads.fetch

    def _read(self, _: int, payload: int, at: int) -> None:
        if self._engine.transfer_sync_read(self._peer, self._targets[at], self._sources[payload], self._size):
            raise ConnectionError("a read failed")

    def close(self) -> None:
        """The engine ends with the process."""
        self._threads.close()


def connect(content: Content, address: str, buffers: Sequence[Bytes], concurrency: int) -> Client:
    """To the other engine."""
    return Client(address, buffers, concurrency)
