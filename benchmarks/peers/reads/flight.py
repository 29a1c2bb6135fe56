"""Arrow Flight over gRPC and TCP: DoGet of a record batch with one array of bytes, copied into the buffer."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
from in_threads import InThreads

if TYPE_CHECKING:
    from benchmarks.peers.reads.harness import Link
    from transport.bench.reads.content import Bytes, Content

_REQUEST = struct.Struct("<Q")


def serve(content: Content, slots: int, link: Link) -> None:
    """Record batches that look into the payloads' memory."""
    payloads = [content.payload(number).copy() for number in range(slots)]
    batches = [pa.record_batch([pa.array(payload)], names=["data"]) for payload in payloads]

    class Server(fl.FlightServerBase):  # type: ignore[misc]
        def do_get(self, context: Any, ticket: Any) -> Any:
            batch = batches[_REQUEST.unpack(ticket.ticket)[0]]
            return fl.RecordBatchStream(pa.Table.from_batches([batch]))

    server = Server("grpc://127.0.0.1:0")
    link.ready(str(server.port))
    link.wait()
    server.shutdown()


class Client:
    """One client for all threads."""

    def __init__(self, port: int, buffers: Sequence[Bytes], concurrency: int) -> None:
        self._client = fl.connect(f"grpc://127.0.0.1:{port}")
        self._buffers = buffers
        self._threads = InThreads(concurrency, self._read)
        self.fetch = self._threads.fetch

    def _read(self, _: int, payload: int, at: int) -> None:
        buffer = self._buffers[at]
        filled = 0
        for chunk in self._client.do_get(fl.Ticket(_REQUEST.pack(payload))):
            part = chunk.data.column(0).to_numpy()
            np.copyto(buffer[filled : filled + len(part)], part)
            filled += len(part)

    def close(self) -> None:
        """Close the channel."""
        self._threads.close()
        self._client.close()


def connect(content: Content, address: str, buffers: Sequence[Bytes], concurrency: int) -> Client:
    """To the server's port."""
    return Client(int(address), buffers, concurrency)
