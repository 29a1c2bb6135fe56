"""AReaL's tensors between its workers through shared memory and UCX, in place of JSON over HTTP.

    from transport.adapters.areal_plugin import install

    install()  # in a sitecustomize.py, for the controller and all workers

A tensor that a worker returns stays in a ring of that worker. What AReaL passes on is its ticket, by which any process
of the job maps it on the same host and reads it over UCX elsewhere, with a checksum. `clear_batches` of AReaL frees it.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from typing import Any

from transport.client.blocking import BlockingClient
from transport.devices.host_tensors import as_tensor
from transport.errors import ClosedError, MissingDependencyError, RingFullError, UsageError
from transport.ring.buffer import SharedRingBuffer
from transport.runtime.installing import install
from transport.runtime.releases import require_fitting
from transport.server.server import UCXXServer

_SMALLEST = 1 << 12


class RingBackend:
    """An RTensorBackend of AReaL. Any thread may call.

    Rings are made when they are needed, for sizes of powers of two, and stay until `close`. StaleSlotError: a tensor
    was deleted before it was fetched; SharedMemoryError: the host's shared memory has no room for another ring.

    Args:
        ring_bytes: of a ring, unless one tensor is larger.
        client: options of `BlockingClient`.
        options: of `UCXXServer`.
    """

    def __init__(self, ring_bytes: int = 64 << 20, *, client: dict[str, Any] | None = None, **options: Any) -> None:
        self._ring_bytes = ring_bytes
        self._options = options
        self._rings: dict[int, list[tuple[SharedRingBuffer, UCXXServer]]] = defaultdict(list)  # by bytes of a slot
        self._lock = threading.Lock()
        self._client_options = {"ack": "manual", **(client or {})}  # several processes may fetch a tensor
        self._connected: BlockingClient | None = None  # most processes of a job that import AReaL fetch nothing

    def store(self, tensor: Any) -> str:
        """Copy a tensor into a ring; returns its ticket, as text."""
        values = {"tensor": tensor.detach().cpu()}
        slot_bytes = max(_SMALLEST, 1 << (tensor.nbytes - 1).bit_length())
        with self._lock:
            for ring, _ in self._rings[slot_bytes]:
                try:
                    return ring.write(values).to_text()
                except (RingFullError, ClosedError):  # closed: its start was interrupted
                    continue
            return self._made(slot_bytes).write(values).to_text()

    def fetch(self, shards: list[Any]) -> list[Any]:
        """Return the tensors of some shards, in their order, in memory of their own."""
        found: dict[int, Any] = {}
        for outcome in self._client.read_many([shard.shard_id for shard in shards]):
            if outcome.payload is None:
                assert outcome.error is not None
                raise outcome.error
            found[outcome.index] = as_tensor(outcome.payload["tensor"], copy=True)
            outcome.payload.release()
        return [found[index] for index in range(len(shards))]

    async def delete(self, node_addr: str, shard_ids: list[str]) -> None:
        """Free tensors, wherever they are. Those that are gone already are no error."""
        for ticket in shard_ids:
            self._client.ack(ticket)  # which ends the reads of every process; sent soon, without a wait

    def close(self) -> None:
        """Free all that this process has stored. Idempotent."""
        with self._lock:
            rings = list(self._rings.items())
            client, self._connected = self._connected, None
        for size, some in rings:
            for ring, server in some:
                server.close()
                ring.close()
            self._rings.pop(size, None)  # last, so that after an interrupt the next call finishes
        if client is not None:
            client.close()

    @property
    def _client(self) -> BlockingClient:
        with self._lock:
            if self._connected is None:
                self._connected = BlockingClient(**self._client_options)
            return self._connected

    def _made(self, slot_bytes: int) -> SharedRingBuffer:
        slots = max(1, min(self._ring_bytes // slot_bytes, 1 << 14))
        ring = SharedRingBuffer.create(slots=slots, slot_bytes=slot_bytes, overflow="error")
        with contextlib.ExitStack() as unless_kept:  # closed by an interrupt, too: the segment would stay
            unless_kept.callback(ring.close)
            server = UCXXServer(ring, **self._options)
            unless_kept.callback(server.close)
            server.start()
            self._rings[slot_bytes].append((ring, server))
            unless_kept.pop_all()
        return ring


def use(**options: Any) -> RingBackend:
    """Make a `RingBackend` that of AReaL in this process; once, before the first tensor is returned.

    `transport.adapters.areal_plugin` calls it in every process.

    Raises:
        MissingDependencyError: AReaL is not installed, or of a release that does not fit.
        UsageError: this process uses a backend already.
    """
    require_fitting("areal")
    try:
        from areal.infra.rpc import rtensor
    except ImportError as error:
        raise MissingDependencyError(f"this adapter needs AReaL ({error}): {install('areal')}") from error
    if rtensor._backend is not None:
        name = type(rtensor._backend).__name__
        raise UsageError(f"AReaL uses {name} already: call use() once, before tensors are returned")
    backend = RingBackend(**options)
    rtensor.set_backend(backend)
    return backend
