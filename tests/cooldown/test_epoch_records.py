"""What a cooldown stores of an epoch: names, defaults, bytes that are no record, the table of its page."""

from __future__ import annotations

import json

import pytest
from coordinators import RECORD, checkpoint, in_cooldown, report, verify

from transport.cooldown.epochs.records import (
    EpochRecord,
    Note,
    Outcome,
    Phase,
    Refusal,
    ReportKind,
)
from transport.errors import StoreUnsuitableError
from transport.store.stored import decode, encode


def test_enums_are_stored_by_name() -> None:
    machine = in_cooldown()
    machine.report(report("x"))
    verify(machine, report())
    machine.verified(report(), checkpoint(report()))
    stored = json.loads(encode(machine.record))
    assert (stored["phase"], stored["outcome"]) == ("ended", "checkpointed")
    assert stored["notes"]["x"] == {
        "kind": "uploaded",
        "attempt": "0" * 16,
        "refusal": "not_elected",
        "detail": "run run, epoch 7",
    }
    assert decode(EpochRecord, "k", encode(machine.record)) == machine.record
    for enum in (Phase, Outcome, ReportKind, Refusal):
        assert all(member.value == member.name.lower() for member in enum)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"\xff", b'{"run":1}', encode(RECORD).replace(b'"layout":1', b'"layout":3')]
)
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(StoreUnsuitableError):
        decode(EpochRecord, "k", data)


def test_an_unread_note_has_a_default() -> None:
    assert decode(EpochRecord, "k", encode(RECORD)).notes == {}
    assert Note(kind=ReportKind.FAILED).refusal is None
