"""Optional fields: absent from some payloads, without bytes, None at the reader, and False in a batch's mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from claimed import claim_batch

from transport import BlockingClient, Optional, Rollout, Schema, SharedRingBuffer, Trainer, UCXXServer, UpTo
from transport.errors import SchemaError

SCHEMA = Schema.of(
    tokens=("int32", UpTo(8)),
    image=Optional("uint8", UpTo(4), 2),
    reward=Optional("float32"),
    note=Optional("text", UpTo(16)),
    plan=Optional("value", UpTo(1024)),
    digest=Optional("bytes", 3),
)
FULL = {
    "tokens": np.arange(3, dtype=np.int32),
    "image": np.full((2, 2), 7, np.uint8),
    "reward": np.float32(0.5),
    "note": "why",
    "plan": [1, None],
    "digest": b"abc",
}
BARE: dict[str, Any] = {"tokens": np.arange(2, dtype=np.int32), "image": None, "plan": None}
EMPTY = {**FULL, "image": np.empty((0, 2), np.uint8), "note": "", "plan": {}}
PAYLOADS = [FULL, BARE, EMPTY]


def as_lists(payload: Any) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in payload.items()}


WANTED = [as_lists({**dict.fromkeys(SCHEMA.names), **payload}) for payload in PAYLOADS]


def test_what_is_absent_is_none_and_what_is_empty_is_empty() -> None:
    with SharedRingBuffer.create(SCHEMA, slots=8) as ring, BlockingClient(schemas=[SCHEMA]) as client:
        tickets = [ring.write(payload) for payload in PAYLOADS] + list(ring.write_many(PAYLOADS))
        assert [as_lists(client.read(ticket)) for ticket in tickets] == WANTED * 2
        sizes = [{each.name: each.nbytes for each in ticket.fields(SCHEMA)} for ticket in tickets]
        assert sizes[1] == {"tokens": 8, "image": 0, "reward": 0, "note": 0, "plan": 0, "digest": 0}


@pytest.mark.ucx
def test_over_a_wire_and_of_some_fields_the_same_comes() -> None:
    with (
        SharedRingBuffer.create(SCHEMA, slots=8) as ring,
        UCXXServer(ring, mode="thread", addresses=("127.0.0.1",)),
        BlockingClient(schemas=[SCHEMA], wire={"tcp"}, ack="manual") as client,
    ):
        for payload, wanted in zip(PAYLOADS, WANTED, strict=True):
            ticket = ring.write(payload)
            for names in (SCHEMA.names, ("reward", "note"), ("image", "tokens")):
                found = client.read(ticket, fields=names)
                assert as_lists(found) == {name: wanted[name] for name in SCHEMA.names if name in names}


@pytest.mark.parametrize("layout", ["list", "padded", "packed"])
@pytest.mark.parametrize("fields", [SCHEMA.names, ("reward", "digest", "plan")])
def test_a_batch_has_a_mask_of_them_in_every_layout(layout: Any, fields: tuple[str, ...]) -> None:
    with SharedRingBuffer.create(SCHEMA, slots=8) as ring:
        ring.write_many(PAYLOADS)
        with claim_batch(ring, 3, layout=layout, fields=fields, fill=9) as batch:
            there = {name: [wanted[name] is not None for wanted in WANTED] for name in fields if name != "tokens"}
            assert {name: mask.tolist() for name, mask in batch.present.items()} == there
            assert [as_lists(each) for each in batch] == [{name: each[name] for name in fields} for each in WANTED]
            assert batch["plan"] == [[1, None], None, {}]
            if layout != "list":
                assert batch["reward"].tolist() == [0.5, 9.0, 0.5]
            if "image" in fields:
                assert batch.lengths["image"].tolist() == [2, 0, 0]


@pytest.mark.ucx
@pytest.mark.parametrize("wire", ["mapped", "tcp"])
def test_a_trainer_takes_payloads_with_and_without_them(wire: Any) -> None:
    name = f"rings:optional-{wire}-"
    with Rollout(SCHEMA, name, mode="thread", drain_s=0) as rollout:
        for payload in PAYLOADS:
            rollout.write(payload)
        rings = f"rings://127.0.0.1:{rollout.ports[0]}" if wire == "tcp" else name
        with Trainer(SCHEMA, rings, wire={wire}) as trainer:
            batch = trainer.take(3, timeout_s=20, fill_s=20)
            assert batch is not None
            assert [as_lists(each) for each in batch] == WANTED
            assert batch.present["reward"].tolist() == [True, False, True]
            assert batch["image"].shape == (3, 2, 2)
            batch.consume()


def test_reserved_memory_is_of_what_is_there() -> None:
    with SharedRingBuffer.create(SCHEMA, slots=4) as ring, BlockingClient(schemas=[SCHEMA]) as client:
        with ring.reserve({"tokens": 2, "image": 1, "reward": 1, "note": None}) as lease:
            lease["tokens"][:] = 5
            lease["image"][:] = 6
            lease["reward"][...] = 1.5
            assert lease["note"] is lease["plan"] is None
        assert as_lists(client.read(lease.ticket)) == {
            **dict.fromkeys(SCHEMA.names), "tokens": [5, 5], "image": [[6, 6]], "reward": 1.5
        }  # fmt: skip
        for lengths in ({}, {"tokens": 1, "other": 1}):
            with pytest.raises(SchemaError, match="the optional ones"):
                ring.reserve(lengths)


def test_only_what_is_optional_may_be_absent() -> None:
    with SharedRingBuffer.create(SCHEMA, slots=4) as ring:
        with pytest.raises(SchemaError, match=r"missing: tokens$"):
            ring.write({"image": None})
        with pytest.raises(SchemaError, match="tokens"):
            ring.write({"tokens": None})
        assert ring.statistics().free == 4


@pytest.mark.parametrize("numbers", [(0, 6, 0, 0, 0, 0), (0, 0, 2, 0, 0, 0), (0, 0, 0, 18, 0, 0), (0, 0, 0, 0, 0, 2)])
def test_a_ticket_with_another_number_than_there_may_be_is_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(SchemaError, match="expected a length of"):
        SCHEMA.layout(numbers)
