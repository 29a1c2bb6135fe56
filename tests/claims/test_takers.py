"""Takers: which rings are asked, and for how many; and that no sequence of events makes a trainer hoard."""

from __future__ import annotations

from collections import deque

from costs import lines_of
from hypothesis import given
from hypothesis import strategies as st

from transport.claims import takers as takers_module
from transport.claims.takers import Ask, CancelDemand, Close, Open, Takers


def opened(ahead: int, most: int, *places: str) -> Takers:
    takers = Takers(0, most)
    takers.found(places)
    found: list[str] = []
    while actions := takers.step(0.0):
        for action in actions:
            assert isinstance(action, Open)
            found.append(action.place)
            takers.opened(action.place, 0.0)
    assert sorted(found) == sorted(places)
    takers.ahead = ahead
    return takers


def asked(takers: Takers, now: float = 0.0) -> dict[str, tuple[int, bool]]:
    """By place: for how many, and whether the demand waits. Nothing else is done in this step."""
    actions = takers.step(now)
    asks = [action for action in actions if isinstance(action, Ask)]
    assert asks == actions
    return {ask.place: (ask.n, ask.waits) for ask in asks}


def test_a_few_places_are_each_asked_for_a_whole_batch() -> None:
    takers = opened(24, 8, "a", "b", "c")
    assert asked(takers) == {"a": (8, True), "b": (8, True), "c": (8, True)}
    assert takers.step(0.0) == []


def test_the_only_place_is_asked_for_two_batches_where_one_answer_has_room_for_them() -> None:
    takers = opened(24, 8, "a")
    takers.largest = 20
    assert asked(takers) == {"a": (16, True)}
    takers.answered("a", 16, full=True)
    takers.used("a", 8)
    assert asked(takers) == {"a": (16, True)}
    takers.largest = 10
    takers.answered("a", 0, full=False)
    assert asked(takers) == {"a": (10, True)}


def test_a_place_is_asked_when_there_is_room_for_a_whole_batch_and_not_for_what_is_missing() -> None:
    takers = opened(24, 8, "a")
    for came in (8, 8, 3):
        assert asked(takers) == {"a": (8, True)}
        takers.answered("a", came, full=came == 8)
    assert (takers.unused, takers.step(0.0), takers.next_due(0.0)) == (19, [], None)
    takers.used("a", 3)
    assert asked(takers) == {"a": (8, True)}


def test_many_places_share_a_batch_and_those_with_more_are_asked_for_whole_ones() -> None:
    takers = opened(24, 8, "a", "b", "c", "d")
    assert asked(takers) == dict.fromkeys("abcd", (2, True))
    takers.answered("c", 2, full=True)
    assert asked(takers) == {"c": (8, False)}
    takers.answered("c", 5, full=False)
    assert asked(takers) == {"c": (2, True)}


def test_four_full_rings_bring_full_batches_and_take_turns() -> None:
    """A trainer that uses what came first, while every ring has as much as it is asked for."""
    takers = opened(96, 32, "a", "b", "c", "d")
    waiting: deque[Ask] = deque()
    came: deque[tuple[str, int]] = deque()
    sizes = []
    for _ in range(200):
        waiting += [action for action in takers.step(0.0) if isinstance(action, Ask)]
        while waiting:
            ask = waiting.popleft()
            takers.answered(ask.place, ask.n, full=True)
            came.append((ask.place, ask.n))
        place, count = came.popleft()
        sizes.append((place, count))
        takers.used(place, count)
    assert {count for _, count in sizes[4:]} == {32}
    assert all({place for place, _ in sizes[at : at + 4]} == set("abcd") for at in range(4, 196, 4))


def test_more_places_than_payloads_are_wanted_are_all_asked() -> None:
    takers = opened(1, 1, "a", "b", "c")
    assert asked(takers) == {"a": (1, True), "b": (1, True), "c": (1, True)}
    takers.answered("b", 1, full=True)
    assert [type(action) for action in takers.step(0.0)] == [CancelDemand, CancelDemand]
    takers.answered("a", 0, full=False)
    takers.answered("c", 0, full=False)
    assert takers.step(0.0) == []
    takers.used("b", 1)
    assert len(takers.step(0.0)) == 3


