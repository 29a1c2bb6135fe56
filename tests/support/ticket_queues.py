"""A ticket queue for tests of those who use one: a run of its own on a real Redis server."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from redis_server import WHY_NOT, RedisServer, redis_server

from transport.queue import RedisQueue
from transport.storage.urls import RedisURL, parse_url


@pytest.fixture(scope="session")
def redis() -> Iterator[RedisServer]:
    """One server for all tests; each queue is a run of its own."""
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    with redis_server() as server:
        yield server


@pytest.fixture
def queue_url(redis: RedisServer) -> str:
    """Of a queue that nobody has used."""
    return redis.place(run=secrets.token_hex(4))


@pytest.fixture
def queue(queue_url: str) -> Iterator[RedisQueue]:
    """The queue of ``queue_url``."""
    with RedisQueue(_parsed(queue_url)) as opened:
        yield opened


def _parsed(url: str) -> RedisURL:
    found = parse_url(url)
    assert isinstance(found, RedisURL)
    return found


def run_of(server: RedisServer) -> RedisURL:
    """A run that nobody has used."""
    return _parsed(server.place(run=secrets.token_hex(4)))


def ticket_queue(server: RedisServer, **options: Any) -> RedisQueue:
    """A new queue on the server; ``options`` of `RedisQueue`."""
    return RedisQueue(run_of(server), **options)
