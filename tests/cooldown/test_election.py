"""Election: the algorithm's golden vectors, and what holds for every run."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from transport.cooldown.epochs.election import ALGORITHM, checkpointers, elect
from transport.errors import UsageError


def clients(count: int) -> tuple[str, ...]:
    return tuple(f"client-{index}" for index in range(count))


# (clients, seed, epoch) → elected. They never change: another algorithm gets another number.
VECTORS: list[tuple[tuple[str, ...], int, int, tuple[str, ...]]] = [
    ((), 0, 0, ()),
    (("a",), 1, 1, ("a",)),
    (("a", "b", "c"), 1, 1, ("c",)),
    (("a", "b", "c"), 1, 2, ("a",)),
    (("a", "b", "c", "d", "e", "f"), 42, 7, ("e", "c")),
    (("a", "b", "c", "d", "e", "f", "g", "h", "i"), 18446744073709551615, 0, ("h", "g", "e")),
    (("rollout-0", "rollout-1", "trainer-0"), 0, 1, ("trainer-0",)),
    (("ä", "b", "c", "日本", "e", "f"), 3, 5, ("日本", "ä")),
]

names = st.sets(st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), max_size=70)
numbers = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize(("among", "seed", "epoch", "elected"), VECTORS)
def test_golden_vectors(among: tuple[str, ...], seed: int, epoch: int, elected: tuple[str, ...]) -> None:
    assert elect(among, seed=seed, epoch=epoch, algorithm=2) == elected


@pytest.mark.parametrize(
    ("among", "elected"), [(0, 0), (1, 1), (2, 1), (3, 1), (5, 1), (6, 2), (47, 15), (48, 16), (10_000, 16)]
)
def test_a_third_at_least_one_at_most_sixteen(among: int, elected: int) -> None:
    assert checkpointers(among) == elected
    assert len(elect(clients(among), seed=7, epoch=3)) == elected


@examples(20)
@given(names, numbers, numbers, st.randoms())
def test_the_order_of_arrival_does_not_matter(found: set[str], seed: int, epoch: int, shuffle: random.Random) -> None:
    arrived = [*found, *list(found)[:3]]
    shuffle.shuffle(arrived)
    elected = elect(arrived, seed=seed, epoch=epoch)
    assert elected == elect(sorted(found), seed=seed, epoch=epoch)
    assert len(set(elected)) == len(elected) == checkpointers(len(found))
    assert set(elected) <= found


def test_everybody_has_the_same_chance() -> None:
    counts = dict.fromkeys(clients(9), 0)
    for epoch in range(6000):
        for name in elect(clients(9), seed=1, epoch=epoch):
            counts[name] += 1
    assert all(abs(count - 2000) < 200 for count in counts.values()), counts  # five standard deviations


def test_epoch_and_seed_both_decide() -> None:
    by_epoch = {elect(clients(30), seed=1, epoch=epoch) for epoch in range(50)}
    by_seed = {elect(clients(30), seed=seed, epoch=1) for seed in range(50)}
    assert len(by_epoch) == len(by_seed) == 50


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(UsageError, match="the record has 3"):
        elect(clients(3), seed=1, epoch=1, algorithm=ALGORITHM + 1)
