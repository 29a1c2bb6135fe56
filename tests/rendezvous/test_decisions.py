"""The decisions of rendezvous without a store: ranks, the host's table, a member's table, exit codes, names."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import ConfigurationError, InternalError, StoreUnsuitableError, UsageError
from transport.rendezvous.closing import Archive
from transport.rendezvous.decisions import CloseRun, Complete, OpenNext, RoundSnapshot, decide, place, position
from transport.rendezvous.member_states import Event, Member, State
from transport.rendezvous.records import Closing, Keys, Peer, Place, Reason, Role, Round, RoundPhase, Seat, Status
from transport.rendezvous.rules import ExitCodes, Rules
from transport.store.base import MOST_KEY_BYTES

RULES = Rules(least=2, most=3, last_call_s=5.0, join_timeout_s=60.0)


def seats(*members: str, number: int = 1, status: Status = Status.HERE) -> list[Seat]:
    return [Seat(round=number, slot=slot, member=member, status=status) for slot, member in enumerate(members)]


def peers(*members: str) -> tuple[Peer, ...]:
    return tuple(Peer(member, slot, "") for slot, member in enumerate(members))


def a_round(phase: RoundPhase = RoundPhase.OPEN, number: int = 1, **changed: object) -> Round:
    usual = {"incarnation": "x", "number": number, "phase": phase, "term": 1, "host": "a", "least": 2, "most": 3}
    return Round(**{**usual, **changed})


def names(found: Sequence[Seat]) -> list[str]:
    return [seat.member for seat in found]


# --- ranks ----------------------------------------------------------------------------------------------
def test_ranks_follow_slots_and_surplus_is_standby() -> None:
    found = place(list(reversed(seats("a", "b", "c", "d"))), 3, {})
    assert (names(found.active), names(found.standby)) == (["a", "b", "c"], ["d"])


def test_who_had_a_rank_keeps_it_and_comes_first() -> None:
    found = place(seats("new", "newer", "b", "c"), 3, {"a": 0, "b": 1, "c": 2})
    assert (names(found.active), names(found.standby)) == (["new", "b", "c"], ["newer"])


def test_a_rank_that_a_smaller_round_does_not_have_is_replaced() -> None:
    assert names(place(seats("c", "a"), 2, {"a": 0, "b": 1, "c": 2}).active) == ["a", "c"]


def test_a_member_with_two_seats_has_the_later_one() -> None:
    found = place(seats("a", "b", "a"), 3, {})
    assert [(seat.member, seat.slot) for seat in found.active] == [("b", 1), ("a", 2)]


@given(
    st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=12),
    st.integers(1, 6),
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 7)),
)
def test_everybody_has_one_place_and_ranks_do_not_depend_on_the_order_of_reading(
    joined: list[str], most: int, before: dict[str, int]
) -> None:
    found = place(seats(*joined), most, before)
    everybody = names(found.active) + names(found.standby)
    assert sorted(everybody) == sorted(set(joined))
    assert len(found.active) == min(most, len(set(joined)))
    assert place(seats(*joined)[::-1], most, before) == found
    if len(set(before.values())) == len(before):
        kept = {seat.member: rank for rank, seat in enumerate(found.active) if seat.member in before}
        assert all(rank == before[member] for member, rank in kept.items() if before[member] < len(found.active))


# --- the host -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("snapshot", "act"),
    [
        (RoundSnapshot(a_round(), seats("a")), None),
        (RoundSnapshot(a_round(), seats("a", "b"), open_s=4.9), None),
        (RoundSnapshot(a_round(), seats("a", "b"), open_s=5.0), Complete),
        (RoundSnapshot(a_round(), seats("a", "b", "c")), Complete),
        (RoundSnapshot(a_round(), seats("a", "b", "c"), peers("z"), frozenset({"z"})), None),
        (RoundSnapshot(a_round(), seats("a", "b", "c"), peers("z"), frozenset({"z"}), 5.0), None),
        (RoundSnapshot(a_round(), seats("a", "b", "c"), peers("z"), frozenset({"z"}), 10.0), Complete),
        (RoundSnapshot(a_round(), seats("a"), open_s=59.9), None),
        (RoundSnapshot(a_round(), seats("a"), open_s=60.0), CloseRun),
        (RoundSnapshot(a_round(number=2), seats("a", "b", "c", number=1), open_s=30.0), None),
        (RoundSnapshot(a_round(RoundPhase.RUNNING), seats("a", "b"), peers("a", "b")), None),
        (RoundSnapshot(a_round(RoundPhase.RUNNING), seats("a"), peers("a", "b")), OpenNext),
        (RoundSnapshot(a_round(RoundPhase.RUNNING), seats("a", "other"), peers("a", "b")), OpenNext),
        (RoundSnapshot(a_round(RoundPhase.RUNNING), seats("a", "b", status=Status.DONE), peers("a", "b")), CloseRun),
        (RoundSnapshot(a_round(RoundPhase.RUNNING), seats("a", status=Status.DONE), peers("a", "b")), OpenNext),
        (RoundSnapshot(a_round(RoundPhase.RUNNING), seats("a", "b", status=Status.RESTART), peers("a", "b")), OpenNext),
        (RoundSnapshot(a_round(RoundPhase.RUNNING, 2), seats("a", "b", number=1), peers("a", "b")), OpenNext),
        (RoundSnapshot(a_round(RoundPhase.RUNNING), seats("a", "b"), ()), OpenNext),
        (RoundSnapshot(a_round(RoundPhase.CLOSED), seats("a"), peers("a", "b")), None),
    ],
)
def test_the_host_decides_by_what_it_sees(snapshot: RoundSnapshot, act: type | None) -> None:
    found = decide(snapshot, RULES)
    assert found is None if act is None else isinstance(found, act)


def test_success_is_only_what_everybody_with_a_rank_says() -> None:
    everybody = peers("a", "b", "c")
    for statuses in itertools.product(Status, repeat=3):
        here = [Seat(round=1, slot=slot, member="abc"[slot], status=status) for slot, status in enumerate(statuses)]
        found = decide(RoundSnapshot(a_round(RoundPhase.RUNNING), here, everybody), RULES)
        succeeded = isinstance(found, CloseRun) and found.reason is Reason.SUCCESS
        assert succeeded == (set(statuses) == {Status.DONE})


def test_a_spare_ends_a_round_that_is_not_full() -> None:
    rules = Rules(least=2, most=3, grow=True)
    for members, act in (("ab", OpenNext), ("abc", type(None))):
        ranked = RoundSnapshot(a_round(RoundPhase.RUNNING), seats(*members), peers(*members))
        assert isinstance(decide(ranked._replace(waiting=frozenset({"z"})), rules), act)


def test_after_the_last_round_the_run_fails() -> None:
    rules = Rules(least=2, most_rounds=3)
    last = RoundSnapshot(a_round(RoundPhase.RUNNING, 3), seats("a", number=3), peers("a", "b"))
    assert isinstance(decide(last._replace(round=a_round(RoundPhase.RUNNING, 2)), rules), OpenNext)
    found = decide(last, rules)
    assert isinstance(found, CloseRun)
    assert found.reason is Reason.FAILURE


@pytest.mark.parametrize(("members", "seconds"), [(1, 1.0), (2000, 1.0), (3000, 1.5), (10_000, 5.0), (100_000, 5.0)])
def test_the_host_looks_more_rarely_at_larger_runs(members: int, seconds: float) -> None:
    assert Rules().host_poll_s(members) == seconds


@pytest.mark.parametrize("where", ["pod1/\u00b2", "\u0663", "9" * 4000, "/", "a\udcff"])
def test_every_position_can_be_compared(where: str) -> None:
    ordered = sorted(["pod1/host10", where, "pod1/host2"], key=position)
    assert ordered.index("pod1/host2") < ordered.index("pod1/host10")


# --- a member -------------------------------------------------------------------------------------------


def test_a_place_of_another_round_is_not_taken() -> None:
    member = Member()
    member.apply(Event.JOIN)
    member.look(a_round(number=4), None)
    member.took(0)
    member.apply(Event.SEAT)
    member.look(a_round(RoundPhase.RUNNING, 5), Place(round=5, member="a", role=Role.ACTIVE, rank=0, size=1, leader=""))
    assert member.state is State.SPARE
    member.validate()


# --- codes, names, the archive --------------------------------------------------------------------


def test_exit_codes_are_those_of_the_reason_and_never_success_by_default() -> None:
    codes = ExitCodes(no_restart=7)
    closings = [Closing(run="run", reason=reason, round=1, incarnation="x", by="a") for reason in Reason]
    assert {closing.reason: codes.of(closing) for closing in closings} == {
        Reason.SUCCESS: 0,
        Reason.FAILURE: 1,
        Reason.NO_RESTART: 7,
    }
    assert codes.of(None) == 1
    assert ExitCodes().no_restart == 93


@pytest.mark.parametrize(
    "changed",
    [
        {"least": 0},
        {"least": 3, "most": 2},
        {"lease_s": 0.0},
        {"poll_s": float("inf")},
        {"last_call_s": 600.0},
        {"most_rounds": 0},
        {"least": 1.5},
        {"most_rounds": 2.0},
    ],
)
def test_rules_that_cannot_hold_are_refused(changed: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        Rules(**changed)


@pytest.mark.parametrize("name", ["", "a b", "ä", "x" * 129])
def test_names_that_cannot_be_keys_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        Keys(name)


def test_an_archive_keeps_the_first_closing(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "runs" / "a.json")
    first = Closing(run="run", reason=Reason.FAILURE, round=2, incarnation="x", by="a", message="because")
    assert archive.read() is None
    assert archive.write(first)
    assert not archive.write(Closing(run="run", reason=Reason.SUCCESS, round=3, incarnation="x", by="b"))
    assert archive.read() == first
    assert [path.name for path in archive.path.parent.iterdir()] == ["a.json"]


def test_an_archive_gets_the_end_of_a_later_run_in_place_of_an_earlier_ones(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "a.json")
    assert archive.write(Closing(run="run-7", reason=Reason.SUCCESS, round=1, incarnation="x", by="a"))
    assert archive.write(Closing(run="run-8", reason=Reason.FAILURE, round=1, incarnation="y", by="a"))
    assert archive.read().run == "run-8"


def test_no_key_of_a_run_is_below_another_run() -> None:
    names = ["exp", "exp/1", "exp/1/seat", "exp%2F1", "/exp", "exp/"]
    prefixes = [Keys(name).all for name in names]
    assert not any(a != b and a.startswith(b) for a in prefixes for b in prefixes)
    assert len(set(prefixes)) == len(names)
    assert all(len(Keys("/" * 128).seat(10**6, 10**6)) <= MOST_KEY_BYTES for _ in names)


def test_another_programs_file_is_no_closing(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("{}")
    with pytest.raises(StoreUnsuitableError, match=r"a\.json"):
        Archive(path).read()


def test_a_way_that_does_not_exist_is_told_with_the_way_so_far() -> None:
    member = Member()
    member.apply(Event.JOIN)
    with pytest.raises(InternalError, match=r"away \+ join → spare; spare \+ placed active → None"):
        member.apply(Event.PLACED_ACTIVE)
