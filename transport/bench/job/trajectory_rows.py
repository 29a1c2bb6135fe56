"""`bench job --payload trajectory`: our rings and TransferQueue with the same trajectories."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from transport.bench.job import trajectories
from transport.bench.job.trajectories import TOKENS, Sample
from transport.bench.processes import run_group
from transport.bench.registry import JOB_SCRIPTS, Peer, interpreter
from transport.bench.result import OURS, aligned
from transport.client.blocking import BlockingClient
from transport.errors import TransportError, UsageError
from transport.ring.buffer import SharedRingBuffer
from transport.runtime.progress import Progress
from transport.schema import Schema, UpTo
from transport.server.server import UCXXServer
from transport.wires import Wire

PEERS = ("transferqueue",)
_SCRIPT = "trajectories_transfer_queue.py"
_START_S = 120.0  # a cluster of its own
_SLOTS = 3  # batches that the ring has room for


def schema() -> Schema:
    """Of one trajectory."""
    return Schema.of(
        prompt=("text", UpTo(8192)),
        messages=("value", UpTo(16384)),
        tokens=("int32", UpTo(TOKENS)),
        logprobs=("float32", UpTo(TOKENS)),
        ref_logprobs=("float32", UpTo(TOKENS)),
        old_logprobs=("float32", UpTo(TOKENS)),
        image=("uint8", 224, 224, 3),
        reward="float32",
    )


class TrajectoryRow(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds for a payload, medians of the rounds of the best repetition.

    Attributes:
        put_us: handed over, in batches.
        get_us: two fields of it read.
        job_us: put, taken as a whole, every field looked at, consumed.
        bytes: of a payload's arrays; get_bytes: of those of the two fields.
    """

    peer: str
    wire: str
    put_us: float
    get_us: float
    job_us: float
    batch: int
    bytes: int
    get_bytes: int


class TrajectoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `bench job --payload trajectory` writes as JSON."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    rows: list[TrajectoryRow]
    skipped: dict[str, str]
    failed: list[str]


class _Ours:
    """A ring whose payloads one client reads and takes, mapped or through a listener process."""

    def __init__(self, ring: SharedRingBuffer, client: BlockingClient, address: str | None) -> None:
        self._ring = ring
        self._client = client
        self._address = address  # of the listener; None: mapped
        self._tickets: Any = ()

    def put(self, samples: Sequence[Sample]) -> None:
        """One call."""
        self._tickets = self._ring.write_many(samples)

    def get(self, fields: Sequence[str]) -> list[Sample]:
        """By the tickets that `put` got."""
        found: list[Sample] = []
        for outcome in self._client.read_many(self._tickets, fields=fields):
            if outcome.payload is None:
                raise outcome.error or UsageError("no payload")
            found.append(dict(outcome.payload))
        return found

    def clear(self) -> None:
        """Free for all ranks."""
        for ticket in self._tickets:
            self._ring.discard(ticket)

    def take(self) -> list[Sample]:
        """Claimed here, or at the listener."""
        n = len(self._tickets)
        if self._address is None:
            claims = self._ring.claim(n)
            found = [dict(claim.arrays()) for claim in claims]
            self._ring.consume(claims)
            return found
        batch = self._client.take(self._address, n, wait_s=10.0, most_bytes=n << 20)
        taken = [dict(each.arrays()) for each in batch]
        self._client.consume(batch)
        return taken


@contextlib.contextmanager
def _ours(wire: Wire, batch: int) -> Iterator[_Ours]:
    described = schema()
    with contextlib.ExitStack() as stack:
        ring = stack.enter_context(SharedRingBuffer.create(described, slots=_SLOTS * batch))
        address = None
        if wire != "mapped":
            server = stack.enter_context(UCXXServer(ring, addresses=("127.0.0.1",)))
            address = f"127.0.0.1:{server.ports[0]}"
        client = BlockingClient(schemas=[described], wire={wire}, ack="manual")
        yield _Ours(ring, stack.enter_context(client), address)


def _theirs(peer: Peer, seconds: float, batch: int) -> dict[str, float]:
    command = [
        interpreter(peer),
        str(Path(trajectories.__file__)),
        str(JOB_SCRIPTS / _SCRIPT),
        str(seconds),
        str(batch),
    ]
    output = run_group(command, dict(os.environ), _START_S + 4 * seconds)
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def run(
    wires: Sequence[Wire], peers: Sequence[Peer], seconds: float, batch: int, repetitions: int, progress: Progress
) -> tuple[list[TrajectoryRow], dict[str, str], list[str]]:
    """Rows, peers that were left out with the reason, and our own that failed."""
    if strange := [peer.name for peer in peers if peer.name not in PEERS]:
        raise UsageError(f"--payload trajectory knows the peers {', '.join(PEERS)}; leave out {', '.join(strange)}")
    example = [trajectories.sample(0)]
    sizes = trajectories.nbytes(example, tuple(example[0])), trajectories.nbytes(example, trajectories.TWO)
    cases: list[tuple[str, Any, Peer | None]] = [(OURS, wire, None) for wire in wires]
    cases += [(peer.name, peer.wire, peer) for peer in peers]
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    skipped: dict[str, str] = {}
    failed: list[str] = []
    total = repetitions * len(cases)
    for repetition in range(repetitions):
        for at, (name, wire, peer) in enumerate(cases):
            progress(repetition * len(cases) + at, total, 0)
            if name in skipped:
                continue
            try:
                if peer is not None:
                    figures = _theirs(peer, seconds, batch)
                else:
                    with _ours(wire, batch) as carrier:
                        figures = trajectories.measure(carrier, seconds, batch)
            except (TransportError, trajectories.WrongTrajectoryError) as error:
                if peer is None:
                    failed.append(f"{name} {wire}: {error}")
                else:
                    skipped[name] = str(error)
            else:
                found.setdefault((name, wire), []).append(figures)
    progress(total, total, 0)
    rows = [
        TrajectoryRow(
            peer=name,
            wire=wire,
            batch=batch,
            bytes=sizes[0],
            get_bytes=sizes[1],
            **{key: min(each[key] for each in figures) for key in figures[0]},
        )
        for (name, wire), figures in found.items()
    ]
    return rows, skipped, failed


def table(report: TrajectoryReport) -> str:
    """The rows, with ours as multiples of the peer's."""
    lines: list[tuple[str, ...]] = [("", "wire", "put, µs", "get of two fields, µs", "whole job, µs", "payloads/s")]
    theirs = next((row for row in report.rows if row.peer != OURS), None)
    for row in report.rows:
        cells = []
        for key in ("put_us", "get_us", "job_us"):
            own = getattr(row, key)
            ratio = f" ({getattr(theirs, key) / own:.1f}x)" if theirs is not None and row.peer == OURS else ""
            cells.append(f"{own:.0f}{ratio}")
        lines.append((row.peer, row.wire, *cells, f"{1e6 / row.job_us:.0f}"))
    head = ""
    if report.rows:
        first = report.rows[0]
        head = (
            f"A trajectory: {first.bytes / 1e3:.0f} kB of arrays, text and messages; two fields: "
            f"{first.get_bytes / 1e3:.0f} kB; batches of {first.batch}.\n\n"
        )
    left_out = "".join(f"\n{name} left out: {why}" for name, why in report.skipped.items())
    return head + "\n".join(aligned(lines)) + left_out
