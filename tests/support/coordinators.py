"""A coordinator of epoch 7 with six clients, and the reports that it is sent."""

from __future__ import annotations

from transport.cooldown.epochs.coordinator import Coordinator
from transport.cooldown.epochs.election import elect
from transport.cooldown.epochs.records import (
    Checkpoint,
    EpochRecord,
    ReportKind,
    UploadReport,
)

CLIENTS = tuple("abcdef")
RECORD = EpochRecord(run="run", epoch=7, destination="file:///d", cooldown_s=60.0, seed=49)
ELECTED = elect(CLIENTS, seed=49, epoch=7)


def report(
    client: str = "c", attempt: str = "0" * 16, kind: ReportKind = ReportKind.UPLOADED, **other: object
) -> UploadReport:
    fields = {"run": "run", "epoch": 7, "client": client, "kind": kind, "attempt": attempt, "manifest_sha256": "ab"}
    return UploadReport(**{**fields, **other})  # type: ignore[arg-type]


def checkpoint(of: UploadReport) -> Checkpoint:
    return Checkpoint(client=of.client, attempt=of.attempt, manifest_sha256=of.manifest_sha256, files=1, bytes=1)


def in_cooldown(now: float = 0.0) -> Coordinator:
    machine = Coordinator(RECORD)
    machine.begin(3, CLIENTS)
    machine.tick(now)
    return machine


def due(machine: Coordinator) -> list[UploadReport]:
    """What is to be verified now."""
    taken = machine.due[:]
    machine.due.clear()
    return taken


def verify(machine: Coordinator, of: UploadReport) -> list[UploadReport]:
    machine.report(of)
    return due(machine)
