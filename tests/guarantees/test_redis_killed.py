"""A Redis server that is killed behind a consume that it accepted, and before the ring has heard of it.

What a crash takes from the append-only file is cut off it here: with `everysec` what was written since the last flush,
with `always` nothing, since every answer comes behind its flush. That the server does flush is Redis's own promise.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from delivery_accounts import SHORT_LEASE, Told, compare, place_of
from redis_server import RedisServer, needs_redis

pytestmark = [pytest.mark.ucx, pytest.mark.slow, needs_redis]


def log_of(server: RedisServer) -> Path:
    """The file to which it appends its changes."""
    [newest] = server.directory.glob("appendonlydir/*.incr.aof") or server.directory.glob("appendonly.aof")
    return newest


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("flushed", ["always", "everysec"])
def test_a_server_killed_behind_a_consume_costs_nothing_but_with_everysec_a_repetition(
    flushed: str, tmp_path: Path
) -> None:
    with place_of("redis", "--appendfsync", flushed) as place:
        server = place.server
        assert server is not None
        with (
            Told("writer", place) as writer,
            Told("trainer", place, place.environment(**SHORT_LEASE)) as first,
            Told("trainer", place) as second,
        ):
            writer.ask("write", 0, 4)
            writer.ask("flush")
            first.ask("claim", 4)
            first.ask("collect")
            before = log_of(server).stat().st_size
            accepted = first.ask("consume_in_the_queue_only")
            first.kill()
            server.kill()
            if flushed == "everysec":
                with log_of(server).open("r+b") as file:
                    file.truncate(before)
            server.start()
            writer.ask("write", 4, 1)
            writer.ask("flush")
            accepted += second.ask("train", 5 if flushed == "everysec" else 1)
            compare(range(5), accepted, twice=range(4) if flushed == "everysec" else ())
            assert second.ask("claim", 1, 0.0) == []
            second.end()
            writer.end()
