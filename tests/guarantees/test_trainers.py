"""Trainers that are killed or stopped between two steps: each payload is consumed once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from delivery_accounts import SHORT_LEASE, Run, Told, compare, place_of

pytestmark = [pytest.mark.ucx, pytest.mark.slow]


@pytest.fixture(scope="module", params=["mapped", "tcp"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Listeners find a trainer silent, and leases end, after 1.5 s."""
    place = place_of(request.param)
    with Run(place, **SHORT_LEASE) as run:
        yield run


@pytest.mark.guarantee("a trainer that claims from the ring is killed")
@pytest.mark.guarantee("a trainer that takes from rings over the network is killed, or its connection breaks")
@pytest.mark.nightly(keep=1)
def test_what_a_killed_trainer_had_and_had_not_consumed_is_consumed_by_another_one(run: Run) -> None:
    run.publish(8)
    with run.trainer(**SHORT_LEASE) as victim:
        accepted = victim.ask("train", 2)
        assert len(victim.ask("take", 4)) == 4
        victim.kill()  # two consumed, four taken
    accepted += run.other.ask("train", 6)
    run.account(accepted)


@pytest.mark.guarantee("a trainer that claims from a mapped ring is stopped")
@pytest.mark.guarantee("the same trainer is stopped")
@pytest.mark.nightly(keep=1)
def test_what_a_stopped_trainer_held_passes_to_another_one_and_its_own_consume_is_refused(run: Run) -> None:
    run.publish(8)
    with run.trainer(**SHORT_LEASE) as victim:
        accepted = victim.ask("train", 2)
        victim.ask("take", 2)
        victim.stop()
        accepted += run.other.ask("train", 6)
        victim.resume()
        assert victim.ask("consume") == []
        run.account(accepted)
        victim.end()


@pytest.mark.guarantee("two trainers claim from a ring at once")
def test_trainers_that_claim_at_once_by_both_ways_get_every_payload_once() -> None:
    """Two of them map the rings of two writers, two take from them over the network; each takes what it gets."""
    each = 48  # three times through the slots of a ring
    with contextlib.ExitStack() as stack:
        place = place_of("mapped")
        writers = [stack.enter_context(Told("writer", place)) for _ in range(2)]
        ways = [place.environment(**SHORT_LEASE) | {"TRANSPORT_WIRES": wire} for wire in ("mapped", "tcp") * 2]
        trainers = [stack.enter_context(Told("trainer", place, way)) for way in ways]
        for number, writer in enumerate(writers):
            writer.begin("write", number * each, each)
        accepted: list[int] = []
        while len(accepted) < len(writers) * each:
            for trainer in trainers:
                trainer.begin("drain")
            for trainer in trainers:
                numbers, failed = trainer.answer()
                assert failed == 0
                accepted += numbers
        for writer in writers:
            writer.answer()
        compare(range(len(writers) * each), accepted)
        for told in (*trainers, *writers):
            told.end()
