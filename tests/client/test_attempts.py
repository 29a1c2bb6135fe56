"""How often a read tries, over real ports: at each place at least once, and never more often than documented."""

from __future__ import annotations

import logging
import math

import msgspec
import pytest
from helpers import NETWORK, dead_port, noise, serving, settings_with

from transport import BlockingClient
from transport.client.retry import Deadline
from transport.errors import DeadlineExceededError, RetriesExhaustedError, UnreachableError

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
        with caplog.at_level(logging.INFO), BlockingClient(wire=NETWORK, settings=settings) as client:
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


def test_after_the_deadline_not_even_a_first_attempt_is_made() -> None:
    with serving() as (ring, _), BlockingClient(wire=NETWORK, settings=QUICK, ack="manual") as client:
        ticket = ring.write_raw(noise(100))
        client.read(ticket)  # from then on a connection is idle: an attempt does not wait for one
        with pytest.raises(DeadlineExceededError):
            client.read(ticket, timeout=0.0)
        assert client.statistics().links_idle == 1  # where an attempt is late, its connection is given up


def test_a_deadline_that_passes_during_a_pause_does_not_hide_what_failed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    remaining = Deadline.remaining
    monkeypatch.setattr(
        Deadline, "remaining", lambda deadline, now: remaining(deadline, math.inf if attempts_made(caplog) else now)
    )
    with serving() as (ring, _), dead_port() as dead:
        ticket = msgspec.structs.replace(ring.write_raw(noise(100)), host="elsewhere", ports=(dead,))
        with (
            caplog.at_level(logging.INFO),
            BlockingClient(wire=NETWORK, settings=QUICK) as client,
            pytest.raises(DeadlineExceededError) as caught,
        ):
            client.read(ticket, timeout=30.0)
        assert isinstance(caught.value.__cause__, UnreachableError)
