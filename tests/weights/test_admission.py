"""The table of admission: every pair of state and event either has its place in it or is refused."""

from __future__ import annotations

import itertools

import pytest

from transport.errors import InvalidAdmission
from transport.weights.plan.admission import TRANSITIONS, Admission, Event, State


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)), ids=str)
def test_every_event_in_every_state_is_in_the_table_or_refused(state: State, event: Event) -> None:
    before = Admission(state=state, version=3)
    proven = 4 if event is Event.PROVEN_NEW else 3 if event is Event.PROVEN_OLD else None
    if (state, event) not in TRANSITIONS:
        with pytest.raises(InvalidAdmission):
            before.after(event, version=proven)
        return
    after = before.after(event, version=proven, reason="why")
    assert after.state is TRANSITIONS[state, event]
    assert after.admitted == (after.state is State.SERVING)
    assert after.version == (3 if proven is None else proven)


def test_only_a_proof_leads_to_serving() -> None:
    assert {event for (_, event), to in TRANSITIONS.items() if to is State.SERVING} == {
        Event.PROVEN_NEW,
        Event.PROVEN_OLD,
    }
    updating = Admission().after(Event.BEGIN)
    with pytest.raises(InvalidAdmission):
        updating.after(Event.PROVEN_NEW)
    with pytest.raises(InvalidAdmission):
        updating.after(Event.UNPROVEN, version=3)


def test_a_new_replica_is_not_admitted() -> None:
    assert not Admission().admitted
    assert str(Admission()) == "pending weights (it has no weights yet)"
