"""Assembly: groups are whole, each sample is in one of them, and what does not complete is told."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.group import EndOf
from transport.training.assembling import SETTLE_S, Arrival, Assembly


def sample(
    number: int, group: str = "g", of: int | None = None, version: int | None = None, ring: int | None = None
) -> Arrival:
    """Of a restored one ``ring`` is where it is now."""
    origin = (f"{number % 3:032x}", number, 1)
    return Arrival(origin if ring is None else (f"{ring:032x}", number, 1), group, of, 10, version, b"", origin)


def assembly(*, timeout_s: float | None = None, short: bool = False) -> Assembly:
    return Assembly(timeout_s=timeout_s, short=short)


def test_a_group_is_complete_when_as_many_samples_have_come_as_it_is_of() -> None:
    made = assembly()
    made.add(sample(1, of=2), 0.0)
    assert not made.complete
    made.add(sample(2, of=2), 1.0)
    assert [len(group) for group in made.complete] == [2] and not made.open


def test_a_complete_group_takes_no_more_samples_until_it_is_taken_out() -> None:
    made = assembly()
    assert [made.add(sample(number, of=3), 0.0) for number in range(4)] == [True, True, True, False]
    made.pick(1)
    assert made.add(sample(5, of=3), 0.0) and [len(group) for group in made.open] == [1]


def test_a_restored_sample_that_comes_from_two_rings_is_one_sample() -> None:
    made = assembly()
    assert [made.add(sample(1, of=2, ring=ring), 0.0) for ring in (7, 8, 7)] == [True, False, True]
    assert not made.complete and [len(group) for group in made.open] == [1]
    made.lose([sample(1, ring=7).identity])
    assert made.add(sample(1, of=2, ring=8), 0.0) and made.add(sample(2, of=2), 0.0)
    assert [[each.identity[0][-1] for each in group.samples] for group in made.complete] == [["8", "2"]]


def test_a_sample_without_a_group_is_one_by_itself() -> None:
    made = assembly()
    made.add(sample(1, group=""), 0.0)
    made.add(sample(2, group=""), 0.0)
    assert [len(group) for group in made.complete] == [1, 1]


def test_an_ended_group_is_complete_with_what_there_is_when_others_have_had_time_to_come() -> None:
    made = assembly()
    made.add(sample(1, of=8), 0.0)
    made.end(EndOf("g", None, None), ("e", 0, 1), ("e", 0, 1), 1.0)
    made.turn(1.0 + SETTLE_S / 2, False, None)
    made.add(sample(2, of=8), 1.0 + SETTLE_S / 2)  # of another ring, written before the end
    made.turn(1.0 + SETTLE_S, False, None)
    assert not made.complete
    made.turn(1.0 + 2 * SETTLE_S, False, None)
    assert [len(group) for group in made.complete] == [2]


def test_an_ended_group_waits_for_all_that_its_writer_wrote() -> None:
    made = assembly()
    made.add(sample(0), 0.0)
    made.end(EndOf("g", None, 2), ("e", 0, 1), (sample(0).origin[0], 0, 2), 0.0)
    made.turn(10.0 * SETTLE_S, False, None)
    assert not made.complete
    made.add(sample(3), 10.0 * SETTLE_S)  # of the same ring
    made.turn(11.0 * SETTLE_S, False, None)
    assert [len(group) for group in made.complete] == [2]


def test_what_one_writer_wrote_besides_does_not_stand_for_what_another_one_wrote() -> None:
    made = assembly()
    for number in (0, 1, 4):
        made.add(sample(number), 0.0)
    made.end(EndOf("g", None, 2), ("e", 0, 1), (sample(0).origin[0], 0, 2), 0.0)
    made.end(EndOf("g", None, 1), ("e", 1, 1), (sample(1).origin[0], 0, 2), 0.0)
    made.turn(10.0 * SETTLE_S, False, None)
    assert not made.complete
    made.add(sample(3), 10.0 * SETTLE_S)
    made.turn(11.0 * SETTLE_S, False, None)
    assert [len(group) for group in made.complete] == [4]


def test_an_end_says_of_how_many_samples_of_all_rings_the_group_is() -> None:
    made = assembly()
    made.add(sample(0), 0.0)
    made.end(EndOf("g", 2, 1), ("e", 0, 1), (sample(0).origin[0], 0, 2), 0.0)
    made.turn(10.0 * SETTLE_S, False, None)
    assert not made.complete
    made.add(sample(1), 10.0 * SETTLE_S)  # of another ring
    assert [len(group) for group in made.complete] == [2]


def test_an_end_that_comes_when_its_group_is_complete_opens_no_second_one() -> None:
    """Of another writer of the group, or of the writer that has made it anew."""
    made = assembly()
    made.add(sample(0, of=1), 0.0)
    assert not made.end(EndOf("g", 1, 1), ("e", 0, 1), ("e", 0, 1), 1.0)
    assert [len(group) for group in made.complete] == [1] and not made.open and not made.waits_for("g")


def test_an_end_of_a_group_without_samples_leaves_nothing() -> None:
    made = assembly()
    made.end(EndOf("g", None, None), ("e", 0, 1), ("e", 0, 1), 0.0)
    [given_up] = made.turn(10.0, False, None)
    assert given_up.group.identities == [("e", 0, 1)] and not made.complete and not made.open


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("over", [False, True])
def test_a_group_that_will_not_complete_is_given_up_or_short(short: bool, over: bool) -> None:
    made = assembly(timeout_s=60.0, short=short)
    made.add(sample(1, of=2), 0.0)
    assert made.turn(59.0, False, None) == [] and len(made.open) == 1
    given_up = made.turn(59.0 if over else 60.0, over, None)
    assert not made.open
    assert [len(group) for group in made.complete] == ([1] if short else [])
    assert [each.group.name for each in given_up] == ([] if short else ["g"])


def test_a_group_waits_from_its_first_sample_on_however_many_come_meanwhile() -> None:
    made = assembly(timeout_s=60.0)
    for number, now in ((1, 0.0), (2, 50.0)):
        made.add(sample(number, of=3), now)
    assert [each.reason for each in made.turn(60.0, False, None)] == ["incomplete"]


def test_a_group_with_a_sample_that_is_too_old_is_stale() -> None:
    made = assembly()
    made.add(sample(1, "old", 2, version=3), 0.0)
    made.add(sample(2, "old", 2, version=9), 0.0)
    made.add(sample(3, "new", 1, version=9), 0.0)
    made.add(sample(4, "ageless", 1), 0.0)
    assert [(each.group.name, each.reason) for each in made.turn(0.0, False, 5)] == [("old", "stale")]
    assert [group.name for group in made.complete] == ["new", "ageless"]


def test_a_sample_that_comes_again_is_one_sample() -> None:
    made = assembly()
    for _ in range(2):
        made.add(sample(1, of=2), 0.0)
    assert not made.complete and len(made) == 1


def test_a_complete_group_that_has_lost_a_sample_waits_for_it() -> None:
    made = assembly()
    for number in (1, 2):
        made.add(sample(number, of=2), 0.0)
    made.lose([sample(1).identity])
    assert not made.complete
    made.add(sample(1, of=2), 1.0)
    assert [len(group) for group in made.complete] == [2]


def test_a_group_that_its_end_finds_complete_waits_for_a_lost_sample_no_longer_than_before() -> None:
    made = assembly(timeout_s=60.0)
    for number in (1, 2):
        made.add(sample(number, of=2), 0.0)
    made.end(EndOf("g", 2, 2), ("e", 0, 1), (sample(1).origin[0], 0, 2), 50.0)
    made.lose([sample(1).identity])
    assert [len(group) for group in made.open] == [1]
    assert [each.reason for each in made.turn(60.0, False, None)] == ["incomplete"]


events = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", ""]), st.sampled_from(["add", "end", "lose", "turn", "pick"]), st.integers(0, 9)
    ),
    max_size=60,
)


@given(events, st.integers(1, 4), st.booleans())
def test_no_sample_is_in_two_groups_and_none_is_forgotten(
    asked: list[tuple[str, str, int]], of: int, short: bool
) -> None:
    made = assembly(timeout_s=5.0, short=short)
    inside: Counter[int] = Counter()
    number, now = 0, 0.0
    for name, what, amount in asked:
        now += 0.5
        if what == "add":
            number += 1
            inside[number] += made.add(sample(number, name, of), now)
        elif what == "end" and name:
            mark = (name, len(inside), int(2 * now))
            made.end(EndOf(name, None, None), mark, mark, now)
        elif what == "lose":
            made.lose([sample(amount).identity])
            inside.pop(amount, None)
        else:
            left = [each.group for each in made.turn(now, False, None)] if what == "turn" else made.pick(amount)
            for group in left:
                for each in group.samples:
                    inside[each.identity[1]] -= 1
        there = Counter(each.identity[1] for group in (*made.complete, *made.open) for each in group.samples)
        assert there == +inside and all(count == 1 for count in there.values())
        assert all(len(group) == group.of for group in made.complete if not short and group.ended_at is None)
