"""Versions on offer: replicas take a new version between two requests, without being paused.

    offers = Offers(schema, queue, readers=2)    # in the trainer
    offers.publish(weights, version)             # waits for no replica

    taker = Taker(worker)                        # in each replica
    taker.follow(queue, client, rank=0)          # the newest version, complete and proven, or still the one before

There is no group and no manager: replicas may skip versions and take the newest. As in an update, a replica serves all
of a version or none of it, by the same worker interface and the same checksums. `offer` and `Taker.take` are for a
version in a ring of your own, with a notice that goes another way.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import operator
import secrets
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import numpy as np

from transport.claims.rings import RingQueue
from transport.client.blocking import BlockingClient
from transport.errors import LinkError, ProtocolError, StaleSlotError, UsageError, WeightsChecksumError
from transport.packer.options import RingOptions, ServerOptions
from transport.packer.rollout import UCXXRolloutMixin
from transport.queue.base import TicketQueue
from transport.runtime.decoders import hiding
from transport.schema import Schema
from transport.settings import Settings
from transport.ticket import Ticket
from transport.weights.versions.layout import weights_checksum
from transport.weights.worker import RolloutWorker, check

log = logging.getLogger(__name__)

TOPIC: Final = "weights"  # of the notices, where none is chosen
_SLOTS: Final = 4  # the newest version, and older ones that a replica is still reading
_SERVER: Final = ServerOptions()


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


class Offers:
    """The trainer's newest version, in a ring of its own. A trainer's thread.

    Args:
        schema: of the weights.
        queue: carries the notices; the replicas open the same one.
        readers: how many replicas take versions, each with a rank of its own below this; at most 16.
        topic: of the notices.
        name: of the ring, which is no trainer's to claim from; None: a new one.
        server, settings: as `UCXXRolloutMixin.setup_ucxx` takes them.
    """

    def __init__(
        self,
        schema: Schema,
        queue: TicketQueue,
        *,
        readers: int = 1,
        topic: str = TOPIC,
        name: str | None = None,
        server: ServerOptions = _SERVER,
        settings: Settings | None = None,
    ) -> None:
        self._queue = queue
        self._topic = topic
        self._served = UCXXRolloutMixin()
        self._ring = self._served.setup_ucxx(
            schema,
            slots=_SLOTS,
            readers=readers,
            name=name or f"offers-{secrets.token_hex(8)}",
            queue=RingQueue(),  # no trainer is to find the ring
            ring=RingOptions(overflow="overwrite"),
            server=server,
            settings=settings,
        )

    def publish(self, weights: Mapping[str, Any], version: int) -> None:
        """Offer a version in the place of the one before.

        Raises:
            UsageError: this version or a later one was announced under this topic; that one stays on offer.
            QueueError: the queue cannot be reached; whether the version was announced is unknown.
        """
        ticket = self._served.write_to_buffer(weights)  # over the oldest; a replica that finds it gone looks again
        if not self._queue.announce(self._topic, version, offer(ticket, version)):
            self._ring.discard(ticket)
            raise UsageError(
                f"version {version}: {self._queue!r} has this or a later one announced as {self._topic!r}; versions "
                "must grow, also where a job begins again: choose another topic for it"
            )

    def close(self) -> None:
        """End the ring; what replicas have taken is theirs. Idempotent."""
        self._served.cleanup_ucxx()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Taker:
    """A worker that takes versions on offer. One thread.

    Args:
        version: that the worker begins with; -1: none.

    Attributes:
        version: the version that the worker serves, proven when it was loaded; -1: none, or unknown weights, because
            a load failed and the version before could not be loaded again.
        announced: the newest version that `follow` has seen announced, whether it was taken or not; -1: none.
        missed: how many versions `follow` has seen announced and did not take.
        pause_s: how long `follow` took last to read, prove and load a version.
    """

    def __init__(self, worker: RolloutWorker, version: int = -1) -> None:
        self.worker = worker
        self.version = version
        self.announced = version
        self.missed = 0
        self.pause_s = 0.0
        self._held: tuple[Offer, dict[str, Any]] | None = None  # the version that was taken last

    def follow(
        self,
        queue: TicketQueue,
        client: BlockingClient,
        rank: int,
        *,
        topic: str = TOPIC,
        wait_s: float = 0.0,
        timeout: float = 5.0,
    ) -> bool:
        """Take the newest version, if one was announced since the last call; whether one was taken.

        A version that cannot be had is missed, and a warning says why: the one before is served until the next is
        announced.

        Args:
            rank: of this replica, below ``readers`` of the `Offers`.
            wait_s: how long to wait for an announcement.
            timeout: of the read, in seconds.

        Raises:
            QueueError: the queue cannot be asked.
            TransportError: an error that another version does not mend, such as a wrong secret or rank; the worker's
                own.
        """
        notice = queue.latest(topic, newer_than=self.announced, timeout_s=wait_s)
        while notice is not None:
            self.announced = notice.version
            begun = time.monotonic()
            try:
                self.take(client, notice.payload, rank, timeout)
                self.pause_s = time.monotonic() - begun
                return True
            except StaleSlotError:  # the trainer was faster: a newer version has been announced meanwhile
                self.missed += 1
                notice = queue.latest(topic, newer_than=self.announced)
            except (LinkError, WeightsChecksumError) as error:
                self.missed += 1
                log.warning(
                    "version %d was not taken, version %d is served on: %s", notice.version, self.version, error
                )
                return False
        return False

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
