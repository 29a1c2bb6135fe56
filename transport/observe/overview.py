"""The data of `transport top`: every ring of this host, its processes, and the clients on this host.

Looking takes no owner place and changes nothing. `look` is one moment; `rates` are differences between two.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import msgspec

from transport import _ring as _native
from transport.claims.notices import segments_beside
from transport.claims.open import known_rings
from transport.claims.waiting import Holder, holders_of
from transport.client import status_socket
from transport.errors import RingError, RingNotFoundError
from transport.ring.buffer import SharedRingBuffer
from transport.ring.states import RingStatistics

_SHARED_MEMORY: Final = Path("/dev/shm")


class ListenerView(msgspec.Struct, frozen=True, kw_only=True):
    """A living listener."""

    port: int
    pid: int
    heartbeat_age_s: float


class RingView(msgspec.Struct, frozen=True, kw_only=True):
    """One ring. Where it cannot be read, ``unreadable`` says why, and there are no statistics."""

    name: str
    ring: str = ""
    file: str = ""  # that it lies in; "": in /dev/shm
    segment_bytes: int = 0
    writer: int = 0  # process id; 0: gone
    readers: tuple[int, ...] = ()  # processes that map it, each once
    listeners: tuple[ListenerView, ...] = ()
    supervised: bool = False
    statistics: RingStatistics | None = None
    bytes_by_wire: dict[str, int] = {}
    stopped: tuple[Holder, ...] = ()  # that hold claims, and are silent
    unreadable: str = ""


class HostSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of the host; the command's JSON.

    Attributes:
        taken: seconds since the epoch.
        monotonic_s: for differences.
    """

    taken: float
    monotonic_s: float
    rings: tuple[RingView, ...]
    clients: tuple[status_socket.ClientStatus, ...]

    @property
    def retries(self) -> int:
        """Retries of all clients."""
        return sum(client.statistics.retries for client in self.clients)

    @property
    def quarantined(self) -> tuple[str, ...]:
        """Ports that at least one client avoids."""
        return tuple(sorted({port for client in self.clients for port in client.statistics.quarantined_ports}))


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of a ring between two snapshots, per second."""

    published: float
    reads: float
    bytes_by_wire: dict[str, float]


def named(names: Sequence[str]) -> tuple[list[str], set[str]]:
    """Return segments as the system names them, and the runs among the names, as clients say where their rings are.

    Raises RingNotFoundError for a segment that is not on this host.

    A ring may be named as it was when it was created, without "transport-"; "rings:NAME" means those of a run, which
    may be none, its notices, and its weights on offer; "rings+URL" those of this host that are in a directory.
    """
    found = []
    runs = set()
    for name in (each.lstrip("/") for each in names):
        if name.startswith(("rings:", "rings+")):
            with known_rings(name) as rings:
                found += [*rings.places.segments(), *segments_beside(rings.places.prefix)]
                runs.add(repr(rings.places))
            continue
        segment = next((each for each in (name, f"transport-{name}") if (_SHARED_MEMORY / each).exists()), None)
        if segment is None:
            raise RingNotFoundError(f"no ring segment /{name} on this host; `transport top --once` lists the segments")
        found.append(f"/{segment}")
    return found, runs


def look(names: list[str] | None = None, runs: Collection[str] = ()) -> HostSnapshot:
    """Return a snapshot of the host.

    Args:
        names: only these rings, and the clients that map them or are connected to them.
        runs: whose clients are shown, too: a trainer that waits has no ring.
    """
    rings = [view for name in (_native.segments() if names is None else names) if (view := _ring(name)) is not None]
    clients = status_socket.clients()
    if names is not None:
        processes = {pid for view in rings for pid in (view.writer, *view.readers)}
        shown = {view.ring for view in rings}
        clients = [
            each for each in clients if each.pid in processes or each.places in runs or not shown.isdisjoint(each.rings)
        ]
    return HostSnapshot(taken=time.time(), monotonic_s=time.monotonic(), rings=tuple(rings), clients=tuple(clients))


def rates(before: HostSnapshot, after: HostSnapshot) -> dict[str, Rates]:
    """Rates by ring name; a ring that is new, or was made again, has none yet."""
    seconds = after.monotonic_s - before.monotonic_s
    known = {(view.name, view.ring): view for view in before.rings}
    found = {}
    for view in after.rings:
        earlier = known.get((view.name, view.ring))
        if earlier is None or earlier.statistics is None or view.statistics is None or seconds <= 0:
            continue
        found[view.name] = Rates(
            published=(view.statistics.publishes - earlier.statistics.publishes) / seconds,
            reads=(view.statistics.pins - earlier.statistics.pins) / seconds,
            bytes_by_wire={
                wire: (size - earlier.bytes_by_wire.get(wire, 0)) / seconds for wire, size in view.bytes_by_wire.items()
            },
        )
    return found


def _ring(name: str) -> RingView | None:
    """Return the view of a ring; None if it is gone."""
    try:
        size = (_SHARED_MEMORY / name.lstrip("/")).stat().st_size
        ring = SharedRingBuffer.attach(name, role="observer")
    except (FileNotFoundError, RingNotFoundError):
        return None
    except RingError as error:
        return RingView(name=name, segment_bytes=size, unreadable=str(error).removeprefix(f"{name}: "))
    with ring:
        return _view(ring, size)


def _view(ring: SharedRingBuffer, size: int) -> RingView:
    now_ns = time.monotonic_ns()
    owners = [owner for owner in ring.native.owners() if owner.alive]
    statistics = ring.statistics()
    return RingView(
        name=ring.name,
        ring=ring.ring_id,
        file=ring.file,
        segment_bytes=size,
        writer=next((owner.pid for owner in owners if owner.role == _native.ROLE_WRITER), 0),
        readers=tuple(sorted({owner.pid for owner in owners if owner.role == _native.ROLE_READER})),
        listeners=tuple(
            ListenerView(
                port=owner.port, pid=owner.pid, heartbeat_age_s=round(max(0, now_ns - owner.heartbeat_ns) / 1e9, 3)
            )
            for owner in owners
            if owner.port
        ),
        supervised=ring.native.supervised,
        statistics=statistics,
        bytes_by_wire=statistics.bytes_by_wire,
        stopped=tuple(each for each in holders_of(ring) if each.stopped),
    )
