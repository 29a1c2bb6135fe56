"""The coordinator of one epoch's cooldown: events in, actions out. No I/O, no clock of its own.

    TRAINING ──Begin──► COOLDOWN ──Verified, or the time limit──► ENDED
                         │    ▲                                    │ ▲
                         └────┘ Begin, Reported, Refuted, Ticked   └─┘ Superseded

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

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import msgspec

from transport.cooldown.epochs.records import (
    SET,
    Checkpoint,
    EpochRecord,
    Note,
    Outcome,
    Phase,
    Refusal,
    Report,
    ReportKind,
)
from transport.errors import UsageError

MOST_GAP_S: Final = 10.0
LOOK_AGAIN_S: Final = 5.0  # seconds until the next verification, after a destination could not be read
MOST_UNELECTED: Final = 16  # notes on reports of clients that were not elected


# --- events -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Begin:
    """The epoch's training has ended; these clients are healthy and have the model of ``step``."""

    step: int
    clients: tuple[str, ...]
    hosts: Mapping[str, str] = field(default_factory=dict)  # of clients whose save is collective


@dataclass(frozen=True)
class Reported:
    """A client's report was read, perhaps again."""

    report: Report


@dataclass(frozen=True)
class Verified:
    """Result of `Verify`: the upload is a checkpoint."""

    report: Report
    checkpoint: Checkpoint


@dataclass(frozen=True)
class Refuted:
    """Result of `Verify`: the upload is refused."""

    report: Report
    refusal: Refusal
    detail: str
    upload: str = ""  # the part of a set that is wrong, "CLIENT/ATTEMPT"; the other parts stay good


@dataclass(frozen=True)
class Ticked:
    """The clock's reading in seconds; only differences count."""

    now: float


@dataclass(frozen=True)
class Superseded:
    """The record of the last `Write` was refused, because this one is in the store."""

    record: EpochRecord


Event: TypeAlias = Begin | Reported | Verified | Refuted | Ticked | Superseded


# --- actions ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Write:
    """Write the record to the store in place of the version that was last read or written."""

    record: EpochRecord


@dataclass(frozen=True)
class Verify:
    """Verify the reported upload; answer with `Verified` or `Refuted`."""

    report: Report


Action: TypeAlias = Write | Verify


