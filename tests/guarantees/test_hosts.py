"""A host that dies: everything that serves a ring is killed at one moment, and its memory is gone.

To the trainer, which reads over TCP, it is a host that refuses connections. Hosts that do not answer at all, and hosts
that are cut off, are those of tests/client/test_two_hosts.py and of `make cluster`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from delivery_accounts import Told, compare, kill, looking, place_of, served_by
from helpers import eventually, parent_of

from transport.claims.deliveries import QueueDepth

pytestmark = [pytest.mark.ucx, pytest.mark.slow]
# a read gives up at once
ONCE = {"attempts_per_read": 1, "calls_per_ticket": 1, "rounds_per_batch": 1}
IMPATIENT = ONCE | {"backoff_first_s": 0.01, "backoff_most_s": 0.02}


def dies(writer: Told) -> None:
    """Its host does."""
    segment = writer.ask("segment")
    with looking(segment) as ring:
        listeners = served_by(ring)()
    kill(writer.pid, parent_of(listeners[0]), *listeners)
    writer.wait()
    Path(f"/dev/shm{segment}").unlink()


@pytest.mark.guarantee("a host dies, or is out of reach")
@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("directory", [False, True])
def test_the_payloads_of_a_host_that_dies_are_lost_and_reported(directory: bool, tmp_path: Path) -> None:
    """To who reads by ticket: with a directory behind lease and grace, without one as a host that may come back."""
    place = place_of("tcp")
    store = f"sqlite://{tmp_path}/store.sqlite3" if directory else ""
    settings = place.environment(**IMPATIENT)
    reader = {"url": f"tickets:{place.prefix}", "store": store}
    with Told("writer", place, store=store) as writer, Told("trainer", place, settings, **reader) as trainer:
        writer.ask("write", 0, 4)
        tickets = writer.ask("tickets")
        accepted, errors = trainer.ask("read", tickets[:2])
        assert errors == []
        dies(writer)
        seen: list[list[str]] = []

        def read() -> bool:
            more, errors = trainer.ask("read", tickets[2:])
            assert more == []
            seen.append(errors)
            return errors == ["PayloadLostError"] * 2 if directory else len(seen) > 3

        eventually(read, "what is lost is reported")
        assert directory or not any("PayloadLostError" in errors for errors in seen)
        compare(range(4), accepted, lost={2, 3})
        trainer.end()


@pytest.mark.guarantee("a host dies, or is out of reach")
def test_a_host_that_dies_takes_its_ring_where_the_rings_are_the_queue(tmp_path: Path) -> None:
    place = place_of("tcp")
    with Told("writer", place) as first, Told("trainer", place) as trainer:
        first.ask("write", 0, 4)
        accepted = trainer.ask("train", 2)
        dies(first)
        with Told("writer", place) as second:  # the run goes on with the rings that are left
            second.ask("write", 4, 2)
            accepted += trainer.ask("train", 2)
            assert trainer.ask("take", 1, 0.0) == []
            compare(range(6), accepted, lost={0, 1, 2, 3} - set(accepted))
            with place.open() as queue:
                assert queue.depth() == QueueDepth(done=2)  # of the ring that is left
                assert queue.failures() == []
            trainer.end()
            second.end()
