"""Rings of this host as they are found: attached, claimed from, and left at their end."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence, Set
from functools import lru_cache, partial

from transport import _ring
from transport.claims.places import Discovery, Gone, Observed, RingAddress
from transport.claims.waiting import (
    Here,
    Holder,
    foreign,
    held_here,
    holders_of,
    name_of,
    ranks_of,
    schema_of,
    unread_of,
)
from transport.errors import ClosedError, RankError, TransportError, UsageError
from transport.ring.attached import AttachedRings
from transport.ring.buffer import SharedRingBuffer
from transport.ring.claiming import Seen, wait_for_payloads
from transport.runtime.logs import LogLimit
from transport.schema import Schema
from transport.ticket import NO_SCHEMA

log = logging.getLogger(__name__)

Ranked = tuple[SharedRingBuffer, int]  # a ring, and the rank that claims from it


class RingsOfHost:
    """Attachments to the segments of some places, and claims from them. Any thread.

    Args:
        places: looked at under one lock: they keep what they have seen.
        lease_s: after how much silence of this process its claims end; None: they last as long as it lives.
        max_deliveries: claims in vain after which a delivery is dead.

    Attributes:
        bell: ends waits of `take_parts`.
        attached: the attachments, which a client's reads by ticket share.
    """

    def __init__(self, places: Discovery, lease_s: float | None, max_deliveries: int) -> None:
        self._places = places
        self._max_deliveries = max_deliveries
        self.bell = _ring.Bell()
        self._turn = 0  # which ring is asked first
        self.attached = AttachedRings(lease_s, self._left)
        self._lock = self.attached.lock
        self._rings: dict[str, SharedRingBuffer] = {}  # of the attached ones those of the run, by id
        self._there: list[str] = []  # segments, as of the last look
        self._ranked: dict[tuple[frozenset[str], int | str], tuple[Sequence[Ranked], RankError | None]] = {}  # of these
        self._seen = Observed()
        self._log_limit = LogLimit()

    def __repr__(self) -> str:
        return f"<RingsOfHost {len(self._rings)} attached>"

    def add(self, ring: SharedRingBuffer) -> None:
        """Add a ring of this process, which closes it itself."""
        if ring.native.owner < 0:
            raise UsageError(f"ring {ring.ring_id[:8]} is attached as an observer, which claims nothing")
        with self._lock:
            self._rings[ring.ring_id] = self.attached.give(ring)
            self._ranked = {}

    def rings(self, schemas: frozenset[str]) -> list[SharedRingBuffer]:
        """Return the rings to claim from: those with payloads of these schemas (none: of any)."""
        fit = _fitting(schemas)
        return [
            ring
            for ring in list(self._rings.values())
            if not ring.native.closed and (not fit or ring.native.fingerprint in fit)
        ]

    def ranked(self, schemas: frozenset[str], rank: int | str) -> tuple[Sequence[Ranked], RankError | None]:
        """Return the `rings` that have a rank, or a consumer of this name, each with its number.

        Last the error where none has it.
        """
        known = self._ranked
        if (found := known.get((schemas, rank))) is not None:
            return found
        ranked: list[Ranked] = []
        unknown, lacking = None, False
        for ring in self.rings(schemas):
            try:
                ranked.append((ring, ring.rank_of(rank) if isinstance(rank, str) else rank))
            except ClosedError:  # closed meanwhile, by another thread
                continue
            except RankError as error:
                lacking = True  # a ring may come that has it
                if ring.native.consumers or ring.native.counters()["publishes"]:  # else it is being made
                    unknown = error
        if lacking:
            return ranked, None if ranked else unknown
        known[schemas, rank] = found = ranked, None
        return found

    def unmapped(self) -> dict[str, str]:
        """Return why rings could not be attached, by their segments' names."""
        there = set(self._there)
        return {name: why for name, why in self.attached.refused().items() if name in there}

    # --- following ------------------------------------------------------------------------------------
    def look(self, schemas: frozenset[str]) -> None:
        """Attach to what is new and has payloads of these schemas (none: of any), leave what has ended."""
        with self._lock:
            try:
                self.attached.leave_ended()
                self._attach_all(schemas)
            except TransportError as error:
                if (before := self._log_limit.due()) is not None:
                    log.warning("rings were not looked for, and are again soon: %s (%d more)", error, before)

    def _left(self, ring: SharedRingBuffer) -> None:
        """Note how a ring of the run has ended, found by a claim or by a read."""
        if self._rings.pop(ring.ring_id, None) is not None:
            self._ranked = {}
            if not ring.native.begun:  # the set-up of a rollout of this process has failed
                return
            try:
                gone = Gone.of(ring)
            except ClosedError:  # its writer, in this process, has closed it
                gone = Gone(ring.name, ring.fingerprint, ring.data_ended)
            self._seen.ends[ring.ring_id] = gone

    def _attach_all(self, schemas: frozenset[str]) -> None:
        here = self._names()
        self._there = self._places.segments()
        fits = partial(_fits, fit=_fitting(schemas))
        for name in self._there:
            if name not in here and (ring := self.attached.attach(name, schemas, fits)) is not None:
                self._rings[ring.ring_id] = ring
                self._ranked = {}

    def served(
        self, schemas: frozenset[str], *, mapped: bool, foreign: Collection[str] = ()
    ) -> Mapping[str, RingAddress]:
        """Return where rings with payloads of these schemas are asked, except those that ``mapped`` claims are of.

        ``foreign``: rings elsewhere that have others.
        """
        with self._lock:
            known = {ring.ring_id for ring in self.rings(schemas)} if mapped else set()
            places = self._places.served(known, self._names() if mapped else ())
            if not schemas:
                return places
            fit = _fitting(schemas)
            seen = (*self._rings.values(), *self._others().values())
            unfit = {ring.ring_id for ring in seen if not _fits(ring, fit)}.union(foreign)
            return {name: place for name, place in places.items() if place.ring not in unfit} if unfit else places

    def known(self, schemas: Sequence[Schema], rank: int | str | None) -> Here:
        """Return the state of this host's rings for payloads of these schemas (none: of all), of a rank or of all."""
        fit = _fitting(frozenset(each.fingerprint for each in schemas))
        fitting: set[str] = set()
        unread = free = own = 0
        others: set[str] = set()
        strangers: list[str] = []
        unnamed: list[str] = []
        holders: list[Holder] = []
        ranks = 0
        for ring in self.seen():
            with contextlib.suppress(ClosedError):  # closed meanwhile
                if fit and ring.native.fingerprint not in fit:
                    theirs = schema_of(ring.native.schema)
                    strangers.append(foreign(ring.name, ring.native.fingerprint.hex(), theirs, schemas))
                    continue
                fitting.add(ring.ring_id)
                ranks = max(ranks, ranks_of(ring))
                try:
                    of = None if rank is None else ring.rank_of(rank)
                except RankError as error:
                    unnamed.append(f"ring {ring.ring_id[:8]}: {error}")
                    continue
                for each, count in unread_of(ring).items():
                    if of in (None, each):
                        unread += count
                    else:
                        others.add(name_of(ring, each))
                found = holders_of(ring, of)
                holders += found
                own += held_here(ring, found)
                free += sum(ring.native.state_counts()[: _ring.READY])
        return Here(fitting, unread, sorted(others), free, own, strangers, unnamed, holders, ranks)

    def ended(self, schemas: frozenset[str], *, mapped: bool) -> tuple[dict[str, bool], set[str], set[str]]:
        """Return, of rings that are gone, and with ``mapped`` of those that are done, whether the writer has said
        its end; and the ids of the others. Those with payloads of these schemas (none: of any).

        Last the ids of rings without an end in whose place another one has come, by its name: its end is theirs.
        """
        if mapped:
            self.look(schemas)
        fit = _fitting(schemas)
        with self._lock:
            here = (*self._rings.values(), *self._others().values())
            gone = {ring: Gone("", fingerprint, True) for ring, fingerprint in self._places.ended().items()}
            ended = {
                ring: each.said
                for ring, each in {**self._seen.ends, **gone}.items()
                if not fit or each.fingerprint in fit
            }
            last = {each.name: ring for ring, each in self._seen.ends.items()} | {
                ring.name: ring.ring_id for ring in here
            }
            replaced = {ring for ring, each in self._seen.ends.items() if not each.said and last[each.name] != ring}
            living = set()
            for ring in self.rings(schemas) if mapped else ():
                try:
                    drained = ring.native.drained
                except ClosedError:  # closed meanwhile: the next look sees how
                    drained = False
                if drained:
                    ended[ring.ring_id] = True
                else:
                    living.add(ring.ring_id)
            return ended, living, replaced

    def left(self, schemas: frozenset[str], rank: int | str) -> dict[str, int]:
        """Return, for each ring whose writer has said its end, how many payloads this rank has not consumed."""
        left: dict[str, int] = {}
        for ring, of in self.ranked(schemas, rank)[0]:
            with contextlib.suppress(ClosedError):  # closed meanwhile: the next look sees how
                if ring.native.ended:
                    left[ring.ring_id] = ring.native.left(of)
        return left

    def seen(self, rings: Collection[str] | None = None) -> list[SharedRingBuffer]:
        """Every ring of these places that is on this host, some as observers.

        ``rings``: the only ones that are needed; where this process has them, others are not looked for.
        """
        with self._lock:
            ours = [ring for ring in self._rings.values() if not ring.native.closed]
            if rings is not None and {ring.ring_id for ring in ours}.issuperset(rings):
                return ours
            return [*ours, *self._others().values()]

    def segments(self) -> list[str]:
        """Return the names of the segments of these places."""
        with self._lock:
            return self._places.segments()

    def _names(self) -> set[str]:
        """Return the names of the segments that this process is attached to."""
        return {ring.name for ring in self._rings.values() if ring.native.still_named}

    def _others(self) -> dict[str, SharedRingBuffer]:
        """Return observers of the segments that this process is not attached to, by their names."""
        ours = self._names()
        return self._seen.look([name for name in self._places.segments() if name not in ours])

    def past(self) -> dict[tuple[str, int, str], int]:
        """Return the counts of rings that are gone, by ring, rank and name."""
        with self._lock:
            return {
                (ring, rank, name): count
                for ring, gone in self._seen.ends.items()
                for rank, counts in gone.counts.items()
                for name, count in counts.items()
            }

    def elsewhere(self) -> dict[str, RingAddress]:
        """Return where rings are served that are not on this host, by their ids."""
        with self._lock:
            seen = {ring.ring_id for ring in self.seen()}
            places, known = self._places.served(seen), seen | self._places.gone()
            return {ring: place for ring, place in places.items() if ring not in known}

    # --- claiming -------------------------------------------------------------------------------------
    def _events(self, rings: Sequence[Ranked]) -> list[Seen]:
        """Return what to wait for: events of as many rings as the kernel waits for at a time, others in each turn."""
        begin = self._turn % len(rings) if len(rings) > _ring.MAX_WAITED else 0
        seen: list[Seen] = []
        for ring, rank in [*rings[begin:], *rings[:begin]][: _ring.MAX_WAITED]:
            with contextlib.suppress(ClosedError):  # closed meanwhile, by another thread
                seen.append((ring.native, ring.native.published_event(), rank))
        return seen

    def take_parts(
        self,
        rings: Sequence[Ranked],
        n: int,
        wait_s: float,
        rung: int | None,
        consumer: str,
        oldest_version: int | None,
    ) -> list[_ring.ClaimedBatch]:
        """Claim up to ``n`` payloads, of each ring the oldest first, without an object for each.

        Of several rings each is first in turn. Where there is none it looks once more, after ``wait_s`` or a moment, or
        as soon as there may be one, or when `bell` has ``rung`` since.
        """
        parts = self._parts(rings, n, consumer, oldest_version)
        if parts or wait_s <= 0:
            return parts
        seen = self._events(rings)
        parts = self._parts(rings, n, consumer, oldest_version)  # what came before the events were read
        if parts or not seen:
            return parts
        wait_for_payloads(seen, wait_s, None if rung is None else self.bell, rung or 0)
        return self._parts(rings, n, consumer, oldest_version)

    def _parts(
        self,
        rings: Sequence[Ranked],
        n: int,
        consumer: str,
        oldest_version: int | None,
    ) -> list[_ring.ClaimedBatch]:
        parts: list[_ring.ClaimedBatch] = []
        self._turn += 1  # of no consequence if two threads read the same
        for at in range(self._turn, self._turn + len(rings)):
            ring, rank = rings[at % len(rings)]
            try:
                part = ring.native.claim_batch(
                    n,
                    0.0,
                    rank=rank,
                    oldest_version=oldest_version,
                    most_attempts=self._max_deliveries,
                    consumer=consumer,
                )
            except ClosedError:  # meanwhile, by another thread
                continue
            except TransportError:
                if not parts:
                    raise  # else the next call meets it again: what was claimed is the caller's
                continue
            if part:
                parts.append(part)
                n -= len(part)
                if not n:
                    break
        return parts

    def close(self) -> None:
        """Leave every ring that was found; what is claimed of it can be claimed by others. Idempotent."""
        with self._lock:
            self.attached.close()
            self._rings = {}
            self._seen.close()
            self._places.close()


@lru_cache(maxsize=64)
def _fitting(schemas: frozenset[str]) -> frozenset[bytes]:
    """Fingerprints, as a segment has them, of rings that have payloads of these schemas; none: of all."""
    return frozenset(bytes.fromhex(fingerprint) for fingerprint in (*schemas, NO_SCHEMA)) if schemas else frozenset()


def _fits(ring: SharedRingBuffer, fit: Set[bytes]) -> bool:
    return not ring.native.closed and (not fit or ring.native.fingerprint in fit)
