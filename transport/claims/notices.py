"""Notices of a run: in the store of its directory, or in a small ring for each topic.

A notice on one host is a payload of a ring that overwrites its oldest. Readers observe that ring: they hold no owner
place of it, and nothing they do delays the announcer. So the ring's owners are those who announced, and the notice ends
with the last of them, however that ends: `latest` returns it no more, and the next announcement makes the ring anew.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Final, Literal, Protocol

import msgspec

from transport import _ring
from transport.decoders import msgpack_decoder
from transport.errors import (
    ClosedError,
    PayloadTooLargeError,
    RingBusyError,
    RingError,
    RingNotFoundError,
    UsageError,
)
from transport.ring.attachment import belongs, remove_dead, remove_if_dead
from transport.ring.buffer import SharedRingBuffer
from transport.runtime.waits import Flag
from transport.store.base import ABSENT, Store
from transport.store.stored import encode, readable

log = logging.getLogger(__name__)

_SLOTS: Final = 4
_MOST_BYTES: Final = 64 << 10
_LOOK_S: Final = 0.02  # for a topic without a notice
_SLICE_S: Final = 0.5
_PREFIX: Final = "notices/"
_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Notice(msgspec.Struct, frozen=True):
    """The latest announcement on a topic."""

    topic: str
    version: int
    payload: bytes


class FirstAnnouncements:
    """A warning, once for each topic, where the notice of an earlier run seems to be in the way."""

    def __init__(self) -> None:
        self._topics: set[str] = set()

    def answer(self, topic: str, version: int, accepted: bool, later: Callable[[], Notice | None]) -> bool:
        """Return ``accepted``, as `FoundRings.announce` does. ``later`` looks for a notice beyond this version."""
        first = topic not in self._topics
        self._topics.add(topic)
        if first and not accepted and (there := later()) is not None:
            log.warning(
                "version %d of topic %r is not announced, since version %d stands there; if an earlier run announced "
                "it, go on from latest(%r).version, or give this run a name of its own",
                version,
                topic,
                there.version,
                topic,
            )
        return accepted


class Notices(Protocol):
    """Notices of a run, as `FoundRings` has them."""

    def announce(self, topic: str, version: int, payload: bytes) -> bool: ...
    def latest(self, topic: str, newer_than: int | None, timeout_s: float, closed: Flag) -> Notice | None: ...
    def close(self) -> None: ...


class _Said(msgspec.Struct, frozen=True, array_like=True):
    version: int
    payload: bytes


class NoNotices:
    """Notices of rings that are known by their addresses alone: none."""

    def announce(self, topic: str, version: int, payload: bytes) -> bool:
        """Raise UsageError."""
        raise UsageError("rings at addresses have no notices: open rings+redis://…, or announce in a store")

    def latest(self, topic: str, newer_than: int | None, timeout_s: float, closed: Flag) -> Notice | None:
        """Raise UsageError."""
        self.announce(topic, 0, b"")
        return None

    def close(self) -> None:
        """Do nothing: nothing is held."""


class StoreNotices:
    """One record for each topic."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def announce(self, topic: str, version: int, payload: bytes) -> bool:
        """Replace what is older, or cannot be read."""
        key, value = _PREFIX + topic, encode(_Said(version, bytes(memoryview(payload))))
        while True:
            entry = self._store.get(key)
            said = readable(_Said, key, entry)
            if said is not None and said.version >= version:
                return False
            if self._store.compare_and_set(key, value, entry.version if entry else ABSENT) is not None:
                return True

    def latest(self, topic: str, newer_than: int | None, timeout_s: float, closed: Flag) -> Notice | None:
        """Return what the record says."""
        give_up = time.monotonic() + timeout_s
        key = _PREFIX + topic
        entry = self._store.get(key)
        while True:
            said = readable(_Said, key, entry)
            if said is not None and (newer_than is None or said.version > newer_than):
                return Notice(topic, said.version, said.payload)
            left_s = give_up - time.monotonic()
            if left_s <= 0 or closed.is_set:
                return None
            entry = self._store.watch(key, entry.version if entry else ABSENT, min(left_s, _SLICE_S))

    def close(self) -> None:
        """Leave the store open: it is its owner's."""


def beside(kind: Literal["notices", "offers"], run: str, topic: str) -> str:
    """Return the name of a ring that no trainer of the run claims from. No topic has an @: no two runs share a name.

    UsageError for what is no topic.
    """
    if not _TOPIC.fullmatch(topic):
        raise UsageError(f"topic {topic!r}: give 1 to 64 letters, digits, . _ -")
    return f"{_beginning(kind, run)}{topic}"


