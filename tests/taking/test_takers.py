"""Takers: which rings are asked, and for how many; and that no sequence of events makes a trainer hoard."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from transport.taking.takers import Ask, Close, Open, Takers, Untake


def opened(ahead: int, *places: str) -> Takers:
    takers = Takers(ahead)
    takers.found(places)
    assert sorted(map(str, takers.step(0.0))) == sorted(str(Open(place)) for place in places)
    for place in places:
        takers.opened(place)
    return takers


def test_what_is_wanted_is_shared_among_the_places() -> None:
    takers = opened(8, "a", "b")
    assert sorted(takers.step(0.0), key=str) == [Ask("a", 4), Ask("b", 4)]
    assert takers.step(0.0) == []
    takers.answered("a", 3)
    assert takers.step(0.0) == [Ask("a", 1)]


def test_more_places_than_payloads_are_wanted_are_all_asked() -> None:
    takers = opened(1, "a", "b", "c")
    assert sorted(takers.step(0.0), key=str) == [Ask("a", 1), Ask("b", 1), Ask("c", 1)]
    takers.answered("b", 1)
    assert sorted(takers.step(0.0), key=str) == [Untake("a"), Untake("c")]
    takers.answered("a", 0)
    takers.answered("c", 0)
    assert takers.step(0.0) == []
    takers.ended("b", 1)
    assert len(takers.step(0.0)) == 3


def test_a_place_that_is_lost_is_tried_again_after_a_pause_that_doubles() -> None:
    takers = opened(4, "a")
    takers.step(0.0)
    takers.answered("a", 4)
    takers.lost("a", 1.0)
    assert (takers.in_hand, takers.next_due(1.0)) == (0, 1.1)
    assert takers.step(1.05) == []
    assert takers.step(1.1) == [Open("a")]
    takers.lost("a", 2.0)
    assert takers.next_due(2.0) == 2.2


def test_a_place_that_vanishes_is_closed_when_nothing_of_it_is_in_hand() -> None:
    takers = opened(4, "a", "b")
    takers.step(0.0)
    takers.answered("a", 2)
    takers.found(["b"])
    assert Close("a") not in takers.step(0.0)
    takers.ended("a", 2)
    assert Close("a") in takers.step(0.0)
    takers.found([])
    assert takers.step(0.0) == [Untake("b")]
    takers.answered("b", 0)
    assert takers.step(0.0) == [Close("b")]


def test_a_trainer_that_completes_its_batch_is_not_starved_by_what_it_works_on() -> None:
    takers = opened(8, "a")
    takers.step(0.0)
    takers.answered("a", 8)
    assert takers.step(0.0) == []
    takers.used("a", 8)
    assert (takers.in_hand, takers.unused) == (8, 0)
    assert takers.step(0.0) == [Ask("a", 8)]


def test_a_place_that_refuses_a_demand_is_asked_again_after_a_pause_and_keeps_its_claims() -> None:
    takers = opened(8, "a")
    takers.step(0.0)
    takers.answered("a", 3)
    assert takers.step(1.0) == [Ask("a", 5)]
    takers.refused("a", 1.0)
    assert (takers.step(1.05), takers.next_due(1.05), takers.in_hand) == ([], 1.1, 3)
    assert takers.step(1.1) == [Ask("a", 5)]


PLACES = ["a", "b", "c"]


@given(st.integers(1, 20), st.lists(st.tuples(st.integers(0, 5), st.sampled_from(PLACES), st.integers(0, 20))))
def test_what_is_in_hand_and_asked_for_is_bounded(ahead: int, events: list[tuple[int, str, int]]) -> None:
    takers = Takers(ahead)
    takers.found(PLACES)
    asked: dict[str, int] = {}
    hand: dict[str, int] = {}
    opening: set[str] = set()
    now = 0.0
    for kind, place, number in events:
        now += 0.5
        if kind == 0 and place in opening:
            opening.discard(place)
            takers.opened(place)
        elif kind == 1 and place in asked:
            count = min(asked.pop(place), number)
            hand[place] = hand.get(place, 0) + count
            takers.answered(place, count)
        elif kind == 2 and hand.get(place):
            count = min(hand[place], number)
            hand[place] -= count
            takers.ended(place, count)
        elif kind == 3 and (place in asked or place in hand):
            asked.pop(place, None)
            hand.pop(place, None)
            takers.lost(place, now)
        for action in takers.step(now):
            if isinstance(action, Open):
                opening.add(action.place)
            elif isinstance(action, Ask):
                assert action.place not in asked
                asked[action.place] = action.n
        assert takers.in_hand == sum(hand.values())
        assert takers.demanded == sum(asked.values())
        assert takers.in_hand + takers.demanded <= ahead + len(PLACES)
