"""Directory: which server serves which ring, and at which addresses and ports. Its records are in the store.

A ticket names addresses and ports. They suffice while the server keeps them. A server that publishes itself here is
found after it was restarted or moved, and its tickets are reported as lost after it died:

    a reader cannot reach a ticket's ports ──► it looks up the ring in the directory
        other addresses or ports are published ──► it reads there, and from then on tries these first
        the same ones, and its writer lives    ──► the error is raised; a later read may succeed
        no living writer for ``grace_s``       ──► PayloadLostError: the payload is gone with its server

A ring has two records: ``servers/`` says that its writer lives, and ends ``lease_s`` after it; ``rings/`` says where to
ask for payloads, and lasts ``linger_s`` longer, as long as a killed writer's listeners serve what it left.

So the tickets of a dead server are reported as lost at the first read after ``lease_s`` + ``grace_s``. The grace is for
a server that lives but whose record expired because the store was unavailable: it republishes every third of the lease.
A reader that has seen a ring absent looks for it again, more often than a record lasts, so that two absences with a
presence in between never count as one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec

from transport.errors import (
    ClosedError,
    ConfigurationError,
    LinkError,
    PayloadLostError,
    StoreError,
    TicketError,
    TransportError,
)
from transport.runtime import threads
from transport.runtime.blocking_calls import LEAST_ANSWER_S, in_thread
from transport.runtime.error_text import error_text
from transport.runtime.logs import LoggedErrors
from transport.runtime.waits import Flag
from transport.store.base import ABSENT, LONGEST_LEASE_S, Change, Store, check_lease
from transport.store.decision import decide
from transport.store.stored import decode, decode_each, encode
from transport.ticket import Ticket, host_identity, memory_identity
from transport.wire.addresses import is_loopback

if TYPE_CHECKING:
    from transport.ring.buffer import SharedRingBuffer
    from transport.server.server import UCXXServer

log = logging.getLogger(__name__)

LEASE_S = 30.0
_PREFIX = "servers/"
_RINGS = "rings/"
_ENDED = "ended/"
_RUN = "run"
_ENDED_S = 3600.0  # that an end stays, for trainers that come late
# After these errors a reader looks up the ring in the directory.
MAY_HAVE_MOVED = (LinkError, PayloadLostError)

_MOST_RINGS = 4096  # remembered by one reader
_WATCHED_LEASES = 10  # since a read last asked for an absent ring
_JOIN_S = 60.0  # longer than a store waits for its server


class Serving(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The record of a ring: the addresses and ports at which it is served."""

    ring: str
    host: str  # as in tickets
    addresses: tuple[str, ...]
    ports: tuple[int, ...]
    memory: str = ""  # that its writer makes segments in: a host's containers seldom share theirs
    segment: str = ""  # the ring's name there, for as long as it is served

    def moved(self, ticket: Ticket) -> Ticket:
        """Return the ticket with this server's addresses and ports. TicketError if they make no valid ticket."""
        return msgspec.structs.replace(ticket, host=self.host, addresses=self.addresses, ports=self.ports)


class Found(NamedTuple):
    """A ring in the directory: where to ask for its payloads, and whether its writer lives."""

    serving: Serving | None
    lives: bool


class Published(NamedTuple):
    """Versions of the two records of a server."""

    server: int
    ring: int


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """The record of an end: of which schema the ring's payloads were, and the time by its writer's clock."""

    fingerprint: bytes
    at: float


