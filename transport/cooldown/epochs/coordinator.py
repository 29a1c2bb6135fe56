"""The coordinator of one epoch's cooldown: events in, actions out. No I/O, no clock of its own.

    TRAINING ──Begin──► COOLDOWN ──Verified, or the time limit──► DECIDED ──Written──► ENDED
                         │    ▲                                      │
                         └────┘ Reported, Refuted, Ticked            └──Superseded by an end in the store──► ENDED

DECIDED is not yet true: the outcome is what stands in the store, where the first writer wins. So a coordinator that
finds another's end there takes that one over.

The time limit counts time in which a coordinator was watching: differences between ticks, none below 0 and none above
`MOST_GAP_S`, so that a clock which steps, or a process that was stopped, neither ends a cooldown nor makes it endless.
It is stored every `interval` seconds; a coordinator that takes over adds one interval for what it did not see.

What is being verified when the limit ends is complete as far as anybody knows, so its verdict is waited for, at most as
long again: a verification may hang at the destination.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import msgspec

from transport.cooldown.epochs.records import (
    Checkpoint,
    EpochRecord,
    Note,
    Outcome,
    Phase,
    Refusal,
    Report,
    ReportKind,
)

MOST_GAP_S: Final = 10.0
LOOK_AGAIN_S: Final = 5.0  # after a destination that could not be read
LONGEST: Final = 2  # times the limit: for what is being verified when it ends
MOST_UNELECTED: Final = 16  # notes on reports of clients that were not elected


class State(enum.Enum):
    """What the coordinator is doing."""

    TRAINING = "training"
    COOLDOWN = "cooldown"
    DECIDED = "decided"
    ENDED = "ended"


# --- events -------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Begin:
    """The epoch's training is over; these clients are healthy and hold the model of ``step``."""

    step: int
    clients: tuple[str, ...]


@dataclass(frozen=True)
class Reported:
    """A client's report was read, perhaps again."""

    report: Report


@dataclass(frozen=True)
class Verified:
    """What was asked for by `Verify`: it is a checkpoint."""

    report: Report
    checkpoint: Checkpoint


@dataclass(frozen=True)
class Refuted:
    """What was asked for by `Verify`: it is none."""

    report: Report
    refusal: Refusal
    detail: str


@dataclass(frozen=True)
class Ticked:
    """The clock's reading in seconds; only differences count."""

    now: float


@dataclass(frozen=True)
class Written:
    """The record of the last `Write` stands in the store."""


@dataclass(frozen=True)
class Superseded:
    """The record of the last `Write` was refused, because this one stands in the store."""

    record: EpochRecord


Event: TypeAlias = Begin | Reported | Verified | Refuted | Ticked | Written | Superseded


# --- actions ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Write:
    """Put the record into the store in place of the version that was read or written last."""

    record: EpochRecord


@dataclass(frozen=True)
class Verify:
    """Look whether the report is true, and say so by `Verified` or `Refuted`."""

    report: Report


Action: TypeAlias = Write | Verify


