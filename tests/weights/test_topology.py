"""Who pulls from whom: every replica once, no link of the trainer twice, nobody mapped across hosts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import UsageError
from transport.weights.plan.topology import LOCAL_READERS, depth, hops


def of(hosts: str, shape: str = "tree", fanout: int = 2) -> list[tuple[int, bool]]:
    return [(hop.parent, hop.mapped) for hop in hops(hosts, shape, fanout)]  # type: ignore[arg-type]


def test_one_replica_of_a_host_lands_and_the_others_map() -> None:
    assert of("aaaa") == [(-1, False), (0, True), (0, True), (0, True)]


def test_a_chain_passes_from_host_to_host() -> None:
    assert of("ababc", "chain") == [(-1, False), (0, False), (0, True), (1, True), (1, False)]
    assert depth(hops("abcd", "chain")) == 4


def test_a_chain_may_be_longer_than_python_recurses() -> None:
    assert depth(hops([str(each) for each in range(5000)], "chain")) == 5000


def test_a_tree_is_as_deep_as_its_logarithm() -> None:
    assert of("abcdefg") == [(-1, False), (0, False), (0, False), (1, False), (1, False), (2, False), (2, False)]
    assert depth(hops([str(each) for each in range(127)])) == 7


def test_a_star_has_nobody_between() -> None:
    assert of("aab", "star") == [(-1, False)] * 3


def test_more_replicas_than_a_segment_has_places_for_land_twice() -> None:
    found = of("a" * (LOCAL_READERS + 3))
    assert [at for at, (_, mapped) in enumerate(found) if not mapped] == [0, LOCAL_READERS + 1]


@given(
    hosts=st.lists(st.integers(0, 6), min_size=1, max_size=60),
    shape=st.sampled_from(["chain", "tree"]),
    fanout=st.integers(1, 4),
    local=st.integers(1, 5),
)
def test_every_way_ends_at_the_trainer_and_no_parent_has_too_many(
    hosts: list[int], shape: str, fanout: int, local: int
) -> None:
    found = hops([str(host) for host in hosts], shape, fanout, local)  # type: ignore[arg-type]
    for place, hop in enumerate(found):
        if hop.mapped:
            assert hosts[hop.parent] == hosts[place]
            assert not found[hop.parent].mapped
        steps = 0
        while hop.parent >= 0:
            hop, steps = found[hop.parent], steps + 1
            assert steps <= len(hosts)
    for parent in range(-1, len(hosts)):
        children = [hop for hop in found if hop.parent == parent]
        wired = sum(not hop.mapped for hop in children)
        assert wired <= (1 if shape == "chain" or parent == -1 else fanout)
        assert len(children) - wired <= local


@pytest.mark.parametrize(("shape", "fanout"), [("ring", 2), ("tree", 0)])
def test_shapes_that_there_are_not(shape: str, fanout: int) -> None:
    with pytest.raises(UsageError):
        of("ab", shape, fanout)
