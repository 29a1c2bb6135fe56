"""Arguments that would be taken for something else, or that cannot be stored, are UsageErrors, and nothing is done."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from found_rings import consume, seen, take
from packers import Packer, Worker

from transport import FoundRings, Schema, ServerOptions, SharedRingBuffer, UCXXServer
from transport.claims.places import OnThisHost
from transport.errors import UsageError
from transport.store import SQLiteStore

SCHEMA = Schema.of(step=("int64",))
Wrong = Callable[[Any], object]


@pytest.fixture
def queue() -> Iterator[FoundRings]:
    with FoundRings(OnThisHost(f"arguments-{os.getpid()}-")) as made:
        yield made


REFUSED: list[Wrong] = [
    lambda queue: queue.failures(2**70),
    lambda queue: queue.failures(-1),
    lambda queue: queue.announce("t", 2**70),
    lambda queue: queue.latest("t", 2**70),
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_values_that_no_ring_can_hold(case: int, queue: FoundRings) -> None:
    with pytest.raises(UsageError):
        REFUSED[case](queue)
    assert queue.depth().unfinished == 0


def test_numpys_numbers_are_numbers_to_rings(queue: FoundRings, ring: SharedRingBuffer) -> None:
    number: Any = np.int64
    queue.hand_out(ring)
    ring.write({"a": 1}, readers=number(1), policy_version=number(7))
    parts = take(queue, number(2), np.float32(0), rank=number(0), oldest_version=number(7))
    assert seen(parts).versions.tolist() == [7]
    parts[0].release(np.float32(0))
    assert queue.depth(number(0)).unfinished == 1
    assert consume(take(queue, 1, oldest_version=3)) == [True]
    assert queue.failures(number(3)) == []
    assert queue.announce("numpy", number(3))
    assert queue.announce("numpy", 4)  # whatever the earlier one was stored as
    notice = queue.latest("numpy", number(3))
    assert notice is not None
    assert type(notice.version) is int


@pytest.mark.parametrize(
    "options",
    [
        {"lease_s": float("nan")},
        {"lease_s": 0},
        {"lease_s": float("inf")},
        {"max_deliveries": 0},
    ],
    ids=str,
)
def test_what_rings_are_opened_with(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        FoundRings(OnThisHost("arguments-"), **options)


@pytest.mark.parametrize(
    "options", [{"max_bytes": 0}, {"busy_timeout_s": float("nan")}, {"synchronous": "full"}], ids=str
)
def test_what_a_file_is_opened_with(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        SQLiteStore(tmp_path / "file.db", **options)
    assert list(tmp_path.iterdir()) == []


# --- rings and servers --------------------------------------------------------------------------------------
@pytest.fixture
def ring() -> Iterator[SharedRingBuffer]:
    with SharedRingBuffer.create(slots=1, slot_bytes=100) as made:
        yield made


RING: list[Wrong] = [
    lambda ring: SharedRingBuffer.create(SCHEMA, slots=0),
    lambda ring: ring.write({"a": 1}, readers=0),
    lambda ring: UCXXServer(ring, addresses="10.0.0.7"),  # text has letters
    lambda ring: UCXXServer(ring, secret="text"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("case", range(len(RING)))
def test_rings_and_servers(case: int, ring: SharedRingBuffer) -> None:
    with pytest.raises(UsageError):
        RING[case](ring)
    assert ring.statistics().free == 1


def test_numpys_numbers_are_numbers(ring: SharedRingBuffer) -> None:
    ticket = ring.write({"a": 1}, readers=np.int64(2))  # type: ignore[arg-type]
    assert ticket.readers == 2


@pytest.mark.ucx
@pytest.mark.parametrize(
    "setup",
    [
        lambda: Packer().setup_ucxx_packer(schemas=SCHEMA),
        lambda: Worker().setup_ucxx(SCHEMA, rings="x"),
        lambda: Worker().setup_ucxx(SCHEMA, server=ServerOptions(secret="text")),  # type: ignore[arg-type]
    ],
)
def test_mixins(setup: Callable[[], None]) -> None:
    with pytest.raises(UsageError):
        setup()
