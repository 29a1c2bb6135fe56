"""The cut and the upload of a snapshot."""

from __future__ import annotations

import contextlib
import operator
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final, NamedTuple

import msgspec

from transport import _ring
from transport.claims.open import open_rings
from transport.claims.rings import FoundRings
from transport.cooldown.destinations.base import PIECE, Destination, normalise
from transport.cooldown.destinations.open import open_destination
from transport.cooldown.upload import Stop, UploadStream, copied, remove, removed_on_failure
from transport.errors import ClosedError, RingNotFoundError, SnapshotError, UsageError
from transport.ring.buffer import HeldPayload, SharedRingBuffer
from transport.ring.leases import ReadLease
from transport.runtime.blocking_calls import started
from transport.runtime.progress import Progress, silent
from transport.snapshots import manifest as manifests
from transport.snapshots.listing import count_cut, last_cut, run_of
from transport.snapshots.manifest import Index, Manifest, ManifestEntry, RingPart
from transport.ticket import host_identity

PARTS_S: Final = 600.0  # longest wait of part 0 for the others
_LOOK_S: Final = 0.2
_DATA, _INDEX = "payloads", "index"


class Snapshot:
    """A snapshot whose cut is made and whose upload is under way. Keep `attempt` in the model's checkpoint.

    Attributes:
        run, step, attempt: its name; `restore` takes them.
        payloads, bytes: how many this host's rings held, and of all of them together.
        pause_s: seconds that the cut took.
    """

    def __init__(self, cut: _Cut, upload: Future[Manifest], stop: Stop) -> None:
        self.run, self.step, self.attempt = cut.run, cut.step, cut.attempt
        self.payloads = sum(len(ring.held) for ring in cut.rings)
        self.bytes = sum(each.size for ring in cut.rings for each in ring.held)
        self.pause_s = cut.pause_s
        self._upload = upload
        self._stop = stop
        self._process = os.getpid()

    def __repr__(self) -> str:
        state = "complete" if self.done() else "under way"
        return f"<Snapshot {self.run} step {self.step} attempt {self.attempt}, {self.payloads} payloads, {state}>"

    def done(self) -> bool:
        """Return whether the upload has ended, well or not."""
        return self._upload.done()

    def wait(self, timeout_s: float | None = None) -> Manifest:
        """Wait until the upload has ended; returns the manifest as it lies at the destination (of a part: that part's).

        Raises:
            TimeoutError: it has not ended after ``timeout_s``, and goes on.
            DestinationError: the destination failed, is full or is gone. There is no snapshot of this attempt.
            SnapshotError: parts of other hosts are missing, no part has a ring, this attempt was begun before, or a
                later one was complete first and `prune` removed what this one had sent.
            UploadCancelledError: it was cancelled.
            ClosedError: this process was forked from the one that uploads it.
        """
        if os.getpid() != self._process:
            raise ClosedError(f"{self!r}: the process that took it uploads it, and this one is a fork of it")
        try:
            return self._upload.result(timeout_s)
        except TimeoutError:
            if self._upload.done():
                raise
            raise TimeoutError(f"{self!r}: not complete after {timeout_s} s; the upload goes on") from None

    def cancel(self) -> None:
        """End the upload, unless its manifest is being written: no snapshot of this attempt. Does not wait."""
        self._stop.set()


class _Held(NamedTuple):
    """A ring, and the payloads of it that are pinned."""

    ring: SharedRingBuffer
    held: Sequence[HeldPayload]


class _Cut(NamedTuple):
    run: str
    step: int
    attempt: str
    part: tuple[int, int]
    created: float
    rings: Sequence[_Held]
    elsewhere: tuple[str, ...]
    missing: str  # why there is no ring; "": there are some, or all have ended
    pause_s: float


