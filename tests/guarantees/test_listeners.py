"""Listeners that are killed, stopped or ended, and whole rings that die, at a step of a trainer that a test names."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from delivery_accounts import Run, Told, compare, gone, kill, looking, place_of, served_by
from detour import Detour
from helpers import eventually, parent_of
from preloaded import needs_compiler
from told import middle

from transport.wire.frames import Kind

pytestmark = [pytest.mark.ucx, pytest.mark.slow, needs_compiler]


@pytest.fixture(scope="module")
def way(tmp_path_factory: Any) -> Iterator[Detour]:
    with Detour(tmp_path_factory.mktemp("way")) as made:
        yield made


@pytest.fixture(params=["tcp", "tickets"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    with Run(place_of(request.param)) as run:
        yield run


@pytest.fixture(params=["tcp", "tickets"])
def held_up(request: pytest.FixtureRequest, way: Detour) -> Iterator[Run]:
    """One whose messages can be held on their way."""
    with Run(place_of(request.param), detour=way) as run:
        yield run


def listener_of(run: Run) -> int:
    """The process of its only listener."""
    with looking(run.writer.ask("segment")) as ring:
        eventually(lambda: len(served_by(ring)()) == 1, "a listener serves")
        return served_by(ring)()[0]


@pytest.mark.guarantee("a listener is killed, stopped or restarted")
@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize(
    ("run", "how"),
    [("tickets", signal.SIGKILL), ("tcp", signal.SIGKILL), ("tickets", signal.SIGSTOP), ("tcp", signal.SIGTERM)],
    indirect=["run"],
)
def test_a_listener_that_fails_between_claim_and_read(run: Run, how: signal.Signals) -> None:
    run.publish(4)
    by_ticket = run.place.kind == "tickets"
    run.other.ask("choose" if by_ticket else "take", 4)
    os.kill(listener_of(run), how)  # a stopped one is killed after ``watchdog_s``
    if by_ticket:
        run.other.ask("fetch")
    accepted = run.other.ask("consume")
    accepted += run.other.ask("train", 4 - len(accepted))
    run.account(accepted)


@pytest.mark.guarantee("a listener is killed, stopped or restarted")
@pytest.mark.nightly(keep=1)
def test_a_listener_that_is_killed_in_the_middle_of_a_payload(held_up: Run, way: Detour) -> None:
    numbers = held_up.publish(4)
    with held_up.trainer(detour=way) as trainer:
        way.arm("hold", "to the trainer", middle(numbers[1]))
        trainer.begin("train", 4)
        way.wait()
        os.kill(listener_of(held_up), signal.SIGKILL)
        way.cut()
        held_up.account(trainer.answer())
        trainer.end()


@pytest.mark.nightly
@pytest.mark.guarantee("a listener is killed while demands wait at it")
@pytest.mark.parametrize("run", ["tcp"], indirect=True)
def test_a_listener_that_is_killed_while_a_demand_waits(run: Run) -> None:
    assert run.other.ask("take", 1, 0.2) == []  # its demand stays for a while
    os.kill(listener_of(run), signal.SIGKILL)
    run.publish(4)
    run.account(run.other.ask("train", 4))


@pytest.mark.guarantee("a trainer is killed while it takes or ends a claim")
@pytest.mark.parametrize("held_up", ["tcp"], indirect=True)
def test_a_trainer_that_is_killed_while_an_answer_with_claims_is_on_its_way(held_up: Run, way: Detour) -> None:
    numbers = held_up.publish(4)
    with held_up.trainer(detour=way) as victim:
        way.arm("hold", "to the trainer", middle(numbers[1]))
        victim.begin("take", 4)
        way.wait()  # claimed by the listener, and unknown to the trainer
        victim.kill()
    way.cut()
    held_up.account(held_up.other.ask("train", 4))


@pytest.mark.nightly
@pytest.mark.guarantee("a trainer is killed while it takes or ends a claim")
@pytest.mark.parametrize("held_up", ["tcp"], indirect=True)
def test_a_trainer_that_is_killed_before_it_hears_that_its_consume_was_accepted(held_up: Run, way: Detour) -> None:
    """What was accepted counts as consumed: its trainer has trained on nothing that another one gets as well."""
    held_up.publish(4)
    with held_up.trainer(detour=way) as victim:
        in_question = victim.ask("take", 4)
        way.arm("hold", "to the trainer")
        victim.begin("consume")
        way.wait()
        held_up.wait_done(4)
        victim.kill()
    way.cut()
    held_up.account(in_question)


@pytest.mark.guarantee("a connection breaks, or a listener is killed, while a trainer consumes what it took")
@pytest.mark.parametrize("held_up", ["tcp"], indirect=True)
def test_a_listener_that_is_killed_behind_a_consume_that_it_accepted(held_up: Run, way: Detour) -> None:
    held_up.publish(4)
    with held_up.trainer(detour=way) as trainer:
        trainer.ask("take", 4)
        way.arm("hold", "to the trainer")
        trainer.begin("consume")
        way.wait()
        held_up.wait_done(4)
        os.kill(listener_of(held_up), signal.SIGKILL)
        way.cut()
        held_up.account(trainer.answer())  # the next listener says that they are its own
        trainer.end()


# --- everything that serves a ring -------------------------------------------------------------------------
@pytest.fixture
def doomed(way: Detour, tmp_path: Path) -> Iterator[Run]:
    """Another ring. Who waits for an answer about it gives up after 3.5 s."""
    place = place_of("tcp")
    with Run(place, detour=way, **_SHORT) as run:
        yield run
        way.reach(True)


_SHORT = {"connect_timeout_s": 1.0, "handshake_timeout_s": 1.0}


def all_of(run: Run) -> list[int]:
    """Writer, supervisor and listener."""
    listener = listener_of(run)
    return [run.writer.pid, parent_of(listener), listener]


@pytest.mark.guarantee("the same, and the ring's writer, supervisor and listeners are killed at once")
def test_a_ring_killed_as_a_whole_behind_a_consume_is_asked_in_its_segment(doomed: Run, way: Detour) -> None:
    doomed.publish(4)
    segment = doomed.writer.ask("segment")
    with doomed.trainer(detour=way, **_SHORT) as trainer:
        trainer.ask("take", 4)
        way.arm("hold", "to the trainer")
        trainer.begin("consume")
        way.wait()
        doomed.wait_done(4)
        kill(*all_of(doomed))
        doomed.writer.wait()
        way.cut()
        compare(range(4), trainer.answer())
        trainer.end()
    Path(f"/dev/shm{segment}").unlink(missing_ok=True)
    assert gone(segment)


def settled(trainer: Told) -> list[int]:
    """Consume the same batch until nothing of it is in question; the numbers of what was accepted."""
    accepted: list[int] = []

    def settled() -> bool:
        accepted.extend(trainer.ask("consume"))
        return trainer.ask("in_question") == []

    eventually(settled, "the ring says what became of them")
    return accepted


@pytest.mark.guarantee("the network between a trainer and a ring is away")
@pytest.mark.nightly
@pytest.mark.parametrize("heard", [True, False], ids=["accepted", "not accepted"])
def test_a_network_that_is_away_for_too_long_while_a_trainer_consumes(doomed: Run, way: Detour, heard: bool) -> None:
    doomed.publish(4)
    url = f"rings://127.0.0.1:{doomed.writer.ask('ports')[0]}"  # as a trainer of another host has it
    with doomed.trainer(
        detour=way, url=url, **_SHORT, claim_lease_s=200.0
    ) as trainer:  # it renews seldom: the next bytes are its consume
        collected = trainer.ask("take", 4)
        way.reach(False)
        try:
            if heard:
                way.arm("hold", "to the trainer")
            else:
                way.arm("cut", "to the listener", [bytes([Kind.FINISH, 0, 1])])
            trainer.begin("consume")
            way.wait()
            if heard:
                doomed.wait_done(4)
                way.cut()
            assert trainer.answer() == []  # it does not know
            assert trainer.ask("in_question") == collected
            [line] = [line for line in trainer.ask("logged") if "They are in question" in line]
            assert "what became of 4 payloads" in line
        finally:
            way.reach(True)
        accepted = settled(trainer)
        assert accepted == (collected if heard else [])
        trainer.end()  # gives back what it has taken ahead, which may be what was not accepted
        if heard:
            assert doomed.other.ask("take", 1, 0.2) == []
        else:
            accepted += doomed.other.ask("train", 4)
        doomed.account(accepted)


@pytest.mark.guarantee("the same, and the ring's writer, supervisor and listeners are killed at once")
def test_a_ring_elsewhere_that_dies_as_a_whole_behind_a_consume_tells_once_another_writer_has_it(
    doomed: Run, way: Detour
) -> None:
    doomed.publish(4)
    [port] = doomed.writer.ask("ports")
    segment = doomed.writer.ask("segment")
    with doomed.trainer(detour=way, url=f"rings://127.0.0.1:{port}", **_SHORT) as trainer:
        collected = trainer.ask("take", 4)
        way.arm("hold", "to the trainer")
        way.reach(False)  # else a trainer that is tired of waiting asks the listener again before that is killed
        trainer.begin("consume")
        way.wait()
        doomed.wait_done(4)
        kill(*all_of(doomed))
        doomed.writer.wait()
        way.reach(True)
        way.cut()
        assert trainer.answer() == []
        assert trainer.ask("in_question") == collected
        assert any("what became of 4 payloads" in line for line in trainer.ask("logged"))
        assert trainer.ask("consume") == []  # it is still gone
        assert trainer.ask("in_question") == collected
        serving = doomed.place.environment(**_SHORT) | way.listener
        name = segment.removeprefix("/transport-")
        with Told("writer", doomed.place, serving, name=name, slots=32, port=port) as second:
            assert second.ask("segment") == segment
            doomed.account(settled(trainer))
            trainer.end()
            second.end()
    assert gone(segment)
