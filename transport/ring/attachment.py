"""A process's attachment to a ring, and segments by name: create, take over, detach, remove when unused.

Listeners and supervisors use nothing else of a ring. This file does not import numpy, so they start faster.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import os
import re
import secrets
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, Self

from transport import _ring
from transport.errors import ClosedError, RingBusyError, RingError, RingNotFoundError, UsageError
from transport.runtime.amounts import count

log = logging.getLogger(__name__)

Role = Literal["writer", "listener", "reader", "observer"]

ROLES: Final[dict[Role, int]] = {
    "writer": _ring.ROLE_WRITER,
    "listener": _ring.ROLE_LISTENER,
    "reader": _ring.ROLE_READER,
    "observer": _ring.ROLE_OBSERVER,
}
_BEGINNING: Final = "/transport-"
_SEPARATORS: Final = ("-", "@", ".", "_", "=")
_MADE: Final = re.compile(r"[0-9a-f]{16}")  # what follows the prefix in a name that is made here
_GIVES_UP_NONE: Final = 0
_GIVES_UP_ALL: Final = (1 << 64) - 1


class Attachment:
    """One owner of a ring, or an observer. As a context manager it detaches at the end of the ``with`` block.

    Attributes:
        native: the attachment itself.
        name: of the segment.
        ring_id: 32 hex digits, random, in every ticket.
    """

    def __init__(self, native: _ring.Ring) -> None:
        self.native = native
        self.name = native.name
        self.ring_id = native.ring_id.hex()
        self.slot_count = native.slot_count
        self.slot_capacity = native.slot_capacity
        self._made_here = False  # by create, whether new or taken over: closing gives up what is unread
        self._closing = threading.RLock()
        self._forgotten: weakref.finalize[..., Attachment] | None = None

    def __repr__(self) -> str:
        try:
            free, writing, ready, reading = self.native.state_counts()
        except ClosedError:
            return f"<{type(self).__name__} {self.ring_id[:8]} closed>"
        return (
            f"<{type(self).__name__} {self.ring_id[:8]} {self.slot_count}×{self.slot_capacity} B: "
            f"{free} free, {writing} writing, {ready} ready, {reading} reading>"
        )

    def _forget_with(self, release: Callable[[], None] | None = None, *, only_empty: bool) -> None:
        """Detach when this object is garbage-collected without `close`."""
        self._forgotten = weakref.finalize(self, _forget, self.native, release, only_empty=only_empty)

    def reclaim(self) -> int:
        """Reclaim the slots of owners that died; how many slots changed."""
        changed = self.native.reclaim()
        if changed:
            log.warning("ring %s: reclaimed %s of dead processes", self.ring_id[:8], count(changed, "slot"))
        return changed

    def close(self) -> None:
        """Release all pins and detach. Idempotent. The last owner removes a segment without unread payloads.

        Where it is interrupted, or fails because the process has no descriptor left (RingError), the next call goes on.
        """
        if self.native.closed:  # also in a forked child, where the lock may be another thread's for ever
            return
        with self._closing:  # of two threads, each returns when it is closed
            try:
                if not self.native.closed:
                    self._leave()
            except ClosedError:
                if not self.native.closed:  # else a signal's handler did it, in the middle of this
                    raise
            # Last: what an interrupt leaves undone is done by the next call, or when this object goes.
            if self._forgotten is not None and not self.native.lent:
                self._forgotten.detach()

    def _leave(self) -> None:
        leave(self.native, only_empty=not self._made_here)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def attached(name: str, role: Role) -> Attachment:
    """Attach to a ring without looking at payloads, also to one that is being set up.

    Raises what `SharedRingBuffer.attach` raises.
    """
    attachment = Attachment(attach(name, role, set_up=True))
    attachment._forget_with(only_empty=True)
    return attachment


def random_name(prefix: str) -> str:
    """Return a name that no other ring has."""
    return f"{_BEGINNING}{prefix}{secrets.token_hex(8)}"


@functools.lru_cache(maxsize=4096)  # each look at a run asks this of every name in /dev/shm
def belongs(name: str, prefix: str) -> bool:
    """Return whether a ring of this name is one of ``prefix``.

    The prefix ends with a separator (- @ . _ =), or one follows it, or what is made here, or nothing: "job1" has
    "job1-a", not "job10-a".
    """
    name = name.removeprefix(_BEGINNING)
    rest = name.removeprefix(prefix)
    return name.startswith(prefix) and (
        not rest or prefix.endswith(_SEPARATORS) or rest.startswith(_SEPARATORS) or bool(_MADE.fullmatch(rest))
    )


def beginning_of(prefix: str) -> str:
    """Return the beginning of every name that is to belong to ``prefix``."""
    return prefix if prefix.endswith(_SEPARATORS) else f"{prefix}-"


def placed(file: str | os.PathLike[str]) -> str:
    """Return the absolute path of a ring's file. UsageError: it is none, or its folder does not exist."""
    try:
        given = os.fsdecode(file)
        found = Path(given).resolve()
        found.parent.resolve(strict=True)
        str(found).encode()
    except (TypeError, ValueError, OSError, RuntimeError) as error:
        raise UsageError(f"file={file!r:.200}: {error}; give the path of a file in a folder that exists") from None
    if not given or found.is_dir():
        raise UsageError(f"file={file!r:.200} names no file")
    return str(found)


