"""Directory: who serves which ring, and where, through the store. For tickets older than their server.

A ticket names addresses and ports, which is all that a reader needs while its server stays where it was. A server that
publishes itself here is found again after it was restarted or moved, and missed when it died:

    reader cannot reach a ticket's ports ──► asks the directory
        another place is published   ──► reads there, and from then on tries that place first
        the same place is published  ──► the error stands; trying again later is right
        none, for ``grace_s``        ──► PayloadLostError: the payload is gone with its server

So a dead server's tickets are reported as lost at the first read after ``lease_s`` + ``grace_s``. The grace is for a
server whose record ended although it lives (the store was away): it publishes itself again at a third of the lease.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import msgspec

from transport.errors import (
    LinkError,
    PayloadLostError,
    StoreError,
    TicketError,
    TransportError,
    UsageError,
)
from transport.runtime.decoders import ready
from transport.store.base import ABSENT, Store
from transport.ticket import Ticket, host_identity

if TYPE_CHECKING:
    from transport.ring.buffer import SharedRingBuffer
    from transport.server.server import UCXXServer

log = logging.getLogger(__name__)

LEASE_S = 30.0
_PREFIX = "servers/"
_EPOCHS = "servers-epoch"
# After these a reader asks whether the ring is served elsewhere by now.
MAY_HAVE_MOVED = (LinkError, PayloadLostError)

_MOST_RINGS = 4096  # that a reader keeps in mind
_JOIN_S = 60.0  # longer than a store's own patience


class Serving(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a ring is served."""

    ring: str
    host: str  # as in tickets
    addresses: tuple[str, ...]
    ports: tuple[int, ...]
    epoch: int  # grows with every start of any server of the store

    def moved(self, ticket: Ticket) -> Ticket:
        """The ticket as this server would write it now. TicketError where that is none."""
        return msgspec.structs.replace(ticket, host=self.host, addresses=self.addresses, ports=self.ports)


ready(Serving)


class Directory:
    """Servers by ring, in a store that all members of the run share. Thread-safe; blocks as the store does.

    Args:
        store: not closed by the directory.
        lease_s: how long a server that died is still published.
    """

    def __init__(self, store: Store, *, lease_s: float = LEASE_S) -> None:
        if lease_s <= 0:
            raise UsageError(f"lease_s={lease_s}: give seconds above 0")
        self._store = store
        self.lease_s = lease_s

    def __repr__(self) -> str:
        return f"<Directory in {self._store!r}>"

    def find(self, ring: str) -> Serving | None:
        """Where the ring is served; None when nobody has published it, or its lease ended."""
        entry = self._store.get(_PREFIX + ring)
        if entry is None:
            return None
        try:
            return msgspec.msgpack.decode(entry.value, type=Serving)
        except msgspec.MsgspecError as error:
            raise StoreError(f"malformed directory record of ring {ring[:8]}: {error}") from error

    def next_epoch(self) -> int:
        """For a server that starts; greater than that of all who started before."""
        return self._store.add(_EPOCHS)

    def publish(self, serving: Serving) -> int | None:
        """Publish with a new lease; the record's version. None: one of a later epoch serves this ring."""
        key, value = _PREFIX + serving.ring, msgspec.msgpack.encode(serving)
        while True:
            entry = self._store.get(key)
            before = self.find(serving.ring) if entry is not None else None
            if before is not None and before.epoch > serving.epoch:
                return None
            version = self._store.compare_and_set(
                key, value, ABSENT if entry is None else entry.version, lease_s=self.lease_s
            )
            if version is not None:
                return version  # else somebody was faster: look again

    def renew(self, ring: str, version: int) -> bool:
        """Begin the lease of a record anew; False when it is not there any more."""
        return bool(self._store.renew({_PREFIX + ring: version}, self.lease_s))

    def withdraw(self, ring: str, version: int) -> None:
        """Remove a record, unless it was replaced."""
        self._store.compare_and_set(_PREFIX + ring, None, version)


