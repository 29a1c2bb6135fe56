"""Named consumers: stages that each see every payload once, by names that are fixed when the ring is made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from claimed import claim_batch, claim_each, consumed

from transport import Schema, SharedRingBuffer, Trainer, UCXXServer
from transport.errors import LayoutError, RankError, SharedMemoryError, UsageError
from transport.ring.consumers import consumers_of, consumers_text, rank_of

SCHEMA = Schema.of(x="int64")


def test_other_processes_find_the_names_in_the_segment() -> None:
    with SharedRingBuffer.create(SCHEMA, slots=2, consumers={"reference": 1, "train": 4}) as ring:
        ticket = ring.write({"x": 7})
        assert ticket.readers == 5
        with SharedRingBuffer.attach(ring.name, SCHEMA, role="reader") as other:
            assert other.consumers == {"reference": range(1), "train": range(1, 5)}
            assert [other.rank_of("train", rank) for rank in range(4)] == [1, 2, 3, 4]
            with claim_batch(other, 1, rank="reference", layout="packed") as batch:
                assert batch["x"].tolist() == [7]
                assert batch.consume().all()
        with SharedRingBuffer.attach(ring.name, SCHEMA, role="writer") as writer:
            assert writer.write({"x": 8}).readers == 5


@pytest.mark.ucx
def test_a_name_is_known_over_a_wire() -> None:
    with (
        SharedRingBuffer.create(SCHEMA, slots=4, consumers=["reference", "reward"]) as ring,
        UCXXServer(ring, mode="thread") as server,
    ):
        rings = f"rings://127.0.0.1:{server.ports[0]}"
        ring.write({"x": 1})
        for name in ("reward", "reference"):
            with Trainer(SCHEMA, rings, rank=name, wire={"tcp"}) as trainer:
                batch = trainer.take(4, 20.0)
                assert batch is not None and batch["x"].tolist() == [1]
                batch.consume()
                assert batch.accepted.all()
        assert ring.statistics().free == 4
        with (
            Trainer(SCHEMA, rings, rank="rewards", wire={"tcp"}) as trainer,
            pytest.raises(RankError, match="no consumer 'rewards': it has reference, reward"),
        ):
            while True:  # raised once the time of a take is over
                trainer.take(4, 0.2)


def test_unknown_names_and_ranks_are_clear_errors() -> None:
    with SharedRingBuffer.create(SCHEMA, slots=2, consumers={"a": 1, "b": 2}) as ring:
        ring.write({"x": 1})
        with pytest.raises(RankError, match="no consumer 'c': it has a, b"):
            claim_each(ring, 1, rank="c")
        with pytest.raises(RankError, match="has 2 ranks; say which one"):
            claim_each(ring, 1, rank="b")
        with pytest.raises(RankError, match=r"consumer b has ranks 0\.\.1, not 2"):
            ring.rank_of("b", 2)
        for readers in (1, 4):
            with pytest.raises(UsageError, match="made for readers=3"):
                ring.write({"x": 1}, readers=readers)
            with pytest.raises(UsageError, match="made for readers=3"):
                ring.write_many([{"x": 1}], readers=readers)
        assert ring.write({"x": 1}, readers=3).readers == 3
    with SharedRingBuffer.create(SCHEMA, slots=2) as ring:
        assert ring.write({"x": 1}).readers == 1
        assert ring.consumers == {}
        with pytest.raises(RankError, match="it was made without names; give a rank"):
            claim_each(ring, 1, rank="a")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("reference", "give names in a list"),
        ([], "0 ranks of all consumers"),
        (["a", "a"], "stands there twice"),
        (["a b"], "invalid consumer"),
        (["a:1"], "invalid consumer"),
        (["x" * 33], "invalid consumer"),
        ([3], "invalid consumer"),
        ({"a": 0}, "give 1 or more"),
        ({"a": True}, "give 1 or more"),
        ({"a": 16, "b": 1}, "17 ranks of all consumers"),
        ([chr(97 + at) * 32 for at in range(16)], "bytes together; the limit is 400"),
        (7.0, "give names in a list"),
        (17, "1 to 16 ranks"),
        (0, "1 to 16 ranks"),
    ],
)
def test_consumers_that_make_no_sense_are_refused(given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        SharedRingBuffer.create(SCHEMA, slots=1, consumers=given)


@pytest.mark.parametrize(
    "text", ["0", "17", "a", "a:0", "a:17", "a:1,a:1", ":1", "a:9,b:9", "a:x", "a:1,", "\ufffd:1", "a:" + "9" * 300]
)
def test_damaged_names_are_an_error_and_never_ranks(text: str) -> None:
    with pytest.raises(SharedMemoryError, match="consumers are damaged"):
        consumers_of(text)


def test_text_and_ranks_belong_together() -> None:
    text = consumers_text({"a": 3, "b-2": 13})
    assert text == "a:3,b-2:13"
    assert rank_of(consumers_of(text), "b-2", 12) == 15
    assert rank_of({}, 5) == 5
    assert np.array_equal(list(consumers_of(text)["a"]), [0, 1, 2])


def test_a_ring_that_is_taken_over_keeps_its_consumers() -> None:
    name = f"nested-{np.random.default_rng().integers(1 << 60):x}"
    first = SharedRingBuffer.create(SCHEMA, slots=2, name=name, consumers=("a", "b"))
    with SharedRingBuffer.attach(first.name, role="reader"):  # keeps the segment while the writer goes
        first.write({"x": 1})
        first.close(keep_unread=True)
        with pytest.raises(LayoutError, match="made for the consumers a:1,b:1, not for c:1"):
            SharedRingBuffer.create(SCHEMA, slots=2, name=name, consumers=("c",))
        with SharedRingBuffer.create(SCHEMA, slots=2, name=name, consumers=("a", "b")) as second:
            assert len(claim_each(second, 1, rank="b")) == 1


@pytest.mark.parametrize("before", [2, None])
def test_a_ring_is_taken_over_for_as_many_ranks_as_its_payloads_are_for(before: int | None) -> None:
    name = f"ranks-{np.random.default_rng().integers(1 << 60):x}"
    first = SharedRingBuffer.create(SCHEMA, slots=2, name=name, consumers=before)
    with SharedRingBuffer.attach(first.name, role="reader") as kept:  # keeps the segment while the writer goes
        first.write({"x": 1}, readers=2)
        first.close(keep_unread=True)
        for other in (1, 4):
            with pytest.raises(LayoutError, match=f"made for the consumers 2, not for {other}"):
                SharedRingBuffer.create(SCHEMA, slots=2, name=name, consumers=other)
        second = SharedRingBuffer.create(SCHEMA, slots=2, name=name, consumers=2)
        for rank in range(2):
            assert consumed(second, 2, rank=rank) == 1
        second.close(keep_unread=True)
        with SharedRingBuffer.create(SCHEMA, slots=2, name=name, consumers=4) as third:  # nothing is unread
            assert (kept.ring_id, third.write({"x": 2}).readers) == (third.ring_id, 4)