def snapshot(
    queue: FoundRings | str,
    destination: str,
    step: int,
    *,
    run: str | None = None,
    part: tuple[int, int] = (0, 1),
    attempt: str | None = None,
    progress: Progress = silent,
) -> Snapshot:
    """Fix what the rings of this host hold and no trainer has consumed, and upload it in the background.

    Call it between two steps, when the record is taken: no trainer consumes between its `record` and the return of
    this call. Of several trainers one calls it, and the others wait for it. Claims may be held meanwhile.

    Args:
        queue: the run's rings, or the text by which `open_rings` finds them.
        destination: a folder, s3://…, gs://… (docs/COOLDOWN.md).
        step: of the model, 0 to 10**12 - 1.
        run: name below which the destination has it; default: the setting ``run``, else "run". Jobs that share a
            destination give one each, the same when they start again.
        part: number of this host, and how many hosts have rings. Each takes its part, with the same ``attempt``. A
            part may be without rings, the whole may not.
        attempt: name of this one cut, 16 hexadecimal digits; default random. Where there are several parts, one of them
            makes it with `new_attempt` and tells the others; after a failure all take their parts with a new one.
        progress: called with (files done, files in all, bytes done).

    Raises:
        SnapshotError: no ring is found, unless this queue knows that its rings have ended; rings are served by other
            hosts, and no part of them is asked for; or a ring lies in a file.
        NoOwnerError: a ring has 16 attached processes. Whatever is raised, nothing stays pinned.
    """
    began = time.monotonic()
    name = run_of(run)
    step = manifests.check_step(step)
    url = normalise(destination)
    number, parts = part = operator.index(part[0]), operator.index(part[1])
    if not 0 <= number < parts:
        raise UsageError(f"part={part}: give this host's number, from 0 on, and how many hosts there are")
    if parts > 1 and attempt is None:
        raise UsageError(
            "attempt: all parts of a snapshot need the same name; give each `new_attempt()` of one of them"
        )
    chosen = manifests.new_attempt() if attempt is None else manifests.check_attempt(attempt)
    with contextlib.ExitStack() as stack:
        if isinstance(queue, str):
            queue = stack.enter_context(open_rings(queue))
        if not isinstance(queue, FoundRings):
            raise UsageError("queue of snapshot(): give rings, as open_rings('rings:NAME') finds them")
        elsewhere = queue.not_counted()
        if elsewhere and parts == 1:
            where = sorted(f"{each.addresses[0]}:{each.ports[0]}" for each in elsewhere.values() if each.ports)
            raise SnapshotError(
                f"rings are served by other hosts ({', '.join(where[:4])}): take a part of the snapshot on each host, "
                "part=(number, hosts) with one attempt; their payloads would be missing"
            )
        with contextlib.ExitStack() as undo:
            rings = []
            for segment in queue.segments_here():
                with contextlib.suppress(RingNotFoundError):  # it has ended meanwhile, with nothing unread
                    # For the upload alone: of the owner numbers that trainers leave, one is for that.
                    ring = SharedRingBuffer.attach(segment, role="reader")
                    undo.callback(ring.close)
                    require_in_memory(ring)
                    rings.append(_Held(ring, ring.hold_unread()))
            created = time.time()
            why = "" if rings else missing(queue)
            if why and parts == 1:
                raise SnapshotError(why)
            ids = tuple(each.ring for each in elsewhere.values() if each.ring)
            cut = _Cut(name, step, chosen, part, created, rings, ids, why, time.monotonic() - began)
            stop = Stop()
            # From here on the rings are the thread's.
            upload = started(partial(_upload, undo.pop_all(), cut, url, stop, progress))
    return Snapshot(cut, upload, stop)


def missing(queue: FoundRings) -> str:
    """Say why a queue without rings on this host has none.

    "": it has had one, which is gone, or one has come meanwhile.
    """
    why = None if queue.has_met_rings() else queue.why_nothing()
    return "" if why is None else why.text


def require_in_memory(ring: SharedRingBuffer) -> None:
    """SnapshotError: the ring lies in a file."""
    if ring.file:
        raise SnapshotError(
            f"ring {ring.name} lies in {ring.file}, which keeps its payloads for the next run: with a snapshot they "
            "would come twice"
        )


def part_of(ring: SharedRingBuffer, payloads: int, size: int) -> RingPart:
    """Return a ring's part of a manifest, without its files. ``size``: bytes of all ``payloads`` together."""
    return RingPart(
        ring=ring.ring_id,
        segment=ring.name,
        host=host_identity(),
        fingerprint=ring.fingerprint.hex(),
        consumers=ring.native.consumers,
        slots=ring.slot_count,
        slot_bytes=ring.slot_capacity,
        payloads=payloads,
        bytes=size,
    )


def _upload(rings: contextlib.ExitStack, cut: _Cut, url: str, stop: Stop, progress: Progress) -> Manifest:
    place = manifests.place_of(cut.run, cut.step, cut.attempt)
    number, parts = cut.part
    with rings, open_destination(url) as destination, contextlib.ExitStack() as stack:
        count = _begin(cut, destination, place)
        if parts == 1:  # else the other parts lie in the same place; `prune` removes what has no manifest
            stack.enter_context(removed_on_failure(destination, place))
        manifest = msgspec.structs.replace(_sent(cut, destination, place, stop, progress), number=count)
        if parts > 1:
            destination.put(f"{place}/{manifests.part_name(number)}", manifest.encode())
            if number:
                return manifest
            manifest = _whole(cut, manifest, destination, place, stop)
        stop.check()
        destination.put(f"{place}/{manifests.NAME}", manifest.encode())
        if destination.size(f"{place}/{manifests.begun_name(number)}") is None:  # see `prune`
            remove(destination, place)
            raise SnapshotError(
                f"snapshot of step {cut.step}, attempt {cut.attempt}: a later one was complete first, and `prune` has "
                "removed this one's files"
            )
        return manifest


