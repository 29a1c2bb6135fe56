"""Places of the rings of a run: their segments on this host, addresses, or a directory. Blocks while a store does.

rings:NAME                       the rings of this host that belong to NAME (`belongs`): NAME, NAME-a, not NAME1-a
rings://host:port,host:port      what is served at these addresses
rings+redis://host:port/db?run=  what servers have published in the directory of this store; also rings+sqlite:
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from transport import _ring
from transport.claims.waiting import run_of
from transport.client.connections.pool import port_of
from transport.config import configuration
from transport.errors import ClosedError, ConfigurationError, OpenFilesError, RingError, UsageError
from transport.ring.attachment import beginning_of, belongs
from transport.ring.buffer import SharedRingBuffer
from transport.runtime import threads
from transport.runtime.descriptors import OF_A_RING, promised
from transport.store.directory import LEASE_S, Directory, Ended, Serving
from transport.ticket import host_identity, memory_identity
from transport.wire.addresses import loopback_of

log = logging.getLogger(__name__)

UNNAMED: Final = "rollout-"

_BEGINNING: Final = "/transport-"
_NAME: Final = re.compile(r"[A-Za-z0-9._=-]{1,100}@?")
_STORE_EVERY_S: Final = 0.5
_RINGS_A_SECOND: Final = 250  # that a reader reads from the store in the mean, however many there are
_STORE_MOST_S: Final = LEASE_S * 2 / 3


def default_prefix() -> str:
    """Return the beginning of the names of rings that are handed out where no queue was chosen.

    Two runs on one host must not get each other's payloads. The setting ``run`` names a run; without it, SLURM's job
    does, which all processes of a run share. The name ends with a character that no run's name has: what belongs to
    "exp-2" does not belong to "exp".
    """
    run = configuration().run or os.environ.get("SLURM_JOB_ID", "")
    return f"run-{run}@" if run else UNNAMED


class RingAddress(NamedTuple):
    """Addresses and ports of one ring: any address with any port.

    Attributes:
        ring: its id; "": whatever is served there.
        segment: where it is on this host; None: it is on another one; "": unknown.
    """

    addresses: tuple[str, ...]
    ports: tuple[int, ...]
    ring: str = ""
    segment: str | None = ""


class Discovery:
    """Source of a run's rings. This one finds none: a queue that is given its rings looks for none."""

    prefix: str = ""  # with which a writer's new ring is to be named, so that it is found; "": any name will do
    directory: Directory | None = None  # where a writer's server is to be published, so that it is found
    fixed: bool = False  # no other places come than those that are known

    def __repr__(self) -> str:
        return "rings that were given"

    def named(self, name: str) -> str:
        """Return the segment's name of a ring that a writer of this run names so; no other run has the same."""
        return _with(self.prefix, name)

    def segments(self) -> list[str]:
        """Names of segments of this host that a reader may map."""
        return []

    def served(self, mapped: Collection[str], names: Collection[str] = ()) -> Mapping[str, RingAddress]:
        """Return where the others answer; without the rings of these ids, whose segments have these ``names``."""
        return {}

    def unseen(self) -> Mapping[str, str]:
        """Segments of this host that could not be looked at, with the reason."""
        return {}

    def gone(self) -> set[str]:
        """Rings that nobody serves any more though these places name them: their segments would be seen from here."""
        return set()

    def ended(self) -> Mapping[str, bytes]:
        """Rings whose writers have said their end and are gone, as these places know it; with their fingerprints."""
        return {}

    def ended_before(self) -> Mapping[str, float]:
        """Those of `ended` that had ended when rings were first looked for here, with the time of each end."""
        return {}

    def others(self) -> list[str]:
        """List where rings of other runs are found on this host, as URLs."""
        return []

    def close(self) -> None:
        """Release everything."""


class Gone(NamedTuple):
    """A ring that is gone: its segment's name and fingerprint, whether its writer has said the end, and its counts."""

    name: str
    fingerprint: bytes
    said: bool
    counts: Mapping[int, Mapping[str, int]] = {}  # of deliveries that ended, by rank

    @classmethod
    def of(cls, ring: SharedRingBuffer) -> Gone:
        """Note what the ring says at its end. ClosedError: it says nothing any more."""
        native = ring.native
        counts = {rank: {**native.depth(rank), "ready": 0, "claimed": 0} for rank in range(_ring.MAX_READERS)}
        return cls(
            ring.name, ring.fingerprint, native.ended, {rank: of for rank, of in counts.items() if any(of.values())}
        )


