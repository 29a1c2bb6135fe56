"""Versions on offer: replicas take a new version between two requests, without being paused.

    notice = offer(ring.write(weights), version)               # in the trainer; any queue or store carries the notice
    taker = Taker(worker); taker.take(client, notice, rank=0)  # complete and proven, or still the previous version

There is no group and no manager: replicas may skip versions and take the newest. As in an update, a replica serves all
of a version or none of it, by the same worker interface and the same checksums.
"""

from __future__ import annotations

import asyncio
import inspect
import operator
from typing import Any

import msgspec
import numpy as np

from transport.client.blocking import BlockingClient
from transport.errors import ProtocolError, UsageError, WeightsChecksumError
from transport.runtime.decoders import hiding
from transport.ticket import Ticket
from transport.weights.versions.layout import weights_checksum
from transport.weights.worker import RolloutWorker, check


@hiding("ticket")
class Offer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A version that can be read by a ticket, and the checksum that proves it."""

    version: int
    checksum: int
    ticket: bytes


def offer(ticket: Ticket, version: int) -> bytes:
    """Describe a version whose tensors were written under this ticket, which has the checksum of what was written.

    UsageError for a ticket without a checksum; those of rings have one. TypeError for a version that is no integer.
    """
    if ticket.checksum is None:
        raise UsageError(f"{ticket.name} has no checksum, which proves a version: write the version to a ring")
    return msgspec.msgpack.encode(Offer(operator.index(version), ticket.checksum, ticket.encode()))


_decode = msgspec.msgpack.Decoder(Offer).decode


class Taker:
    """A worker that takes versions on offer. One thread.

    Attributes:
        version: the version that the worker serves, proven when it was loaded; -1: none, or unknown weights, because
            a load failed and the version before could not be loaded again.
    """

    def __init__(self, worker: RolloutWorker) -> None:
        self.worker = worker
        self.version = -1
        self._held: tuple[Offer, dict[str, Any]] | None = None  # the version that was taken last

    def take(self, client: BlockingClient, notice: bytes, rank: int, timeout: float) -> int:
        """Read, prove and load the version of a notice; returns it.

        Raises:
            WeightsChecksumError: the bytes received or loaded are not that version; the previous one is served.
            ProtocolError: this is not a notice.
            TransportError: an error of the read; StaleSlotError if a newer version has replaced this one.
        """
        try:
            found = _decode(notice)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ProtocolError(f"not an offer of a version ({len(notice)} bytes): {error}") from error
        with client.read(Ticket.decode(found.ticket), rank=rank, timeout=timeout) as payload:
            # the slot is for the next version; what a client with ``device=`` has read is in no slot any more
            weights = {
                name: np.array(array) if isinstance(array, np.ndarray) else array for name, array in payload.items()
            }
        arrived = weights_checksum(weights)
        if arrived != found.checksum:
            raise WeightsChecksumError(
                f"v{found.version}: checksum mismatch: received {arrived:016x}, expected {found.checksum:016x}"
            )
        try:
            self._load(found, weights)
        except BaseException as error:
            if self._held is not None:
                try:
                    self._load(*self._held)
                except Exception as second:
                    error.add_note(f"the version before was not restored: {type(second).__name__}: {second}")
            raise
        self._held = found, weights
        return found.version

    def _load(self, found: Offer, weights: dict[str, Any]) -> None:
        """Load and prove a version; while this runs, and if it fails, `version` is -1."""
        self.version = -1
        staged = _awaited(self.worker.stage(weights, found.version))
        check(_awaited(self.worker.load(staged, found.version)), "load")
        served = _awaited(self.worker.served_checksum())
        if served not in (None, found.checksum):
            raise WeightsChecksumError(
                f"v{found.version}: checksum mismatch after loading: the worker would serve {served or 0:016x}, "
                f"expected {found.checksum:016x}"
            )
        self.version = found.version


def _awaited(result: Any) -> Any:
    """What a worker's method returned, once it is there."""

    async def wait() -> Any:
        return await result

    return asyncio.run(wait()) if inspect.isawaitable(result) else result