def _beginning(kind: str, run: str) -> str:
    return f"{kind}-{run}@"


def segments_beside(run: str) -> list[str]:
    """Return the segments of this host whose names `beside` makes for a run, also those of killed processes."""
    return [
        name for name in _ring.segments() if any(belongs(name, _beginning(kind, run)) for kind in ("notices", "offers"))
    ]


class RingNotices:
    """One ring of this host for each topic."""

    def __init__(self, prefix: str) -> None:
        self._run = prefix
        self._lock = threading.Lock()
        self._own: dict[str, SharedRingBuffer] = {}
        self._seen: dict[str, SharedRingBuffer] = {}

    def _name(self, topic: str) -> str:
        return f"/transport-{beside('notices', self._run, topic)}"

    def announce(self, topic: str, version: int, payload: bytes) -> bool:
        """Write it, unless what is there is as new: of two processes at once each may look before the other writes.

        PayloadTooLargeError beyond 64 KiB.
        """
        said = msgspec.msgpack.encode(_Said(version, bytes(memoryview(payload))))
        if len(said) > _MOST_BYTES:
            raise PayloadTooLargeError(
                f"the notice of topic {topic!r} has {len(said)} bytes, and rings carry {_MOST_BYTES}: announce where "
                "the data is, or open rings+redis://…"
            )
        with self._lock:
            ring = self._own.get(topic)
            if ring is None:
                ring = self._own[topic] = self._made(self._name(topic))
            newest = _newest(ring)
            if newest is not None and newest.version >= version:
                return False
            ring.write_raw(said)
            return True

    @staticmethod
    def _made(name: str) -> SharedRingBuffer:
        while True:
            remove_if_dead(name)
            try:
                return SharedRingBuffer.create(slots=_SLOTS, slot_bytes=_MOST_BYTES, name=name, overflow="overwrite")
            except RingBusyError:  # another process announces on this topic
                with contextlib.suppress(RingNotFoundError):  # it went meanwhile, or is still making the ring
                    ring = SharedRingBuffer.attach(name, role="writer")
                    ring.overflow = "overwrite"
                    return ring

    def latest(self, topic: str, newer_than: int | None, timeout_s: float, closed: Flag) -> Notice | None:
        """Look, and wait for the next one."""
        give_up = time.monotonic() + timeout_s
        name = self._name(topic)
        while True:
            ring = self._observer(name)
            event = 0
            if ring is not None:
                with contextlib.suppress(ClosedError):
                    event = ring.native.published_event()
                said = _newest(ring)
                if said is not None and (newer_than is None or said.version > newer_than):
                    return Notice(topic, said.version, said.payload)
            left_s = give_up - time.monotonic()
            if left_s <= 0 or closed.is_set:
                return None
            if ring is None:
                closed.wait(min(left_s, _LOOK_S))
            else:
                with contextlib.suppress(ClosedError):
                    ring.native.wait_published(event, min(left_s, _SLICE_S))

    def _observer(self, name: str) -> SharedRingBuffer | None:
        """Return an observer of the segment that has this name now, and an owner that lives."""
        with self._lock:
            seen = self._seen.get(name)
            if seen is not None and not seen.native.still_named:
                del self._seen[name]
                seen.close()
                seen = None
            if seen is None:
                try:
                    seen = self._seen[name] = SharedRingBuffer.attach(name, role="observer")
                except RingError:
                    return None
            return seen if any(owner.alive for owner in seen.native.owners()) else None

    def close(self) -> None:
        """Notices end with the last of those who announced them, and who leaves takes away those that have ended."""
        with self._lock:
            for ring in self._seen.values():
                ring.close()
            for ring in self._own.values():
                ring.close(keep_unread=True)
            self._own.clear()
            self._seen.clear()
        remove_dead(_beginning("notices", self._run))


def _newest(ring: SharedRingBuffer) -> _Said | None:
    """Return the greatest version in the ring, without those that are overwritten meanwhile."""
    newest: _Said | None = None
    with contextlib.suppress(ClosedError):
        for slot in range(ring.slot_count):
            info = ring.native.info(slot)
            if info.state not in (_ring.READY, _ring.READING):
                continue
            data = bytes(ring.native.payload(slot)[: info.length])
            if ring.native.info(slot).generation != info.generation or _ring.checksum(data) != info.checksum:
                continue
            with contextlib.suppress(msgspec.MsgspecError):  # of another program
                said = msgpack_decoder(_Said)(data)
                if newest is None or said.version > newest.version:
                    newest = said
    return newest