def name_in(file: str, prefix: str) -> str:
    """Return the name of the ring in this file: the same in every run with the prefix."""
    return f"{_BEGINNING}{prefix}{hashlib.sha256(file.encode()).hexdigest()[:16]}"


def create(
    name: str,
    slots: int,
    slot_bytes: int,
    fingerprint: bytes,
    *,
    file: str = "",
    synced: bool = False,
    begins: bool = True,
) -> _ring.Ring:
    """Make the segment, or take it over from a dead writer. Raises what `SharedRingBuffer.create` raises."""
    if not name.startswith(_BEGINNING):
        name = f"{_BEGINNING}{name}"
    made: list[_ring.Ring] = []
    make = functools.partial(_ring.Ring.create, file=file, synced=synced, begins=begins)
    try:
        # Python handles a signal as soon as a call is over, before its result has a name: by then it has a place here.
        made.extend(itertools.starmap(make, [(name, slots, slot_bytes, fingerprint)]))
        [native] = made
        if native.taken_over:
            log.warning(
                "took over ring %s from a dead writer, %s unread", file or name, count(native.unread, "payload")
            )
        if native.torn:
            log.error(
                "%s: %s not as published (a loss of power, or a changed file); freed unread",
                file,
                count(native.torn, "payload"),
            )
        return native
    except RingBusyError as error:
        raise RingBusyError(f"{error}{_writing(name)}") from None
    except BaseException:  # an interrupt: no caller has it yet
        for native in made:
            give_up(native)
        raise


def _writing(name: str) -> str:
    """Name the process that writes the ring, behind another sentence; "": it cannot be seen."""
    with contextlib.suppress(RingError), attached(name, "observer") as ring:
        for owner in ring.native.owners():
            if owner.alive and owner.role == _ring.ROLE_WRITER:
                return f". Process {owner.pid} writes it"
    return ""


def give_up(native: _ring.Ring | None) -> None:
    """Detach what was not handed out, and remove a segment that holds nothing."""
    if native is not None and not native.closed:
        leave(native, only_empty=True)


def attach(name: str, role: Role, *, set_up: bool = False) -> _ring.Ring:
    """Attach to the segment as an owner or observer, with ``set_up`` also while it is being set up.

    Raises what `SharedRingBuffer.attach` raises.
    """
    return _ring.Ring.attach(name, ROLES[role], writable_payload=role == "writer", set_up=set_up)


def _forget(native: _ring.Ring, release: Callable[[], None] | None, *, only_empty: bool) -> None:
    """Detach an attachment that was not closed, so that an unused segment does not stay behind."""
    if release is not None:
        release()
    with contextlib.suppress(ClosedError):  # in a forked child the attachment belongs to the parent
        if not native.closed:
            leave(native, only_empty=only_empty)


