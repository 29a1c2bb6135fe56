"""Versions on offer: what a ring wrote is what is proven."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from found_rings import take
from helpers import Child, until

from transport import BlockingClient, FoundRings, Schema, SharedRingBuffer, open_rings
from transport.claims.notices import Notice
from transport.errors import (
    ClosedError,
    MemberFailedError,
    SchemaError,
    StoreUnavailableError,
    UsageError,
    WeightsChecksumError,
)
from transport.ring.attachment import remove_dead
from transport.weights import Offers, ReferenceWorker, RolloutWorker, Taker, offer
from transport.weights.offers import TOPIC

pytestmark = pytest.mark.ucx

SCHEMA = Schema.of(a=("float32", 5), b=("float32", 3), none=("uint8", 0))
VERSION = {
    "a": np.arange(5, dtype=np.float32),
    "b": np.arange(3, dtype=np.float32) - 7,
    "none": np.empty(0, np.uint8),
}


@pytest.mark.parametrize(
    "weights",
    [
        VERSION,
        dict(reversed(VERSION.items())),
        {name: array.astype(array.dtype.newbyteorder()) for name, array in VERSION.items()},
        {"a": VERSION["a"].astype(np.float16), "b": [-7.0, -6.0, -5.0], "none": b""},
    ],
    ids=["as the schema", "in another order", "in the other byte order", "converted"],
)
def test_whatever_a_ring_takes_is_a_version_that_can_be_taken(weights: dict[str, Any]) -> None:
    worker = ReferenceWorker()
    with (
        SharedRingBuffer.create(SCHEMA, slots=2) as ring,
        BlockingClient(schemas=[SCHEMA], wire="mapped") as client,
    ):
        assert Taker(worker).take(client, offer(ring.write(weights), 1), 0, 30.0) == 1
    for name, array in worker.weights.items():
        np.testing.assert_array_equal(array, VERSION[name])


def test_bytes_that_are_not_the_offered_version_are_not_loaded() -> None:
    worker = ReferenceWorker()
    with (
        SharedRingBuffer.create(SCHEMA, slots=2) as ring,
        BlockingClient(schemas=[SCHEMA], wire="mapped") as client,
    ):
        written = ring.write(VERSION)
        assert written.checksum is not None
        other = msgspec.structs.replace(written, checksum=written.checksum ^ 1)
        with pytest.raises(WeightsChecksumError):
            Taker(worker).take(client, offer(other, 1), 0, 30.0)
        with pytest.raises(UsageError):
            offer(msgspec.structs.replace(written, checksum=None), 1)
        with pytest.raises(TypeError):
            offer(written, "1")  # type: ignore[arg-type]
    assert not worker.weights


# --- the newest version ---------------------------------------------------------------------------
@pytest.fixture
def place() -> Iterator[str]:
    prefix = f"offers-test-{secrets.token_hex(4)}-"
    yield f"rings:{prefix}"
    remove_dead(f"notices-{prefix}")  # of a process that was killed


SCHEMA_NAMES = {"a", "b", "none"}


def weights_of(version: int) -> dict[str, Any]:
    return {"a": np.full(5, version, np.float32), "b": np.zeros(3, np.float32), "none": np.empty(0, np.uint8)}


def test_a_version_that_was_replaced_or_is_damaged_is_missed(place: str, caplog: pytest.LogCaptureFixture) -> None:
    worker = ReferenceWorker("own")
    taker = Taker(worker)
    with (
        open_rings(place) as queue,
        SharedRingBuffer.create(SCHEMA, slots=2, overflow="overwrite") as ring,
        BlockingClient(schemas=[SCHEMA], wire="mapped") as client,
    ):
        replaced = ring.write(weights_of(1))
        queue.announce(TOPIC, 1, offer(replaced, 1))
        ring.discard(replaced)
        assert not taker.follow(queue, client)
        assert (taker.version, taker.announced, taker.missed) == (-1, 1, 1)

        queue.announce(TOPIC, 2, offer(ring.write(weights_of(2)), 2))
        assert taker.follow(queue, client)
        assert not taker.follow(queue, client)
        assert (taker.version, taker.announced, taker.missed) == (2, 2, 1)

        forged = msgspec.structs.replace(ring.write(weights_of(3)), checksum=replaced.checksum)
        queue.announce(TOPIC, 3, offer(forged, 3))
        with caplog.at_level(logging.WARNING, "transport.weights.offers"):
            assert not taker.follow(queue, client)
        assert (taker.version, taker.announced, taker.missed) == (2, 3, 2)
        assert "version 3" in caplog.text
    np.testing.assert_array_equal(worker.weights["a"], weights_of(2)["a"])


@pytest.fixture
def wire() -> str:
    return "mapped"


@pytest.fixture
def offered(place: str, wire: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Offers, BlockingClient]]:
    """With as few slots as for large versions."""
    monkeypatch.setattr("transport.weights.offers._SMALL_BYTES", 0)
    with (
        open_rings(place) as queue,
        Offers(SCHEMA, queue) as offers,
        BlockingClient(schemas=[SCHEMA], wire=wire) as client,
    ):
        yield queue, offers, client


@pytest.mark.nightly
@pytest.mark.parametrize("wire", ["mapped", "tcp"])
def test_no_replica_holds_up_the_trainer_and_each_gets_the_newest(offered: Any) -> None:
    """One takes many versions, one the last, one begins again."""
    queue, offers, client = offered
    takers = [Taker(ReferenceWorker("own")) for _ in range(2)]
    for version in range(20):
        offers.publish(weights_of(version), version)
        if version % 3 == 0:
            assert takers[0].follow(queue, client)
    for taker in (*takers, Taker(ReferenceWorker("own"))):
        assert taker.follow(queue, client)
        assert taker.version == 19
        worker = taker.worker
        assert isinstance(worker, ReferenceWorker)
        np.testing.assert_array_equal(worker.weights["a"], weights_of(19)["a"])
    assert take(queue, 1) == []  # weights are no payloads


@pytest.mark.nightly
@pytest.mark.parametrize("wire", ["tcp"])
def test_a_version_that_was_taken_over_a_wire_is_no_fault(offered: Any, capfd: pytest.CaptureFixture[str]) -> None:
    queue, offers, client = offered
    offers.publish(weights_of(1), 1)
    assert Taker(ReferenceWorker("own")).follow(queue, client)
    asyncio.run(until(lambda: not offers._ring.statistics().reading))  # the listener has given up waiting for more
    assert "WARNING" not in capfd.readouterr().err


@pytest.mark.nightly
def test_weights_on_offer_are_no_run_to_read_from(place: str) -> None:
    with open_rings(place) as queue, Offers(SCHEMA, queue) as offers, open_rings(f"{place}other-") as other:
        offers.publish(weights_of(1), 1)
        assert "rings:offers-" not in re.split(r"[ ,()]+", str(other.why_nothing()))  # as its ring would be told


@pytest.mark.nightly
def test_versions_on_offer_take_little_more_memory_than_four_of_them(place: str) -> None:
    for size in (1 << 20, 8 << 20):
        with open_rings(place) as queue, Offers(Schema.of(w=("uint8", size)), queue) as offers:
            assert 4 * size <= offers._ring.slot_count * size <= max(4 * size, 16 << 20)


@pytest.mark.nightly
def test_a_version_that_is_not_newer_is_refused_and_the_newest_stays_on_offer(offered: Any) -> None:
    queue, offers, client = offered
    taker = Taker(ReferenceWorker("own"))
    offers.publish(weights_of(5), 5)
    for version in (5, 4) * 4:
        with pytest.raises(UsageError):
            offers.publish(weights_of(version), version)
    assert taker.follow(queue, client)
    assert taker.version == 5
    offers.publish(weights_of(6), 6)
    assert taker.follow(queue, client)


def test_a_version_is_tried_again_where_taking_it_was_interrupted(place: str) -> None:
    class Interrupted(ReferenceWorker):
        def load(self, weights: Any, version: int) -> Any:
            if not self.weights:
                self.weights = dict(weights)
                raise KeyboardInterrupt
            return super().load(weights, version)

    taker = Taker(Interrupted("own"))
    with (
        open_rings(place) as queue,
        SharedRingBuffer.create(SCHEMA, slots=2) as ring,
        BlockingClient(schemas=[SCHEMA], wire="mapped") as client,
    ):
        queue.announce(TOPIC, 1, offer(ring.write(weights_of(1)), 1))
        with pytest.raises(KeyboardInterrupt):
            taker.follow(queue, client)
        assert (taker.version, taker.missed) == (-1, 0)
        assert taker.follow(queue, client)
        assert taker.version == 1


class Loses(ReferenceWorker):
    """Its stage of version 2 loses a tensor, and of version 3 returns an error."""

    def stage(self, weights: Any, version: int) -> Any:
        if version == 3:
            return MemoryError("no room for a second version")
        found = super().stage(weights, version)
        return {name: array for name, array in found.items() if version != 2 or name != "b"}


def test_what_a_taker_stages_is_proven_as_a_replica_proves_it(offered: Any) -> None:
    queue, offers, client = offered
    worker = Loses("own")
    taker = Taker(worker)
    for version, error in ((1, None), (2, WeightsChecksumError), (3, MemberFailedError), (4, None)):
        offers.publish(weights_of(version), version)
        if error is MemberFailedError:
            with pytest.raises(error):
                taker.follow(queue, client)
        else:
            assert taker.follow(queue, client) is (error is None)
        served = version if error is None else 1
        assert taker.version == served
        np.testing.assert_array_equal(worker.weights["a"], weights_of(served)["a"])
        assert worker.weights.keys() == SCHEMA_NAMES


def test_the_version_on_offer_stays_while_no_other_can_be_announced(
    offered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, offers, client = offered
    taker = Taker(ReferenceWorker("own"))
    offers.publish(weights_of(1), 1)
    with monkeypatch.context() as away:
        away.setattr(queue, "announce", lambda *_: (_ for _ in ()).throw(StoreUnavailableError("away")))
        for version in range(2, 12):
            with pytest.raises(StoreUnavailableError):
                offers.publish(weights_of(version), version)
    assert taker.follow(queue, client)
    assert taker.version == 1
    offers.publish(weights_of(12), 12)
    assert taker.follow(queue, client)
    assert taker.version == 12


def test_a_wrong_call_leaves_the_version_on_offer(offered: Any) -> None:
    queue, offers, client = offered
    offers.publish(weights_of(1), 1)
    for _ in range(8):
        with pytest.raises(TypeError):
            offers.publish(weights_of(2), "2")
        with pytest.raises(SchemaError):
            offers.publish({"a": np.zeros(5, np.float32)}, 2)
        with pytest.raises(UsageError):
            offers.publish(weights_of(1), 1)
    taker = Taker(ReferenceWorker("own"))
    assert taker.follow(queue, client)
    assert taker.version == 1
    offers.close()
    offers.close()
    with pytest.raises(ClosedError):
        offers.publish(weights_of(3), 3)
    client.close()
    with pytest.raises(ClosedError):
        Taker(ReferenceWorker("own")).follow(queue, client)


@pytest.mark.nightly
@pytest.mark.parametrize("directory", [False, True])
def test_a_trainer_that_begins_again_may_offer_smaller_versions(place: str, directory: bool, tmp_path: Path) -> None:
    if directory:  # whose notices outlive the trainer
        place = f"rings+sqlite:///{tmp_path}/directory"
    taker = Taker(ReferenceWorker("own"))
    with BlockingClient(schemas=[SCHEMA], wire="mapped") as client, open_rings(place) as replica:
        for versions in ((100,), (1, 2), (2,)):
            with open_rings(place) as queue, Offers(SCHEMA, queue) as offers:
                for version in versions:
                    offers.publish(weights_of(version), version)
                    assert taker.follow(replica, client)
                    assert taker.version == version


TRAINER = """
import sys
import numpy as np
from transport import Schema, ServerOptions
from transport import open_rings
from transport.weights import Offers
place, version = sys.argv[1], int(sys.argv[2])
schema = Schema.of(a=("float32", 5), b=("float32", 3), none=("uint8", 0))
with open_rings(place) as queue, Offers(schema, queue, server=ServerOptions(linger_s=0.1)) as offers:
    while True:
        weights = {"a": np.full(5, version, np.float32), "b": np.zeros(3, np.float32), "none": np.empty(0, np.uint8)}
        offers.publish(weights, version)
        print(version, flush=True)
        version = int(sys.stdin.readline())