class Directory:
    """Servers by ring, in a store that all members of the run share. Thread-safe; blocks while the store does.

    Args:
        store: not closed by the directory.
        lease_s: how long the record of a dead server stays.
    """

    def __init__(self, store: Store, *, lease_s: float = LEASE_S) -> None:
        check_lease(lease_s)
        self._store = store
        self.lease_s = lease_s

    def __repr__(self) -> str:
        return f"<Directory in {self._store!r}>"

    @property
    def place(self) -> str:
        """Return where its store is, for messages."""
        return self._store.place

    def run(self) -> str:
        """Return the name of this directory's run, which the first to ask makes: 8 hexadecimal digits."""
        return decide(self._store, _RUN, secrets.token_hex(4))

    def find(self, ring: str) -> Found:
        """Return what is published of the ring. StoreUnsuitableError for a record that cannot be read."""
        server, place = self._store.get_many([_PREFIX + ring, _RINGS + ring])
        return Found(None if place is None else decode(Serving, _RINGS + ring, place.value), server is not None)

    def absent(self, rings: Sequence[str]) -> list[str]:
        """Return those of the rings that have no record, with one call to the store."""
        entries = self._store.get_many([_PREFIX + ring for ring in rings])
        return [ring for ring, entry in zip(rings, entries, strict=True) if entry is None]

    def all(self) -> list[Serving]:
        """Return the records of all rings that can be read, also of those that outlive their writers."""
        return list(decode_each(Serving, self._store.scan(_RINGS)).values())

    def end(self, ring: str, fingerprint: bytes) -> None:
        """Say that the writer of this ring writes nothing more."""
        self._store.put(_ENDED + ring, encode(Ended(fingerprint, time.time())), lease_s=_ENDED_S)

    def ended(self) -> dict[str, Ended]:
        """Return the rings whose writers have said their end within the last hour."""
        return {key.removeprefix(_ENDED): end for key, end in decode_each(Ended, self._store.scan(_ENDED)).items()}

    def publish(self, serving: Serving, linger_s: float = 0.0) -> Published:
        """Publish a server that starts, with new leases, whatever is there: a ring has one writer at a time.

        Its ring is found for ``linger_s`` longer. ConfigurationError: the store is on another host, and would tell
        others of loopback alone.
        """
        published = self._write(serving, linger_s, None)
        assert published is not None  # nothing was expected
        return published

    def publish_again(self, serving: Serving, linger_s: float, published: Published) -> Published | None:
        """Publish as `publish`, in place of the records that this server has published, or of none.

        None: there are others.
        """
        return self._write(serving, linger_s, published.server) or self._write(serving, linger_s, ABSENT)

    def renew(self, ring: str, linger_s: float, published: Published) -> bool:
        """Restart the leases of a server's records, which wakes nobody, and which a full store can do, too.

        False: they are gone, or another server's.
        """
        server = self._store.renew({_PREFIX + ring: published.server}, self.lease_s)
        return bool(server and self._store.renew({_RINGS + ring: published.ring}, self._lasts_s(linger_s)))

    def _lasts_s(self, linger_s: float) -> float:
        return min(self.lease_s + linger_s, LONGEST_LEASE_S)

    def _write(self, serving: Serving, linger_s: float, expected: int | None) -> Published | None:
        if all(map(is_loopback, serving.addresses)) and (own := self._store.reached_from()) is not None:
            raise ConfigurationError(
                f"ring {serving.ring[:8]} would be found at {', '.join(serving.addresses)}, where other hosts reach "
                f"themselves: set TRANSPORT_ADDRESSES to an address that they reach, such as {own}"
            )
        record = encode(serving)
        versions = self._store.put_many(
            [
                Change(_PREFIX + serving.ring, record, expected, self.lease_s),
                Change(_RINGS + serving.ring, record, None, self._lasts_s(linger_s)),
                Change(_ENDED + serving.ring, None),  # of the writer before, whose file this one has
            ]
        )
        return None if versions is None else Published(*versions[:2])

    def withdraw(self, ring: str, published: Published | None) -> None:
        """Remove a server's records, unless they were replaced. None: whatever is there."""
        for expected in (None if published is None else published.server, ABSENT):
            if self._store.put_many([Change(_PREFIX + ring, None, expected), Change(_RINGS + ring, None)]) is not None:
                return


