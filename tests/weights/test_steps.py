"""The order of steps: intent before each, clean-up that always runs, the first error first, verdicts by proof alone."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import MemberFailedError, UsageError, WeightsTimeoutError
from transport.weights.plan.admission import Event
from transport.weights.plan.steps import CLOSING, FORWARD, Limits, Proof, Step, UpdateMachine, Verdict, verdicts

FAILED = MemberFailedError("it did not work")


def machine(policy: str = "restore", **limits: float) -> UpdateMachine:
    return UpdateMachine(["t"], ["a", "b"], policy, Limits(**limits), now=0.0)  # type: ignore[arg-type]


def walk(update: UpdateMachine, faults: dict[tuple[Step, str], BaseException], admitted: str = "ab") -> list[Step]:
    """Drive it to its end; the steps that were begun."""
    seen = []
    while (do := update.next(1.0)) is not None:
        seen.append(do.step)
        assert update.begun[do.step] == set(do.members)  # the flag is up before anything is done
        update.report((name, faults[do.step, name]) for name in do.members if (do.step, name) in faults)
        if do.step is Step.PROVE:
            update.admit(admitted)
    return seen


def test_without_faults_every_step_comes_once_in_order() -> None:
    update = machine()
    assert walk(update, {}) == list(Step)
    assert update.failures == []
    assert update.begun[Step.TRANSFER] == {"t", "a", "b"}
    assert update.begun[Step.RESUME_GENERATION] == {"a", "b"}


CLEANED = {
    Step.ABORT: [Step.PROVE, Step.RESUME_GENERATION],
    Step.RELEASE_KV: [Step.PROVE, Step.RESUME_KV, Step.RESUME_GENERATION],
    Step.PREPARE: list(CLOSING),
    Step.INIT: list(CLOSING),
    Step.TRANSFER: list(CLOSING),
}


@pytest.mark.parametrize("step", CLEANED, ids=str)
def test_a_failure_undoes_what_was_begun_and_nothing_else(step: Step) -> None:
    update = machine()
    seen = walk(update, {(step, "a"): FAILED})
    assert seen == [*FORWARD[: FORWARD.index(step) + 1], *CLEANED[step]]
    assert update.begun[Step.RESUME_GENERATION] == {"a", "b"}  # also of the one whose abort may or may not have worked


@given(faults=st.sets(st.tuples(st.sampled_from(list(CLOSING)), st.sampled_from("tab"))))
def test_no_failure_of_a_closing_step_keeps_another_from_running(faults: set[tuple[Step, str]]) -> None:
    update = machine()
    errors = {each: MemberFailedError(f"{each}") for each in sorted(faults, key=str)}
    assert walk(update, dict(errors)) == list(Step)
    due = [(step, name) for step in CLOSING for name in ("t", "a", "b") if (step, name) in faults]
    asked = [(step, name) for step, name in due if name in update.begun[step]]
    assert [(failure.step, failure.member) for failure in update.failures] == asked


def test_the_first_failure_stays_the_first() -> None:
    update = machine()
    second = MemberFailedError("resume")
    walk(update, {(Step.TRANSFER, "b"): FAILED, (Step.RESUME_KV, "a"): second})
    assert [failure.error for failure in update.failures] == [FAILED, second]
    assert update.failed_in("a", CLOSING) == (Step.RESUME_KV, "a", second)
    assert update.failed_in("b", CLOSING) is None


def test_only_who_is_admitted_resumes_generation_but_every_cache_comes_back() -> None:
    update = machine()
    walk(update, {(Step.TRANSFER, "b"): FAILED}, admitted="a")
    assert update.begun[Step.RESUME_KV] == {"a", "b"}
    assert update.begun[Step.RESUME_GENERATION] == {"a"}


def test_exclude_goes_on_without_a_replica_while_a_group_can_still_be_built() -> None:
    update = machine("exclude")
    assert walk(update, {(Step.ABORT, "a"): FAILED}) == list(Step)
    assert update.group == ("b",)
    assert update.begun[Step.TRANSFER] == {"t", "b"}
    assert update.begun[Step.RESUME_GENERATION] == {"a", "b"}
    assert Step.TRANSFER not in walk(machine("exclude"), {(Step.ABORT, "a"): FAILED, (Step.PREPARE, "b"): FAILED})


def test_exclude_does_not_go_on_without_the_trainer() -> None:
    assert Step.INIT not in walk(machine("exclude"), {(Step.PREPARE, "t"): FAILED})


def test_cancelling_is_a_failure() -> None:
    update = machine()
    for _ in FORWARD[:-2]:
        do = update.next(1.0)
        assert do is not None
        update.report(())
    update.fail(do.step, "", asyncio.CancelledError())
    assert walk(update, {}) == list(CLOSING)


def test_the_deadline_of_the_whole_bounds_every_forward_step_and_no_closing_one() -> None:
    update = machine(total=10.0, abort=30.0, finalize=7.0)
    do = update.next(4.0)
    assert do is not None
    assert (do.step, do.limit_s) == (Step.ABORT, 6.0)
    update.report(())
    steps = []
    while (do := update.next(11.0)) is not None:
        steps.append(do.step)
        update.report(())
        update.admit("ab")
    assert steps == [Step.PROVE, Step.RESUME_GENERATION]
    assert isinstance(update.failures[0].error, WeightsTimeoutError)


@pytest.mark.parametrize(
    ("trainers", "replicas", "policy"),
    [([], ["a"], "restore"), (["t"], [], "restore"), (["a"], ["a"], "restore"), (["t"], ["a"], "hope")],
)
def test_what_cannot_be_updated(trainers: list[str], replicas: list[str], policy: str) -> None:
    with pytest.raises(UsageError):
        UpdateMachine(trainers, replicas, policy, Limits(), 0.0)  # type: ignore[arg-type]


# --- verdicts ---------------------------------------------------------------------------------------------------
OLD, NEW, OTHER = Proof(1, 11), Proof(2, 22), Proof(2, 33)
WHY = {"": "manager", "n": "why"}


def judged(policy: str, proofs: dict[str, Proof | None], lost: str = "") -> dict[str, Event]:
    found = verdicts(policy, proofs, NEW, dict.fromkeys(proofs, OLD), WHY, frozenset(lost))  # type: ignore[arg-type]
    return {name: verdict.event for name, verdict in found.items()}


def test_restore_admits_whatever_is_whole() -> None:
    proofs = {"n": NEW, "o": OLD, "x": OTHER, "z": None, "l": None}
    assert judged("restore", proofs, lost="l") == {
        "n": Event.PROVEN_NEW,
        "o": Event.PROVEN_OLD,
        "x": Event.UNPROVEN,
        "z": Event.UNPROVEN,
        "l": Event.EXCLUDE,
    }


def test_exclude_keeps_out_who_fell_behind_others_only() -> None:
    assert judged("exclude", {"n": NEW, "o": OLD}) == {"n": Event.PROVEN_NEW, "o": Event.EXCLUDE}
    assert judged("exclude", {"o": OLD, "p": OLD}) == {"o": Event.PROVEN_OLD, "p": Event.PROVEN_OLD}


def test_a_failed_job_admits_nobody() -> None:
    assert set(judged("fail_job", {"n": NEW, "o": OLD, "z": None}).values()) == {Event.EXCLUDE}
    found = verdicts("fail_job", {"n": NEW}, NEW, {}, {})
    assert found == {"n": Verdict(Event.PROVEN_NEW, 2, "")}


@given(
    proof=st.one_of(st.none(), st.builds(Proof, st.integers(0, 3), st.integers(0, 3))),
    new=st.one_of(st.none(), st.builds(Proof, st.integers(0, 3), st.integers(0, 3))),
    old=st.one_of(st.none(), st.builds(Proof, st.integers(0, 3), st.integers(0, 3))),
    policy=st.sampled_from(["restore", "exclude", "fail_job"]),
)
def test_nobody_is_admitted_without_proof_of_the_new_or_the_old_version(
    proof: Proof | None, new: Proof | None, old: Proof | None, policy: str
) -> None:
    verdict = verdicts(policy, {"r": proof}, new, {"r": old}, {"": "x"})["r"]  # type: ignore[arg-type]
    if verdict.event in (Event.PROVEN_NEW, Event.PROVEN_OLD):
        assert proof is not None
        assert proof in (new, old)
        assert verdict.version == proof.version