class Announcement:
    """Keeps a server published from a thread of its own until `close`, which withdraws it.

    Raises what the store raises when the first publication fails; later failures are logged and tried again.
    """

    def __init__(self, directory: Directory, ring: SharedRingBuffer, server: UCXXServer) -> None:
        self._directory = directory
        self._server = server
        self._ring = ring.ring_id
        self._epoch = directory.next_epoch()
        self._published = self._serving()
        self._version = directory.publish(self._published)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="transport directory", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Announcement of ring {self._ring[:8]} epoch {self._epoch}>"

    def _serving(self) -> Serving:
        return Serving(
            ring=self._ring,
            host=host_identity(),
            addresses=self._server.addresses,
            ports=self._server.ports,
            epoch=self._epoch,
        )

    def _keep(self) -> None:
        while not self._ended.wait(self._directory.lease_s / 3):
            try:
                if self._version is None:
                    log.warning("a later server serves ring %s; this server is no longer published", self._ring[:8])
                    return
                serving = self._serving()
                if not serving.ports:  # it is being closed
                    return
                if serving != self._published or not self._directory.renew(self._ring, self._version):
                    self._version = self._directory.publish(serving)
                    self._published = serving
            except TransportError as error:
                log.warning("publishing ring %s again failed: %s; trying again later", self._ring[:8], error)

    def close(self) -> None:
        """Stop, and withdraw the record where the store can be reached. Idempotent."""
        self._ended.set()
        self._thread.join(_JOIN_S)
        if self._version is not None:
            try:
                self._directory.withdraw(self._ring, self._version)
            except TransportError as error:
                log.warning(
                    "withdrawing ring %s failed, it stays published until its lease ends: %s", self._ring[:8], error
                )
            self._version = None  # last, so that an interrupted call is made good by the next one

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Whereabouts:
    """What a reader knows of servers. Decides without I/O; belongs to one loop.

    Args:
        grace_s: how long a ring must have been absent from the directory to be lost.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._known: dict[str, Serving] = {}
        self._absent_since: dict[str, float] = {}

    def current(self, ticket: Ticket) -> Ticket:
        """The ticket with the place that was last found for its ring."""
        serving = self._known.get(ticket.ring)
        return ticket if serving is None else serving.moved(ticket)

    def found(self, ticket: Ticket, serving: Serving | None, now: float) -> Ticket | None:
        """After a failed read: the ticket to read instead; None where the failure stands.

        Raises PayloadLostError when nobody has served the ring for the grace.
        """
        if serving is None:
            self._known.pop(ticket.ring, None)
            since = self._absent_since.setdefault(ticket.ring, now)
            _bound(self._absent_since)
            if now - since >= self._grace_s:
                raise PayloadLostError(
                    f"payload {ticket.name} is lost: its ports do not answer, and the directory has had no server of "
                    f"its ring for {self._grace_s:g} s"
                )
            return None
        self._absent_since.pop(ticket.ring, None)
        moved = serving.moved(ticket)
        if moved == ticket:
            return None
        self._known.pop(ticket.ring, None)
        self._known[ticket.ring] = serving
        _bound(self._known)
        return moved


def _bound(rings: dict[str, Any]) -> None:
    if len(rings) > _MOST_RINGS:
        rings.pop(next(iter(rings)))


class Finder:
    """A client's side of the directory.

    Args:
        grace_s: see `Whereabouts`; default two thirds of the lease.
    """

    def __init__(
        self, directory: Directory, *, grace_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._whereabouts = Whereabouts(directory.lease_s * 2 / 3 if grace_s is None else grace_s)

    def current(self, ticket: Ticket) -> Ticket:
        """The ticket with the place that was last found for its ring."""
        try:
            return self._whereabouts.current(ticket)
        except TicketError:
            return ticket

    async def after(self, ticket: Ticket, error: TransportError) -> Ticket | None:
        """What to read instead after ``error``; None where it stands. Raises PayloadLostError, see above."""
        if not isinstance(error, MAY_HAVE_MOVED):
            return None
        try:
            serving = await asyncio.to_thread(self._directory.find, ticket.ring)
            return self._whereabouts.found(ticket, serving, self._clock())
        except PayloadLostError as lost:
            raise lost from error
        except (StoreError, TicketError) as unknown:
            log.warning("directory lookup of ring %s failed: %s", ticket.ring[:8], unknown)
            return None
