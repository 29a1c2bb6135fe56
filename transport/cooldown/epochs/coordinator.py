"""The coordinator of one epoch's cooldown: news changes its record, which is in the store.

`Coordinator` decides, without I/O and without a clock of its own; `StoredCoordinator` reads reports for it, and writes
its record.

    TRAINING ──begin──► COOLDOWN ──verified, or the time limit──► ENDED
                         │    ▲
                         └────┘ begin again, report, refuted, tick

ENDED is final once it is in the store, where the first writer wins. A coordinator that finds another one's end there
takes it over; one whose end was not written writes it again.

The time limit counts the time in which a coordinator was running: the differences between ticks, each limited to 0 to
`MOST_GAP_S`, so that a clock that steps, or a process that was stopped, neither ends a cooldown nor makes it endless.
The time is stored every `interval` seconds; a coordinator that takes over adds one interval for the unknown rest.

Verification has a time of its own, ``verify_s``: an upload that was reported and is not yet proven when the limit is
reached may be complete, so it is verified on, and again after a failure of the destination, for at most that long. A
verification may hang at the destination.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

import msgspec

from transport.cooldown.epochs.ledger import Ledger
from transport.cooldown.epochs.records import (
    SET,
    Checkpoint,
    EpochRecord,
    Note,
    Outcome,
    Phase,
    Refusal,
    ReportKind,
    UploadReport,
)
from transport.cooldown.epochs.shares import NameConflict, complete, composed, set_name
from transport.errors import RunError, UsageError
from transport.runtime.error_text import reportable
from transport.store.base import ABSENT

MOST_GAP_S: Final = 10.0
LOOK_AGAIN_S: Final = 5.0  # seconds until the next verification, after a destination could not be read
MOST_DETAIL: Final = 500  # characters of a note
MOST_UNELECTED: Final = 16  # notes on reports of clients that were not elected


class Coordinator:
    """One epoch. One thread.

    What comes in a phase that it is not for changes nothing: a report in TRAINING or ENDED is too early or too late,
    and so is a verdict.

    Args:
        record: the record in the store; the epoch goes on from there.

    Attributes:
        record: the record as it is to be in the store.
        elapsed_s: seconds of the cooldown in which a coordinator was running.
        due: reported uploads to verify; the caller takes them out, and answers with `verified` or `refuted`.
    """

    def __init__(self, record: EpochRecord) -> None:
        self.record = record
        self.due: list[UploadReport] = []
        self.interval = min(max(record.cooldown_s / 60, 1.0), 10.0)
        self._now: float | None = None
        self.elapsed_s = record.elapsed_s
        if record.phase is Phase.COOLDOWN:
            self.elapsed_s += self.interval
        # Reported uploads, of elected clients and of this epoch, with the elapsed time at which to verify them again;
        # None while they are being verified.
        self._unproven: dict[str, tuple[UploadReport, float | None]] = {}

    def __repr__(self) -> str:
        left = max(0.0, self.record.cooldown_s - self.elapsed_s)
        outcome = f" {self.record.outcome.value}" if self.record.outcome else ""
        return f"<Coordinator epoch {self.record.epoch} {self.record.phase.value}{outcome} {left:.0f} s left>"

    def begin(self, step: int, clients: Collection[str], hosts: Mapping[str, str] | None = None) -> None:
        """Begin the cooldown: these clients are healthy and have the model of ``step``.

        ``hosts``: of clients whose save is collective. Raises UsageError where the cooldown was begun with another step
        or other clients.
        """
        their_hosts = dict(hosts or {})
        begun = {"step": step, "clients": tuple(sorted({*clients, *their_hosts})), "hosts": their_hosts}
        if self.record.phase is Phase.TRAINING:
            self._change(phase=Phase.COOLDOWN, **begun)
        elif self.record.phase is Phase.COOLDOWN:
            _require_same(self.record, msgspec.structs.replace(self.record, **begun))

    def report(self, report: UploadReport) -> None:
        """Take in a client's report, perhaps again."""
        record = self.record
        if record.phase is not Phase.COOLDOWN or report.upload in self._unproven:
            return
        known = record.notes.get(report.client)
        if known is not None and known.refused and known.attempt == report.attempt:
            return  # for good, whatever its client reports afterwards
        if known is not None and (known.kind, known.attempt) == (report.kind, report.attempt):
            open_ones = (None, Refusal.UNREADABLE) if report.kind is ReportKind.UPLOADED else ()
            if known.refusal not in open_ones:
                return  # read again; already answered
        refusal = None
        if (report.run, report.epoch) != (record.run, record.epoch):
            refusal = Refusal.OTHER_EPOCH
        elif not record.accepts(report.client, report.kind):
            refusal = Refusal.NOT_ELECTED
        if refusal is not None:
            self._note(report, refusal, f"run {report.run}, epoch {report.epoch}")
        elif report.kind is not ReportKind.UPLOADED:
            self._note(report, None, report.detail)
        else:
            self._note(report, None, "")
            self._verify(report)

    def verified(self, report: UploadReport, checkpoint: Checkpoint) -> None:
        """Take an upload as the checkpoint."""
        if self._is_awaited(report):
            self._end(Outcome.CHECKPOINTED, checkpoint)

    def refuted(self, report: UploadReport, refusal: Refusal, detail: str, upload: str = "") -> None:
        """Refuse an upload. ``upload``: the wrong part of a set; the others stay good."""
        if not self._is_awaited(report):
            return
        del self._unproven[report.upload]
        self.due = [each for each in self.due if each != report]
        if refusal is Refusal.UNREADABLE:
            self._unproven[report.upload] = (report, self.elapsed_s + LOOK_AGAIN_S)
        elif upload:
            why = reportable(f"{refusal.value}: {detail}", MOST_DETAIL)
            self._change(refused={**self.record.refused, upload: why})
        self._note(report, refusal, detail)

    def tick(self, now: float) -> None:
        """Take in the clock's reading in seconds; only differences count."""
        if self.record.phase is not Phase.COOLDOWN:
            return
        before, self._now = self._now, now
        if before is not None:
            self.elapsed_s += min(max(now - before, 0.0), MOST_GAP_S)
        if self.elapsed_s >= (self.record.most_s if self._unproven else self.record.cooldown_s):
            self._end(Outcome.TIMED_OUT, None)
            return
        for report in [each for each, at in self._unproven.values() if at is not None and at <= self.elapsed_s]:
            self._verify(report)
        if self.elapsed_s - self.record.elapsed_s >= self.interval:
            self._change()

    def superseded(self, theirs: EpochRecord) -> None:
        """Another coordinator's record is in the store: take over its end, or add to its record what it lacks.

        What it has refused for good is refused, whatever this one has found.
        """
        if theirs.phase is Phase.ENDED:
            self._verify_nothing()
            self.record = theirs
            return
        self.elapsed_s = max(self.elapsed_s, theirs.elapsed_s)
        mine = self.record
        refuted = {f"{client}/{note.attempt}" for client, note in theirs.notes.items() if note.refused}
        if mine.checkpoint is not None and mine.checkpoint.upload in refuted:
            self.record = theirs  # its client may have removed it
            return
        if mine.phase is Phase.ENDED or theirs.phase is Phase.TRAINING:  # the store has lost what it had
            self._change()
            return
        _require_same(theirs, mine)
        self._unproven = {upload: state for upload, state in self._unproven.items() if upload not in refuted}
        own = {client: note for client, note in mine.notes.items() if f"{client}/{note.attempt}" not in refuted}
        notes, refused = {**theirs.notes, **own}, {**theirs.refused, **mine.refused}
        self.record = theirs
        if (notes, refused) != (theirs.notes, theirs.refused):
            self._change(notes=notes, refused=refused)

    # --- their parts ----------------------------------------------------------------------------------
    def _verify(self, report: UploadReport) -> None:
        self._unproven[report.upload] = (report, None)
        self.due.append(report)

    def _is_awaited(self, report: UploadReport) -> bool:
        """Return whether a verdict on this upload is awaited."""
        known = self._unproven.get(report.upload)
        return known is not None and known[1] is None

    def _end(self, outcome: Outcome, checkpoint: Checkpoint | None) -> None:
        self._verify_nothing()
        self._change(phase=Phase.ENDED, outcome=outcome, checkpoint=checkpoint)

    def _verify_nothing(self) -> None:
        """Drop all verifications: the epoch has ended."""
        self._unproven.clear()
        self.due.clear()

    def _note(self, report: UploadReport, refusal: Refusal | None, detail: str) -> None:
        notes = self.record.notes
        known = {SET, *(self.record.hosts or self.record.elected)}
        if report.client not in known:
            strangers = set(notes) - known
            if report.client not in strangers and len(strangers) >= MOST_UNELECTED:
                return
        note = Note(
            kind=report.kind, attempt=report.attempt[:16], refusal=refusal, detail=reportable(detail, MOST_DETAIL)
        )
        if notes.get(report.client) != note:
            self._change(notes={**notes, report.client: note})

    def _change(self, **changes: object) -> None:
        self.record = msgspec.structs.replace(self.record, elapsed_s=self.elapsed_s, **changes)


