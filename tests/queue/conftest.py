"""A Redis server for the tests of a file, empty for each of them."""

from redis_stores import running, server

__all__ = ["running", "server"]
