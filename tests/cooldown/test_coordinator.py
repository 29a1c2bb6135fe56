"""The coordinator's machine: every transition, and what holds whatever comes in."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from coordinators import CLIENTS, ELECTED, RECORD, checkpoint, due, in_cooldown, report, verify
from hypothesis import given
from hypothesis import strategies as st

from transport.cooldown.epochs.coordinator import (
    LOOK_AGAIN_S,
    MOST_GAP_S,
    MOST_UNELECTED,
    Coordinator,
)
from transport.cooldown.epochs.election import elect
from transport.cooldown.epochs.records import (
    SET,
    EpochRecord,
    Outcome,
    Phase,
    Refusal,
    ReportKind,
    UploadReport,
)
from transport.errors import UsageError


# --- the way through ------------------------------------------------------------------------------------
def test_beginning_writes_the_clients_in_order() -> None:
    machine = Coordinator(RECORD)
    machine.begin(3, ("f", "a", "a", "e", "d", "c", "b"))
    assert (machine.record.phase, machine.record.clients, machine.record.step) == (Phase.COOLDOWN, CLIENTS, 3)
    assert set(machine.record.elected) == set(ELECTED)


def test_the_first_verified_report_ends_it() -> None:
    machine = in_cooldown()
    assert verify(machine, report("c")) == [report("c")]
    assert verify(machine, report("e")) == [report("e")]
    machine.verified(report("e"), checkpoint(report("e")))
    ended = machine.record
    assert (ended.phase, ended.outcome) == (Phase.ENDED, Outcome.CHECKPOINTED)
    assert ended.checkpoint == checkpoint(report("e"))
    machine.verified(report("c"), checkpoint(report("c")))
    assert machine.record == ended
    assert repr(machine) == "<Coordinator epoch 7 ended checkpointed 60 s left>"


def test_nobody_in_time_is_a_time_out() -> None:
    machine = in_cooldown()
    for now in range(10, 60, 10):
        machine.tick(now)
    assert machine.record.phase is Phase.COOLDOWN
    machine.tick(60.0)
    assert (machine.record.outcome, machine.record.checkpoint) == (Outcome.TIMED_OUT, None)


def at_the_limit_while_verifying() -> Coordinator:
    machine = in_cooldown()
    verify(machine, report("c"))
    for now in range(10, 70, 10):
        machine.tick(now)
    assert machine.record.phase is Phase.COOLDOWN
    return machine


def test_what_is_being_verified_at_the_time_limit_may_still_count() -> None:
    machine = at_the_limit_while_verifying()
    machine.verified(report("c"), checkpoint(report("c")))
    assert machine.record.outcome is Outcome.CHECKPOINTED


def test_what_could_not_be_read_at_the_limit_is_verified_again() -> None:
    """The destination is away for a moment; the upload may be good."""
    machine = at_the_limit_while_verifying()
    machine.refuted(report("c"), Refusal.UNREADABLE, "gone")
    machine.tick(60.0 + LOOK_AGAIN_S)
    assert due(machine) == [report("c")]
    machine.verified(report("c"), checkpoint(report("c")))
    assert machine.record.outcome is Outcome.CHECKPOINTED


@pytest.mark.parametrize(("verify_s", "most"), [(0.0, 120.0), (5.0, 65.0), (600.0, 660.0)])
def test_verification_has_a_time_of_its_own(verify_s: float, most: float) -> None:
    machine = Coordinator(msgspec.structs.replace(RECORD, verify_s=verify_s))
    machine.begin(3, CLIENTS)
    verify(machine, report("c"))
    for now in range(0, int(most), 5):
        machine.tick(now)
        assert machine.record.phase is Phase.COOLDOWN
    machine.tick(most)
    assert machine.record.outcome is Outcome.TIMED_OUT


@pytest.mark.parametrize("kind", [ReportKind.SKIPPED, ReportKind.CANCELLED, ReportKind.FAILED])
def test_what_is_no_upload_completes_nothing(kind: ReportKind) -> None:
    machine = in_cooldown()
    for client in ELECTED:
        assert verify(machine, report(client, kind=kind)) == []
    assert machine.record.phase is Phase.COOLDOWN
    assert machine.record.notes["c"].kind is kind


@pytest.mark.parametrize(
    ("wrong", "refusal"),
    [
        (report("a"), Refusal.NOT_ELECTED),
        (report("stranger"), Refusal.NOT_ELECTED),
        (report(epoch=6), Refusal.OTHER_EPOCH),
        (report(run="other"), Refusal.OTHER_EPOCH),
    ],
)
def test_reports_that_cannot_count_are_refused(wrong: UploadReport, refusal: Refusal) -> None:
    machine = in_cooldown()
    assert verify(machine, wrong) == []
    assert machine.record.notes[wrong.client].refusal is refusal
    machine.verified(wrong, checkpoint(wrong))
    assert machine.record.phase is Phase.COOLDOWN


def test_strangers_do_not_fill_the_record() -> None:
    machine = in_cooldown()
    for number in range(100):
        machine.report(report(f"stranger-{number}"))
    assert len(machine.record.notes) == MOST_UNELECTED
    assert verify(machine, report())


def test_a_lie_is_refused_and_another_upload_of_the_same_client_counts() -> None:
    machine = in_cooldown()
    verify(machine, report())
    machine.refuted(report(), Refusal.WRONG_SIZE, "model has 1 byte")
    assert machine.record.notes["c"].refusal is Refusal.WRONG_SIZE
    assert verify(machine, report()) == []
    second = report(attempt="1" * 16)
    assert verify(machine, second) == [second]
    machine.verified(second, checkpoint(second))
    assert machine.record.outcome is Outcome.CHECKPOINTED


def test_a_destination_that_cannot_be_read_is_looked_at_again() -> None:
    machine = in_cooldown()
    verify(machine, report())
    machine.refuted(report(), Refusal.UNREADABLE, "gone")
    assert verify(machine, report()) == []
    machine.tick(LOOK_AGAIN_S - 1)
    assert due(machine) == []
    machine.tick(LOOK_AGAIN_S)
    assert due(machine) == [report()]


# --- others, restarts, clocks ---------------------------------------------------------------------------
def test_the_outcome_of_another_coordinator_is_taken_over() -> None:
    machine = in_cooldown()
    verify(machine, report())
    machine.verified(report(), checkpoint(report()))
    theirs = EpochRecord(
        run="run",
        epoch=7,
        destination="file:///d",
        cooldown_s=60.0,
        seed=49,
        phase=Phase.ENDED,
        outcome=Outcome.TIMED_OUT,
    )
    machine.superseded(theirs)
    assert machine.record == theirs


def test_a_decision_outlasts_a_note_of_another_coordinator() -> None:
    machine = in_cooldown()
    theirs = machine.record
    verify(machine, report())
    machine.verified(report(), checkpoint(report()))
    decided = machine.record
    machine.superseded(theirs)
    assert machine.record == decided


@pytest.mark.parametrize("heard", ["before its verdict", "with its verdict", "between two tries"])
def test_what_another_coordinator_has_refused_for_good_is_no_checkpoint(heard: str) -> None:
    one, other = in_cooldown(), in_cooldown()
    for machine in (one, other):
        verify(machine, report())
    one.refuted(report(), Refusal.WRONG_CHECKSUM, "other bytes")
    if heard == "between two tries":
        other.refuted(report(), Refusal.UNREADABLE, "away")
    if heard != "with its verdict":
        other.superseded(one.record)
        for now in (0.0, LOOK_AGAIN_S, 2 * LOOK_AGAIN_S):
            other.tick(now)
    other.verified(report(), checkpoint(report()))
    other.superseded(one.record)
    assert other.record.phase is Phase.COOLDOWN
    assert other.record.notes == one.record.notes
    assert verify(other, report()) == []
    again = report(attempt="1" * 16)
    assert verify(other, again) == [again]
    other.verified(again, checkpoint(again))
    assert other.record.checkpoint == checkpoint(again)


def test_a_verdict_comes_too_late_for_the_end_of_another_coordinator() -> None:
    machine = in_cooldown()
    verify(machine, report())
    theirs = msgspec.structs.replace(machine.record, phase=Phase.ENDED, outcome=Outcome.TIMED_OUT)
    machine.superseded(theirs)
    machine.verified(report(), checkpoint(report()))
    machine.refuted(report(), Refusal.UNREADABLE, "gone")
    assert machine.record == theirs


def test_a_store_that_has_lost_the_beginning_gets_it_again() -> None:
    machine = in_cooldown()
    before = msgspec.structs.replace(machine.record, phase=Phase.TRAINING, clients=(), step=0)
    begun = machine.record
    machine.superseded(before)
    assert machine.record == begun
    for now in (10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0):
        machine.tick(now)
    assert machine.record.outcome is Outcome.TIMED_OUT


def test_a_coordinator_that_takes_over_carries_on() -> None:
    first = in_cooldown()
    for now in (10.0, 20.0, 30.0):
        first.tick(now)
    verify(first, report())
    second = Coordinator(first.record)
    assert second.elapsed_s == 30.0 + second.interval
    assert verify(second, report()) == [report()]  # what was being verified is verified again
    for now in (1000.0, 1010.0, 1020.0):
        second.tick(now)
    assert second.record.phase is Phase.COOLDOWN
    second.refuted(report(), Refusal.WRONG_CHECKSUM, "")
    second.tick(1030.0)
    assert second.record.outcome is Outcome.TIMED_OUT


def test_a_coordinator_that_keeps_crashing_ends_the_cooldown_all_the_same() -> None:
    record = in_cooldown().record
    for lives in range(1, 1000):
        machine = Coordinator(record)
        machine.tick(float(lives))
        record = machine.record
        if record.phase is Phase.ENDED:
            break
    assert record.outcome is Outcome.TIMED_OUT


@pytest.mark.parametrize(
    ("step", "clients", "hosts"), [(4, CLIENTS, {}), (3, ("a",), {}), (3, (), dict.fromkeys(CLIENTS, "host"))]
)
def test_a_cooldown_is_resumed_with_what_it_was_begun_with_only(
    step: int, clients: tuple[str, ...], hosts: dict[str, str]
) -> None:
    machine = in_cooldown()
    begun = machine.record
    machine.begin(3, CLIENTS[::-1])
    with pytest.raises(UsageError):
        machine.begin(step, clients, hosts)
    assert machine.record == begun
    late = Coordinator(RECORD)
    late.begin(step, clients, hosts)
    with pytest.raises(UsageError):  # another coordinator has begun it meanwhile
        late.superseded(begun)


@pytest.mark.parametrize("step", [-1e9, 1e9])
def test_a_clock_that_steps_neither_ends_a_cooldown_nor_makes_it_endless(step: float) -> None:
    machine = in_cooldown(1000.0)
    machine.tick(1000.0 + step)
    assert machine.record.phase is Phase.COOLDOWN
    assert machine.elapsed_s <= MOST_GAP_S
    for second in range(61):
        machine.tick(1000.0 + step + second)
    assert machine.record.outcome is Outcome.TIMED_OUT


# --- members whose save is collective -------------------------------------------------------------------
HOSTS = {"a0": "a", "a1": "a", "a2": "a", "b0": "b"}
SHARDED = report(SET)


def of_members() -> Coordinator:
    machine = Coordinator(RECORD)
    machine.begin(3, tuple(HOSTS), HOSTS)
    machine.tick(0.0)
    return machine


def test_members_are_elected_on_each_host() -> None:
    record = of_members().record
    assert (record.hosts, record.clients) == (HOSTS, tuple(sorted(HOSTS)))
    assert len(record.elected) == 2
    assert record.elected_of("a") == elect(("a0", "a1", "a2"), seed=49, epoch=7)
    assert record.elected_of("b") == ("b0",)


@pytest.mark.parametrize("client", ["a0", "stranger"])
def test_what_one_member_uploaded_is_no_checkpoint(client: str) -> None:
    machine = of_members()
    assert verify(machine, report(client)) == []
    assert machine.record.notes[client].refusal is Refusal.NOT_ELECTED


def test_a_share_that_is_wrong_is_refused_and_the_others_stay() -> None:
    machine = of_members()
    verify(machine, SHARDED)
    machine.refuted(SHARDED, Refusal.WRONG_SIZE, "1 byte", "a1/" + "0" * 16)
    assert machine.record.refused == {"a1/" + "0" * 16: "wrong_size: 1 byte"}
    second = report(SET, "1" * 16)
    assert verify(machine, second) == [second]


def some_report(client: str, attempt: str, kind: ReportKind = ReportKind.UPLOADED, epoch: int = 7) -> UploadReport:
    return report(client, attempt * 16, kind, epoch=epoch)


ANYONE = st.sampled_from([*CLIENTS, "x"])
UPLOADS = st.builds(some_report, ANYONE, st.sampled_from("01"))
REPORTS = st.builds(some_report, ANYONE, st.sampled_from("01"), st.sampled_from(ReportKind), st.sampled_from([6, 7]))
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 9), st.sets(st.sampled_from(CLIENTS))),
        st.tuples(st.just("report"), REPORTS),
        st.tuples(st.just("verified"), UPLOADS),
        st.tuples(st.just("refuted"), UPLOADS, st.sampled_from(Refusal)),
        st.tuples(st.just("tick"), st.floats(-1e6, 1e6)),
    ),
    max_size=60,
)


def told(machine: Coordinator, call: tuple[Any, ...]) -> None:
    match call:
        case "begin", step, clients:
            machine.begin(step, clients)
        case "report", read:
            machine.report(read)
        case "verified", uploaded:
            machine.verified(uploaded, checkpoint(uploaded))
        case "refuted", uploaded, why:
            machine.refuted(uploaded, why, "")
        case "tick", now:
            machine.tick(now)


@given(CALLS)
def test_it_ends_by_a_verified_report_of_an_elected_client_or_by_time(calls: list[tuple[Any, ...]]) -> None:
    machine = Coordinator(RECORD)
    asked: set[tuple[str, str]] = set()
    watched, last = 0.0, None
    for call in calls:
        kind, about = call[:2]
        before = machine.record
        cooling = before.phase is Phase.COOLDOWN
        if cooling and kind == "tick":
            watched += min(max(about - last, 0.0), MOST_GAP_S) if last is not None else 0.0
            last = about
        try:
            told(machine, call)
        except UsageError:
            assert cooling and kind == "begin" and machine.record == before
            continue
        asked |= {each.upload for each in machine.due}
        if before.phase is Phase.ENDED:
            assert machine.record == before, "an end is for good"
            assert due(machine) == []
        elif machine.record.outcome is Outcome.CHECKPOINTED:
            assert kind == "verified"
            assert about.client in machine.record.elected
            assert about.epoch == machine.record.epoch
            assert about.upload in asked
        elif machine.record.outcome is Outcome.TIMED_OUT:
            assert kind == "tick"
            assert watched >= RECORD.cooldown_s - 1e-6
        elif cooling and kind == "tick":
            assert watched < 2 * RECORD.cooldown_s
            assert watched < RECORD.cooldown_s or asked, "nothing is being verified"
