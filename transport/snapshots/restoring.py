"""A snapshot at its destination: found, looked at, verified, and written into a ring."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

from transport import _ring
from transport.cooldown.destinations.base import Destination
from transport.cooldown.destinations.open import open_destination
from transport.cooldown.epochs.manifest import BLOCK, File
from transport.cooldown.upload import FILES_AT_ONCE, Stop
from transport.cooldown.verify import RefusedUpload, check_size, checked_block, checked_pieces
from transport.errors import (
    CheckpointDamagedError,
    NoCheckpointError,
    RingError,
    RingFullError,
    SchemaError,
    SnapshotError,
    UsageError,
)
from transport.packer.consumed_record import ConsumedRecord
from transport.ring.attachment import remove_if_dead
from transport.ring.buffer import SharedRingBuffer
from transport.runtime.blocking_calls import in_parallel
from transport.runtime.progress import Progress, silent
from transport.schema import Schema
from transport.server.users import end_lingering, users_of
from transport.snapshots import manifest as manifests
from transport.snapshots.listing import complete, listed, run_of
from transport.snapshots.manifest import Manifest, RingPart
from transport.ticket import NO_SCHEMA, ORIGIN, Metadata, Ticket

if TYPE_CHECKING:
    from transport.packer.rollout import UCXXRolloutMixin

log = logging.getLogger(__name__)

_KEPT_BLOCKS: Final = 16  # of 16 MiB, between their verification and their use


class SavedPayload(NamedTuple):
    """One payload of a snapshot.

    Attributes:
        ticket: as its ring had it, with the caller's metadata.
        due: ranks that have not consumed it.
        begin: where its bytes begin in the file of its ring.
    """

    ticket: Ticket
    due: tuple[int, ...]
    policy_version: int | None
    ring: RingPart
    begin: int


class RestoredPayloads(NamedTuple):
    """Result of a call of `restore`.

    Attributes:
        tickets: of the payloads that it wrote.
        bytes: of these.
        known: payloads left out because the records have them.
        expired: payloads whose deadline has passed.
        others: payloads of rings of other schemas.
        there: payloads that the ring had from an earlier call.
    """

    manifest: Manifest
    tickets: list[Ticket]
    bytes: int
    known: int
    expired: int
    others: int
    there: int


class Saved:
    """One complete snapshot at its destination. Use it in a ``with``.

    Args:
        destination: as given to `snapshot`.
        step: of the snapshot; None: the newest that is complete.
        run: as given to `snapshot`.
        attempt: one of several of this step, as the model's checkpoint has it; None: the newest.

    Attributes:
        manifest: what it consists of.
        payloads: all of them, ring by ring, the oldest of each first.

    Raises:
        NoCheckpointError: there is no complete snapshot of this step, or attempt.
        CheckpointDamagedError: its manifest or an index is missing, changed or truncated; the message names it.
        UsageError: it has a newer format than this build reads.
        DestinationError: the destination cannot be read now.
    """

    def __init__(
        self, destination: str, step: int | None = None, *, run: str | None = None, attempt: str | None = None
    ) -> None:
        name = run_of(run)
        with contextlib.ExitStack() as stack:
            self._destination = stack.enter_context(open_destination(destination))
            self.manifest = _found(self._destination, name, step, attempt)
            with self._damage():
                found = [each for ring in self.manifest.rings for each in self._payloads(ring)]
            self.payloads = [payload for payload, _ in found]
            self._schemas = {payload.ring.ring: schema for payload, schema in found}
            self._files = {ring.data.name: ring.data for ring in self.manifest.rings if ring.data is not None}
            self._block = lru_cache(maxsize=_KEPT_BLOCKS)(
                partial(_block, self._destination, self.manifest, self._files)
            )
            self._close = stack.pop_all()

    def __repr__(self) -> str:
        return f"<Saved {self.manifest.place}: {len(self.payloads)} payloads>"

    def close(self) -> None:
        """Leave the destination. Idempotent."""
        self._close.close()

    def __enter__(self) -> Saved:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def schema_of(self, payload: SavedPayload) -> Schema | None:
        """Return the schema of a payload; None: it had more bytes than a segment keeps, and the new run has it."""
        encoded = self._schemas[payload.ring.ring]
        return payload.ticket.schema or (Schema.decode(encoded) if encoded else None)

    # --- verifying --------------------------------------------------------------------------------------
    def verify(self, payloads: Sequence[SavedPayload] | None = None, progress: Progress = silent) -> None:
        """Read every byte of these payloads (None: of all) and compare the checksums.

        Raises CheckpointDamagedError, which names the file; DestinationError.
        """
        wanted: dict[str, set[int]] = {}
        for each in self.payloads if payloads is None else payloads:
            if each.ring.data is not None and each.ticket.size:
                end = each.begin + each.ticket.size
                numbers = range(each.begin // BLOCK, -(-end // BLOCK))
                wanted.setdefault(each.ring.data.name, set()).update(numbers)
        calls = [(name, number) for name, numbers in wanted.items() for number in sorted(numbers)]
        stop, done = Stop(), Counter[str]()

        def check(name: str, number: int) -> None:
            stop.check()
            size = len(self._block(name, number))
            done.update(blocks=1, bytes=size)
            progress(done["blocks"], len(calls), done["bytes"])

        with self._damage():
            for name in wanted:
                check_size(self._destination, self.manifest.path(self._files[name]), self._files[name])
            in_parallel([partial(check, *call) for call in calls], FILES_AT_ONCE, stop.set)

    @contextlib.contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except (RefusedUpload, CheckpointDamagedError) as error:
            raise CheckpointDamagedError(
                f"the snapshot at {self._destination.url}/{self.manifest.place} is damaged: {error}"
            ) from error

    def _payloads(self, ring: RingPart) -> Iterator[tuple[SavedPayload, bytes]]:
        if ring.index is None or ring.data is None:
            return
        path = self.manifest.path(ring.index)
        check_size(self._destination, path, ring.index)
        index = b"".join(checked_pieces(self._destination, path, ring.index))
        schema, entries = manifests.decode_index(index, ring)
        if ring.data.size != ring.bytes:
            raise CheckpointDamagedError(f"{ring.data.name} has {ring.data.size} bytes, its payloads {ring.bytes}")
        begins = accumulate((ticket.size for ticket, _ in entries), initial=0)
        for begin, (ticket, entry) in zip(begins, entries, strict=False):
            yield SavedPayload(ticket, entry.due, entry.policy_version, ring, begin), schema

    def data(self, payload: SavedPayload) -> bytes:
        """Return the bytes of a payload, proven by the checksum of its block and by its own. CheckpointDamagedError."""
        ticket, file = payload.ticket, payload.ring.data
        end = payload.begin + ticket.size
        with self._damage():
            parts = (
                []
                if file is None
                else [
                    self._block(file.name, number)[max(payload.begin - number * BLOCK, 0) : end - number * BLOCK]
                    for number in range(payload.begin // BLOCK, -(-end // BLOCK))
                ]
            )
            data = b"".join(parts)
            if len(data) != ticket.size or ticket.checksum not in (None, _ring.checksum(data)):
                raise CheckpointDamagedError(f"payload {ticket.name} has other bytes than were published")
        return data

    # --- the way back -----------------------------------------------------------------------------------
    def restore(
        self,
        into: SharedRingBuffer | UCXXRolloutMixin,
        *,
        share: tuple[int, int] = (0, 1),
        consumed: Iterable[ConsumedRecord] = (),
        only: Sequence[SavedPayload] | None = None,
        timeout_s: float | None = None,
        progress: Progress = silent,
    ) -> RestoredPayloads:
        """See `restore`. ``only``: of these `payloads` all that the ring can take, whatever their ring's schema."""
        ring = into if isinstance(into, SharedRingBuffer) else into.ring
        records = list(consumed)
        number, of = share
        if not 0 <= number < of:
            raise UsageError(f"share={share}: give the number of this ring, from 0 on, and how many rings there are")
        self._refuse_living()
        wanted = self.payloads if only is None else only
        fingerprint = ring.fingerprint.hex()
        if only is None:  # of one ring's schema alone, so that all shares together are each payload once
            fitting = [each for each in wanted if each.ring.fingerprint == fingerprint]
        else:
            fitting = [
                each
                for each in wanted
                if each.ticket.bare or fingerprint in (NO_SCHEMA, each.ticket.schema_fingerprint)
            ]
        if wanted and not fitting:
            theirs = ", ".join(sorted({each.ring.fingerprint for each in wanted}))
            raise SchemaError(
                f"schema mismatch: the snapshot's rings have {theirs}, ring {ring.ring_id[:8]} {fingerprint}: give a "
                "ring with the schema of the run that was saved; to one without a schema also name the payloads that "
                "it is to take, Saved.restore(ring, only=…)"
            )
        now = time.time()
        mine: list[tuple[SavedPayload, tuple[int, ...]]] = []
        known = expired = 0
        share_of = fitting[len(fitting) * number // of : len(fitting) * (number + 1) // of]
        had = ring.originals()
        left = [each for each in share_of if each.ticket.origin not in had]
        for each in left:
            due = tuple(rank for rank in each.due if not any(it.contains(*each.ticket.origin, rank) for it in records))
            known += not due
            expired += bool(due) and each.ticket.deadline is not None and each.ticket.deadline <= now
            if due and (each.ticket.deadline is None or each.ticket.deadline > now):
                mine.append((each, due))
        if ring.overflow == "overwrite" and len(mine) > ring.statistics().free:
            raise RingFullError(
                f"{len(mine)} payloads are to be restored, and this ring cannot hold all of them at once: make it with "
                'more slots, or with overflow="block"'
            )
        for each, _ in mine:
            ring.check_copy(each.ticket, self.schema_of(each), metadata=_metadata_of(each))
        self.verify([each for each, _ in mine], progress)
        tickets = self._written(mine, ring, timeout_s)
        size = sum(ticket.size for ticket in tickets)
        others, there = len(wanted) - len(fitting), len(share_of) - len(left)
        return RestoredPayloads(self.manifest, tickets, size, known, expired, others, there)

    def _refuse_living(self) -> None:
        """Refuse while a ring of the snapshot hands out payloads, of before the cut or behind it, or has its writer.

        The ring of a killed writer that no trainer has goes: its payloads are in the snapshot, or written again.
        """
        for ring in self.manifest.rings:
            with contextlib.suppress(RingError), SharedRingBuffer.attach(ring.segment, role="observer") as seen:
                if seen.ring_id == ring.ring:
                    if left := end_lingering(seen):
                        log.info("removing ring %s, which a killed rollout of the snapshot's run has left", seen.name)
                    else:
                        _refuse(seen, ring)
                    remove_if_dead(ring.segment, only_empty=not left)  # a next writer would go on with its generations

    def _written(
        self, payloads: Sequence[tuple[SavedPayload, tuple[int, ...]]], ring: SharedRingBuffer, timeout_s: float | None
    ) -> list[Ticket]:
        """Write the payloads. What is written stays when the next one cannot be: a trainer may have consumed it."""
        give_up = None if timeout_s is None else time.monotonic() + timeout_s
        written: list[Ticket] = []
        for payload, due in payloads:
            data = self.data(payload)
            try:
                ticket = ring.write_copy(
                    payload.ticket,
                    data,
                    self.schema_of(payload),
                    metadata=_metadata_of(payload),
                    policy_version=payload.policy_version,
                    timeout_s=None if give_up is None else max(give_up - time.monotonic(), 0.0),
                )
            except RingFullError as full:
                error = RingFullError(f"{full}. {len(written)} of {len(payloads)} are restored; the same call goes on")
                error.written = written
                raise error from None
            written.append(ticket)
            # A trainer that claims it first for a rank that is done drops it, by its record.
            for rank in set(range(ticket.readers)) - set(due):
                ring.acknowledge(ticket, rank)
        return written


def _metadata_of(payload: SavedPayload) -> Metadata:
    return {**payload.ticket.metadata, ORIGIN: "/".join(map(str, payload.ticket.origin))}


def _refuse(ring: SharedRingBuffer, part: RingPart) -> None:
    why = []
    if unread := ring.native.unread:
        why.append(f"its {unread} unread payloads would come beside those that are restored, or written again")
    if part.payloads and ring.native.keeper_alive:
        why.append("records would take its writer's next payloads for those of the snapshot")
    if why:
        users = users_of(ring)
        raise SnapshotError(
            f"ring {ring.name} of the snapshot is still here: {'; '.join(why)}. "
            f"{f'End its processes ({users}), and remove' if users else 'Remove'} what is left of it with "
            f"`transport reclaim {ring.name}`"
        )


def _block(destination: Destination, manifest: Manifest, files: Mapping[str, File], name: str, number: int) -> bytes:
    return checked_block(destination, manifest.path(files[name]), files[name], number)


def restore(
    destination: str,
    step: int | None,
    into: SharedRingBuffer | UCXXRolloutMixin,
    *,
    run: str | None = None,
    attempt: str | None = None,
    share: tuple[int, int] = (0, 1),
    consumed: Iterable[ConsumedRecord] = (),
    timeout_s: float | None = None,
    progress: Progress = silent,
) -> RestoredPayloads:
    """Write a snapshot's payloads, or this ring's share of them, into a ring of the new run. Blocks.

    Every byte that is needed is verified before the first payload is written. The trainers of the new run begin with
    the records of the same checkpoint. No snapshot is taken before all shares are restored: it would lack the rest.

    A ring gets each payload once. What is written stays, whatever is raised then, and the same call with the same ring
    goes on behind it.

    Args:
        destination, step, run, attempt: as for `Saved`.
        into: a `Rollout`, or the ring of a writer. It takes what lay in rings of its schema; one without a schema, what
            lay in rings without one. The rest is left to other rings.
            Where it has fewer slots than payloads, this waits until trainers have consumed some.
        share: number of this ring, and how many rings of its schema share the payloads.
        consumed: records of the checkpoint's trainers; what they have is left out.
        timeout_s: longest wait for free slots, in all; None: no limit.
        progress: of the verification, called with (blocks done, blocks in all, bytes done).

    Raises:
        NoCheckpointError, CheckpointDamagedError, DestinationError, UsageError: as `Saved`; nothing was written.
        SchemaError, PayloadTooLargeError: the ring is not one for these payloads; nothing was written.
        TicketError: its name and addresses leave too little room for a ticket; nothing was written.
        SnapshotError: a ring of the snapshot is still on this host; nothing was written.
        RingFullError: not all found a slot in time; ``written`` has the tickets of those that did.
    """
    with Saved(destination, step, run=run, attempt=attempt) as saved:
        return saved.restore(into, share=share, consumed=consumed, timeout_s=timeout_s, progress=progress)


def _found(destination: Destination, run: str, step: int | None, attempt: str | None) -> Manifest:
    if step is None or attempt is None:
        there = complete(listed(destination, run, step if step is None else manifests.check_step(step)))
        named = [each for each in there if attempt in (None, each.attempt)]
        if not named:
            which = "no complete snapshot" if step is None else f"no complete snapshot of step {step}"
            raise NoCheckpointError(f"{destination.url}: run {run} has {which}{_others(destination, run, step)}")
        step, attempt = named[-1].step, named[-1].attempt
    place = manifests.place_of(run, step, attempt)
    data = destination.read(f"{place}/{manifests.NAME}", manifests.MOST_BYTES)
    if data is None:
        raise NoCheckpointError(f"{destination.url}/{place} is no complete snapshot: it has no manifest")
    try:
        return manifests.decode(data, run, step, attempt)
    except CheckpointDamagedError as error:
        raise CheckpointDamagedError(f"the snapshot at {destination.url}/{place} is damaged: {error}") from error


def _others(destination: Destination, run: str, step: int | None) -> str:
    there = [] if step is None else sorted({each.step for each in complete(listed(destination, run))})
    return f"; there are those of steps {', '.join(map(str, there[-8:]))}" if there else ""
