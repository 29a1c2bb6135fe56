"""Rings of this host as they are found: attached, claimed from, and left at their end."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence, Set
from functools import lru_cache
from typing import Any, Final

from transport import _ring
from transport.claims.batch import End, Verdict
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
from transport.devices.buffers import BufferPool
from transport.errors import ClosedError, RankError, RingNotFoundError, TransportError, UsageError
from transport.queue.base import Claim, PayloadBytes
from transport.ring.buffer import SharedRingBuffer, attached_reader
from transport.ring.claiming import Seen, wait_for_payloads
from transport.runtime.decoders import hiding
from transport.runtime.logs import LogLimit
from transport.schema import Schema
from transport.ticket import NO_SCHEMA

log = logging.getLogger(__name__)

_TRY_AGAIN_S: Final = 30.0  # after an attachment was refused
Ranked = tuple[SharedRingBuffer, int]  # a ring, and the rank that claims from it
_ENDINGS: Final = {Verdict.DISCARDED: "discarded", Verdict.DEAD: "dead", Verdict.AGED: "aged"}


@hiding("data", "token", "source", "ring", "native")
class MappedClaim(Claim, frozen=True, kw_only=True):
    """A claim of a mapped ring. It goes back when nothing refers to it any more."""

    source: RingsOfHost
    ring: SharedRingBuffer
    native: _ring.Claim

    @property
    def in_vain(self) -> int:
        """How often the delivery was claimed in vain before."""
        return self.native.in_vain

    @property
    def in_question(self) -> bool:
        """Whether it may have been consumed: never, since the ring is at hand."""
        return False

    def renewed(self) -> bool:
        """Whether it is held; says that its holder is alive."""
        try:
            self.ring.native.heard()
            return self.native.held
        except ClosedError:
            return False

    def payload_bytes(self) -> PayloadBytes | None:
        """The payload; None: it is gone, or to be read by its ticket."""
        return self.source.payload_bytes(self)


class RingsOfHost:
    """Attachments to the segments of some places, and claims from them. Any thread.

    Args:
        lease_s: after how much silence of this process its claims end; None: they last as long as it lives.
        max_deliveries: claims in vain after which a delivery is dead.

    Attributes:
        bell: ends waits of `claim`.
    """

    def __init__(self, places: Discovery, lease_s: float | None, max_deliveries: int) -> None:
        self._places = places
        self._lease_s = lease_s
        self._max_deliveries = max_deliveries
        self.bell = _ring.Bell()
        self._turn = 0  # which ring is asked first
        self._lock = threading.RLock()
        self._attached: dict[str, SharedRingBuffer] = {}  # by id: a newer ring may have the same name
        self._own: dict[str, SharedRingBuffer] = {}  # writers' of this process
        # Until when, and why; by name, and the schemas that were asked for. "": it has payloads of others.
        self._refused: dict[tuple[str, frozenset[str]], tuple[float, str]] = {}
        self._seen = Observed()
        self._buffers = BufferPool()
        self._log_limit = LogLimit()

    def __repr__(self) -> str:
        return f"<RingsOfHost {len(self._attached)} attached>"

    def add(self, ring: SharedRingBuffer) -> None:
        """A ring of this process, which closes it itself."""
        if ring.native.owner < 0:
            raise UsageError(f"ring {ring.ring_id[:8]} is attached as an observer, which claims nothing")
        with self._lock:
            self._leave_ended()
            self._own = {**self._own, ring.ring_id: ring}
            ring.set_lease(self._lease_s)

    def remove(self, ring: SharedRingBuffer) -> None:
        """Claim no more from a ring that was added."""
        with self._lock:
            self._own = {ring_id: each for ring_id, each in self._own.items() if each is not ring}

    def rings(self, schemas: frozenset[str]) -> list[SharedRingBuffer]:
        """To claim from: those with payloads of these schemas (none: of any)."""
        fit = _fitting(schemas)
        return [
            ring
            for ring in (*self._attached.values(), *self._own.values())
            if not ring.native.closed and (not fit or ring.native.fingerprint in fit)
        ]

    def ranked(self, schemas: frozenset[str], rank: int | str) -> tuple[list[Ranked], RankError | None]:
        """Return the `rings` that have a rank, or a consumer of this name, each with its number.

        Last the error where none has it.
        """
        rings = self.rings(schemas)
        if isinstance(rank, int):
            return [(ring, rank) for ring in rings], None
        ranked: list[Ranked] = []
        unknown = None
        for ring in rings:
            try:
                ranked.append((ring, ring.rank_of(rank)))
            except ClosedError:  # closed meanwhile, by another thread
                continue
            except RankError as error:
                unknown = error
        return ranked, None if ranked else unknown

    def unmapped(self, schemas: frozenset[str]) -> dict[str, str]:
        """Return why rings with payloads of these schemas could not be attached, by their segments' names."""
        with self._lock:
            return {name: why for (name, of), (_, why) in self._refused.items() if of == schemas and why}

    # --- following ------------------------------------------------------------------------------------
    def look(self, schemas: frozenset[str]) -> None:
        """Attach to what is new and has payloads of these schemas (none: of any), leave what has ended."""
        with self._lock:
            try:
                self._leave_ended()
                self._attach_all(schemas)
            except TransportError as error:
                if (before := self._log_limit.due()) is not None:
                    log.warning("rings were not looked for, and are again soon: %s (%d more)", error, before)

    def _leave_ended(self) -> None:
        for ring in [ring for ring in self._own.values() if ring.native.closed]:
            self._seen.ends[ring.ring_id] = Gone(ring.name, ring.fingerprint, ring.data_ended)
            del self._own[ring.ring_id]
        for ring in [ring for ring in self._attached.values() if self._ended(ring)]:
            self._leave(ring)

    def _attach_all(self, schemas: frozenset[str]) -> None:
        now = time.monotonic()
        here = self._names()
        names = self._places.segments()
        there = set(names)
        self._refused = {key: each for key, each in self._refused.items() if key[0] in there}
        for name in names:
            if name not in here and now >= self._refused.get((name, schemas), (0.0, ""))[0]:
                self._refused.pop((name, schemas), None)
                self._attach(name, schemas, now)

    def _attach(self, name: str, schemas: frozenset[str], now: float) -> None:
        try:
            ring = attached_reader(name)
        except RingNotFoundError:  # gone, or being made: the next look sees
            return
        except TransportError as error:
            log.info("ring %s is not mapped: %s", name, error)
            self._refused[name, schemas] = now + _TRY_AGAIN_S, str(error)
            return
        if not _fits(ring, _fitting(schemas)):
            ring.close()
            self._refused[name, schemas] = now + _TRY_AGAIN_S, ""
            return
        ring.set_lease(self._lease_s)
        self._attached[ring.ring_id] = ring

    def _ended(self, ring: SharedRingBuffer) -> bool:
        if ring.native.closed:
            return True
        with contextlib.suppress(ClosedError):
            writing = ring.native.state_counts()[_ring.WRITING]
            return not (ring.native.keeper_alive or writing or ring.native.unread or ring.native.lent)
        return True

    def _leave(self, ring: SharedRingBuffer) -> None:
        with contextlib.suppress(ClosedError):
            self._seen.ends[ring.ring_id] = Gone.of(ring)
        del self._attached[ring.ring_id]
        ring.close()

    def served(self, schemas: frozenset[str], *, mapped: bool) -> Mapping[str, RingAddress]:
        """Where rings with payloads of these schemas are asked, those that ``mapped`` claims are of excepted."""
        with self._lock:
            known = {ring.ring_id for ring in self.rings(schemas)} if mapped else set()
            places = self._places.served(known, self._names() if mapped else ())
            if not schemas:
                return places
            fit = _fitting(schemas)
            seen = (*self._attached.values(), *self._own.values(), *self._others().values())
            unfit = {ring.ring_id for ring in seen if not _fits(ring, fit)}
            return {name: place for name, place in places.items() if place.ring not in unfit} if unfit else places

    def known(self, schemas: Sequence[Schema], rank: int | str | None) -> Here:
        """What the rings on this host say of payloads of these schemas (none: of all), and of a rank or of all."""
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
        """Of rings that are gone, and with ``mapped`` of those whose payloads are all done, whether the writer has said
        its end; and the ids of the others. Those with payloads of these schemas (none: of any).

        Last the ids of rings without an end in whose place another one has come, by its name: its end is theirs.
        """
        if mapped:
            self.look(schemas)
        fit = _fitting(schemas)
        with self._lock:
            here = (*self._attached.values(), *self._own.values(), *self._others().values())
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

    def written(self, schemas: frozenset[str], held: Mapping[str, int]) -> set[str]:
        """Ids of the rings whose writers have said that they write nothing more, and that have only what is held."""
        found = set()
        for ring in self.rings(schemas):
            with contextlib.suppress(ClosedError):  # closed meanwhile: the next look sees how
                if ring.native.ended and ring.native.unread <= held.get(ring.ring_id, 0):
                    found.add(ring.ring_id)
        return found

    def seen(self, rings: Collection[str] | None = None) -> list[SharedRingBuffer]:
        """Every ring of these places that is on this host, some as observers.

        ``rings``: the only ones that are needed; where this process has them, others are not looked for.
        """
        with self._lock:
            ours = [ring for ring in (*self._attached.values(), *self._own.values()) if not ring.native.closed]
            if rings is not None and {ring.ring_id for ring in ours}.issuperset(rings):
                return ours
            return [*ours, *self._others().values()]

    def _names(self) -> set[str]:
        """Return the names of the segments that this process is attached to."""
        return {ring.name for ring in (*self._attached.values(), *self._own.values()) if ring.native.still_named}

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
        """Where rings are served that are not on this host, by their ids."""
        with self._lock:
            seen = {ring.ring_id for ring in self.seen()}
            return {ring: place for ring, place in self._places.served(seen).items() if ring not in seen}

    # --- claiming -------------------------------------------------------------------------------------
    def claim(
        self,
        rings: Sequence[Ranked],
        n: int,
        wait_s: float,
        rung: int | None = None,
        *,
        consumer: str,
        oldest_version: int | None,
    ) -> list[Claim]:
        """Up to ``n``, of each ring the oldest first. Of several rings each is first in turn.

        Where there is none it looks once more, after ``wait_s`` or a moment, or as soon as there may be one, or when
        `bell` has ``rung`` since.
        """
        claims = self._claimed(rings, n, consumer, oldest_version)
        if claims or wait_s <= 0:
            return claims
        seen = self._events(rings)
        claims = self._claimed(rings, n, consumer, oldest_version)  # what came before the events were read
        if claims or not seen:
            return claims
        wait_for_payloads(seen, wait_s, None if rung is None else self.bell, rung or 0)
        return self._claimed(rings, n, consumer, oldest_version)

    def _events(self, rings: Sequence[Ranked]) -> list[Seen]:
        """Return what to wait for: events of as many rings as the kernel waits for at a time, others in each turn."""
        begin = self._turn % len(rings) if len(rings) > _ring.MAX_WAITED else 0
        seen: list[Seen] = []
        for ring, rank in [*rings[begin:], *rings[:begin]][: _ring.MAX_WAITED]:
            with contextlib.suppress(ClosedError):  # closed meanwhile, by another thread
                seen.append((ring.native, ring.native.published_event(), rank))
        return seen

    def _claimed(self, rings: Sequence[Ranked], n: int, consumer: str, oldest_version: int | None) -> list[Claim]:
        claims: list[Claim] = []
        self._turn += 1  # of no consequence if two threads read the same
        for at in range(len(rings)):
            if len(claims) == n:
                break
            ring, rank = rings[(self._turn + at) % len(rings)]
            try:
                taken = ring.native.claim(
                    n - len(claims),
                    0.0,
                    rank=rank,
                    oldest_version=oldest_version,
                    most_attempts=self._max_deliveries,
                    consumer=consumer,
                )
                claims += [self._claim(ring, each, consumer) for each in taken]
            except ClosedError:  # meanwhile, by another thread
                continue
            except TransportError:
                if not claims:
                    raise  # else the next call meets it again: what was claimed is the caller's
        return claims

    def _claim(self, ring: SharedRingBuffer, native: _ring.Claim, consumer: str) -> MappedClaim:
        name = f"{ring.ring_id}/{native.slot}/{native.generation}"
        return MappedClaim(
            name,
            ring.native.note(native.slot, native.generation) or b"",  # consumed by ticket meanwhile: ack will be told
            native.rank,
            native.attempts,
            f"{name} {native.rank} {native.attempts} {consumer}",
            native.policy_version,
            source=self,
            ring=ring,
            native=native,
        )

    def take_parts(
        self,
        rings: Sequence[Ranked],
        n: int,
        wait_s: float,
        rung: int | None,
        consumer: str,
        oldest_version: int | None,
    ) -> list[_ring.ClaimedBatch]:
        """Claim up to ``n`` payloads, of each ring the oldest first, without an object for each; waits as `claim`."""
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

    def heard(self) -> None:
        """Say to every ring that this process lives, so that its claims last."""
        with self._lock:
            for ring in (*self._attached.values(), *self._own.values()):
                with contextlib.suppress(ClosedError):
                    ring.native.heard()

    def end(self, claims: Sequence[MappedClaim], end: End) -> list[Claim]:
        """End claims so; those for which it was accepted, now or before."""
        return [claim for claim in claims if _has_ended(claim.native, end)]

    # --- payloads -------------------------------------------------------------------------------------
    def payload_bytes(self, claim: MappedClaim) -> PayloadBytes | None:
        """The payload of a claim: a view of its slot, or a copy where many views are out; None: it is gone."""
        if not claim.data or claim.ring.native.closed:
            return None
        ring, native = claim.ring, claim.native
        key = ring.key(native.slot, native.generation)
        wanted = native.slot, native.generation, key, native.length, native.rank
        data: Any = ring.native.begin_read(*wanted, ring.most_views)
        if data is None:  # many views are out
            loan = ring.native.begin_read(*wanted)
            if isinstance(loan, int):
                return None
            data = self._buffers.take(native.length)
            _ring.copy(data, loan)
        return None if isinstance(data, int) else PayloadBytes("mapped", data)

    def close(self) -> None:
        """Leave every ring that was found; what is claimed of it can be claimed by others. Idempotent."""
        with self._lock:
            for ring in list(self._attached.values()):
                self._leave(ring)
            self._own = {}
            self._seen.close()
            self._places.close()


def _has_ended(claim: _ring.Claim, end: End) -> bool:
    try:
        if end.verdict is Verdict.CONSUMED:
            return claim.finish()
        if end.verdict is Verdict.GIVEN_BACK:
            return claim.give_back(end.delay_s)
        return claim.end(_ENDINGS[end.verdict], end.reason, end.consumer)
    except ClosedError:  # the claim has ended with its ring
        return False


@lru_cache(maxsize=64)
def _fitting(schemas: frozenset[str]) -> frozenset[bytes]:
    """Fingerprints, as a segment has them, of rings that have payloads of these schemas; none: of all."""
    return frozenset(bytes.fromhex(fingerprint) for fingerprint in (*schemas, NO_SCHEMA)) if schemas else frozenset()


def _fits(ring: SharedRingBuffer, fit: Set[bytes]) -> bool:
    return not ring.native.closed and (not fit or ring.native.fingerprint in fit)
