"""Some fields of payloads that are claimed or taken: as batches in every layout, and as a list of payloads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import NETWORK, NETWORK_WIRE, eventually

from transport import BlockingClient, Schema, SharedRingBuffer, UCXXServer, UpTo
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
        with ring.claim_batch(16, layout=layout, fields=PART, verify=verify) as batch:
            check(batch, layout)
            assert batch.consume().all()
            del batch
        assert ring.statistics().free == 16


@pytest.mark.parametrize("layout", ["list", "padded", "packed"])
def test_a_batch_over_a_wire_moves_only_these_fields(layout: Any) -> None:
    with (
        SharedRingBuffer.create(SCHEMA, slots=16) as ring,
        UCXXServer(ring, mode="thread") as server,
        BlockingClient(schemas=[SCHEMA], wire=NETWORK) as client,
    ):
        tickets = ring.write_many([sample(n) for n in NUMBERS])
        wanted = sum(each.nbytes for t in tickets for each in t.fields(SCHEMA) if each.name in PART)
        with client.take_batch(f"127.0.0.1:{server.ports[0]}", 16, wait_s=5, layout=layout, fields=PART) as batch:
            check(batch, layout)
            assert batch.consume().all()
        eventually(lambda: getattr(ring.statistics(), f"bytes_{NETWORK_WIRE}") == wanted)  # once UCX is through
        assert ring.statistics().free == 16


@pytest.mark.parametrize("schema", [SCHEMA, None], ids=["fixed", "open"])
def test_taken_payloads_have_these_fields(schema: Schema | None) -> None:
    with (
        SharedRingBuffer.create(schema, slots=16, slot_bytes=None if schema else 1 << 15) as ring,
        UCXXServer(ring, mode="thread") as server,
        BlockingClient(schemas=[SCHEMA], wire=NETWORK) as client,
    ):
        ring.write_many([sample(n) for n in NUMBERS])
        batch = client.take(f"127.0.0.1:{server.ports[0]}", 16, wait_s=5, fields=("prompt", "mask"))
        assert [each.arrays()["prompt"] for each in batch] == ["p" * n for n in NUMBERS]
        assert [list(each.arrays()) for each in batch] == [["prompt", "mask"]] * len(NUMBERS)
        assert client.consume(batch).all()
        assert ring.statistics().free == 16


def test_what_is_unknown_gives_all_payloads_back() -> None:
    with (
        SharedRingBuffer.create(SCHEMA, slots=4) as ring,
        UCXXServer(ring, mode="thread") as server,
        BlockingClient(schemas=[SCHEMA], wire=NETWORK) as client,
        BlockingClient(wire=NETWORK) as stranger,
    ):
        address = f"127.0.0.1:{server.ports[0]}"
        ring.write(sample(3))
        for client_, fields in ((client, ("rewards",)), (stranger, ("reward",))):
            with pytest.raises(SchemaError):
                client_.take(address, 4, wait_s=5, fields=fields)
        with pytest.raises(SchemaError, match="no field 'x'"):
            client.take_batch(address, 4, fields=("x",))
        with pytest.raises(SchemaError, match="no field 'x'"):
            ring.claim_batch(4, fields=("x",))
        with pytest.raises(UsageError, match="give the names"):
            ring.claim_batch(4, fields=())
        with pytest.raises(SchemaError, match="out= has arrays for image"):
            ring.claim_batch(4, layout="padded", fields=("reward",), out={"image": np.zeros(4)})
        batch = client.take(address, 4, wait_s=5, fields=("reward",))
        assert len(batch) == 1
        client.give_back(batch)
        assert len(ring.claim_batch(4, timeout_s=5, fields=("reward",))) == 1
