"""`benchmarks/job --payload trajectory`: our rings and TransferQueue with the same trajectories."""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.job import trajectories
from benchmarks.job.trajectories import TOKENS, Sample
from benchmarks.peers.registry import JOB_PEERS, JOB_SCRIPTS, Peer, interpreter
from transport.bench import session
from transport.bench.processes import run_group
from transport.bench.result import OURS, BenchReport, aligned
from transport.bench.session import SessionOutcome
from transport.client.blocking import BlockingClient
from transport.decoders import convert, json_decoder
from transport.errors import LinkError, UsageError
from transport.ring.buffer import SharedRingBuffer
from transport.runtime.progress import Progress
from transport.schema import Schema, UpTo
from transport.server.server import UCXXServer
from transport.training.trainer import Trainer
from transport.wires import Wire

PEERS = ("transferqueue",)
_SCRIPT = "trajectories_transfer_queue.py"
_START_S = 120.0  # a cluster of its own
_SLOTS = 3  # batches that a ring has room for
_TAKE_S = 10.0


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


class TrajectoryCase(msgspec.Struct, frozen=True):
    """A carrier; ``size_bytes`` of a payload's arrays."""

    peer: str
    wire: str
    size_bytes: int

    @property
    def label(self) -> str:
        """As messages name it."""
        return self.wire


class _Figures(msgspec.Struct, frozen=True):
    put_us: float
    get_us: float
    job_us: float
    count: int = 0


class _Ours:
    """A ring that a client reads by ticket, and one that a trainer takes from, mapped or through a listener process.

    What is put is read and cleared, or taken, in turn: a trainer's demands would take what the client reads.
    """

    def __init__(
        self, read: SharedRingBuffer, taken: SharedRingBuffer, client: BlockingClient, trainer: Trainer
    ) -> None:
        self._rings = itertools.cycle((read, taken))
        self._ring = read
        self._client = client
        self._trainer = trainer
        self._tickets: Any = ()

    def put(self, samples: Sequence[Sample]) -> None:
        """One call."""
        self._ring = next(self._rings)
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
        """As a training loop takes and consumes them."""
        batch = self._trainer.take(len(self._tickets), _TAKE_S, fill_s=_TAKE_S)
        if batch is None:
            return []
        found = [dict(each) for each in batch]
        batch.consume()
        return found


@contextlib.contextmanager
def _ours(wire: Wire, batch: int) -> Iterator[_Ours]:
    described = schema()
    with contextlib.ExitStack() as stack:
        run = f"bench-{secrets.token_hex(8)}-"
        read, taken = (
            stack.enter_context(SharedRingBuffer.create(described, slots=_SLOTS * batch, prefix=prefix))
            for prefix in (f"read-{run}", run)
        )
        if wire != "mapped":
            for ring in (read, taken):
                stack.enter_context(UCXXServer(ring, addresses=("127.0.0.1",)))
        client = stack.enter_context(BlockingClient(schemas=[described], wire={wire}, ack="manual"))
        trainer = stack.enter_context(Trainer(described, f"rings:{run}", wire={wire}))
        yield _Ours(read, taken, client, trainer)


def _theirs(peer: Peer, seconds: float, batch: int) -> _Figures:
    script = str(JOB_SCRIPTS / _SCRIPT)
    command = [interpreter(peer), str(Path(trajectories.__file__)), script, str(seconds), str(batch)]
    output = run_group(command, {}, _START_S + 4 * seconds)
    return json_decoder(_Figures)(output.splitlines()[-1])


def run(
    wires: Sequence[Wire], peers: Sequence[Peer], seconds: float, batch: int, repetitions: int, progress: Progress
) -> SessionOutcome:
    """Ours over each wire, and the peers; the best repetition of each figure."""
    if strange := [peer.name for peer in peers if peer.name not in PEERS]:
        raise UsageError(f"--payload trajectory knows the peers {', '.join(PEERS)}; leave out {', '.join(strange)}")
    example = [trajectories.sample(0)]
    whole, two = (trajectories.nbytes(example, fields) for fields in (tuple(example[0]), trajectories.TWO))
    cases = [TrajectoryCase(OURS, wire, whole) for wire in wires]
    cases += [TrajectoryCase(peer.name, peer.wire, whole) for peer in peers]

    def measure(case: TrajectoryCase) -> _Figures:
        if case.peer != OURS:
            return _theirs(JOB_PEERS[case.peer], seconds, batch)
        with _ours(case.wire, batch) as carrier:  # type: ignore[arg-type]
            try:
                return convert(trajectories.measure(carrier, seconds, batch), _Figures)
            except trajectories.WrongTrajectoryError as error:
                raise LinkError(str(error)) from error

    def row(case: TrajectoryCase, found: Sequence[_Figures]) -> TrajectoryRow:
        best = {name: min(getattr(each, name) for each in found) for name in ("put_us", "get_us", "job_us")}
        return TrajectoryRow(peer=case.peer, wire=case.wire, batch=batch, bytes=whole, get_bytes=two, **best)

    return session.run(cases, repetitions, progress, measure, row)


def table(report: BenchReport) -> str:
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
