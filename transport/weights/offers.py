"""Versions on offer: replicas take a new version between two requests, without being paused.

    offers = Offers(schema, queue)      # in the trainer
    offers.publish(weights, version)    # waits for no replica

    taker = Taker(worker)               # in each replica
    taker.follow(queue, client)         # the newest version, complete and proven, or still the one before

There is no group and no manager: replicas may skip versions and take the newest. Notices have numbers of their own,
which grow also where a trainer goes back to a checkpoint, and offers smaller versions from then on. As in an update, a
replica serves all of a version or none of it, by the same worker interface and the same checksums. `offer` and
`Taker.take` are for a version in a ring of your own, with a notice that goes another way.
"""

from __future__ import annotations

import hashlib
import logging
import operator
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import msgspec
import numpy as np

from transport.claims.notices import Notice, beside
from transport.claims.open import given_rings
from transport.claims.rings import FoundRings
from transport.client.blocking import BlockingClient
from transport.client.payload import AckMode
from transport.config import configuration
from transport.decoders import msgpack_decoder
from transport.errors import (
    LinkError,
    PayloadLostError,
    ProtocolError,
    StaleSlotError,
    UsageError,
    WeightsChecksumError,
)
from transport.packer.options import RingOptions, ServerOptions
from transport.packer.rollout import UCXXRolloutMixin
from transport.runtime.hiding import hiding
from transport.schema import Schema
from transport.settings import Settings
from transport.ticket import Ticket
from transport.weights.plan.steps import VersionProof
from transport.weights.version_switch import VersionSwitch, WorkerState
from transport.weights.versions.layout import weights_checksum
from transport.weights.worker import RolloutWorker
from transport.weights.worker_calls import wait_here

log = logging.getLogger(__name__)

TOPIC: Final = "weights"  # of the notices, where none is chosen
_SLOTS: Final = 4  # the newest version, and older ones that a replica is still reading
_MOST_SLOTS, _SMALL_BYTES = 64, 8 << 20  # of small versions there is room for more: some trainers offer many a second
# A replica acknowledges no version: others, and its own next life, read the same one. Over a wire a listener keeps what
# was read for this long, and the trainer waits for that at most so long.
_KEPT_S: Final = 1.0
_FULL_S: Final = 5.0
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


_decode = msgpack_decoder(Offer)


def _offer_of(notice: bytes) -> Offer:
    """Decode a notice's contents. Raises ProtocolError for what is no offer."""
    try:
        return _decode(notice)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ProtocolError(f"not an offer of a version ({len(notice)} bytes): {error}") from error


def _version_of(notice: Notice) -> int:
    return _offer_of(notice.payload).version