def _begin(cut: _Cut, destination: Destination, place: str) -> int:
    """Begin a part of an attempt, which is one cut. SnapshotError where this part was begun before.

    Returns the cut's number; of a part but the first, the number of the last cut that the destination has counted.
    """
    number, parts = cut.part
    mark = manifests.begun_name(number)
    there = destination.names(place)
    if there if parts == 1 else {mark, manifests.NAME} & set(there):
        raise SnapshotError(
            f"attempt {cut.attempt} of step {cut.step} was begun before, at another cut: take the snapshot with a new "
            "attempt, on every host"
        )
    count = last_cut(destination, cut.run) if number else count_cut(destination, cut.run)
    destination.put(f"{place}/{mark}", b"%d" % count)
    return count


def _sent(cut: _Cut, destination: Destination, place: str, stop: Stop, progress: Progress) -> Manifest:
    """Send the files of every ring that holds something."""
    with contextlib.ExitStack() as stack:
        sources: list[tuple[str, UploadStream]] = []
        parts: list[RingPart] = []
        for ring, held in cut.rings:
            payloads = _Payloads(ring, held)
            stack.callback(payloads.release)
            if payloads.leases:
                index = msgspec.msgpack.encode(Index(schema=ring.native.schema, entries=payloads.entries))
                sources.append((f"{ring.ring_id}.{_DATA}", UploadStream(payloads.bytes, payloads.pieces)))
                sources.append((f"{ring.ring_id}.{_INDEX}", UploadStream(len(index), partial(_cut_up, index))))
            parts.append(part_of(ring, len(payloads.leases), payloads.bytes))
        files = {file.name: file for file in copied(sources, destination, place, stop, progress)}
    rings = (
        msgspec.structs.replace(part, data=files.get(f"{part.ring}.{_DATA}"), index=files.get(f"{part.ring}.{_INDEX}"))
        for part in parts
    )
    return Manifest(
        run=cut.run,
        step=cut.step,
        attempt=cut.attempt,
        created=cut.created,
        rings=tuple(rings),
        elsewhere=cut.elsewhere,
    )


class _Payloads:
    """The payloads of a ring that are pinned, as one file. Each is let go of behind its last byte."""

    def __init__(self, ring: SharedRingBuffer, held: Sequence[HeldPayload]) -> None:
        found = [(each, ring.ticket_in(each.slot, each.generation)) for each in held]
        known = [(each, ticket) for each, ticket in found if ticket is not None]  # no reader has the others, either
        self.entries = tuple(ManifestEntry(ticket.encode(), each.due, each.policy_version) for each, ticket in known)
        self.bytes = sum(ticket.size for _, ticket in known)
        self.leases = [
            ReadLease(ring, ticket, each.due[0], _ring.Loan(ring.native, each.slot, each.generation, ticket.size))
            for each, ticket in known
        ]

    def pieces(self) -> Iterator[bytes]:
        """Return all bytes, in pieces of `PIECE` and the rest."""
        gathered = bytearray()
        for lease in self.leases:
            begin = 0
            while begin < len(lease.view):
                end = min(len(lease.view), begin + PIECE - len(gathered))
                gathered += lease.view[begin:end]
                begin = end
                if len(gathered) == PIECE:
                    yield bytes(gathered)
                    gathered.clear()
            lease.release()
        if gathered:
            yield bytes(gathered)

    def release(self) -> None:
        """Let go of what has not been sent. Idempotent."""
        for lease in self.leases:
            lease.release()


def _cut_up(data: bytes) -> Iterator[bytes]:
    return (data[begin : begin + PIECE] for begin in range(0, len(data), PIECE))


def _whole(cut: _Cut, own: Manifest, destination: Destination, place: str, stop: Stop) -> Manifest:
    """Return the manifest of all parts, when the other hosts have sent theirs."""
    found: dict[int, Manifest] = {0: own}
    give_up = time.monotonic() + PARTS_S
    while missing := sorted(set(range(cut.part[1])) - set(found)):
        data = destination.read(f"{place}/{manifests.part_name(missing[0])}", manifests.MOST_BYTES)
        if data is not None:
            found[missing[0]] = manifests.decode(data, cut.run, cut.step, cut.attempt)
            continue
        if time.monotonic() > give_up:
            raise SnapshotError(f"parts {missing} of the snapshot of step {cut.step} did not come in {PARTS_S:g} s")
        stop.check()
        time.sleep(_LOOK_S)
    rings = [ring for part in found.values() for ring in part.rings]
    names = [ring.ring for ring in rings]
    known = {name for part in found.values() for name in part.elsewhere}
    if left_out := sorted(known - set(names)):
        raise SnapshotError(f"rings {', '.join(left_out)} are in no part of the snapshot of step {cut.step}")
    if len(set(names)) != len(names):
        raise SnapshotError("two parts have the same rings: take one part on each host, not one in each process")
    if not rings and cut.missing:
        raise SnapshotError(f"no part of the snapshot of step {cut.step} has a ring: {cut.missing}")
    return msgspec.structs.replace(own, rings=tuple(rings), elsewhere=())