"""


def test_a_replica_serves_on_when_the_trainer_is_killed_and_takes_what_its_successor_offers(tmp_path: Path) -> None:
    place = f"rings+sqlite:///{tmp_path}/directory"  # whose notices outlive the trainer
    worker = ReferenceWorker("own")
    taker = Taker(worker, 3)
    with open_rings(place) as queue, BlockingClient(schemas=[SCHEMA], wire="mapped") as client:
        with Child(TRAINER, place, 4) as trainer:
            trainer.line()
            assert taker.follow(queue, client)
            trainer.kill()
        assert not taker.follow(queue, client)
        assert taker.version == 4
        with Child(TRAINER, place, 2) as trainer:  # as from an earlier checkpoint
            trainer.line()
            assert taker.follow(queue, client, wait_s=30.0)
        assert taker.version == 2
    np.testing.assert_array_equal(worker.weights["a"], weights_of(2)["a"])


def test_a_follower_waits_for_the_next_trainer_when_the_notice_of_the_last_one_is_gone() -> None:
    waits: list[tuple[int | None, float]] = []

    class Gone:
        def latest(self, topic: str, newer_than: int | None = None, timeout_s: float = 0.0) -> None:
            if timeout_s:
                waits.append((newer_than, timeout_s))

    taker = Taker(cast("RolloutWorker", object()), 10)
    taker._seen = Notice("weights", 10, b"")
    assert not taker.follow(cast("FoundRings", Gone()), cast("BlockingClient", None), wait_s=3.0)
    assert waits == [(None, 3.0)]