class Offers:
    """The trainer's newest version, in a ring of its own. A trainer's thread.

    Args:
        schema: of the weights.
        queue: carries the notices; the replicas open the same one.
        topic: of the notices.
        name: of the ring, from which no trainer claims; None: one for queue and topic, which the next trainer of this
            host takes over where this one is killed.
        server, settings: as `UCXXRolloutMixin.setup_ucxx` takes them.
    """

    def __init__(
        self,
        schema: Schema,
        queue: FoundRings,
        *,
        topic: str = TOPIC,
        name: str | None = None,
        server: ServerOptions = _SERVER,
        settings: Settings | None = None,
    ) -> None:
        self._queue = queue
        self._topic = topic
        self._unsure: Ticket | None = None  # whether it was announced is unknown
        self._version: int | None = None  # that was published last
        self._number: int | None = None  # of its notice
        self._served = UCXXRolloutMixin()
        settings = configuration().settings if settings is None else settings
        kept_s = max(_KEPT_S, 100 * settings.ack_delay_s)
        self._ring = self._served.setup_ucxx(
            schema,
            slots=max(_SLOTS, min(_MOST_SLOTS, _SMALL_BYTES // max(schema.max_bytes, 1))),
            name=name or _name_of(queue, topic),
            rings=given_rings(),  # no trainer is to find the ring
            ring=RingOptions(overflow="overwrite"),
            server=msgspec.structs.replace(server, settings=msgspec.structs.replace(settings, ack_timeout_s=kept_s)),
        )

    def publish(self, weights: Mapping[str, Any], version: int) -> None:
        """Offer a version in the place of the one before.

        Raises:
            UsageError: a version that is not greater than the one before, or another trainer has announced under this
                topic; the version before, or that of the other trainer, stays on offer.
            StoreError: the store cannot be reached; whether the version was announced is unknown.
            RingFullError: for 5 s every slot has been held, by replicas that were stopped while they read.
        """
        if self._version is not None and version <= self._version:
            raise UsageError(f"version {version}: version {self._version} is on offer, and versions must grow")
        # Over the oldest that nobody reads; a replica that finds it gone looks again.
        ticket = self._served.write_to_buffer(weights, timeout_s=_FULL_S)
        unsure, self._unsure = self._unsure, ticket
        if unsure is not None:  # else versions that were not announced would overwrite the one on offer
            self._ring.discard(unsure)
        if self._number is None:
            there = self._queue.latest(self._topic)
            self._number = -1 if there is None else there.version
        self._number = max(self._number + 1, version)
        announced = self._queue.announce(self._topic, self._number, offer(ticket, version))
        self._unsure = None
        if not announced:
            self._ring.discard(ticket)
            raise UsageError(
                f"version {version} is not on offer, since another trainer offers weights as {self._topic!r}: end it, "
                "or give each a topic of its own"
            )
        self._version = version

    def close(self) -> None:
        """End the ring; what replicas have taken is theirs. Idempotent."""
        self._served.cleanup_ucxx()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _name_of(queue: FoundRings, topic: str) -> str:
    """Return the name of a topic's ring on this host: beside the run's, or of the directory or addresses."""
    places = queue.places
    return beside("offers", places.prefix or hashlib.sha256(repr(places).encode()).hexdigest()[:16], topic)


class Taker:
    """A worker that takes versions on offer. One thread.

    Args:
        version: that the worker begins with; -1: none.

    Attributes:
        missed: how many versions `follow` has seen announced and could not have.
        pause_s: how long `follow` took last to read, prove and load a version.
    """

    def __init__(self, worker: RolloutWorker, version: int = -1) -> None:
        self.worker = worker
        self.missed = 0
        self.pause_s = 0.0
        self._begun_with = version
        self._seen: Notice | None = None  # taken or missed last
        self._held: _Taken | None = None  # the version that was taken last
        self._switch: VersionSwitch[_Taken] = VersionSwitch("taker", worker, lambda taken: taken.weights, wait_here)

    @property
    def version(self) -> int:
        """The version that the worker serves, proven when it was loaded.

        -1: none, or unknown weights, because a load failed and the version before could not be loaded again.
        """
        if self._switch.state is WorkerState.UNTOUCHED:
            return self._begun_with
        served = self._switch.version
        return -1 if served is None else served.proof.version

    @property
    def announced(self) -> int:
        """The version that `follow` has taken or missed last; before, the one that the worker began with."""
        return self._begun_with if self._seen is None else _version_of(self._seen)

    def follow(
        self,
        queue: FoundRings,
        client: BlockingClient,
        *,
        topic: str = TOPIC,
        wait_s: float = 0.0,
        timeout: float = 5.0,
    ) -> bool:
        """Take the version on offer, unless it was taken or missed before; whether one was taken.

        A version that cannot be had is missed, and a warning says why: the one before is served until the next is
        announced. A trainer that begins again may offer smaller versions.

        Args:
            wait_s: how long to wait for a newer version.
            timeout: of the read, in seconds.

        Raises:
            StoreError: the store cannot be asked.
            TransportError: an error that another version does not mend, such as a wrong secret; the worker's own. The
                next call tries again.
        """
        notice = queue.latest(topic)
        if notice is not None and self._seen is None and _version_of(notice) == self._begun_with:
            self._seen = notice
        if notice is None or notice == self._seen:  # none: a trainer that begins again may have smaller numbers
            number: int | None = self._begun_with if self._seen is None else self._seen.version
            if notice is None and self._seen is not None:
                number = None
            notice = queue.latest(topic, newer_than=number, timeout_s=wait_s) if wait_s > 0 else None
        while notice is not None:
            begun = time.monotonic()
            try:
                self._take(client, notice.payload, 0, timeout, "manual")
            except (StaleSlotError, LinkError, PayloadLostError, WeightsChecksumError) as error:
                self._seen = notice
                self.missed += 1
                newest = queue.latest(topic) if isinstance(error, StaleSlotError) else notice
                if newest == notice:
                    missed = _version_of(notice)
                    log.warning("version %d is missed, version %d is served on: %s", missed, self.version, error)
                    return False
                notice = newest  # the trainer was faster
            else:
                self._seen = notice
                self.pause_s = time.monotonic() - begun
                return True
        return False

    def take(self, client: BlockingClient, notice: bytes, rank: int, timeout: float) -> int:
        """Read, prove and load the version of a notice; returns it.

        Raises:
            WeightsChecksumError: the bytes received or loaded are not that version; the previous one is served.
            ProtocolError: this is not a notice.
            TransportError: an error of the read; StaleSlotError if a newer version has replaced this one.
        """
        return self._take(client, notice, rank, timeout, None)

    def _take(self, client: BlockingClient, notice: bytes, rank: int, timeout: float, ack: AckMode | None) -> int:
        """``ack``: "manual" leaves the version to every other reader; None: as the client does."""
        found = _offer_of(notice)
        payload = client.read(Ticket.decode(found.ticket), rank=rank, timeout=timeout, ack=ack)
        try:
            weights = {name: _copied(array) for name, array in payload.items()}  # the slot is for the next version
            if ack is None:
                payload.ack()
        finally:
            payload.release()
        arrived = weights_checksum(weights)
        if arrived != found.checksum:
            raise WeightsChecksumError(
                f"v{found.version}: checksum mismatch: received {arrived:016x}, expected {found.checksum:016x}"
            )
        taken = _Taken(VersionProof(found.version, found.checksum), found.checksum, weights)
        try:
            self._switch.stage(taken)
            self._switch.load(taken)
        except BaseException as error:
            self._switch.go_back(taken, lambda: self._held, error)
            raise
        self._switch.keep()
        self._held = taken
        return found.version


class _Taken(NamedTuple):
    proof: VersionProof
    checksum: int
    weights: dict[str, Any]


def _copied(array: Any) -> Any:
    """Return an array in memory of its own, read-only."""
    if not isinstance(array, np.ndarray):
        return array  # in device memory, which is no slot's
    copied = np.array(array)
    copied.flags.writeable = False  # it is loaded again where a later version fails
    return copied
