"""How often a read tries, over real ports: at each place at least once, and never more often than documented."""

from __future__ import annotations

import logging

import msgspec
import pytest
from helpers import dead_port, noise, serving, settings_with

from transport import BlockingClient
from transport.errors import RetriesExhaustedError

pytestmark = pytest.mark.ucx

QUICK = settings_with(backoff_first_s=0.001, backoff_most_s=0.002)


def attempts_made(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The ports of the attempts that failed, in order."""
    return [record.port for record in caplog.records if hasattr(record, "attempt")]


@pytest.mark.parametrize(("addresses", "reads", "attempts"), [(1, 2, 2), (1, 5, 5), (3, 2, 3)])
@pytest.mark.parametrize("together", [False, True])
def test_a_read_makes_its_attempts_and_no_more(
    addresses: int, reads: int, attempts: int, together: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """``together``: the first attempt is part of a message for several payloads, which counts as one."""
    with serving() as (ring, _), dead_port() as dead:
        hosts = tuple(f"127.0.0.{n + 1}" for n in range(addresses))
        tickets = [
            msgspec.structs.replace(ring.write_raw(noise(100)), host="elsewhere", addresses=hosts, ports=(dead,))
            for _ in range(2)
        ]
        settings = msgspec.structs.replace(QUICK, attempts_per_read=reads)
        with caplog.at_level(logging.INFO), BlockingClient(wire={"tcp"}, settings=settings) as client:
            if together:
                failures = [outcome.error for outcome in client.read_many(tickets)]
            else:
                with pytest.raises(RetriesExhaustedError) as caught:
                    client.read(tickets[0])
                failures = [caught.value]
        assert all(isinstance(failure, RetriesExhaustedError) for failure in failures)
        made = attempts_made(caplog)
        if together:
            assert len(made) == len(tickets) * (attempts - 1)
        else:
            assert len(made) == attempts
            assert {port.partition(":")[0] for port in made} == set(hosts)
