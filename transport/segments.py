"""Segments by name: made, taken over, attached to, left, and removed when nobody lives that needs them."""

from __future__ import annotations

import contextlib
import logging
import secrets
from typing import Final, Literal

from transport import _native
from transport.slots import SlotState, named
from transport.streams import RegisteredPages

log = logging.getLogger(__name__)

Role = Literal["writer", "listener", "reader", "observer"]

_ROLES: Final[dict[Role, int]] = {
    "writer": _native.ROLE_WRITER,
    "listener": _native.ROLE_LISTENER,
    "reader": _native.ROLE_READER,
    "observer": _native.ROLE_OBSERVER,
}
_BEGINNING: Final = "/transport-"


def random_name(prefix: str) -> str:
    """A name that no other ring has."""
    return f"{_BEGINNING}{prefix}{secrets.token_hex(8)}"


def create(name: str, slots: int, slot_bytes: int, fingerprint: bytes) -> _native.Ring:
    """Make the segment, or take it over from a dead writer. Raises what `SharedRingBuffer.create` raises."""
    if not name.startswith(_BEGINNING):
        name = f"{_BEGINNING}{name}"
    try:
        native = _native.Ring.create(name, slots, slot_bytes, fingerprint)
    except _native.RingFault as fault:
        raise named(fault) from None
    if native.taken_over:
        log.warning("took over ring %s of a dead writer, %d payloads unread", name, native.state_counts()[2])
    return native


def attach(name: str, role: Role) -> _native.Ring:
    """One more owner of the segment, or an observer. Raises what `SharedRingBuffer.attach` raises."""
    try:
        return _native.Ring.attach(name, _ROLES[role], writable_payload=role == "writer")
    except _native.RingFault as fault:
        raise named(fault) from None


def give_up_unread(native: _native.Ring) -> None:
    """Discard what is unread; a reader that looks at a slot keeps its memory until it lets go."""
    given_up = 0
    for slot in range(native.slot_count):
        info = native.info(slot)
        if info.state in (SlotState.READY, SlotState.READING):
            given_up += native.discard(slot, info.generation)
    if given_up:
        log.info("ring %s was closed with %d payloads unread", native.ring_id.hex()[:8], given_up)


def forget(native: _native.Ring, pages: RegisteredPages, *, only_empty: bool = False) -> None:
    """For whoever ends without `close`: no segment stays behind, unless somebody lives that needs it."""
    pages.release()
    with contextlib.suppress(_native.RingFault):  # a forked child's end is none of the ring's business
        if not native.closed:
            leave(native, only_empty=only_empty)


def leave(native: _native.Ring, *, only_empty: bool) -> None:
    """Detach; the last one removes the segment.

    Of several that leave at once, each may still see another's place. So whoever may remove it looks again when its
    own place is free: the last to get there finds nobody.
    """
    _, _, ready, reading = native.state_counts()
    removes = not only_empty or ready + reading == 0
    removed = removes and native.unlink_if_last()
    native.close()
    if removes and not removed:
        remove_if_dead(native.name)


def remove_if_dead(name: str) -> bool:
    """Remove a segment that nobody lives to use, unread payloads included. False: somebody does, or it is gone."""
    try:
        return _native.Ring.unlink_if_dead(name)
    except _native.RingFault:  # gone, or another user's
        return False


def remove_dead(prefix: str) -> bool:
    """Remove the segments of this ``prefix`` (of `SharedRingBuffer.create`) that nobody lives to use. Blocks.

    False: some are in use, and still there.
    """
    beginning = f"{_BEGINNING}{prefix}"
    for name in _native.segments():
        if name.startswith(beginning):
            remove_if_dead(name)
    return not any(name.startswith(beginning) for name in _native.segments())
