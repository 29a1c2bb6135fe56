"""Connections between two processes that break, or change bytes, at a byte that the test names.

The trainer's connections pass through detour.py. "tickets" reads by ticket (READ), "tcp" takes from the ring (TAKE).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from delivery_accounts import Run, Told, place_of
from detour import Detour, Direction
from preloaded import needs_compiler
from told import label, middle

from transport.wire.frames import VERSION, Kind

pytestmark = [pytest.mark.ucx, pytest.mark.slow, needs_compiler]


@pytest.fixture(scope="module", params=["tcp", "tickets"])
def run(request: pytest.FixtureRequest, way: Detour) -> Iterator[Run]:
    place = place_of(request.param)
    with Run(place, detour=way) as run:
        yield run


@pytest.fixture(scope="module")
def way(tmp_path_factory: Any) -> Iterator[Detour]:
    with Detour(tmp_path_factory.mktemp("way")) as made:
        yield made


@pytest.fixture(scope="module")
def trainer(run: Run, way: Detour) -> Iterator[Told]:
    """Its connections pass through this process."""
    with run.trainer(detour=way) as trainer:
        yield trainer
        trainer.end()


taking = pytest.mark.parametrize("run", ["tcp"], indirect=True)


@pytest.mark.guarantee("a connection breaks before, during or after the payload")
@pytest.mark.nightly(keep=1)
def test_a_connection_that_breaks_in_the_middle_of_a_payload(run: Run, way: Detour, trainer: Told) -> None:
    numbers = run.next_numbers(4)
    way.arm("cut", "to the trainer", middle(numbers[1]))
    run.publish(4)  # a demand may wait already
    accepted = trainer.ask("train", 4)
    way.wait()
    run.account(accepted)


@pytest.mark.nightly(keep=1)
@pytest.mark.guarantee("a connection breaks before, during or after the payload")
@pytest.mark.parametrize("direction", ["to the listener", "to the trainer"])
def test_a_connection_that_breaks_before_the_payload(
    run: Run, way: Detour, trainer: Told, direction: Direction
) -> None:
    run.publish(1)
    accepted = trainer.ask("train", 1)  # so that there is a connection
    # what asks for the payload, or the first of what is answered
    if run.place.kind != "tickets":  # where a demand may wait already
        way.arm("cut", direction)
        run.publish(3)
    else:
        run.publish(3)
        trainer.ask("choose", 3)
        way.arm("cut", direction)
        trainer.ask("fetch")
        accepted += trainer.ask("consume")
    accepted += trainer.ask("train", 4 - len(accepted))
    way.wait()
    run.account(accepted)


@pytest.mark.nightly
@pytest.mark.guarantee("a connection breaks before, during or after the payload")
@pytest.mark.guarantee("a trainer that takes from rings over the network is killed, or its connection breaks")
@pytest.mark.guarantee("a connection breaks, or a listener is killed, while a trainer consumes what it took")
@pytest.mark.parametrize("direction", ["to the listener", "to the trainer"])
def test_a_connection_that_breaks_between_payload_and_acknowledgement(
    run: Run, way: Detour, trainer: Told, direction: Direction
) -> None:
    run.publish(6)
    trainer.ask("take", 4)
    # the acknowledgement, or what answers it; where none comes, what is asked or answered next
    way.arm("cut", direction)
    accepted = trainer.ask("consume")
    accepted += trainer.ask("train", 6 - len(accepted))
    way.wait()
    run.account(accepted)


@pytest.mark.guarantee("bytes change on the way")
@pytest.mark.nightly(keep=1)
def test_bytes_of_a_payload_that_change_on_the_way_are_noticed_and_read_again(
    run: Run, way: Detour, trainer: Told
) -> None:
    numbers = run.next_numbers(4)
    before = trainer.ask("counted").get("checksum_failures", 0)
    way.arm("flip", "to the trainer", middle(numbers[1]))
    run.publish(4)  # a demand may wait already
    accepted = trainer.ask("train", 4)
    way.wait()
    run.account(accepted)
    assert trainer.ask("counted")["checksum_failures"] == before + 1


@pytest.mark.guarantee("bytes change on the way")
@taking
def test_bytes_of_a_ticket_that_change_on_the_way_are_noticed_and_taken_again(
    run: Run, way: Detour, trainer: Told
) -> None:
    """Every message has a checksum; the first mismatch ends the connection, and its claims go back."""
    numbers = run.next_numbers(4)
    way.arm("flip", "to the trainer", [label(number).encode() for number in numbers])
    run.publish(4)  # a demand may wait already
    accepted = trainer.ask("train", 4)
    way.wait()
    run.account(accepted)
    assert trainer.ask("changed_tickets") == 0


@taking
@pytest.mark.parametrize(
    ("direction", "marks"),
    [
        ("to the listener", [bytes([Kind.FINISH, 0, 1])]),
        ("to the trainer", [bytes([VERSION, Kind.STATUS, count, 0]) for count in range(1, 5)]),
    ],
    ids=["the request", "its answer"],
)
def test_bytes_of_an_acknowledgement_that_change_on_the_way_end_the_connection_and_nothing_comes_twice(
    run: Run, way: Detour, trainer: Told, direction: Direction, marks: list[bytes]
) -> None:
    run.publish(4)
    trainer.ask("take", 4)
    way.arm("flip", direction, marks)
    accepted = trainer.ask("consume")
    way.wait()
    accepted += trainer.ask("train", 4 - len(accepted))
    run.account(accepted)
