"""What `benchmarks/job` measures: cases from its options, and what is refused before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from benchmarks.job.work import HEADER
from benchmarks.peers.registry import Peer
from transport.bench.result import OURS
from transport.bench.units import parse_names, show_size
from transport.doctor import infiniband
from transport.errors import UsageError

WIRES = ("mapped", "shm", "tcp", "rdma")
LAYOUTS = ("list", "padded", "packed")
_MOST_WINDOW = 128
_WINDOW_BYTES = 128 << 20
_WINDOW_BATCHES = 4  # one is written, one claimed, one fetched, one consumed


class JobCase(msgspec.Struct, frozen=True, kw_only=True):
    """One way to carry payloads of one size.

    Attributes:
        wire, layout: of a peer the wire only.
        batch: payloads that a writer hands over with one call, and that a trainer claims at most.
        window: payloads of a writer that are unread at any time; then it waits.
        idle: one payload at a time, with the trainer waiting.
    """

    peer: str
    wire: str
    layout: str
    size_bytes: int
    writers: int
    trainers: int
    batch: int
    window: int
    idle: bool = False

    @property
    def name(self) -> str:
        """Without the size: the wire for ours, a peer by its name."""
        return self.wire if self.peer == OURS else self.peer

    @property
    def label(self) -> str:
        """As messages name it."""
        of_ours = f"{self.name}, " if self.peer == OURS else ""
        return f"{of_ours}{show_size(self.size_bytes)}"


def window_for(size: int) -> int:
    """Enough that batches overlap, and no more than 128 MiB."""
    return max(_WINDOW_BATCHES, min(_MOST_WINDOW, _WINDOW_BYTES // size))


def check_wires(names: str) -> list[str]:
    """Return the wires of a list. UsageError: not a wire, or rdma where this host cannot use it."""
    wires = parse_names("--wire", names, WIRES)
    if "rdma" in wires:
        infiniband.require()
    return wires


def check_layout(name: str) -> str:
    """The layout of a batch. UsageError: not a layout."""
    if name not in LAYOUTS:
        raise UsageError(f"--layout {name}: choose one of {', '.join(LAYOUTS)}")
    return name


def cases(
    sizes: Sequence[int],
    wires: Sequence[str],
    layout: str,
    peers: Iterable[Peer],
    writers: int,
    trainers: int,
    batch: int,
    idle: bool,
) -> list[JobCase]:
    """Ours, then the peers, at every size; of one size all have the same batches and window.

    Raises:
        UsageError: sizes, or numbers of writers, that cannot be measured.
    """
    if idle and writers > 1:
        raise UsageError(f"--idle needs --writers 1, got {writers}")
    if min(sizes) <= HEADER.size:
        raise UsageError(f"--sizes {min(sizes)}: give more than {HEADER.size} bytes, the size of a payload's header")
    ways = [(OURS, wire, layout) for wire in wires]
    ways += [(peer.name, peer.wire, "list") for peer in peers]
    found = []
    for size in sizes:
        window = window_for(size)
        claimed = min(batch, max(1, window // _WINDOW_BATCHES))
        found += [
            JobCase(
                peer=peer,
                wire=wire,
                layout=shape,
                size_bytes=size,
                writers=writers,
                trainers=trainers,
                batch=claimed,
                window=window,
                idle=idle,
            )
            for peer, wire, shape in ways
        ]
    return found
