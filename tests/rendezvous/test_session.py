"""Sessions of one run in one thread, stopped between any two calls to the store. Clocks are the test's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from simulated_run import RULES, RUN, SimulatedMember, SimulatedRun

from transport.errors import (
    JoinTimeoutError,
    RunLostError,
    StaleRoundError,
    StoreUnavailableError,
    StoreUnsuitableError,
    UsageError,
)
from transport.rendezvous.closing import Archive
from transport.rendezvous.member_states import State
from transport.rendezvous.records import Closing, Reason, Role, RoundPhase, Status
from transport.rendezvous.rules import Rules
from transport.rendezvous.session import Session
from transport.store.base import Change, Entry


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SimulatedRun]:
    with SimulatedRun(tmp_path) as run:
        yield run


def ranks(members: list[SimulatedMember]) -> list[int]:
    return [-9 if (place := each.session.view.place) is None else place.rank for each in members]


def test_surplus_joiners_are_standby_and_latecomers_hot_spares(run: SimulatedRun) -> None:
    members = run.joined(5)
    run.run(3)
    late = run.joined(1)
    run.run(3)
    assert [each.state for each in members] == [State.ACTIVE] * 3 + [State.STANDBY] * 2
    assert [each.session.view.place.role for each in members[3:]] == [Role.STANDBY] * 2
    assert late[0].state is State.SPARE


def test_least_members_begin_when_the_last_call_is_over(run: SimulatedRun) -> None:
    members = run.joined(2)
    run.run(RULES.last_call_s - 1)
    assert [each.state for each in members] == [State.SEATED] * 2
    run.run(3)
    assert ranks(members) == [0, 1]


def test_a_spare_gets_the_rank_of_whom_it_replaces(run: SimulatedRun) -> None:
    members = run.joined(3)
    run.run(3)
    spare = run.joined(1)[0]
    run.run(2)
    members[1].alive = False
    survivors = [members[0], members[2]]
    run.run(RULES.lease_s + 3)
    assert [each.state for each in survivors] == [State.AWAY] * 2
    for each in survivors:
        each.do(each.session.join)
    run.run(3)
    assert ranks([*survivors, spare]) == [0, 2, 1]
    assert run.round().number == 2
    assert "rank 1 (m1) is gone" in run.round().why


def test_a_round_waits_for_survivors_who_are_slow_to_come_back(tmp_path: Path) -> None:
    with SimulatedRun(tmp_path, Rules(least=2, most=3)) as run:
        members = run.joined(3)
        spares = run.joined(2)
        run.run(3)
        assert [each.state for each in spares] == [State.STANDBY] * 2
        members[2].alive = False
        run.run(RULES.lease_s + 2)
        assert run.round().phase is RoundPhase.OPEN
        members[0].do(members[0].session.join)
        run.run(2)  # three sit there, but m1 is still stopping its work
        assert run.round().phase is RoundPhase.OPEN
        members[1].do(members[1].session.join)
        run.run(2)
        assert ranks([*members[:2], *spares]) == [0, 1, 2, -1]


@pytest.mark.parametrize("before", [True, False], ids=["before the call", "after the call"])
@pytest.mark.parametrize("calls", range(0, 12, 2))
def test_a_host_that_dies_between_any_two_calls_leaves_a_run_that_goes_on(
    tmp_path: Path, calls: int, before: bool
) -> None:
    with SimulatedRun(tmp_path) as run:
        host = run.member()
        host.line.die_after, host.line.die_before_the_write = calls, before
        host.do(host.session.join)
        members = run.joined(4)
        for _ in range(8):
            run.run(4)
            for each in members:
                if each.state is State.AWAY:
                    each.do(each.session.join)
        assert not host.alive
        assert sorted(ranks(members)) == [-1, 0, 1, 2]


def test_the_run_succeeds_when_everybody_is_done_and_not_before(run: SimulatedRun) -> None:
    members = run.joined(4)
    run.run(3)
    for each in members[:2]:
        each.do(lambda each=each: each.session.say(Status.DONE))
    run.run(5)
    assert run.round().phase is RoundPhase.RUNNING
    members[2].do(lambda: members[2].session.say(Status.DONE))
    run.run(2)
    assert [each.session.view.closing.reason for each in members] == [Reason.SUCCESS] * 4
    assert run.check_archive().reason is Reason.SUCCESS


def test_a_member_that_dies_when_it_is_done_is_not_counted_as_done(run: SimulatedRun) -> None:
    members = run.joined(3)
    run.run(3)
    members[2].do(lambda: members[2].session.say(Status.DONE))
    members[2].alive = False
    run.run(RULES.lease_s + 2)
    assert run.round().number == 2


@pytest.mark.parametrize(("reason", "code"), [(Reason.SUCCESS, 0), (Reason.FAILURE, 1), (Reason.NO_RESTART, 93)])
def test_spare_and_standby_learn_the_reason_at_their_next_step(run: SimulatedRun, reason: Reason, code: int) -> None:
    members = run.joined(4)
    run.run(3)
    spare = run.joined(1)[0]
    members[0].do(lambda: members[0].session.close(reason, "because"))
    run.run(1)
    assert [each.exit_code for each in [*members, spare]] == [code] * 5
    late = run.joined(1)[0]
    assert late.exit_code == code


def test_the_first_who_closes_decides(run: SimulatedRun) -> None:
    members = run.joined(3)
    run.run(3)
    assert members[0].session.close(Reason.FAILURE).reason is Reason.FAILURE
    assert members[1].session.close(Reason.SUCCESS).reason is Reason.FAILURE
    assert members[0].session.close(Reason.SUCCESS).reason is Reason.FAILURE


def test_a_member_of_an_older_round_cannot_close_the_run(run: SimulatedRun) -> None:
    members = run.joined(4)
    run.run(3)
    members[0].frozen = True
    run.run(RULES.lease_s + 3)
    assert run.round().number == 2
    members[0].frozen = False
    with pytest.raises(StaleRoundError, match="round 1 is over"):
        members[0].session.close(Reason.SUCCESS)
    assert run.round().closing is None


def test_a_gate_that_stays_empty_closes_the_run_as_failed(run: SimulatedRun) -> None:
    alone = run.joined(1)[0]
    run.run(RULES.join_timeout_s + 2)
    closing = alone.session.view.closing
    assert (closing.reason, alone.exit_code) == (Reason.FAILURE, 1)
    assert closing.message == "1 of 2 members joined round 1 within 60 s"


def test_whoever_waits_at_a_gate_whose_hosts_all_die_gives_up(run: SimulatedRun) -> None:
    host = run.member()
    host.do(host.session.step)
    alone = run.joined(1)[0]
    while run.now < 1000 + RULES.join_timeout_s + 2 * RULES.lease_s + 5:
        run.run(5)
        host.do(host.session.leave)  # each host begins the gate's time anew, and none is there long enough
        host.alive = False
        host = run.member()
        host.do(host.session.step)
    assert isinstance(alone.session.view.error, JoinTimeoutError)


def test_a_place_that_cannot_be_read_ends_its_round_and_nobody(run: SimulatedRun) -> None:
    members = run.joined(3)
    run.run(3)
    run.store.put(members[1].session.keys.place(1, members[1].session._member.slot), b"\xff")
    for _ in range(4):
        run.run(3)
        for each in members:
            if each.state is State.AWAY:
                each.do(each.session.join)
    assert [each.session.view.error for each in members] == [None] * 3
    assert run.round().number == 2
    assert sorted(each.session.view.place.rank for each in members) == [0, 1, 2]


def test_too_many_rounds_fail_the_run(tmp_path: Path) -> None:
    with SimulatedRun(tmp_path, Rules(least=1, most_rounds=2)) as run:
        alone = run.joined(1)[0]
        for _ in range(2):
            run.run(3)
            alone.do(lambda: alone.session.say(Status.RESTART, "again"))
            run.run(3)
            if alone.state is State.AWAY:
                alone.do(alone.session.join)
        assert alone.session.view.closing.reason is Reason.FAILURE
        assert "the last of 2" in alone.session.view.closing.message


# --- the store fails --------------------------------------------------------------------------------


def test_a_member_cut_off_from_the_store_stops_before_others_take_its_place(run: SimulatedRun) -> None:
    members = run.joined(3)
    spare = run.joined(1)[0]
    run.run(3)
    members[1].line.down = True
    while members[1].state is State.ACTIVE:
        assert run.round().number == 1, "its place was given away while it believed to have it"
        run.run(1)
    run.run(3)
    assert spare.state in (State.SEATED, State.TAKING, State.STANDBY)


def test_a_store_that_was_emptied_is_no_new_run_to_its_members(run: SimulatedRun) -> None:
    members = run.joined(3)
    run.run(3)
    for key in list(run.store.scan("")):
        run.store.delete(key)
    newcomer = run.joined(1)[0]
    run.run(2)
    assert all(isinstance(each.session.view.error, RunLostError) for each in members)
    assert newcomer.state is State.SEATED
    with pytest.raises(RunLostError):
        members[0].session.close(Reason.SUCCESS)


def test_a_round_whose_roster_was_lost_is_followed_by_another(run: SimulatedRun) -> None:
    members = run.joined(3)
    run.run(3)
    run.store.delete(f"rendezvous/{RUN}/1/roster")
    members[0].session._hosting._roster = None  # as a host that has just taken over
    run.run(3)
    assert run.round().number == 2
    assert "roster is missing" in run.round().why


def test_another_programs_counter_ends_the_run_for_its_members(run: SimulatedRun) -> None:
    host = run.joined(1)[0]
    run.store.put(f"rendezvous/{RUN}/1/slots", b"many")
    run.run(2)
    assert isinstance(host.session.view.error, StoreUnsuitableError)


def test_a_closed_run_stays_closed_even_in_an_emptied_store(run: SimulatedRun) -> None:
    members = run.joined(3)
    run.run(3)
    members[0].session.close(Reason.NO_RESTART)
    for key in list(run.store.scan("")):
        run.store.delete(key)
    assert run.joined(1)[0].exit_code == 93


def test_the_lease_of_a_seat_counts_from_before_its_renewal_was_sent(run: SimulatedRun) -> None:
    members = run.joined(3)
    run.run(3)
    slow = members[1]
    renew = slow.line.renew
    sent: list[float] = []

    def answer_late(leases: Mapping[str, int], lease_s: float) -> set[str]:
        sent.append(run.now)
        kept = renew(leases, lease_s)
        run.now += RULES.lease_s / 2
        return kept

    slow.line.renew = answer_late  # type: ignore[method-assign]
    while not sent:
        run.run(1)
    slow.line.down = True
    run.now = sent[-1] + RULES.lease_s  # the store's end of the lease
    assert slow.session.view.state is State.AWAY


def test_lost_answers_do_not_give_a_member_two_places(run: SimulatedRun) -> None:
    members = run.joined(1)
    members[0].line.forgets_answers = True
    run.run(4)
    members[0].line.forgets_answers = False
    members += run.joined(2)
    run.run(RULES.last_call_s + 4)
    assert sorted(ranks(members)) == [0, 1, 2]


def test_old_rounds_are_removed_from_the_store(run: SimulatedRun) -> None:
    members = run.joined(3)
    for number in range(1, 6):
        run.run(RULES.lease_s + 4)
        assert run.round().number == number
        members[1].do(lambda: members[1].session.say(Status.RESTART, "again"))
        run.run(3)
        for each in members:
            each.do(each.session.join)
    rounds = {key.split("/")[2] for key in run.store.scan(f"rendezvous/{RUN}/")} - {"round", "host"}
    assert len(rounds) <= 3


@pytest.mark.parametrize("reads_only", [False, True])
def test_a_rank_is_not_given_away_while_its_member_is_cut_off_with_a_lease(tmp_path: Path, reads_only: bool) -> None:
    assert RULES.last_call_s < RULES.lease_s

    def fail(keys: Sequence[str]) -> list[Entry | None]:
        raise StoreUnavailableError("the store is away")

    with SimulatedRun(tmp_path, msgspec.structs.replace(RULES, most=2)) as run:
        members, spare = run.joined(2), run.joined(1)[0]
        run.run(4)  # its lease was renewed just now
        other, cut = members
        if reads_only:  # its renewals would go through
            cut.line.get_many = fail  # type: ignore[method-assign]
        else:
            cut.line.down = True
        other.do(lambda: other.session.say(Status.RESTART, "its worker failed"))
        for _ in range(round(RULES.lease_s) + 5):
            if other.state is State.AWAY:
                other.do(other.session.join)
            run.run(1)  # checks at each step that no two members have one rank
        assert sorted(ranks([other, spare])) == [0, 1]
        assert cut.state is State.AWAY


def test_a_member_whose_seat_was_written_without_an_answer_knows_its_lease(tmp_path: Path) -> None:
    with SimulatedRun(tmp_path, msgspec.structs.replace(RULES, most=2)) as run:
        host, member = run.joined(1)[0], run.member()
        write = member.line.put_many

        def lose(changes: Sequence[Change]) -> list[int] | None:
            write(changes)
            raise StoreUnavailableError("the answer was lost")

        member.line.put_many = lose  # type: ignore[method-assign]
        member.do(member.session.join)
        member.line.put_many = write  # type: ignore[method-assign]
        assert member.state is State.SEATING
        while run.round().phase is RoundPhase.OPEN:
            run.now += 1
            host.do(host.session.step)
        run.run(2)
        assert sorted(ranks([host, member])) == [0, 1]
        member.line.down = True
        spare = run.joined(1)[0]
        for _ in range(round(RULES.lease_s) + 5):
            if host.state is State.AWAY:
                host.do(host.session.join)
            run.run(1)  # checks at each step that no two members have one rank
        assert member.state is State.AWAY
        assert sorted(ranks([host, spare])) == [0, 1]


def test_a_rank_that_was_lost_does_not_come_back_in_any_call_to_the_store(run: SimulatedRun) -> None:
    members = run.joined(3)
    run.run(3)
    late = members[1]
    late.frozen = True
    run.joined(1)
    run.run(RULES.lease_s + 3)
    assert run.round().number == 2
    seen: list[State] = []
    call = late.line.call

    def observed(*arguments: Any) -> Any:
        seen.append(late.session.view.state)
        answer = call(*arguments)
        seen.append(late.session.view.state)
        return answer

    late.line.call = observed  # type: ignore[method-assign]
    late.frozen = False
    run.run(2)
    assert seen
    assert State.ACTIVE not in seen


def test_a_rank_that_somebody_saw_lost_is_given_up_though_its_lease_was_renewed(run: SimulatedRun) -> None:
    members = run.joined(3)
    run.run(3)
    late = members[1]
    late.skew_s += RULES.lease_s  # its clock is ahead of the store's: the lease there still runs
    assert late.state is State.AWAY
    late.skew_s -= RULES.lease_s
    assert late.state is State.AWAY
    run.run(2)
    assert late.session.view.place is None
    assert run.round().number == 2


def test_a_member_is_not_active_while_the_end_of_its_run_is_written_down(run: SimulatedRun) -> None:
    members = run.joined(3)
    run.run(3)
    seen = []
    archive = run.archive
    assert archive is not None
    write = archive.write

    def observed(closing: Closing) -> bool:
        seen.append(members[1].session.view)
        return write(closing)

    archive.write = observed  # type: ignore[method-assign]
    members[0].session.close(Reason.FAILURE)
    run.run(2)
    assert [(view.state, view.closing) for view in seen[1:2]] == [(State.ENDING, None)]
    assert all(each.session.view.closing is not None for each in members)


@pytest.mark.parametrize("where", ["x" * 5000, "pod1/\udcff"])
def test_a_position_that_others_could_not_read_is_refused_where_it_is_given(run: SimulatedRun, where: str) -> None:
    with pytest.raises(UsageError, match="Seat"):
        Session(run.store, RUN, "m", RULES, where=where)
    session = Session(run.store, RUN, "m", RULES)
    with pytest.raises(UsageError, match="Seat"):
        session.join(where)


def test_a_seat_that_cannot_be_read_is_missing_and_ends_nobody(run: SimulatedRun) -> None:
    members = run.joined(3)
    run.run(3)
    run.store.put(f"rendezvous/{RUN}/1/seat/1", b"\xff")
    run.run(3)
    assert run.round().number == 2
    run.store.put(f"rendezvous/{RUN}/2/roster", b"[]")
    members[0].session._hosting._roster = None  # as a host that has just taken over
    run.run(RULES.lease_s + RULES.last_call_s)
    assert all(each.session.view.error is None for each in members)
    assert run.round().closing is None


@pytest.mark.parametrize(
    "spoil", [Path.mkdir, lambda path: path.write_bytes(b"\xff"), lambda path: path.write_text("{}")]
)
def test_an_archive_that_cannot_be_read_ends_the_member_that_begins_with_it_alone(
    run: SimulatedRun, tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    spoil(tmp_path / "wrong")
    alone = Session(run.store, RUN, "alone", RULES, archive=Archive(tmp_path / "wrong"))
    alone.join()
    assert isinstance(alone.view.error, StoreUnsuitableError)
    assert "wrong" in str(alone.view.error)
    members = run.joined(2)  # the others have an archive of their own
    members[0].session._archive = Archive(tmp_path / "wrong")
    run.run(RULES.last_call_s + 2)
    assert ranks(members) == [0, 1]
    assert members[0].session.close(Reason.SUCCESS).reason is Reason.SUCCESS
