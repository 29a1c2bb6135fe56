"""A ticket queue for tests of those who use one: a run of its own on a real Redis server."""

from __future__ import annotations

import secrets
from typing import Any

from redis_server import RedisServer

from transport.queue import RedisQueue
from transport.storage.urls import RedisURL, parse_url


def run_of(server: RedisServer) -> RedisURL:
    """A run that nobody has used."""
    found = parse_url(server.place(run=secrets.token_hex(4)))
    assert isinstance(found, RedisURL)
    return found


def ticket_queue(server: RedisServer, **options: Any) -> RedisQueue:
    """A new queue on the server; ``options`` of `RedisQueue`."""
    return RedisQueue(run_of(server), **options)