class Observed:
    """Observers of segments, kept as long as these exist. They hold no owner place, and claim nothing."""

    def __init__(self) -> None:
        self._rings: dict[str, SharedRingBuffer] = {}
        self.ends: dict[str, Gone] = {}  # by ring, in the order in which they went
        self.unseen: dict[str, str] = {}  # by name, why this process could not look

    def look(self, names: Collection[str]) -> dict[str, SharedRingBuffer]:
        """Return an observer of each of these segments that can be seen. Others are left."""
        wanted = set(names)
        for name, ring in list(self._rings.items()):
            gone = not ring.native.still_named
            if gone:
                with contextlib.suppress(ClosedError):
                    self.ends[ring.ring_id] = Gone.of(ring)
            if gone or name not in wanted:
                ring.close()
                del self._rings[name]
        unseen = {}
        for name in names:
            if name not in self._rings:
                try:
                    with promised(OF_A_RING, "it"):
                        self._rings[name] = SharedRingBuffer.attach(name, role="observer")
                except RingError:  # gone again, being made, or another user's
                    continue
                except OpenFilesError as error:
                    unseen[name] = str(error)
        self.unseen = unseen
        return {name: self._rings[name] for name in names if name in self._rings}

    def close(self) -> None:
        """Detach."""
        while self._rings:
            self._rings.popitem()[1].close()


def _with(prefix: str, name: str) -> str:
    if not prefix or belongs(name, prefix):
        return name
    return beginning_of(prefix) + name.removeprefix(_BEGINNING)


def segment_served_at(port: int) -> str:
    """Return the segment of this host whose living server names the port; "": none or several. Blocks."""
    names = [
        ring.name
        for ring in each_observed(_ring.segments())
        if port in ring.native.ports() and (ring.native.supervised or ring.native.keeper_alive)
    ]
    return names[0] if len(names) == 1 else ""


def each_observed(names: Iterable[str]) -> Iterator[SharedRingBuffer]:
    """Observe one segment after the other: a host may have more than this process may open files."""
    for name in names:
        with contextlib.suppress(RingError), SharedRingBuffer.attach(name, role="observer") as ring:
            yield ring


def starts_of(rings: Iterable[SharedRingBuffer]) -> dict[int, set[int]]:
    """Return the processes that write these rings, by the session of each: one for each terminal or scheduled job."""
    starts: dict[int, set[int]] = {}
    for ring in rings:
        with contextlib.suppress(ClosedError):  # closed meanwhile
            for owner in ring.native.owners():
                if owner.alive and owner.role == _ring.ROLE_WRITER:
                    with contextlib.suppress(OSError):  # of another container, or it has ended
                        starts.setdefault(os.getsid(owner.pid), set()).add(owner.pid)
    return starts


def _of_another(ring: SharedRingBuffer) -> bool:
    """Return whether another process than this one writes the ring."""
    try:
        owners = ring.native.owners() if ring.native.keeper_alive else []
    except ClosedError:  # closed meanwhile
        return False
    return any(each.alive and each.role == _ring.ROLE_WRITER and each.pid != os.getpid() for each in owners)


class OnThisHost(Discovery):
    """Rings by their names."""

    def __init__(self, prefix: str | None = None) -> None:
        if prefix is not None:
            prefix = prefix.removeprefix(_BEGINNING)
            if not _NAME.fullmatch(prefix):
                raise UsageError(f"{prefix!r} begins no name of a ring: give 1 to 100 letters, digits, . _ -")
        self.prefix = default_prefix() if prefix is None else prefix
        self._observed = Observed()

    def __repr__(self) -> str:
        return f"rings:{self.prefix}"

    def segments(self) -> list[str]:
        """Names that belong to the prefix."""
        return [name for name in _ring.segments() if belongs(name, self.prefix)]

    def others(self) -> list[str]:
        """List other runs by the segments that other processes write: what this one writes is no other run."""
        names = {name for name in set(_ring.segments()) - set(self.segments()) if run_of(name)}
        return sorted({run_of(ring.name) for ring in each_observed(names) if _of_another(ring)})

    def served(self, mapped: Collection[str], names: Collection[str] = ()) -> Mapping[str, RingAddress]:
        """Return what the segments say of their listeners. Segments of these ``names`` are not looked at."""
        found = {}
        for ring in self._observed.look([name for name in self.segments() if name not in names]).values():
            with contextlib.suppress(ClosedError):
                ports = ring.native.ports()
                if ports and ring.ring_id not in mapped:
                    addresses = [each for each in ring.native.addresses.split(",") if each]
                    found[ring.ring_id] = RingAddress(
                        (*addresses, loopback_of(addresses)), ports, ring.ring_id, ring.name
                    )
        return found

    def unseen(self) -> Mapping[str, str]:
        """Return the segments that the last look of `served` could not look at."""
        return self._observed.unseen

    def close(self) -> None:
        """Detach the observers."""
        self._observed.close()


