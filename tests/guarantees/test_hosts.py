"""A host that dies: everything that serves a ring is killed at one moment, and its memory is gone.

To the trainer, which reads over TCP, it is a host that refuses connections. Hosts that do not answer at all, and hosts
that are cut off, are those of tests/client/test_two_hosts.py and of `make cluster`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from delivery_accounts import Place, Told, compare, kill, looking, place_of, served_by, states
from helpers import parent_of

from transport.queue import DeliveryState, QueueDepth

pytestmark = [pytest.mark.ucx, pytest.mark.slow]
# a read gives up at once, and a claim comes back at once
ONCE = {"attempts_per_read": 1, "calls_per_ticket": 1, "rounds_per_batch": 1}
IMPATIENT = ONCE | {"backoff_first_s": 0.01, "backoff_most_s": 0.02}
MAX_DELIVERIES = 20


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with place_of(request.param) as made:
        yield made


def dies(writer: Told) -> None:
    """Its host does."""
    segment = writer.ask("segment")
    with looking(segment) as ring:
        listeners = served_by(ring)()
    kill(writer.pid, parent_of(listeners[0]), *listeners)
    writer.wait()
    Path(f"/dev/shm{segment}").unlink()


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(("place", "directory"), [("redis", False), ("redis", True)], indirect=["place"])
def test_the_payloads_of_a_host_that_dies_are_lost_and_reported(place: Place, directory: bool, tmp_path: Path) -> None:
    store = f"sqlite://{tmp_path}/store.sqlite3" if directory else ""
    # with a directory a delivery must not be dead of its attempts before lease and grace (3.3 s) have ended
    settings = place.environment(**IMPATIENT | ({"backoff_most_s": 0.5} if directory else {}))
    with Told("writer", place, store=store) as writer, Told("trainer", place, settings, store=store) as trainer:
        writer.ask("write", 0, 4)
        writer.ask("flush")
        accepted = trainer.ask("train", 2)
        dies(writer)
        more, errors = trainer.ask("drain")
        assert more == []
        compare(range(4), accepted, lost={0, 1, 2, 3} - set(accepted))
        with place.open() as queue:
            ended = {"dead": 0, "discarded": 2} if directory else {"dead": 2, "discarded": 0}
            assert states(queue.depth()) == {"done": 2, "unfinished": 0, **ended}
            failures = queue.failures()
            if directory:
                assert all("PayloadLostError" in failure.reason for failure in failures)
            else:
                assert "PayloadLostError" not in errors
                assert {failure.state for failure in failures} == {DeliveryState.DEAD}
                assert {failure.attempts for failure in failures} == {MAX_DELIVERIES}
                assert all(failure.reason for failure in failures)
        trainer.end()


def test_a_host_that_dies_takes_its_ring_where_the_rings_are_the_queue(tmp_path: Path) -> None:
    with place_of("tcp") as place, Told("writer", place) as first, Told("trainer", place) as trainer:
        first.ask("write", 0, 4)
        accepted = trainer.ask("train", 2)
        dies(first)
        with Told("writer", place) as second:  # the run goes on with the rings that are left
            second.ask("write", 4, 2)
            accepted += trainer.ask("train", 2)
            assert trainer.ask("claim", 1, 0.0) == []
            compare(range(6), accepted, lost={0, 1, 2, 3} - set(accepted))
            with place.open() as queue:
                assert queue.depth() == QueueDepth(done=2)  # of the ring that is left
                assert queue.failures() == []
            trainer.end()
            second.end()