def test_demands_for_whole_batches_give_way_when_more_places_are_found() -> None:
    takers = opened(24, 8, "a", "b", "c")
    first = asked(takers)
    takers.found("abcd")
    assert (takers.step(0.0), first) == ([Open("d")], dict.fromkeys("abc", (8, True)))
    takers.opened("d", 0.0)
    assert asked(takers) == {"d": (2, True)}
    takers.answered("d", 2, full=True)
    assert sorted(action.place for action in takers.step(0.0) if isinstance(action, CancelDemand)) == ["a", "b", "c"]
    for place in "abc":
        takers.answered(place, 0, full=False)
    takers.used("d", 2)
    assert asked(takers) == {"d": (8, False), **dict.fromkeys("abc", (2, True))}


def test_listeners_that_do_not_answer_do_not_keep_the_trainer_from_the_others() -> None:
    takers = opened(24, 8, "a", "b", "c", "d")
    takers.step(0.0)
    for place in "abcd":
        takers.answered(place, 2, full=True)
        takers.used(place, 2)
    hung = asked(takers)
    assert list(hung.values()) == [(8, False)] * 3
    [last] = set("abcd") - hung.keys()
    assert (takers.step(0.5), takers.next_due(0.5)) == ([], 1.0)
    assert asked(takers, 1.0) == {last: (8, False)}
    assert takers.next_due(1.0) == 2.0


def test_no_more_than_some_places_are_opened_at_once() -> None:
    takers = Takers(0, 4)
    takers.found(f"{at:03}" for at in range(100))
    first = [action.place for action in takers.step(0.0)]
    assert len(first) == 16
    assert (takers.step(0.0), takers.next_due(0.0)) == ([], None)
    takers.opened(first[0], 0.0)
    takers.lost(first[1], 0.0)
    [third, fourth] = [action.place for action in takers.step(0.0)]
    assert not {third, fourth} & set(first)
    takers.lost(first[0], 0.0)  # it was open: that makes no room
    assert takers.step(0.0) == []
    takers.validate()


def test_a_place_that_is_lost_is_tried_again_after_a_pause_that_doubles() -> None:
    takers = opened(12, 4, "a")
    takers.step(0.0)
    takers.answered("a", 4, full=True)
    takers.lost("a", 1.0)
    assert (takers.unused, takers.next_due(1.0)) == (0, 1.1)
    assert takers.step(1.05) == []
    assert takers.step(1.1) == [Open("a")]
    takers.lost("a", 2.0)
    assert takers.next_due(2.0) == 2.2


def test_a_place_that_answers_is_paused_for_the_first_time_only_at_its_next_failure() -> None:
    takers = opened(12, 4, "a")
    takers.step(0.0)
    takers.refused("a", 0.0)
    assert asked(takers, 0.1) == {"a": (4, True)}
    takers.answered("a", 4, full=True)
    takers.lost("a", 1.0)
    assert takers.next_due(1.0) == 1.1


def test_a_place_that_vanishes_is_closed_when_it_has_no_demand() -> None:
    takers = opened(12, 4, "a", "b")
    takers.step(0.0)
    takers.answered("a", 2, full=False)
    takers.found(["b"])
    assert Close("a") in takers.step(0.0)
    takers.validate()
    takers.found([])
    assert [type(action) for action in takers.step(0.0)] == [CancelDemand]
    takers.answered("b", 0, full=False)
    assert takers.step(0.0) == [Close("b")]


def test_a_trainer_that_completes_its_batch_is_not_starved_by_what_it_works_on() -> None:
    takers = opened(8, 8, "a")
    n, _ = asked(takers)["a"]
    takers.answered("a", n, full=True)
    takers.used("a", n)
    assert takers.unused == 0
    assert asked(takers) == {"a": (n, True)}


