"""``transport reclaim``: lists the ring segments of this host and removes those whose owners are dead.

Of a ring in a file it removes the name in /dev/shm; the file, and what is unread in it, stays.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from transport.cli.output import JsonTarget, emit, shown
from transport.runtime.amounts import count

if TYPE_CHECKING:
    from transport.errors import RingError
    from transport.ring.attachment import Attachment

EXAMPLE = "Example: transport reclaim rings:run-7- --dry-run"

_SHARED_MEMORY = Path("/dev/shm")
_OF_UCX = "ucx_shm_"  # UCX removes the name right after it made the segment, by its default settings
_LEFT_AFTER_S = 60.0


class Segment(msgspec.Struct, kw_only=True):
    """One ring segment. Where it cannot be read, ``unreadable`` says why, and the counts are zero."""

    name: str
    bytes: int
    file: str = ""  # that it lies in, and which stays
    free: int = 0
    writing: int = 0
    ready: int = 0
    reading: int = 0
    owners: list[int] = []  # process ids of the living ones
    served: bool = False  # a supervisor keeps it for readers
    users: str = ""  # what they are, and how to end what lingers
    dead: bool = False
    removed: bool = False
    unreadable: str = ""

    def __str__(self) -> str:
        """One line."""
        size = shown(self.bytes)
        if self.name.startswith(_OF_UCX):
            what = "of UCX, used by no process"
        elif self.unreadable:
            what = f"not readable: {self.unreadable}"
        else:
            what = f"{self.free} free, {self.writing} writing, {self.ready} ready, {self.reading} reading"
        if self.removed:
            fate = "its name is removed" if self.file else "removed"
        elif self.dead:
            fate = "its owners are dead"
        elif self.users:
            fate = f"in use by {self.users}" if self.owners else self.users
        else:
            fate = "kept"
        where = f"  in {self.file}" if self.file else ""
        return f"{self.name}  {size}{where}  {what}  {fate}"


class ReclaimReport(msgspec.Struct, frozen=True, kw_only=True):
    """The command's JSON."""

    segments: list[Segment]
    removed: int
    bytes_freed: int


def reclaim(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SEGMENT|rings:NAME|rings+URL]…",
            help="Segments to look at, or the rings of a run. Default: all of this host, whichever run they are of.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the segments, remove none.")] = False,
    json_target: JsonTarget = None,
) -> None:
    """List the ring segments of this host, and remove those whose owners are all dead, unread payloads included.

    What lingers for the unread payloads of a killed rollout keeps its ring; the line of the ring says how to end that.
    Segments that UCX left in killed processes go as well. A ring's file is never removed, only its name in /dev/shm:
    delete it yourself when you do not need its payloads.
    """
    from transport import _ring
    from transport.observe import overview

    if names:
        of_ucx = [name for name in names if name.startswith(_OF_UCX)]
        chosen, _ = overview.named([name for name in names if name not in of_ucx])
    else:
        of_ucx, chosen = [f"{_OF_UCX}*"], _ring.segments()
    found = [seen for name in chosen if (seen := _look(name)) is not None]
    for segment, sequence in found:
        if segment.dead and not dry_run:
            _remove(segment, sequence)
    segments = [segment for segment, _ in found]
    segments += [_unused(path, size, dry_run=dry_run) for path, size in _left_by_ucx(of_ucx).items()]
    removed = [segment for segment in segments if segment.removed]
    freed = sum(segment.bytes for segment in removed if not segment.file)
    report = ReclaimReport(segments=segments, removed=len(removed), bytes_freed=freed)
    total = f"{report.removed} of {count(len(segments), 'segment')} removed, {shown(report.bytes_freed)} freed"
    if dry_run:
        dead = [segment for segment in segments if segment.dead]
        size = shown(sum(segment.bytes for segment in dead if not segment.file))
        total = f"{len(dead)} of {count(len(segments), 'segment')} would be removed, {size} freed"
    emit(report, "\n".join([*map(str, segments), total]), json_target)


def _look(name: str) -> tuple[Segment, int] | None:
    """Return what is known of a segment, and its ring's sequence; None when it has gone meanwhile."""
    from transport.errors import RingError, RingNotFoundError
    from transport.ring.attachment import attached, file_of

    file = file_of(name)
    try:
        size = _path_of(name).stat().st_size
        ring = attached(name, "observer")
    except FileNotFoundError:
        gone = file and not Path(file).exists()
        return (Segment(name=name, bytes=0, file=file, unreadable="its file is gone", dead=True), 0) if gone else None
    except RingNotFoundError as error:
        left = not file and _path_of(name).exists()  # by a writer that was killed while it made it, or makes it now
        return (Segment(name=name, bytes=size, unreadable=_said(error, name), dead=True), 0) if left else None
    except RingError as error:
        return Segment(name=name, bytes=size, file=file, unreadable=_said(error, name)), 0
    with ring:
        sequence = ring.native.sequence  # first: what the counts do not show is not given up
        return _described(ring, size), sequence


def _path_of(name: str) -> Path:
    return _SHARED_MEMORY / name.lstrip("/")


def _said(error: RingError, name: str) -> str:
    return str(error).removeprefix(f"{name}: ")


def _described(ring: Attachment, size: int) -> Segment:
    free, writing, ready, reading = ring.native.state_counts()
    from transport.server.users import users_of

    owners = [owner.pid for owner in ring.native.owners() if owner.alive]
    # A supervisor has no owner number, but it restarts the listeners of a dead writer while payloads are unread.
    served = ring.native.supervised
    return Segment(
        name=ring.name,
        bytes=size,
        file=ring.native.file,
        free=free,
        writing=writing,
        ready=ready,
        reading=reading,
        owners=owners,
        served=served,
        users=users_of(ring),
        dead=not (owners or served or ring.native.keeper_alive),
    )


def _remove(segment: Segment, sequence: int) -> None:
    from transport import _ring
    from transport.errors import RingError

    try:
        # checks again: a process may have attached, or a writer may have come and gone
        segment.removed = _ring.Ring.unlink_if_dead(segment.name, gives_up_to=sequence)
    except RingError as error:
        segment.unreadable = str(error)


def _left_by_ucx(patterns: list[str]) -> dict[Path, int]:
    """Return the segments that UCX left, and their bytes: a process was killed before it removed the name."""
    old: dict[Path, int] = {}
    for path in (path for pattern in patterns for path in _SHARED_MEMORY.glob(pattern)):
        with contextlib.suppress(FileNotFoundError):
            seen = path.stat()
            if time.time() - seen.st_mtime > _LEFT_AFTER_S and os.geteuid() in (0, seen.st_uid):
                old[path] = seen.st_blocks * 512
    if not old:
        return old
    used: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # its process has ended, or is of another user, who cannot map ours
            used.update(re.findall(rf"/dev/shm/({_OF_UCX}\S+)", maps.read_text(errors="replace")))
    return {path: size for path, size in old.items() if path.name not in used}


def _unused(path: Path, size: int, *, dry_run: bool) -> Segment:
    """Describe a segment that UCX left, and remove it."""
    if not dry_run:
        path.unlink(missing_ok=True)
    return Segment(name=path.name, bytes=size, dead=True, removed=not dry_run)