_LEFT: Final[weakref.WeakSet[_ring.Ring]] = weakref.WeakSet()  # while memory of theirs was in use


def _end_reading() -> None:
    """Let go, at the end of the process, of what is still looked at: it would keep the segments of left rings."""
    for native in list(_LEFT):
        native.end_reading()


weakref.finalize(_ring.Ring, _end_reading)  # made before the finalizer of any ring, so it runs after them


def leave(native: _ring.Ring, *, only_empty: bool, give_up_unread: bool = False) -> None:
    """Detach; the last owner removes the segment. Lent memory stays attached until it is returned, and removes it then.

    An observer removes nothing: a segment that only observers see may be in question elsewhere, and stays for its next
    writer or for `transport reclaim`.

    ``give_up_unread``: discard unread payloads in one step with closing, so that no thread publishes in between. A
    reader that has pinned a slot keeps the memory until it unpins.

    A writer that closes its ring and gives up unread payloads removes the segment's name even while readers are
    attached: they keep the memory until they detach, and a killed one leaves no segment behind.
    If several owners detach at once, each may still see another's owner number in use. So an owner that may remove the
    segment checks again after its own number is free: the last one finds no other.
    """
    if native.owner < 0:
        native.close()
        return
    removes = not only_empty or native.unread == 0  # a first look; the removal looks again, when no process can join
    removed = removes and native.unlink_if_last(
        readers_may_stay=give_up_unread, gives_up_to=_GIVES_UP_NONE if only_empty else _GIVES_UP_ALL
    )
    given_up = native.leave(give_up_unread=give_up_unread, only_empty=only_empty)
    if native.lent:
        _LEFT.add(native)
    if given_up:
        log.info("ring %s was closed with %s unread", native.ring_id.hex()[:8], count(given_up, "payload"))
    if removes and not removed:  # what was to be given up is; what is there now is a successor's
        remove_if_dead(native.name, only_empty=only_empty or give_up_unread)


def file_of(name: str) -> str:
    """Return the file that a segment of this host lies in, also when that is gone; "": it lies in /dev/shm itself."""
    try:
        return str(Path(f"/dev/shm{name}").readlink())
    except OSError:
        return ""


def shares_memory(name: str, *, seen: bool = False) -> bool:
    """Return whether the processes of a segment of this host and this process may map each other's memory.

    The kernel permits it only for processes of the same user and group; UCX detects a refusal too late and crashes. A
    segment that is not visible here (another container's) counts as another user's. RingNotFoundError if it was
    ``seen`` here before: it is gone.
    """
    try:
        owner = Path(f"/dev/shm{name}").stat()
    except OSError as error:
        if seen and isinstance(error, FileNotFoundError):
            raise RingNotFoundError(f"the segment {name} has gone since it was found") from None
        return False
    return bool(name) and (owner.st_uid, owner.st_gid) == (os.geteuid(), os.getegid())


def found_here(name: str) -> None:
    """RingNotFoundError if this process cannot see a segment that was made on this host."""
    if name and not Path(f"/dev/shm{name}").exists():
        raise RingNotFoundError(
            f"the segment {name} is not to be seen: its ring has gone with its payloads, or it is in another "
            "container, to which shared memory does not reach; if so, allow tcp"
        )


def remove_if_dead(name: str, *, only_empty: bool = False) -> bool:
    """Remove a segment without living owners, unread payloads included. False: it has some, or is already gone.

    ``only_empty``: keep a segment with unread payloads. It is checked while no process can join, so no writer can fill
    the ring between the check and the removal.
    """
    try:
        return _ring.Ring.unlink_if_dead(name, gives_up_to=_GIVES_UP_NONE if only_empty else _GIVES_UP_ALL)
    except RingError:  # gone, or another user's
        return False


def remove_dead(prefix: str) -> bool:
    """Remove the segments of this ``prefix`` (see `belongs`) that have no living owners. Blocks.

    False: some are in use and remain.
    """
    for name in _ring.segments():
        if belongs(name, prefix):
            remove_if_dead(name)
    return not any(belongs(name, prefix) for name in _ring.segments())