def test_a_place_that_refuses_a_demand_is_asked_again_after_a_pause_and_keeps_its_claims() -> None:
    takers = opened(12, 4, "a")
    takers.step(0.0)
    takers.answered("a", 3, full=False)
    assert asked(takers, 1.0) == {"a": (4, True)}
    takers.refused("a", 1.0)
    assert (takers.step(1.05), takers.next_due(1.05), takers.unused) == ([], 1.1, 3)
    assert asked(takers, 1.1) == {"a": (4, True)}


def test_a_place_whose_connection_has_stood_comes_back_at_once_however_often_and_one_that_breaks_does_not() -> None:
    takers = opened(0, 4, "a")  # it rests: no answer says that all is well
    pauses, now = [], 0.0
    for stands_s in [100.0] * 10 + [0.0] * 10:
        now += stands_s
        takers.lost("a", now)
        assert takers.step(now) == []
        due = takers.next_due(now)
        assert due is not None
        pauses.append(round(due - now, 6))
        now = due
        assert takers.step(now) == [Open("a")]
        takers.opened("a", now)
    assert max(pauses[:10]) == min(pauses)
    assert pauses[10:] == sorted(pauses[10:])
    assert pauses[-1] > 10 * pauses[0]


PLACES = ["a", "b", "c", "d", "e"]


@given(
    st.integers(1, 20),
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(PLACES), st.integers(0, 20))),
)
def test_what_is_unused_and_asked_for_is_bounded(most: int, places: int, events: list[tuple[int, str, int]]) -> None:
    known = PLACES[:places]
    takers = Takers(3 * most, most, largest=256)
    takers.found(known)
    asked: dict[str, int] = {}
    unused: dict[str, int] = {}
    opening: set[str] = set()
    now = 0.0
    for kind, place, number in events:
        now += 0.001
        if kind == 0 and place in opening:
            opening.discard(place)
            takers.opened(place, now)
        elif kind == 1 and place in asked:
            n = asked.pop(place)
            count = min(n, number)
            unused[place] = unused.get(place, 0) + count
            takers.answered(place, count, full=count == n)
        elif kind == 2 and unused.get(place):
            count = min(unused[place], number)
            unused[place] -= count
            takers.used(place, count)
        elif kind == 3 and (place in asked or place in unused):
            asked.pop(place, None)
            unused.pop(place, None)
            takers.lost(place, now)
        for action in takers.step(now):
            if isinstance(action, Open):
                opening.add(action.place)
            elif isinstance(action, Ask):
                assert action.place not in asked
                asked[action.place] = action.n
        assert takers.step(now) == []
        assert takers.unused == sum(unused.values())
        assert takers.demanded == sum(asked.values())
        assert takers.unused + takers.demanded <= 3 * most + len(known)
        if takers.unused == 0 and not asked and not opening:  # it waits for something, be it the end of a pause
            assert takers.next_due(now) is not None


def cost_of_an_event(places: int) -> int:
    """With so many places, all of which are asked: an answer, its use, and a connection that breaks."""
    takers = opened(24, 8, *(f"{at:05}" for at in range(places)))
    takers.step(0.0)

    def events() -> None:
        takers.answered("00000", 1, full=True)
        takers.step(1.0)
        takers.used("00000", 1)
        takers.step(1.0)
        takers.lost("00001", 1.0)
        takers.step(1.0)
        assert takers.next_due(1.0) == 1.1

    return lines_of(events, takers_module)


def test_an_event_costs_little_more_with_thousands_of_places_than_with_a_few() -> None:
    assert cost_of_an_event(5000) < 2 * cost_of_an_event(5)


def test_a_place_that_is_known_again_is_asked_and_not_before_its_pause_is_over() -> None:
    takers = opened(12, 4, "a", "b")
    takers.step(0.0)
    takers.answered("a", 3, full=False)
    takers.step(0.0)
    takers.refused("a", 1.0)
    takers.found(["b"])
    takers.found(["a", "b"])
    assert (takers.step(1.05), takers.next_due(1.05)) == ([], 1.1)
    assert asked(takers, 1.1) == {"a": (4, True)}