class AtAddresses(Discovery):
    """Listeners by host and port."""

    fixed = True

    def __init__(self, addresses: str) -> None:
        try:
            self._places = {
                each: RingAddress((port_of(each)[0],), (port_of(each)[1],)) for each in addresses.rstrip("/").split(",")
            }
        except UsageError as error:
            raise ConfigurationError(f"rings://{addresses}: {error}; give rings://host:port,host:port") from None

    def __repr__(self) -> str:
        return f"rings://{','.join(self._places)}"

    def served(self, mapped: Collection[str], names: Collection[str] = ()) -> Mapping[str, RingAddress]:
        """All of them."""
        return self._places


class InDirectory(Discovery):
    """Servers that published themselves; those of this host are found by their segments, too.

    The store is read in a thread, and what it said last is used meanwhile: one that hangs delays nobody who knows it.
    """

    def __init__(self, directory: Directory) -> None:
        self.directory: Directory = directory
        self._observed = Observed()
        self._known: Mapping[str, Serving] = {}
        self._ended: Mapping[str, Ended] = {}
        self._before: Mapping[str, float] = {}  # of the first look: when which ring had ended
        self._here: set[str] = set()
        self._segments: dict[str, str] = {}
        self._due = float("-inf")
        self._reads = 0  # of the directory
        self._reading: threading.Thread | None = None
        self._failed: Exception | None = None
        self._made: tuple[object, Mapping[str, RingAddress]] = (
            None,
            {},
        )  # and what it is made of; one object, for all threads

    def __repr__(self) -> str:
        return f"rings in the directory {self.directory.place}"

    def named(self, name: str) -> str:
        """Return the name with the run's own in front, by which a ring that was left is found again."""
        return _with(f"{self.directory.run()}-", name)

    def _look(self) -> None:
        """Have the directory read where that is due. Waits for the first answer alone, and raises its error."""
        if self._reading is None or (not self._reading.is_alive() and time.monotonic() >= self._due):
            self._reading = threading.Thread(target=self._read, name="transport directory", daemon=True)
            threads.start(self._reading)
        if not self._reads:
            self._reading.join()
            if self._failed is not None:
                self._reading, failed = None, self._failed
                raise failed

    def _read(self) -> None:
        try:
            records = self.directory.all()
            ended = self.directory.ended()  # last: a ring says its end before its record goes
        except Exception as error:
            # The rings are not in the store: they are written and read while that is away.
            self._failed = error
            self._due = time.monotonic() + _STORE_MOST_S
            if self._reads:
                log.warning("rings are not looked for, those found before are used: %s", error)
            return
        self._failed = None
        self._due = time.monotonic() + min(max(_STORE_EVERY_S, len(records) / _RINGS_A_SECOND), _STORE_MOST_S)
        here = host_identity()
        published = {each.ring for each in records}
        self._known = {each.ring: each for each in records if each.ring not in ended}
        # The directory forgets an end in time, this process does not: it still counts it.
        self._ended = {ring: said for ring, said in self._ended.items() if ring not in published} | ended
        if not self._reads:
            self._before = {ring: said.at for ring, said in ended.items()}
        self._here = {each.ring for each in records if each.host == here}
        self._reads += 1

    def segments(self) -> list[str]:
        """Return the segments of the rings that this host serves."""
        self._look()
        if not self._here:
            return []
        seen = self._observed.look(_ring.segments())
        self._segments = {ring.ring_id: name for name, ring in seen.items() if ring.ring_id in self._here}
        return list(self._segments.values())

    def served(self, mapped: Collection[str], names: Collection[str] = ()) -> Mapping[str, RingAddress]:
        """Return the rings as published; the same object while nothing changes: ten thousand places take 8 ms."""
        self.segments()
        made_of = self._reads, frozenset(mapped), tuple(self._segments.items())
        before, served = self._made
        if made_of != before:
            memory = memory_identity()
            served = {
                ring: RingAddress(
                    each.addresses, each.ports, ring, self._segments.get(ring, "") if ring in self._here else None
                )
                for ring, each in self._known.items()
                # Who has seen its segment go knows that nobody serves it, however long its record lasts.
                if ring not in mapped
                and (each.memory != memory or ring in self._segments or ring not in self._observed.ends)
            }
            self._made = made_of, served
        return served

    def gone(self) -> set[str]:
        """Return the published rings whose segments are not in this memory, where they would be."""
        self.segments()
        known = self._known  # before the names: a segment is there before its record
        memory, others = memory_identity(), set(_ring.segments()).difference(self._segments.values())
        return {
            ring
            for ring, each in known.items()
            if each.memory == memory and ring not in self._segments and each.segment not in others
        }

    def ended(self) -> Mapping[str, bytes]:
        """Return the rings whose ends are written into the directory."""
        return {ring: said.fingerprint for ring, said in self._ended.items()}

    def ended_before(self) -> Mapping[str, float]:
        """Return the ends that the first look into the directory found."""
        return self._before

    def close(self) -> None:
        """Detach the observers. The store stays its owner's."""
        self._observed.close()
