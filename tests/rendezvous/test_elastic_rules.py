"""Rules of launchers that restart their work by themselves: growth, short gates, work that stays done, positions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_run import SimulatedMember, SimulatedRun

from transport.rendezvous.decisions import OpenNext, RoundSnapshot, decide, place, position
from transport.rendezvous.member_states import State
from transport.rendezvous.records import Peer, Reason, Round, RoundPhase, Seat, Status
from transport.rendezvous.rules import Rules

RULES = Rules(least=1, most=3, lease_s=10.0, last_call_s=20.0, join_timeout_s=60.0, grow=True, done_stays=True)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SimulatedRun]:
    with SimulatedRun(tmp_path, RULES) as run:
        yield run


def again(members: list[SimulatedMember]) -> None:
    """What a launcher does when its round is over."""
    for each in members:
        if each.alive and each.state is State.AWAY:
            each.do(each.session.join)


def ranks(members: list[SimulatedMember]) -> list[int]:
    return [-9 if (place := each.session.view.place) is None else place.rank for each in members]


def a_pair(run: SimulatedRun) -> list[SimulatedMember]:
    members = run.joined(2)
    run.run(RULES.last_call_s + 3)
    assert ranks(members) == [0, 1]
    return members


# --- growth ---------------------------------------------------------------------------------------------
def test_a_newcomer_ends_a_round_that_has_ranks_to_give(run: SimulatedRun) -> None:
    members = a_pair(run)
    members += run.joined(1)
    run.run(3)
    assert [each.state for each in members[:2]] == [State.AWAY] * 2
    again(members)
    run.run(4)
    assert ranks(members) == [0, 1, 2]
    assert run.round().number == 2
    assert run.round().why == "m2 joined: more ranks than 2 are possible"


def test_a_newcomer_that_died_ends_no_round(run: SimulatedRun) -> None:
    members = a_pair(run)
    for each in members:
        each.frozen = True  # nobody decides meanwhile
    gone = run.joined(1)[0]
    gone.alive = False
    run.now += RULES.lease_s + 1
    for each in members:
        each.frozen = False
    before = run.round().number
    run.run(1)
    assert "joined" not in run.round().why
    assert run.round().number <= before + 1  # the others' own leases ended


def test_work_that_is_ending_is_not_begun_again_for_a_newcomer(run: SimulatedRun) -> None:
    members = a_pair(run)
    members[0].do(lambda: members[0].session.say(Status.DONE))
    spare = run.joined(1)[0]
    run.run(5)
    assert run.round().number == 1
    members[1].do(lambda: members[1].session.say(Status.DONE))
    run.run(3)
    assert [each.exit_code for each in (*members, spare)] == [0, 0, 0]


def test_a_spare_that_has_waited_for_long_is_waited_for_when_a_round_begins(tmp_path: Path) -> None:
    with SimulatedRun(tmp_path, msgspec.structs.replace(RULES, most=2)) as run:
        members = a_pair(run)
        spare = run.joined(1)[0]
        run.run(2 * RULES.lease_s)
        spare.frozen = True
        members[1].do(members[1].session.leave)
        members[1].alive = False
        for _ in range(4):
            run.run(1)
            again(members)
        assert (run.round().number, run.round().phase) == (2, RoundPhase.OPEN)
        spare.frozen = False
        run.run(3)
        assert ranks([members[0], spare]) == [0, 1]


def test_growth_does_not_fail_a_run_that_has_no_rounds_left() -> None:
    snapshot = RoundSnapshot(
        Round(incarnation="x", number=4, phase=RoundPhase.RUNNING, term=1, host="a", least=1, most=3),
        [Seat(round=4, slot=0, member="a")],
        (Peer("a", 0, ""),),
        waiting=frozenset({"new"}),
    )
    assert isinstance(decide(snapshot, RULES), OpenNext)
    assert decide(snapshot, msgspec.structs.replace(RULES, most_rounds=4)) is None


def test_a_round_that_is_full_goes_on_whoever_waits() -> None:
    full = [Seat(round=1, slot=slot, member=member) for slot, member in enumerate("abc")]
    snapshot = RoundSnapshot(
        Round(incarnation="x", number=1, phase=RoundPhase.RUNNING, term=1, host="a", least=1, most=3),
        full,
        tuple(Peer(seat.member, seat.slot, "") for seat in full),
        waiting=frozenset({"new"}),
    )
    assert decide(snapshot, RULES) is None


# --- short gates ----------------------------------------------------------------------------------------


def test_it_waits_for_a_survivor_that_still_stops_its_work(run: SimulatedRun) -> None:
    members = a_pair(run)
    members[0].do(lambda: members[0].session.say(Status.RESTART, "again"))
    run.run(2)
    members[0].do(members[0].session.join)
    run.run(8)
    assert run.round().phase is RoundPhase.OPEN
    again(members)
    run.run(2)
    assert ranks(members) == [0, 1]


def test_it_does_not_wait_for_the_dead_longer_than_their_lease(run: SimulatedRun) -> None:
    members = a_pair(run)
    members[1].alive = False
    members[0].do(lambda: members[0].session.say(Status.RESTART, "the other worker is gone"))
    run.run(2)
    again(members)
    run.run(RULES.lease_s + 2)
    assert ranks(members[:1]) == [0]
    assert members[0].session.view.place.size == 1


# --- work that stays done -----------------------------------------------------------------------------------
def test_a_member_that_dies_when_it_is_done_stays_done(run: SimulatedRun) -> None:
    members = a_pair(run)
    members[1].do(lambda: members[1].session.say(Status.DONE))
    members[1].alive = False
    run.run(RULES.lease_s + 5)
    assert (run.round().number, run.round().phase) == (1, RoundPhase.RUNNING)
    members[0].do(lambda: members[0].session.say(Status.DONE))
    run.run(2)
    assert run.round().closing.reason is Reason.SUCCESS


def test_an_end_that_a_leaving_host_decided_is_in_the_archive_although_the_store_went_away(run: SimulatedRun) -> None:
    members = a_pair(run)
    host, other = sorted(members, key=lambda each: not each.session.is_host)
    other.do(lambda: other.session.say(Status.DONE))
    host.session._hosting.next_at = math.inf  # it decides when it leaves
    host.do(lambda: host.session.say(Status.DONE))

    def wrote(name: str, value: Round) -> None:
        run.wrote(name, value)
        host.line.down = value.phase is RoundPhase.CLOSED

    host.line._wrote = wrote
    host.session.leave()
    assert host.line.down
    assert run.check_archive().reason is Reason.SUCCESS


# --- leaving ------------------------------------------------------------------------------------------------
def test_a_host_that_leaves_opens_the_next_round_itself(run: SimulatedRun) -> None:
    members = a_pair(run)
    host = next(each for each in members if each.session.is_host)
    host.do(host.session.leave)
    assert (run.round().number, run.round().phase) == (2, RoundPhase.OPEN)
    host.alive = False
    run.run(2)
    again(members)
    run.run(4)
    assert sorted(ranks(members)) == [-9, 0]


# --- positions ----------------------------------------------------------------------------------------------
def seat(slot: int, where: str) -> Seat:
    return Seat(round=1, slot=slot, member=f"m{slot}", where=where)


def test_ranks_follow_positions_and_numbers_count_by_value() -> None:
    paths = ["pod2/rack1/h1", "pod1/rack10/h1", "pod1/rack2/h9", "pod1/rack2/h10"]
    found = place([seat(slot, where) for slot, where in enumerate(paths)], 4, {"m0": 0, "m1": 1})
    assert [each.where for each in found.active] == ["pod1/rack2/h9", "pod1/rack2/h10", "pod1/rack10/h1", paths[0]]


def test_members_without_a_position_come_last() -> None:
    found = place([seat(0, ""), seat(1, "rack1"), seat(2, "")], 3, {})
    assert [each.member for each in found.active] == ["m1", "m0", "m2"]


@given(st.lists(st.text("ab09/-", max_size=6), min_size=1, max_size=8))
def test_all_positions_can_be_compared_and_the_order_does_not_depend_on_reading(paths: list[str]) -> None:
    seats = [seat(slot, where) for slot, where in enumerate(paths)]
    assert place(seats[::-1], 5, {}) == place(seats, 5, {})
    assert sorted(map(position, paths)) == sorted(map(position, paths[::-1]))


def test_a_members_position_is_in_its_seat(run: SimulatedRun) -> None:
    members = run.joined(2)
    for number, each in enumerate(members):
        each.session._where = f"rack{9 - number}"
    run.run(RULES.last_call_s + 3)
    members[0].do(lambda: members[0].session.say(Status.RESTART, "again"))
    run.run(2)
    again(members)
    run.run(4)
    assert ranks(members) == [1, 0]
