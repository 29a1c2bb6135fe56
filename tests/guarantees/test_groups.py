"""A rank of a group that is killed, where the rings are the queue: the next group gets what the group had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from delivery_accounts import Place, Told, compare, place_of

pytestmark = [pytest.mark.ucx, pytest.mark.slow]


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    return place_of(request.param)


def both(ranks: list[Told], step: str, *given: object) -> Any:
    """Both ranks do it at once, and have the same answer: it."""
    for rank in ranks:
        rank.begin(step, *given)
    first, second = [rank.answer() for rank in ranks]
    assert first == second
    return first


def train(ranks: list[Told], n: int) -> list[int]:
    """What both consume, as soon as it is so many."""
    accepted: list[int] = []
    while len(accepted) < n:
        accepted += both(ranks, "train_once", n - len(accepted))
    return accepted


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(("place", "victim"), [("mapped", 0), ("tcp", 1)], indirect=["place"])
def test_what_a_group_had_whose_rank_was_killed_is_consumed_by_the_next_group(
    place: Place, victim: int, tmp_path: Path
) -> None:
    store = f"sqlite://{tmp_path}/store.sqlite3"

    def rank(number: int, group: str) -> Told:
        return Told("trainer", place, store=store, group=group, rank=number)

    with Told("writer", place, group=True) as writer:
        writer.ask("write", 0, 6)
        with rank(0, "first") as leader, rank(1, "first") as follower:
            ranks = [leader, follower]
            accepted = train(ranks, 2)
            both(ranks, "claim", 2)
            ranks[victim].kill()
            ranks[1 - victim].kill()  # a group that has lost a rank starts again as a whole
        with rank(0, "second") as leader, rank(1, "second") as follower:
            accepted += train([leader, follower], 4)
            compare(range(6), accepted)
            leader.end()
            follower.end()
        writer.ask("write", 6, 16)  # every slot of the ring is free for the writer
        writer.end()
