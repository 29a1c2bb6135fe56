"""Some fields of payloads in a batch, in every layout."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import pytest
from claimed import claim_batch
from helpers import NETWORK_WIRE

from transport import Schema, SharedRingBuffer, Trainer, UCXXServer, UpTo
from transport.errors import SchemaError, UsageError

pytestmark = pytest.mark.ucx

SCHEMA = Schema.of(
    prompt=("text", UpTo(100)),
    tokens=("int32", UpTo(1000)),
    image=("uint8", 100, 100),
    reward="float32",
    mask=("bool", UpTo(1000)),
    messages=("value", UpTo(4096)),
)
NUMBERS = list(range(3, 13))
PART = ("messages", "tokens", "reward")


def sample(number: int) -> dict[str, Any]:
    return {
        "prompt": "p" * number,
        "tokens": np.arange(number, dtype=np.int32),
        "image": np.full((100, 100), number, np.uint8),
        "reward": number / 2,
        "mask": np.ones(number, bool),
        "messages": [{"n": number, "scores": np.arange(number)}],
    }


def check(batch: Any, layout: str) -> None:
    assert batch.schema.names == ("tokens", "reward", "messages")
    assert len(batch) == len(NUMBERS)
    assert [each[0]["n"] for each in batch["messages"]] == NUMBERS
    assert [each[0]["scores"].tolist() for each in batch["messages"]] == [list(range(n)) for n in NUMBERS]
    assert [float(each) for each in batch["reward"]] == [n / 2 for n in NUMBERS]
    if layout == "packed":
        assert batch["tokens"].tolist() == [at for n in NUMBERS for at in range(n)]
        assert set(batch.cu_seqlens) == {"tokens"}
    assert [each["tokens"].tolist() for each in batch] == [list(range(n)) for n in NUMBERS]
    assert all(set(each) == {"tokens", "reward", "messages"} for each in batch)
    assert batch.lengths["tokens"].tolist() == NUMBERS
    with pytest.raises(KeyError):
        batch["image"]


@pytest.mark.parametrize("layout", ["list", "padded", "packed"])
@pytest.mark.parametrize("verify", [True, False])
def test_a_batch_of_a_mapped_ring_has_the_fields_that_were_asked_for(layout: Any, verify: bool | None) -> None:
    with SharedRingBuffer.create(SCHEMA, slots=16) as ring:
        ring.write_many([sample(n) for n in NUMBERS])
        with claim_batch(ring, 16, layout=layout, fields=PART, verify=verify) as batch:
            check(batch, layout)
            assert batch.consume().all()
            del batch
        assert ring.statistics().free == 16


@pytest.mark.parametrize("layout", ["list", "padded", "packed"])
@pytest.mark.parametrize("wire", ["mapped", NETWORK_WIRE])
def test_a_trainers_batch_has_the_fields_that_were_asked_for(layout: Any, wire: Any) -> None:
    prefix = f"fields-{secrets.token_hex(4)}-"
    with (
        SharedRingBuffer.create(SCHEMA, slots=16, prefix=prefix) as ring,
        UCXXServer(ring, mode="thread"),
        Trainer(SCHEMA, f"rings:{prefix}", wire={wire}, layout=layout, fields=PART) as trainer,
    ):
        ring.write_many([sample(n) for n in NUMBERS])
        batch = trainer.take(len(NUMBERS), 20.0, fill_s=20.0)
        assert batch is not None
        assert [each[0]["n"] for each in batch["messages"]] == NUMBERS
        assert [float(each) for each in batch["reward"]] == [n / 2 for n in NUMBERS]
        assert [each["tokens"].tolist() for each in batch] == [list(range(n)) for n in NUMBERS]
        assert all(set(each) == {"tokens", "reward", "messages"} for each in batch)
        assert batch.lengths["tokens"].tolist() == NUMBERS
        with pytest.raises(KeyError):
            batch["image"]
        batch.consume()
        assert batch.accepted.all()


@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [
        ({"fields": ("x",)}, SchemaError, "no field 'x'"),
        ({"fields": ()}, UsageError, "give the names"),
        (
            {"layout": "padded", "fields": ("reward",), "out": {"image": np.zeros(4)}},
            SchemaError,
            "out= has arrays for image",
        ),
    ],
)
def test_fields_that_are_unknown_are_refused_before_anything_is_taken(
    shape: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Trainer(SCHEMA, "rings:nobody-", **shape)
