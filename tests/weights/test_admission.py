"""The table of admission: every pair of state and event either has its place in it or is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import WeightsError
from transport.weights.plan.admission import TRANSITIONS, Admission, AdmissionEvent, AdmissionState
from transport.weights.plan.steps import Policy, ReplicaVerdict, VersionProof, known_alone, verdicts


@pytest.mark.parametrize(("state", "event"), list(itertools.product(AdmissionState, AdmissionEvent)), ids=str)
def test_every_event_in_every_state_is_in_the_table_or_refused(state: AdmissionState, event: AdmissionEvent) -> None:
    before = Admission(state=state, version=3)
    proven = 4 if event is AdmissionEvent.PROVEN_NEW else 3 if event is AdmissionEvent.PROVEN_OLD else None
    if (state, event) not in TRANSITIONS:
        with pytest.raises(WeightsError):
            before.after(event, version=proven)
        return
    after = before.after(event, version=proven, reason="why")
    assert after.state is TRANSITIONS[state, event]
    assert after.admitted == (after.state is AdmissionState.SERVING)
    assert after.version == (3 if proven is None else proven)


def test_only_a_proof_leads_to_serving() -> None:
    assert {event for (_, event), to in TRANSITIONS.items() if to is AdmissionState.SERVING} == {
        AdmissionEvent.PROVEN_NEW,
        AdmissionEvent.PROVEN_OLD,
    }
    updating = Admission().after(AdmissionEvent.BEGIN)
    with pytest.raises(WeightsError):
        updating.after(AdmissionEvent.PROVEN_NEW)
    with pytest.raises(WeightsError):
        updating.after(AdmissionEvent.UNPROVEN, version=3)


def test_a_new_replica_is_not_admitted() -> None:
    assert not Admission().admitted
    assert str(Admission()) == "pending weights (it has no weights yet)"


# --- what an update means for each replica: by proof alone

OLD, NEW, OTHER = VersionProof(1, 11), VersionProof(2, 22), VersionProof(2, 33)
WHY = {"": "manager", "n": "why"}
POLICIES = ["restore", "exclude", "fail_job"]


def judged(policy: str, proofs: dict[str, VersionProof | None], lost: str = "") -> dict[str, AdmissionEvent]:
    found = verdicts(policy, proofs.keys(), proofs, NEW, dict.fromkeys(proofs, OLD), WHY, frozenset(lost))  # type: ignore[arg-type]
    return {name: verdict.event for name, verdict in found.items() if verdict is not None}


def test_restore_admits_whatever_is_whole() -> None:
    proofs = {"n": NEW, "o": OLD, "x": OTHER, "z": None, "l": None}
    assert judged("restore", proofs, lost="l") == {
        "n": AdmissionEvent.PROVEN_NEW,
        "o": AdmissionEvent.PROVEN_OLD,
        "x": AdmissionEvent.UNPROVEN,
        "z": AdmissionEvent.UNPROVEN,
        "l": AdmissionEvent.EXCLUDE,
    }


def test_exclude_keeps_out_who_fell_behind_others_only() -> None:
    assert judged("exclude", {"n": NEW, "o": OLD}) == {"n": AdmissionEvent.PROVEN_NEW, "o": AdmissionEvent.EXCLUDE}
    assert judged("exclude", {"o": OLD, "p": OLD}) == {"o": AdmissionEvent.PROVEN_OLD, "p": AdmissionEvent.PROVEN_OLD}


def test_a_failed_job_admits_nobody() -> None:
    assert set(judged("fail_job", {"n": NEW, "o": OLD, "z": None}).values()) == {AdmissionEvent.EXCLUDE}
    found = verdicts("fail_job", ["n"], {"n": NEW}, NEW, {}, {})
    assert found == {"n": ReplicaVerdict(AdmissionEvent.PROVEN_NEW, 2, "")}


def test_a_replica_that_was_not_paused_goes_on_unless_it_is_gone_or_the_policy_leaves_it_behind() -> None:
    def unpaused(policy: Policy, reasons: dict[str, str], lost: str = "", *, arrived: bool = False) -> dict[str, str]:
        proofs = {"c": NEW} if arrived else {}
        found = verdicts(policy, "ab", proofs, NEW, {}, reasons, lost)
        return {name: verdict.reason for name, verdict in found.items() if verdict is not None}

    assert unpaused("restore", WHY, "b") == {"b": "manager"}
    assert unpaused("exclude", WHY) == {}
    assert unpaused("exclude", WHY, arrived=True) == {"a": "manager", "b": "manager"}
    assert unpaused("fail_job", WHY) == {"a": "the job failed: manager", "b": "the job failed: manager"}
    assert unpaused("fail_job", {}) == {}


proofs = st.one_of(st.none(), st.builds(VersionProof, st.integers(0, 3), st.integers(0, 3)))


@given(proof=proofs, new=proofs, old=proofs, policy=st.sampled_from(POLICIES))
def test_nobody_is_admitted_without_proof_of_the_new_or_the_old_version(
    proof: VersionProof | None, new: VersionProof | None, old: VersionProof | None, policy: str
) -> None:
    verdict = verdicts(policy, ["r"], {"r": proof}, new, {"r": old}, {"": "x"})["r"]  # type: ignore[arg-type]
    assert verdict is not None
    if verdict.event in (AdmissionEvent.PROVEN_NEW, AdmissionEvent.PROVEN_OLD):
        assert proof is not None
        assert proof in (new, old)
        assert verdict.version == proof.version


@pytest.mark.parametrize("policy", POLICIES)
@given(mine=proofs, other=proofs, new=proofs, failed=st.booleans())
def test_a_replica_that_resumes_before_the_others_have_proven_anything_gets_the_same_verdict(
    policy: str, mine: VersionProof | None, other: VersionProof | None, new: VersionProof | None, failed: bool
) -> None:
    if known_alone(policy, mine, new):  # type: ignore[arg-type]
        old = {"r": OLD, "s": OLD}
        before = verdicts(policy, "rs", {"r": mine, "s": None}, new, old, {})["r"]  # type: ignore[arg-type]
        after = verdicts(policy, "rs", {"r": mine, "s": other}, new, old, {"s": "x"} if failed else {})["r"]  # type: ignore[arg-type]
        assert before is not None
        assert after is not None
        assert before.event == after.event
