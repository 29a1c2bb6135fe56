"""Writers and supervisors that are killed: what was written is consumed once."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
from delivery_accounts import (
    Place,
    Serving,
    Told,
    compare,
    consumed,
    gone,
    kill,
    looking,
    place_of,
    served_by,
)
from helpers import eventually, parent_of

pytestmark = [pytest.mark.ucx, pytest.mark.slow]


@pytest.fixture(params=["tcp", "mapped"])
def place(request: pytest.FixtureRequest) -> Place:
    return place_of(request.param)


tcp = pytest.mark.parametrize("place", ["tcp"], indirect=True)


@pytest.mark.guarantee("a rollout worker is killed later, also with its supervisor")
@pytest.mark.nightly(keep=1)
def test_what_a_killed_writer_had_written_is_consumed(place: Place) -> None:
    with Told("writer", place) as writer:
        segment = writer.ask("segment")
        writer.ask("write", 0, 6)
        writer.kill()
        compare(range(6), consumed(place, 6))
    eventually(lambda: gone(segment), "the ring goes with its last payload")


@pytest.mark.guarantee("a rollout worker is killed while it writes")
@tcp
def test_what_a_killed_writer_was_writing_was_never_there_and_its_slot_is_free_again(place: Place) -> None:
    name = f"{place.prefix}named"
    with Told("writer", place, name=name, slots=4) as first:
        first.ask("write", 0, 3)
        first.ask("begin", 3)
        with looking(first_segment := f"/transport-{name}") as ring:
            assert (ring.statistics().writing, ring.statistics().ready) == (1, 3)
            first.kill()
    with Told("writer", place, name=name, slots=4) as second:
        assert second.ask("segment") == first_segment
        second.ask("write", 4, 1)  # the fourth slot
        compare([0, 1, 2, 4], consumed(place, 4))
        second.end()


@pytest.mark.guarantee("a rollout worker is killed later, also with its supervisor")
@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("then", ["another writer", "no writer"])
def test_what_writer_and_supervisor_that_are_killed_together_had_written_is_consumed(place: Place, then: str) -> None:
    name = f"{place.prefix}named"
    with Told("writer", place, name=name) as writer:
        serving = Serving(writer)
        writer.ask("write", 0, 6)
        kill(writer.pid, serving.supervisor)
        writer.wait()
    with looking(serving.segment) as ring:
        assert served_by(ring)() == serving.listeners
    if then == "another writer":
        with Told("writer", place, name=name) as second:
            compare(range(6), consumed(place, 6))
            second.end()
    else:
        compare(range(6), consumed(place, 6))
        kill(*serving.listeners)  # they would serve it for ``linger_s``
        Path(f"/dev/shm{serving.segment}").unlink(missing_ok=True)


@pytest.mark.guarantee("a restarted rollout worker takes its ring over, and its setup fails")
@pytest.mark.nightly
@tcp
def test_a_ring_that_was_taken_over_by_a_writer_whose_setup_failed_keeps_its_payloads(place: Place) -> None:
    name = f"{place.prefix}named"
    with Told("writer", place, name=name) as first:
        serving = Serving(first)
        first.ask("write", 0, 3)
        serving.kill_all()
    with socket.create_server(("0.0.0.0", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(AssertionError, match="the child ended with 1"):
            Told("writer", place, name=name, port=port)
    with Told("writer", place, name=name) as third:
        third.ask("write", 3, 1)
        compare(range(4), consumed(place, 4))
        third.end()


@pytest.mark.guarantee("a supervisor is killed")
@tcp
def test_a_killed_supervisor_is_started_again_and_adopts_its_listeners(place: Place) -> None:
    with Told("writer", place) as writer:
        serving = Serving(writer)
        writer.ask("write", 0, 3)
        os.kill(serving.supervisor, signal.SIGKILL)
        eventually(lambda: parent_of(serving.listeners[0]) != serving.supervisor, "it is an orphan")
        writer.ask("write", 3, 3)
        compare(range(6), consumed(place, 6))
        with looking(serving.segment) as ring:
            assert served_by(ring)() == serving.listeners
            [listener] = serving.listeners
            os.kill(listener, signal.SIGKILL)  # which only a supervisor notices
            eventually(lambda: served_by(ring)() not in ([], [listener]), "the new one has started another listener")
        writer.end()
