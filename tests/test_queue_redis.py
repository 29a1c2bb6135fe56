"""The ticket queue on a real Redis server: the common contract, and what only a server can get wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from queue_conformance import LEASE_S, QueueConformance, ids, in_thread, ticket, tickets
from queue_model import QueueMachine
from redis_server import RedisServer, needs_redis, redis_server

from transport.places import RedisPlace, parse_place
from transport.queue import RedisQueue

pytestmark = needs_redis


@pytest.fixture(scope="module")
def running() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def server(running: RedisServer) -> RedisServer:
    running.flush()
    return running


def place(server: RedisServer, run: str = "test") -> RedisPlace:
    found = parse_place(server.place(run))
    assert isinstance(found, RedisPlace)
    return found


class RedisHarness:
    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.now = 1000.0
        self.queues: list[RedisQueue] = []

    def open(self, *, max_deliveries: int = 20) -> RedisQueue:
        queue = RedisQueue(
            place(self.server), lease_s=LEASE_S, max_deliveries=max_deliveries, clock=lambda: self.now
        )
        self.queues.append(queue)
        return queue

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def close(self) -> None:
        for queue in self.queues:
            queue.close()


@pytest.fixture
def harness(server: RedisServer) -> Iterator[RedisHarness]:
    harness = RedisHarness(server)
    yield harness
    harness.close()


class TestConformance(QueueConformance):
    pass


def test_random_operations_agree_with_a_model(server: RedisServer) -> None:
    class Machine(QueueMachine):
        @staticmethod
        def make_harness() -> RedisHarness:
            server.flush()
            return RedisHarness(server)

    case = Machine.TestCase
    case.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
    case().runTest()
