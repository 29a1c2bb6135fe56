"""Endpoint pool: decisions over time, as short stories and against random ones."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from properties import examples

from transport.client.connections.pool import EndpointPool
from transport.errors import InternalError
from transport.settings import DEFAULTS

HERE = ("10.0.0.1", 7000)
THERE = ("10.0.0.1", 7001)
SMALL = msgspec.structs.replace(DEFAULTS, pool_endpoints_per_port=3, pool_endpoints_idle=4)


def opened(pool: EndpointPool[str], *names: str, port: tuple[str, int] = HERE) -> None:
    for name in names:
        pool.begin_open(port)
        pool.opened(port, name)


def test_the_freshest_connection_is_used_first() -> None:
    pool = EndpointPool[str]()
    opened(pool, "a", "b")
    pool.checkin("b", 1.0)
    pool.checkin("a", 2.0)
    assert pool.checkout(HERE, 3.0) == "a"
    assert pool.checkout(HERE, 3.0) == "b"
    assert pool.checkout(HERE, 3.0) is None


def test_age_counts_from_the_last_use() -> None:
    pool = EndpointPool[str]()
    opened(pool, "old", "older", "young")
    pool.checkin("older", -1.0)
    pool.checkin("old", 0.0)
    pool.checkin("young", 50.0)
    assert pool.next_expiry() == DEFAULTS.pool_endpoint_max_age_s - 1
    assert pool.expired(DEFAULTS.pool_endpoint_max_age_s - 1.001) == []
    assert pool.expired(DEFAULTS.pool_endpoint_max_age_s + 1) == ["older", "old"]
    assert pool.checkout(HERE, 60.0 + DEFAULTS.pool_endpoint_max_age_s) is None  # too old, though not yet taken out
    assert pool.expired(60.0 + DEFAULTS.pool_endpoint_max_age_s) == ["young"]
    assert pool.next_expiry() is None


def test_places_of_a_port_are_bounded_while_connections_are_being_opened() -> None:
    pool = EndpointPool[str](SMALL)
    opened(pool, "a")
    pool.begin_open(HERE)
    pool.begin_open(HERE)
    assert not pool.may_open(HERE)
    assert pool.may_open(THERE)
    with pytest.raises(InternalError, match="exceeds the limit"):
        pool.begin_open(HERE)
    pool.open_failed(HERE)
    assert pool.may_open(HERE)
    assert pool.counts(HERE) == (0, 1, 1)
    assert repr(pool) == "<EndpointPool open, 0 idle, 1 in use, 1 opening>"


def test_beyond_the_bound_on_idle_connections_the_longest_idle_is_closed() -> None:
    pool = EndpointPool[str](SMALL)
    opened(pool, "a", "b", "c")
    opened(pool, "d", "e", port=THERE)
    closed = [pool.checkin(name, at) for at, name in enumerate("abcde")]
    assert closed == [[], [], [], [], ["a"]]
    assert pool.counts() == (4, 0, 0)


def test_for_a_connection_that_somebody_waits_for_no_other_one_is_closed() -> None:
    pool = EndpointPool[str](SMALL)
    opened(pool, "a", "b", "c")
    opened(pool, "d", "e", "f", port=THERE)
    closed = [pool.checkin(name, at, awaited={HERE}) for at, name in enumerate("abcdef")]
    assert closed == [[], [], [], [], [], []]
    assert pool.checkout(THERE, 6.0) == "f"
    assert pool.checkin("f", 7.0) == ["a", "b"]  # nobody waited for them: the bound holds again


class PoolMachine(RuleBasedStateMachine):
    """Every connection is held by exactly one: the pool, a user, or whoever closes it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool: EndpointPool[int] = EndpointPool(SMALL)
        self.now = 0.0
        self.made = 0
        self.used: dict[int, tuple[str, int]] = {}
        self.last_use: dict[int, float] = {}
        self.closed: set[int] = set()

    def close(self, connections: list[int]) -> None:
        assert not self.closed & set(connections)
        self.closed.update(connections)

    @rule(port=st.sampled_from([HERE, THERE]))
    def use(self, port: tuple[str, int]) -> None:
        self.close(self.pool.expired(self.now))
        connection = self.pool.checkout(port, self.now)
        if connection is not None:
            assert connection not in self.closed
            assert connection not in self.used
            assert self.now - self.last_use[connection] <= DEFAULTS.pool_endpoint_max_age_s
            self.used[connection] = port
        elif self.pool.may_open(port):
            self.pool.begin_open(port)
            self.made += 1
            self.pool.opened(port, self.made)
            self.used[self.made] = port

    @precondition(lambda self: self.used)
    @rule(data=st.data(), awaited=st.sets(st.sampled_from([HERE, THERE])))
    def checkin(self, data: st.DataObject, awaited: set[tuple[str, int]]) -> None:
        connection = data.draw(st.sampled_from(sorted(self.used)))
        del self.used[connection]
        self.last_use[connection] = self.now
        self.close(self.pool.checkin(connection, self.now, awaited=awaited))
        idle = sum(self.pool.counts(port).idle for port in {HERE, THERE} - awaited)
        assert idle <= SMALL.pool_endpoints_idle

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def breaks(self, data: st.DataObject) -> None:
        connection = data.draw(st.sampled_from(sorted(self.used)))
        del self.used[connection]
        self.pool.drop(connection)
        self.close([connection])

    @rule(port=st.sampled_from([HERE, THERE]))
    def port_dies(self, port: tuple[str, int]) -> None:
        self.close(self.pool.drain_port(port))

    @rule(seconds=st.sampled_from([0.0, 1.0, 60.0, 101.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def nothing_is_lost(self) -> None:
        self.pool.validate()
        counts = self.pool.counts()
        assert counts.in_use == len(self.used)
        assert counts.idle + counts.in_use + len(self.closed) == self.made

    def teardown(self) -> None:
        self.close(self.pool.drain())
        for connection in self.used:
            self.close(self.pool.checkin(connection, self.now))
        assert len(self.closed) == self.made
        self.pool.validate()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = examples(30, stateful_step_count=40)


@pytest.mark.parametrize("seed", range(5))
def test_who_wakes_at_the_next_expiry_finds_something(seed: int) -> None:
    """At any moment, whatever a float rounds; else the upkeep would turn without a pause until the clock goes on."""
    rng = random.Random(seed)
    for _ in range(200):
        pool = EndpointPool[str]()
        opened(pool, "one")
        pool.checkin("one", rng.uniform(0.0, 1e6))
        at = pool.next_expiry()
        assert at is not None
        assert pool.expired(at) == ["one"]


def test_misuse_is_a_defect_that_is_named() -> None:
    pool = EndpointPool[str]()
    with pytest.raises(InternalError, match="not in use"):
        pool.checkin("stranger", 0.0)
    with pytest.raises(InternalError, match="being opened"):
        pool.opened(HERE, "stranger")
    opened(pool, "a")
    pool.begin_open(HERE)
    with pytest.raises(InternalError, match="already"):
        pool.opened(HERE, "a")
