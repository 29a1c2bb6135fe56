"""Two builds of neighbouring versions of the wire, each in processes of its own, exchange payloads both ways."""

from __future__ import annotations

from pathlib import Path

import pytest
from delivery_accounts import Told, compare, place_of
from former_build import environment_of, former_build

pytestmark = [pytest.mark.ucx, pytest.mark.nightly]


@pytest.fixture(scope="module")
def former() -> dict[str, str]:
    """The environment of processes of the former build."""
    return environment_of(former_build())


@pytest.mark.timeout(400)  # the first one builds the former version
@pytest.mark.parametrize(("kind", "wires"), [("tcp", "tcp"), ("sqlite", "mapped,shm,tcp")])
@pytest.mark.parametrize("older", ["writer", "trainer"])
def test_payloads_of_one_build_are_consumed_by_the_other(
    kind: str, wires: str, older: str, former: dict[str, str], tmp_path: Path
) -> None:
    with place_of(kind, tmp_path) as place:
        newer = place.environment() | {"TRANSPORT_WIRES": wires}
        of = {"writer": newer, "trainer": newer, older: newer | former}
        with Told("writer", place, of["writer"]) as writer:
            writer.ask("write", 0, 6)
            writer.ask("flush")
            # processes that share a ring are of one build, so this one has to be told where it is served
            url = f"rings://127.0.0.1:{writer.ask('ports')[0]}" if place.is_ring else place.url
            with Told("trainer", place, of["trainer"], url=url) as trainer:
                assert writer.wire_version - trainer.wire_version == (-1 if older == "writer" else 1)
                compare(range(6), trainer.ask("train", 6))
                trainer.end()
            writer.end()