class Coordinator:
    """One epoch. One thread.

    Args:
        record: the record in the store; the machine begins in its phase.
    """

    def __init__(self, record: EpochRecord) -> None:
        self.record = record
        self.interval = min(max(record.cooldown_s / 60, 1.0), 10.0)
        self._now: float | None = None
        self._elapsed = record.elapsed_s
        if record.phase is Phase.COOLDOWN:
            self._elapsed += self.interval
        # Invariant: every upload in it is of an elected client and of this epoch.
        self._verifying: set[tuple[str, str]] = set()
        self._again: dict[tuple[str, str], tuple[float, Report]] = {}  # (elapsed time at which to verify again, report)

    def __repr__(self) -> str:
        left = max(0.0, self.record.cooldown_s - self._elapsed)
        outcome = f" {self.record.outcome.value}" if self.record.outcome else ""
        return f"<Coordinator epoch {self.record.epoch} {self.record.phase.value}{outcome} {left:.0f} s left>"

    @property
    def elapsed_s(self) -> float:
        """Seconds of the cooldown in which a coordinator was running."""
        return self._elapsed

    def tick(self, now: float) -> list[Action]:
        """What is due at ``now`` (seconds of any clock)."""
        return self.handle(Ticked(now))

    def handle(self, event: Event) -> list[Action]:
        """The actions that follow from an event. An event without a transition in this phase changes nothing.

        Raises UsageError where the cooldown was begun with another step or other clients.
        """
        transition = TABLE.get((self.record.phase, type(event)))
        return [] if transition is None else transition(self, event)

    # --- transitions ----------------------------------------------------------------------------------
    def _begin(self, event: Begin) -> list[Action]:
        return self._write(phase=Phase.COOLDOWN, **_begun(event))

    def _resume(self, event: Begin) -> list[Action]:
        _require_same(self.record, msgspec.structs.replace(self.record, **_begun(event)))
        return []

    def _report(self, event: Reported) -> list[Action]:
        report, record = event.report, self.record
        known = record.notes.get(report.client)
        if report.identity in self._verifying or report.identity in self._again:
            return []
        if known is not None and (known.kind, known.attempt) == (report.kind, report.attempt):
            open_ones = (None, Refusal.UNREADABLE) if report.kind is ReportKind.UPLOADED else ()
            if known.refusal not in open_ones:
                return []  # read again; already answered
        refusal = None
        if (report.run, report.epoch) != (record.run, record.epoch):
            refusal = Refusal.OTHER_EPOCH
        elif not record.accepts(report.client, report.kind):
            refusal = Refusal.NOT_ELECTED
        if refusal is not None:
            return self._note(report, refusal, f"run {report.run}, epoch {report.epoch}")
        if report.kind is not ReportKind.UPLOADED:
            return self._note(report, None, report.detail)
        self._verifying.add(report.identity)
        return [*self._note(report, None, ""), Verify(report)]

    def _accept(self, event: Verified) -> list[Action]:
        if event.report.identity not in self._verifying:
            return []
        return self._decide(Outcome.CHECKPOINTED, event.checkpoint)

    def _refute(self, event: Refuted) -> list[Action]:
        identity = event.report.identity
        if identity not in self._verifying:
            return []
        self._verifying.discard(identity)
        if event.refusal is Refusal.UNREADABLE:
            self._again[identity] = (self._elapsed + LOOK_AGAIN_S, event.report)
        elif event.upload:
            why = f"{event.refusal.value}: {event.detail}"[:500]
            self.record = msgspec.structs.replace(self.record, refused={**self.record.refused, event.upload: why})
        return self._note(event.report, event.refusal, event.detail)

    def _tick(self, event: Ticked) -> list[Action]:
        before, self._now = self._now, event.now
        if before is not None:
            self._elapsed += min(max(event.now - before, 0.0), MOST_GAP_S)
        unproven = self._verifying or self._again
        if self._elapsed >= (self.record.most_s if unproven else self.record.cooldown_s):
            return self._decide(Outcome.TIMED_OUT, None)
        due = [report for at, report in self._again.values() if at <= self._elapsed]
        for report in due:
            del self._again[report.identity]
            self._verifying.add(report.identity)
        write = self._write() if self._elapsed - self.record.elapsed_s >= self.interval else []
        return [*write, *map(Verify, due)]

    def _yield(self, event: Superseded) -> list[Action]:
        """Another coordinator has written: take over its end, or merge its record."""
        theirs = event.record
        if theirs.phase is Phase.ENDED:
            self.record = theirs
            return []
        self._elapsed = max(self._elapsed, theirs.elapsed_s)
        if self.record.phase is Phase.ENDED or theirs.phase is Phase.TRAINING:  # the store has lost what it had
            return self._write()
        mine = self.record
        _require_same(theirs, mine)
        self.record = msgspec.structs.replace(
            theirs, notes={**theirs.notes, **mine.notes}, refused={**theirs.refused, **mine.refused}
        )
        return [] if self.record == theirs else self._write()

    # --- their parts ----------------------------------------------------------------------------------
    def _decide(self, outcome: Outcome, checkpoint: Checkpoint | None) -> list[Action]:
        self._verifying.clear()
        self._again.clear()
        return self._write(phase=Phase.ENDED, outcome=outcome, checkpoint=checkpoint)

    def _note(self, report: Report, refusal: Refusal | None, detail: str) -> list[Action]:
        notes = self.record.notes
        known = {SET, *(self.record.hosts or self.record.elected)}
        if report.client not in known:
            strangers = set(notes) - known
            if report.client not in strangers and len(strangers) >= MOST_UNELECTED:
                return []
        note = Note(kind=report.kind, attempt=report.attempt[:16], refusal=refusal, detail=detail[:500])
        if notes.get(report.client) == note:
            return []
        return self._write(notes={**notes, report.client: note})

    def _write(self, **changes: object) -> list[Action]:
        self.record = msgspec.structs.replace(self.record, elapsed_s=self._elapsed, **changes)
        return [Write(self.record)]


def _begun(event: Begin) -> dict[str, Any]:
    """The fields of the record that a beginning sets."""
    clients = tuple(sorted(set(event.clients) | set(event.hosts)))
    return {"step": event.step, "clients": clients, "hosts": dict(event.hosts)}


def _require_same(begun: EpochRecord, given: EpochRecord) -> None:
    """UsageError: the members act on what the cooldown was begun with, so it has no other step or clients."""
    values = [(each.step, each.hosts or each.clients) for each in (begun, given)]
    if values[0] != values[1]:
        theirs, ours = (f"step {step} and clients {str(clients)[:200]}" for step, clients in values)
        raise UsageError(
            f"epoch {begun.epoch}: its cooldown was begun with {theirs}, and is not resumed with {ours}: give the "
            "former, or open the next epoch"
        )


# Events that are not here change nothing: a report in TRAINING or ENDED is too early or too late, and so is a verdict.
TABLE: Final[Mapping[tuple[Phase, type], Callable[..., list[Action]]]] = {
    (Phase.TRAINING, Begin): Coordinator._begin,
    (Phase.COOLDOWN, Begin): Coordinator._resume,
    (Phase.COOLDOWN, Reported): Coordinator._report,
    (Phase.COOLDOWN, Verified): Coordinator._accept,
    (Phase.COOLDOWN, Refuted): Coordinator._refute,
    (Phase.COOLDOWN, Ticked): Coordinator._tick,
    (Phase.COOLDOWN, Superseded): Coordinator._yield,
    (Phase.ENDED, Superseded): Coordinator._yield,
}
