"""The layout of a step: every invariant that `lay_out` states, for any groups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import UsageError
from transport.training.layout import SampleSize, StepLayout, lay_out

Groups = list[list[int]]
some_groups = st.lists(st.lists(st.integers(0, 500), min_size=1, max_size=9), max_size=24)
some_replicas = st.integers(1, 6)
some_limits = st.none() | st.integers(1, 1500)


def load(groups: Groups, batches: tuple[tuple[SampleSize, ...], ...]) -> int:
    return sum(groups[each.group][each.number] for batch in batches for each in batch)


def laid_out(groups: Groups, replicas: int, limit: int | None) -> StepLayout:
    layout = lay_out(groups, replicas, limit)
    assert len(layout) == replicas
    return layout


@given(some_groups, some_replicas, some_limits)
def test_every_sample_is_trained_on_once_and_a_group_stays_on_one_replica(
    groups: Groups, replicas: int, limit: int | None
) -> None:
    layout = laid_out(groups, replicas, limit)
    placed = [(each, replica) for replica, batches in enumerate(layout) for batch in batches for each in batch]
    every = [SampleSize(group, number) for group, samples in enumerate(groups) for number in range(len(samples))]
    assert sorted(each for each, _ in placed) == every
    assert len({(each.group, replica) for each, replica in placed}) == len(groups)


@given(some_groups, some_replicas, some_limits)
def test_every_replica_has_as_many_micro_batches_which_are_empty_only_for_want_of_samples(
    groups: Groups, replicas: int, limit: int | None
) -> None:
    layout = laid_out(groups, replicas, limit)
    [count] = {len(batches) for batches in layout}
    assert count >= 1
    for batches in layout:
        samples = sum(map(len, batches))
        assert sum(not batch for batch in batches) == max(0, count - samples)


@given(some_groups, some_replicas, st.integers(1, 1500))
def test_no_micro_batch_is_above_the_limit_unless_it_is_one_sample(groups: Groups, replicas: int, limit: int) -> None:
    for batches in laid_out(groups, replicas, limit):
        assert all(len(batch) <= 1 or load(groups, (batch,)) <= limit for batch in batches)


@given(some_groups, some_replicas, some_limits)
def test_the_heaviest_replica_is_within_the_heaviest_group_of_the_mean(
    groups: Groups, replicas: int, limit: int | None
) -> None:
    loads = [load(groups, batches) for batches in laid_out(groups, replicas, limit)]
    assert max(loads) * replicas <= sum(loads) + replicas * max(map(sum, groups), default=0)


@given(some_groups, some_replicas, some_limits)
def test_the_same_groups_give_the_same_layout(groups: Groups, replicas: int, limit: int | None) -> None:
    assert lay_out(groups, replicas, limit) == lay_out([list(group) for group in groups], replicas, limit)


def test_groups_that_fit_together_share_a_micro_batch_whole() -> None:
    layout = lay_out([[60, 40], [30, 30], [20, 20]], 1, 100)
    assert sorted(sorted({each.group for each in batch}) for batch in layout[0]) == [[0], [1, 2]]


@pytest.mark.parametrize(("groups", "replicas", "limit"), [([[1]], 0, None), ([[1]], 1, 0), ([[-1]], 1, None)])
def test_an_argument_that_makes_no_sense_is_refused(groups: Groups, replicas: int, limit: int | None) -> None:
    with pytest.raises(UsageError):
        lay_out(groups, replicas, limit)