class Announcement:
    """Record of a server, which `start` publishes and a thread keeps so, until `close` withdraws it."""

    def __init__(self, directory: Directory, ring: SharedRingBuffer, server: UCXXServer) -> None:
        self._directory = directory
        self._server = server
        self._ring = ring.ring_id
        self._written = ring
        self._said = self._serving()
        self._published: Published | None = None  # None: it is not known whether there is anything
        self._withdrawn = False
        self._ended, self._left = Flag(), Flag()  # the latter: a call of the thread is not waited for any more
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._keep, name="transport directory", daemon=True)

    def start(self) -> Self:
        """Publish the record. Raises the store's errors; where it fails later, that is logged and tried again."""
        self._published = self._directory.publish(self._said, self._server.linger_s)
        threads.start(self._thread)
        return self

    def __repr__(self) -> str:
        return f"<Announcement of ring {self._ring[:8]}>"

    def _serving(self) -> Serving:
        return Serving(
            ring=self._ring,
            host=host_identity(),
            addresses=self._server.addresses,
            ports=self._server.ports,
            memory=memory_identity(),
            segment=self._written.name,
        )

    def _keep(self) -> None:
        failures = LoggedErrors(log, f"publishing ring {self._ring[:8]} again")
        while not self._ended.wait(self._directory.lease_s / 3):
            with failures:
                serving, linger_s = self._serving(), self._server.linger_s
                if not serving.ports:  # the server is being closed, and is published until it is withdrawn
                    serving = self._said
                assert self._published is not None
                if serving == self._said and self._directory.renew(self._ring, linger_s, self._published):
                    continue
                if self._ended.is_set:  # what was to be renewed is withdrawn
                    continue
                published = self._directory.publish_again(serving, linger_s, self._published)
                if published is None:
                    log.warning("another server has published ring %s; trying again later", self._ring[:8])
                else:
                    self._published, self._said = published, serving
                    if self._left.is_set:  # this is behind what `close` has withdrawn
                        self._withdraw()

    def close(self) -> None:
        """Stop, and withdraw the record if the store answers. Idempotent. Nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        if not self._withdrawn:
            self._left.set()
            try:
                self._withdraw()
            except TransportError as error:
                log.warning(
                    "withdrawing ring %s failed, it stays published until its lease ends: %s", self._ring[:8], error
                )
            self._withdrawn = True  # last, so that after an interrupt the next call finishes

    def _withdraw(self) -> None:
        if self._written.data_ended:  # before it is gone, so that no trainer sees neither
            self._directory.end(self._ring, self._written.fingerprint)
        self._directory.withdraw(self._ring, self._published)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


class _Absence(msgspec.Struct):
    """Absence of a ring: when it began, when it was last seen, and when a read last asked for the ring."""

    since: float
    seen: float
    asked: float


class Finder:
    """A client's side of the directory: where rings are served by now, and since when one is absent. For one loop.

    Args:
        grace_s: how long a ring must be absent before its payloads count as lost; default two thirds of the lease.
    """

    def __init__(
        self, directory: Directory, *, grace_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._grace_s = directory.lease_s * 2 / 3 if grace_s is None else grace_s
        self._known: dict[str, Serving] = {}
        self._absent: dict[str, _Absence] = {}
        self._asked: dict[str, asyncio.Future[Found]] = {}  # lookups under way, by ring
        self._watch: asyncio.Task[None] | None = None  # while any ring is absent
        self._ended = False

    def current(self, ticket: Ticket) -> Ticket:
        """Return the ticket with the addresses and ports that were last found for its ring."""
        serving = self._known.get(ticket.ring)
        try:
            return ticket if serving is None else serving.moved(ticket)
        except TicketError:
            return ticket

    def reached(self, ticket: Ticket) -> None:
        """Note a successful read of the ticket's ring: the time of its absence is counted from zero again."""
        if self._absent:
            self._absent.pop(ticket.ring, None)

    def found(self, ticket: Ticket, found: Found, now: float) -> Ticket | None:
        """Return the ticket to read after a failed read; None if the failure is to be raised.

        Raises PayloadLostError if the ring is nowhere else, and has had no living writer for ``grace_s``.
        """
        if found.lives:
            self._absent.pop(ticket.ring, None)
        if found.serving is None:
            self._known.pop(ticket.ring, None)
        elif (moved := found.serving.moved(ticket)) != ticket:
            self._known.pop(ticket.ring, None)
            self._known[ticket.ring] = found.serving
            _bound(self._known)
            return moved
        if not found.lives:
            absence = self._seen_absent(ticket.ring, now)
            absence.asked = now
            if now - absence.since >= self._grace_s:
                raise PayloadLostError(
                    f"payload {ticket.name} is lost: its ports do not answer, and the directory has had no server of "
                    f"its ring for {self._grace_s:g} s"
                )
        return None

    def watched(self, now: float) -> list[str]:
        """Return the absent rings to look for again, within a lease.

        A ring that is not read from any more is forgotten.
        """
        forget_s = _WATCHED_LEASES * self._directory.lease_s
        self._absent = {ring: absence for ring, absence in self._absent.items() if now - absence.asked < forget_s}
        return list(self._absent)

    def looked(self, rings: Iterable[str], absent: Container[str], now: float) -> None:
        """Note the result of a look at some of these rings."""
        for ring in rings:
            if ring not in absent:
                self._absent.pop(ring, None)
            elif ring in self._absent:  # not reached meanwhile
                self._seen_absent(ring, now)

    def _seen_absent(self, ring: str, now: float) -> _Absence:
        absence = self._absent.get(ring)
        if absence is None:
            absence = self._absent[ring] = _Absence(now, now, now)
            _bound(self._absent)
        elif now - absence.seen >= self._directory.lease_s:
            absence.since = now  # in between it may have been there
        absence.seen = now
        return absence

    async def after(self, ticket: Ticket, error: TransportError, most_s: float = float("inf")) -> Ticket | None:
        """Return the ticket to read after one of `MAY_HAVE_MOVED`; None: raise that. PayloadLostError as in `found`.

        The store is waited for ``most_s``, at least `LEAST_ANSWER_S`.
        """
        try:
            async with asyncio.timeout(None if most_s == float("inf") else max(most_s, LEAST_ANSWER_S)):
                found = await asyncio.shield(self._find(ticket.ring))
            return self.found(ticket, found, self._clock())
        except PayloadLostError as lost:
            raise lost from error
        except (StoreError, TicketError, ClosedError, TimeoutError) as unknown:
            log.warning("directory lookup of ring %s failed: %s", ticket.ring[:8], error_text(unknown))
            return None
        finally:
            if self._watch is None and not self._ended and self.watched(self._clock()):
                self._watch = asyncio.get_running_loop().create_task(self._look(), name="transport directory")

    def _find(self, ring: str) -> asyncio.Future[Found]:
        """Look a ring up, once for all who ask meanwhile: where the store hangs, each would have a thread that does."""
        asked = self._asked.get(ring)
        if asked is None or asked.done():
            asked = self._asked[ring] = in_thread(self._directory.find, ring)
            asked.add_done_callback(partial(self._answered, ring))
        return asked

    def _answered(self, ring: str, asked: asyncio.Future[Found]) -> None:
        if self._asked.get(ring) is asked:
            del self._asked[ring]
        if not asked.cancelled():
            asked.exception()  # retrieved, also where nobody waits any more

    async def _look(self) -> None:
        """Look again and again for what was absent, until nothing is."""
        failures = LoggedErrors(log, "looking for absent rings")
        try:
            while True:
                await asyncio.sleep(self._directory.lease_s / 3)
                with failures:
                    if not (rings := self.watched(self._clock())):
                        return
                    try:
                        absent = await in_thread(self._directory.absent, rings)
                    except ClosedError:
                        return
                    self.looked(rings, set(absent), self._clock())
        finally:
            self._watch = None

    def end(self) -> None:
        """Look for nothing any more. Idempotent."""
        self._ended = True
        if self._watch is not None:
            self._watch.cancel()


def _bound(rings: dict[str, Any]) -> None:
    if len(rings) > _MOST_RINGS:
        rings.pop(next(iter(rings)))