def _require_same(begun: EpochRecord, given: EpochRecord) -> None:
    """UsageError: the members act on what the cooldown was begun with, so it has no other step or clients."""
    values = [(each.step, each.hosts or each.clients) for each in (begun, given)]
    if values[0] != values[1]:
        theirs, ours = (f"step {step} and clients {str(clients)[:200]}" for step, clients in values)
        raise UsageError(
            f"epoch {begun.epoch}: its cooldown was begun with {theirs}, and is not resumed with {ours}: give the "
            "former, or open the next epoch"
        )


class StoredCoordinator:
    """One epoch's coordinator with its record in the store. Blocks; one call at a time.

    The next call of `write` or `step` stores what `machine` was told. Both raise StoreError; after a retryable one the
    same call can be repeated: nothing is lost or done twice.
    """

    def __init__(self, ledger: Ledger, epoch: int, wall: Callable[[], float] = time.time) -> None:
        record, _ = ledger.look(epoch)
        if record is None:
            raise UsageError(f"run {ledger.run}: epoch {epoch} is not open; open() it first")
        self.machine = Coordinator(record)
        self._ledger = ledger
        self._epoch = epoch
        self._wall = wall
        self._known = record  # as it stood in the store when it was last read or written
        self._heard = (ABSENT, 0)  # the bell's version, and the shares refused, when the shares were read
        self.sets: dict[str, bytes] = {}  # manifests of complete sets, by attempt

    def ended(self) -> bool:
        """Return whether the store has the epoch's end."""
        return self._known.phase is Phase.ENDED

    def step(self, now: float) -> list[UploadReport]:
        """Handle new reports and the time; returns the reports to verify."""
        for report in self._ledger.reports(self._epoch):
            if not (self.machine.record.hosts and report.kind is ReportKind.UPLOADED):
                self.machine.report(report)
        self._look_for_a_set()
        self.machine.tick(now)
        return self.write()

    def write(self) -> list[UploadReport]:
        """Write the record where it has changed; returns the reports to verify."""
        if self.machine.record != self._known:
            self._ledger.advance(self._epoch, self._next)
            self._known = self.machine.record
        due = self.machine.due[:]
        self.machine.due.clear()
        return due

    def _next(self, standing: EpochRecord | None) -> EpochRecord | None:
        """Return the record to write in place of the standing one; None where nothing is to be written."""
        if standing is None:
            raise RunError(f"run {self._ledger.run}: the record of epoch {self._epoch} is no longer in the store")
        machine = self.machine
        if standing not in (self._known, machine.record):
            machine.superseded(standing)
            self._known = standing
        if standing == machine.record:
            return None
        if machine.record.phase is Phase.ENDED and not machine.record.ended_at:
            machine.record = msgspec.structs.replace(machine.record, ended_at=self._wall())
        return machine.record

    def _look_for_a_set(self) -> None:
        """Handle a set that has become complete as a report; its manifest is written when it is verified."""
        record = self.machine.record
        if not record.hosts or record.phase is not Phase.COOLDOWN:
            return
        heard = (self._ledger.wait_for_report(self._epoch, ABSENT, 0.0), len(record.refused))
        if heard == self._heard:
            return
        shares = complete(record, self._ledger.shares(self._epoch))
        if shares is not None:
            name, data, conflict = set_name(shares), b"", ""
            try:
                data = composed(record, shares, self._ledger.saved(self._epoch)).encode()
            except NameConflict as error:
                conflict = str(error)
            self.sets[name] = data
            report = UploadReport(
                run=record.run,
                epoch=record.epoch,
                client=SET,
                kind=ReportKind.UPLOADED,
                attempt=name,
                manifest_sha256=hashlib.sha256(data).hexdigest(),
            )
            self.machine.report(report)
            if conflict:
                self.machine.refuted(report, Refusal.NAME_CONFLICT, conflict)
        self._heard = heard