class Coordinator:
    """One epoch. One thread.

    Args:
        record: as it stands in the store; the machine begins where it is.
    """

    def __init__(self, record: EpochRecord) -> None:
        self.record = record
        self.state = State(record.phase.value)
        self.interval = min(max(record.cooldown_s / 60, 1.0), 10.0)
        self._now: float | None = None
        self._elapsed = record.elapsed_s
        if self.state is State.COOLDOWN:
            self._elapsed += self.interval
        # Invariant: what is being verified was elected, and reported for this epoch.
        self._verifying: set[tuple[str, str]] = set()
        self._again: dict[tuple[str, str], tuple[float, Report]] = {}  # when, by elapsed time

    def __repr__(self) -> str:
        left = max(0.0, self.record.cooldown_s - self._elapsed)
        outcome = f" {self.record.outcome.value}" if self.record.outcome else ""
        return f"<Coordinator epoch {self.record.epoch} {self.state.value}{outcome} {left:.0f} s left>"

    @property
    def elapsed_s(self) -> float:
        """Of the cooldown, as far as it was watched."""
        return self._elapsed

    def tick(self, now: float) -> list[Action]:
        """What is due at ``now`` (seconds of any clock)."""
        return self.handle(Ticked(now))

    def handle(self, event: Event) -> list[Action]:
        """What an event leads to. One that the table does not have for this state changes nothing."""
        transition = TABLE.get((self.state, type(event)))
        return [] if transition is None else transition(self, event)

    # --- transitions ----------------------------------------------------------------------------------
    def _begin(self, event: Begin) -> list[Action]:
        self.state = State.COOLDOWN
        return self._write(phase=Phase.COOLDOWN, step=event.step, clients=tuple(sorted(set(event.clients))))

    def _report(self, event: Reported) -> list[Action]:
        report, record = event.report, self.record
        known = record.notes.get(report.client)
        if report.identity in self._verifying or report.identity in self._again:
            return []
        if known is not None and (known.kind, known.attempt) == (report.kind, report.attempt):
            open_ones = (None, Refusal.UNREADABLE) if report.kind is ReportKind.UPLOADED else ()
            if known.refusal not in open_ones:
                return []  # read again, and answered before
        refusal = None
        if (report.run, report.epoch) != (record.run, record.epoch):
            refusal = Refusal.OTHER_EPOCH
        elif report.client not in record.elected:
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
        return self._note(event.report, event.refusal, event.detail)

    def _tick(self, event: Ticked) -> list[Action]:
        before, self._now = self._now, event.now
        if before is not None:
            self._elapsed += min(max(event.now - before, 0.0), MOST_GAP_S)
        limit = self.record.cooldown_s
        if self._elapsed >= limit and not (self._verifying and self._elapsed < LONGEST * limit):
            return self._decide(Outcome.TIMED_OUT, None)
        due = [report for at, report in self._again.values() if at <= self._elapsed]
        for report in due:
            del self._again[report.identity]
            self._verifying.add(report.identity)
        write = self._write() if self._elapsed - self.record.elapsed_s >= self.interval else []
        return [*write, *map(Verify, due)]

    def _end(self, event: Written) -> list[Action]:
        self.state = State.ENDED
        return []

    def _yield(self, event: Superseded) -> list[Action]:
        """Another coordinator has written: its end counts, and nothing else of it is lost."""
        theirs = event.record
        if theirs.phase is Phase.ENDED:
            self.record = theirs
            self.state = State.ENDED
            return []
        self._elapsed = max(self._elapsed, theirs.elapsed_s)
        if self.state is State.DECIDED:
            return self._write()
        mine = self.record
        self.state = State(theirs.phase.value)
        self.record = msgspec.structs.replace(theirs, notes={**theirs.notes, **mine.notes})
        return [] if self.record == theirs else self._write()

    # --- their parts ----------------------------------------------------------------------------------
    def _decide(self, outcome: Outcome, checkpoint: Checkpoint | None) -> list[Action]:
        self.state = State.DECIDED
        self._verifying.clear()
        self._again.clear()
        return self._write(phase=Phase.ENDED, outcome=outcome, checkpoint=checkpoint)

    def _note(self, report: Report, refusal: Refusal | None, detail: str) -> list[Action]:
        notes = self.record.notes
        if report.client not in self.record.elected:
            strangers = set(notes) - set(self.record.elected)
            if report.client not in strangers and len(strangers) >= MOST_UNELECTED:
                return []
        note = Note(kind=report.kind, attempt=report.attempt[:16], refusal=refusal, detail=detail[:500])
        if notes.get(report.client) == note:
            return []
        return self._write(notes={**notes, report.client: note})

    def _write(self, **changes: object) -> list[Action]:
        self.record = msgspec.structs.replace(self.record, elapsed_s=self._elapsed, **changes)
        return [Write(self.record)]


# Whatever is not here changes nothing: in TRAINING and ENDED a report is early or late, and a late verdict is one, too.
TABLE: Final[Mapping[tuple[State, type], Callable[..., list[Action]]]] = {
    (State.TRAINING, Begin): Coordinator._begin,
    (State.TRAINING, Superseded): Coordinator._yield,
    (State.COOLDOWN, Reported): Coordinator._report,
    (State.COOLDOWN, Verified): Coordinator._accept,
    (State.COOLDOWN, Refuted): Coordinator._refute,
    (State.COOLDOWN, Ticked): Coordinator._tick,
    (State.COOLDOWN, Superseded): Coordinator._yield,
    (State.DECIDED, Written): Coordinator._end,
    (State.DECIDED, Superseded): Coordinator._yield,
}
