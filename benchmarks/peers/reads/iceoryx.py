"""iceoryx2, request and response, polling on both sides: copied into shared memory here, and out of it there."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import iceoryx2 as iox2

if TYPE_CHECKING:
    from benchmarks.peers.reads.harness import Link
    from transport.bench.reads.content import Bytes, Content

_MOST_UNDER_WAY = 64
_SHARED_MEMORY = Path("/dev/shm")


def _service(folder: str) -> Any:
    """A node and the service; all of its files are in ``folder``, and in shared memory by that name."""
    iox2.set_log_level(iox2.LogLevel.Error)
    config = iox2.config.default()
    config.global_cfg.root_path = iox2.Path.new(folder)
    config.global_cfg.prefix = iox2.FileName.new(_prefix(folder))
    node = iox2.NodeBuilder.new().config(config).create(iox2.ServiceType.Ipc)
    builder = node.service_builder(iox2.ServiceName.new("bench"))
    builder = builder.request_response(ctypes.c_uint64, iox2.Slice[ctypes.c_uint8])
    return node, builder.max_active_requests_per_client(_MOST_UNDER_WAY).open_or_create()


def _prefix(folder: str) -> str:
    return f"{Path(folder).name}_"


def serve(content: Content, slots: int, link: Link) -> None:
    """Copies the payload into a loaned response and sends that."""
    payloads = [content.payload(number).copy() for number in range(slots)]
    folder = tempfile.mkdtemp(prefix="iox2-")
    node, service = _service(folder)
    server = service.server_builder().initial_max_slice_len(content.size).create()
    link.ready(folder)
    while not link.ended():
        request = server.receive()
        if request is None:
            continue
        payload = payloads[request.payload().contents.value]
        response = request.loan_slice_uninit(content.size)
        ctypes.memmove(response.payload().as_ptr(), payload.ctypes.data, content.size)
        response.assume_init().send()
        request.delete()
    del server, service, node
    shutil.rmtree(folder, ignore_errors=True)
    for left in _SHARED_MEMORY.glob(f"{_prefix(folder)}*"):  # what iceoryx2 keeps for the next node
        left.unlink()


class Client:
    """Requests ahead; whichever has its response is copied out and let go."""

    def __init__(self, folder: str, buffers: Sequence[Bytes], concurrency: int) -> None:
        self._node, service = _service(folder)
        self._client = service.client_builder().create()
        self._targets = [buffer.ctypes.data for buffer in buffers]
        self._size = buffers[0].nbytes
        self._concurrency = concurrency

    def _ask(self, payload: int) -> Any:
        return self._client.loan_uninit().write_payload(ctypes.c_uint64(payload)).send()

    def fetch(self, requests: Sequence[tuple[int, int]]) -> list[float]:
        """Poll the pending ones in turn."""
        times: list[float] = []
        pending: list[tuple[Any, int, float]] = []
        ahead = iter(requests)
        while len(times) < len(requests):
            while len(pending) < self._concurrency and (request := next(ahead, None)) is not None:
                begun = time.perf_counter()
                pending.append((self._ask(request[0]), request[1], begun))
            looked, pending = pending, []
            for asked, at, begun in looked:
                response = asked.receive()
                if response is None:
                    pending.append((asked, at, begun))
                    continue
                ctypes.memmove(self._targets[at], response.payload().as_ptr(), self._size)
                times.append(time.perf_counter() - begun)
                response.delete()
                asked.delete()
        return times

    def close(self) -> None:
        """Leave the service."""
        self._client.delete()


def connect(content: Content, address: str, buffers: Sequence[Bytes], concurrency: int) -> Client:
    """To the service in that folder."""
    return Client(address, buffers, concurrency)
