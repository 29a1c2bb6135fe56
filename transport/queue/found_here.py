"""Rings of this host as they are found: attached, claimed from, and left when their writers have ended."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from transport import _ring
from transport.devices.buffers import BufferPool
from transport.errors import RingNotFoundError, TransportError, UsageError
from transport.queue.base import Claim
from transport.queue.places import Observed, Places
from transport.queue.rings import RingQueue
from transport.ring.buffer import SharedRingBuffer
from transport.ring.states import named
from transport.runtime.logs import Seldom
from transport.ticket import NO_SCHEMA

if TYPE_CHECKING:
    from transport.queue.demands import Place
    from transport.schema import Schema

log = logging.getLogger(__name__)

_TRY_AGAIN_S: Final = 30.0  # after an attachment was refused
_SHARE_OF_SLOTS: Final = 0.5  # views beyond it become copies, so that a reader with many views cannot block the writer


class FoundHere:
    """Attachments to the segments of some places, and the queue over them. Any thread.

    Attributes:
        queue: what is claimed through it is this process's.
        elsewhere: whether any ring has to be asked over the network, as of the last look.
    """

    def __init__(self, places: Places, *, lease_s: float, max_deliveries: int) -> None:
        self._places = places
        self.queue = RingQueue(lease_s=lease_s, max_deliveries=max_deliveries)
        self.elsewhere = False
        self._lock = threading.RLock()
        self._attached: dict[str, SharedRingBuffer] = {}  # by id: a newer ring may have the same name
        self._own: dict[str, SharedRingBuffer] = {}  # writers' of this process
        self._views: weakref.WeakKeyDictionary[SharedRingBuffer, _ring.Views] = weakref.WeakKeyDictionary()
        self._refused: dict[str, float] = {}
        self._seen = Observed()
        self._schemas: frozenset[str] = frozenset()
        self._mapped = True
        self._carries = True
        self._buffers = BufferPool()
        self._seldom = Seldom()

    def __repr__(self) -> str:
        return f"<FoundHere {len(self._attached)} attached>"

    @property
    def some(self) -> bool:
        """Whether there is any ring to claim from."""
        return bool(self._attached or self._own)

    def only(self, schemas: Sequence[Schema], *, mapped: bool, carries: bool) -> None:
        """Claim payloads of these schemas (none: of any), mapped or over the network, if these are allowed."""
        with self._lock:
            self._schemas = frozenset(schema.fingerprint for schema in schemas)
            self._mapped = mapped
            self._carries = carries
            if not mapped:
                for ring in list(self._attached.values()):
                    self._leave(ring)

    def add(self, ring: SharedRingBuffer) -> None:
        """A writer of this process, which closes its ring itself."""
        with self._lock:
            self._own[ring.ring_id] = ring
            self.queue.add(ring)

    # --- following ------------------------------------------------------------------------------------
    def look(self) -> None:
        """Attach to what is new, leave what has ended."""
        with self._lock:
            try:
                for ring in [ring for ring in self._own.values() if ring.native.closed]:
                    del self._own[ring.ring_id]
                    self.queue.remove(ring)
                for ring in [ring for ring in self._attached.values() if self._ended(ring)]:
                    self._leave(ring)
                if self._mapped:
                    self._attach_all()
                self.elsewhere = self._carries and bool(self.served())
            except TransportError as error:
                if (before := self._seldom.due()) is not None:
                    log.warning("rings were not looked for, and are again soon: %s (%d more)", error, before)

    def _attach_all(self) -> None:
        now = time.monotonic()
        here = {ring.name for ring in (*self._attached.values(), *self._own.values()) if ring.native.still_named}
        for name in self._places.segments():
            if name in here or now < self._refused.get(name, 0.0):
                continue
            why = self._attach(name)
            if why:
                self._refused[name] = now + _TRY_AGAIN_S
                log.info("ring %s is not mapped: %s", name, why)

    def _attach(self, name: str) -> str:
        """Why not; "": attached, or not to be attached yet."""
        try:
            ring = SharedRingBuffer.attach(name, role="reader")
        except RingNotFoundError:  # gone, or being made: the next look sees
            return ""
        except TransportError as error:
            return str(error)
        readers = sum(owner.alive and owner.role == _ring.ROLE_READER for owner in ring.native.owners())
        if self._schemas and ring.native.fingerprint not in self._fitting():
            ring.close()
            return "its schema is none of this trainer's"
        if readers > _ring.MAX_OWNERS - 2 - max(1, len(ring.native.ports())):
            ring.close()
            return "its remaining owner numbers are reserved for its writer and listeners"
        try:
            self.queue.add(ring)
        except UsageError as error:
            ring.close()
            return str(error)
        self._attached[ring.ring_id] = ring
        return ""

    def _ended(self, ring: SharedRingBuffer) -> bool:
        if ring.native.closed:
            return True
        views = self._views.get(ring)
        with contextlib.suppress(_ring.RingFault):
            _, writing, ready, reading = ring.native.state_counts()
            return not (ring.native.keeper_alive or writing or ready or reading or views)
        return True

    def _leave(self, ring: SharedRingBuffer) -> None:
        del self._attached[ring.ring_id]
        self.queue.remove(ring)
        views = self._views.pop(ring, None)
        if views is None or views.close():
            ring.close()

    def served(self) -> Mapping[str, Place]:
        """Where the rings that are not attached here are asked."""
        with self._lock:
            mapped = {ring.ring_id for ring in (*self._attached.values(), *self._own.values())}
            unfit = self._unfit() if self._schemas else set()
            places = self._places.served(mapped)
            return {name: place for name, place in places.items() if place.ring not in unfit} if unfit else places

    def _fitting(self) -> set[bytes]:
        """Fingerprints, as a segment has them, of rings that have payloads for this trainer."""
        return {bytes.fromhex(fingerprint) for fingerprint in (*self._schemas, NO_SCHEMA)}

    def _unfit(self) -> set[str]:
        """Rings of this host whose payloads are of another schema."""
        fit = self._fitting()
        return {
            ring.ring_id
            for ring in self._seen.look(self._places.segments()).values()
            if ring.native.fingerprint not in fit
        }

    def seen(self, rings: Collection[str] | None = None) -> list[SharedRingBuffer]:
        """Every ring of these places that is on this host, some as observers.

        ``rings``: the only ones that are needed; where this process has them, others are not looked for.
        """
        with self._lock:
            ours = [ring for ring in (*self._attached.values(), *self._own.values()) if not ring.native.closed]
            if rings is not None and {ring.ring_id for ring in ours}.issuperset(rings):
                return ours
            known = {ring.name for ring in ours}
            others = self._seen.look([name for name in self._places.segments() if name not in known])
            return [*ours, *others.values()]

    # --- payloads -------------------------------------------------------------------------------------
    def payload(self, claim: Claim, size: int) -> Any:
        """The payload of a claim: a view of its slot, or a copy where many views are out; None: it is gone."""
        place = self.queue.place(claim.ticket_id)
        if place is None:
            return None
        ring, slot, generation = place
        try:
            view = self._views_of(ring).read(
                ring, slot, generation, ring.key(slot, generation), size, claim.rank, consume=False
            )
            if isinstance(view, int):
                return None
            if view is not None:
                return view
            if ring.native.begin_read(slot, generation, ring.key(slot, generation), size, claim.rank) != _ring.READ_OK:
                return None
            try:
                block = self._buffers.take(size)
                _ring.copy(block, ring.native.payload(slot)[:size])
                return block
            finally:
                ring.native.unpin(slot, generation)
        except _ring.RingFault as fault:
            raise named(fault) from None

    def _views_of(self, ring: SharedRingBuffer) -> _ring.Views:
        with self._lock:
            views = self._views.get(ring)
            if views is None:
                views = self._views[ring] = _ring.Views(ring.native, int(ring.slot_count * _SHARE_OF_SLOTS))
                # Before the ring's own finalizer: a segment whose last reader exits with views must not stay behind.
                weakref.finalize(ring, views.let_go)
            return views

    def close(self) -> None:
        """Leave every ring that was found; what is claimed of it can be claimed by others. Idempotent."""
        with self._lock:
            self.queue.close()
            for ring in list(self._attached.values()):
                self._leave(ring)
            self._own.clear()
            self._seen.close()
            self._places.close()
