"""Payloads with text, bytes and nested values through a ring: written, read, claimed and batched."""

from __future__ import annotations

import copy
import gc
import pickle
import secrets
from typing import Any

import numpy as np
import pytest
from claimed import claim_batch, claim_each
from PIL import Image

from transport import BlockingClient, Rollout, Schema, SharedRingBuffer, Ticket, Trainer, UCXXServer, UpTo
from transport.errors import PayloadDamagedError, PayloadTooLargeError, SchemaError
from transport.packer.options import ServerOptions
from transport.testing import LocalTransport

SCHEMA = Schema.of(
    prompt=("text", UpTo(200)),
    messages=("value", UpTo(8192)),
    tokens=("int32", UpTo(100)),
    raw=("bytes", UpTo(50)),
    reward="float32",
)


def sample(number: int = 0) -> dict[str, Any]:
    return {
        "prompt": "текст " * (number % 5),
        "messages": [
            {"role": "user", "content": "hi", "number": number, "turn": (1, None, True)},
            {"image": np.full((2, number % 7, 3), number, np.uint8), "scores": [np.arange(number % 4)]},
        ],
        "tokens": np.arange(number % 100, dtype=np.int32),
        "raw": b"\0raw" * (number % 9),
        "reward": 0.5,
    }


def check(found: Any, number: int) -> None:
    wanted = sample(number)
    assert list(found) == list(wanted)
    for name in ("prompt", "raw"):
        assert found[name] == wanted[name]
        assert type(found[name]) is type(wanted[name])
    first, second = found["messages"]
    assert first == wanted["messages"][0]
    assert type(first["turn"]) is tuple
    np.testing.assert_array_equal(second["image"], wanted["messages"][1]["image"])
    np.testing.assert_array_equal(second["scores"][0], wanted["messages"][1]["scores"][0])
    np.testing.assert_array_equal(found["tokens"], wanted["tokens"])
    assert found["reward"] == np.float32(0.5)


def test_the_schema_of_text_and_values_has_a_stable_text_and_fingerprint() -> None:
    assert str(SCHEMA) == (
        "transport schema 1, alignment 64\nprompt text (<=200)\nmessages value (<=8192)\ntokens int32 (<=100)\n"
        "raw bytes (<=50)\nreward float32 ()\n"
    )
    assert Schema.decode(SCHEMA.encode()) == SCHEMA
    assert Schema.from_json(SCHEMA.to_json()) == SCHEMA
    assert SCHEMA.kinds == {"prompt": "text", "messages": "value", "raw": "bytes"}


def test_bytes_without_any_are_taken_of_every_shape() -> None:
    with SharedRingBuffer.create(Schema.of(raw=("bytes", UpTo(50))), slots=1) as ring:
        assert ring.write({"raw": memoryview(np.zeros((0, 3), np.uint8))}).lengths == (0,)


@pytest.mark.parametrize("given", ["text", ("value",), ("bytes", UpTo(4), 3), ("text", 2, 2)])
def test_a_kind_needs_its_bytes_and_nothing_else(given: Any) -> None:
    with pytest.raises(SchemaError, match=r"has one dimension, its bytes at most; give"):
        Schema.of(x=given)


@pytest.mark.parametrize("schema", [SCHEMA, None], ids=["fixed", "open"])
def test_written_and_read_in_every_way(schema: Schema | None) -> None:
    with (
        SharedRingBuffer.create(schema, slots=16, slot_bytes=None if schema else 16384) as ring,
        UCXXServer(ring, mode="thread"),
        BlockingClient(schemas=[SCHEMA], ack="manual") as mapped,
        BlockingClient(schemas=[SCHEMA], wire={"tcp"}, ack="manual") as remote,
    ):
        single = [ring.write(sample(n)) for n in range(3)]
        several = list(ring.write_many([sample(n) for n in range(3, 6)], policy_version=4))
        tickets = [Ticket.parse(each.to_text()) for each in (*single, *several)]
        for client in (mapped, remote):
            for number, ticket in enumerate(tickets):
                payload = client.read(ticket)
                if schema is None:
                    payload = {**payload, "reward": np.float32(payload["reward"])}
                check(payload, number)
            outcomes = {outcome.index: outcome.payload for outcome in client.read_many(tickets)}
            assert sorted(outcomes) == list(range(len(tickets)))
            for index, came in outcomes.items():
                assert came is not None
                assert came["prompt"] == sample(index)["prompt"]
            del outcomes, came
        claims = claim_each(ring, 16)
        for number, claim in enumerate(claims):
            assert claim.payload["prompt"] == sample(number)["prompt"]
        assert [claim.consume() for claim in claims] == [True] * 6


def test_an_open_ring_gives_back_the_types_that_went_in() -> None:
    image = Image.new("RGB", (3, 2), (1, 2, 3))
    values = {
        "a": 1, "b": 1.5, "c": True, "d": None, "e": "text", "f": b"bytes", "g": (1, [2]), "h": {"x": np.float32(2)},
        "i": np.int8(3), "j": image, "k": [np.zeros(2), np.zeros((3, 3))], "l": np.array(7), "m": 1 << 70, "n": "",
        "o": b"", "p": {}, "q": 2j,
    }  # fmt: skip
    with LocalTransport(slots=4, slot_bytes=1 << 16) as local:
        found = local.client.read(local.write(values))
        for name in "abcdefgijmnopq":
            assert type(found[name]) is type(values[name])
            assert found[name] == values[name]
        assert type(found["h"]["x"]) is np.float32
        assert [each.shape for each in found["k"]] == [(2,), (3, 3)]
        assert found["l"].shape == ()


def test_arrays_inside_values_are_views_of_the_slot() -> None:
    with SharedRingBuffer.create(slots=2, slot_bytes=1 << 16) as ring, BlockingClient(ack="manual") as client:
        payload = client.read(ring.write({"m": {"x": [np.arange(5), np.arange(70)]}, "t": "later"}))
        inner = payload["m"]["x"]
        assert all(np.shares_memory(each, np.asarray(payload.data)) for each in inner)
        assert all(each.ctypes.data % 64 == 0 and not each.flags.writeable for each in inner)
        payload.release()
        assert inner[1].sum() == sum(range(70))  # keeps the slot
        del payload, inner


def test_a_slot_is_free_as_soon_as_the_last_array_of_a_value_is_gone() -> None:
    gc.disable()  # which would free what refers to itself, some time later
    try:
        with SharedRingBuffer.create(slots=1, slot_bytes=1 << 14) as ring, BlockingClient() as client:
            payload = client.read(ring.write({"m": [np.arange(5)], "x": np.float32(1), "t": "text"}))
            assert payload["m"][0].sum() == 10
            assert payload["x"] == 1
            payload.release()
            del payload
            assert ring.statistics().free == 1
            with ring.reserve(Schema.of(x=("value", 64))) as lease:
                lease["x"][:] = 1
            payload = client.read(lease.ticket)
            with pytest.raises(PayloadDamagedError):
                payload["x"]
            payload.release()
            del payload
            assert ring.statistics().free == 1
    finally:
        gc.enable()


def test_a_payload_with_values_is_copied_and_pickled_as_a_dict() -> None:
    with LocalTransport(SCHEMA, slots=2) as local:
        payload = local.client.read(local.write(sample(5)))
        for found in (copy.copy(payload), copy.deepcopy(payload), pickle.loads(pickle.dumps(payload))):
            assert type(found) is dict
            check(found, 5)
            assert not np.shares_memory(found["messages"][1]["image"], np.asarray(payload.data))
        payload.release()


def test_lists_of_numbers_are_arrays_where_the_schema_has_one() -> None:
    schema = Schema.of(tokens=("int32", UpTo(8)), scores=("float32", UpTo(4), 2))
    with LocalTransport(schema, slots=2) as local:
        found = local.client.read(local.write({"tokens": [1, 2, 3], "scores": [(1, 2), (3, 4.5)]}))
        assert found["tokens"].tolist() == [1, 2, 3]
        assert found["scores"].tolist() == [[1, 2], [3, 4.5]]
        empty = local.client.read(local.write({"tokens": [], "scores": np.empty((0, 2), np.float32)}))
        assert empty["tokens"].shape == (0,)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt": b"x"}, r"^prompt: expected a str for text, got a bytes"),
    ({"prompt": "x" * 201}, r"^prompt: 201 bytes of UTF-8, and its schema has at most 200"),
    ({"prompt": "ы" * 101}, r"^prompt: 202 bytes of UTF-8"),
    ({"prompt": "\ud800"}, r"^prompt: this text is not UTF-8"),
    ({"prompt": np.zeros(3, np.uint8)}, r"^prompt: expected a str for text, got a ndarray|an ndarray"),
    ({"raw": "x"}, r"^raw: expected bytes, got a str"),
    ({"raw": bytes(51)}, r"^raw: 51 bytes, and its schema has at most 50"),
    ({"messages": np.zeros(9000)}, r"^messages: 72064 bytes of an encoded value, and its schema has at most 8192"),
    ({"messages": [{"f": open}]}, r"^messages\[0\]\.f: a builtin_function_or_method cannot be sent"),
    ({"tokens": [1, 1 << 40]}, r"^tokens: this list has numbers out of range for int32"),
    ({"tokens": [1.5]}, r"^tokens: expected int32, got a list that numpy makes float64 of"),
    ({"tokens": [[1], [1, 2]]}, r"^tokens: this list is no array"),
    ({"tokens": ["a"]}, r"^tokens: expected int32, got a list that numpy makes"),
    ({"reward": [1.0]}, r"^expected reward float32 \(\), got shape \(1\) for reward"),
    ({"missing": 1}, r"not in the schema: 'missing'"),
]


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(("change", "message"), BAD)
def test_what_does_not_fit_is_named_and_keeps_no_slot(change: dict[str, Any], message: str, many: bool) -> None:
    with SharedRingBuffer.create(SCHEMA, slots=2) as ring:
        values = {**sample(3), **change}
        with pytest.raises(SchemaError, match=message):
            ring.write_many([sample(1), values]) if many else ring.write(values)
        with pytest.raises(SchemaError, match="missing: prompt"):
            ring.write({"tokens": np.zeros(1, np.int32)})
        assert ring.statistics().free == 2
        ring.write_many([sample(1), sample(2)], timeout_s=0)


def test_an_open_ring_refuses_by_path_and_size_and_keeps_no_slot() -> None:
    with SharedRingBuffer.create(slots=1, slot_bytes=4096) as ring:
        with pytest.raises(SchemaError, match=r"^calls\[0\]\.tool: a set cannot be sent"):
            ring.write({"calls": [{"tool": {1}}]})
        with pytest.raises(PayloadTooLargeError):
            ring.write({"text": "x" * 5000})
        assert ring.statistics().free == 1


def test_damaged_bytes_are_an_error_of_their_field_alone() -> None:
    schema = Schema.of(text=("text", UpTo(8)), value=("value", UpTo(128)), x="int8")
    with SharedRingBuffer.create(schema, slots=1) as ring:
        with ring.reserve({"text": 2, "value": 64}) as lease:  # a writer that fills in bytes of its own
            lease["text"][:] = (0xC3, 0x28)
            lease["value"][:] = 0xFF
            lease["x"][...] = 3
        with BlockingClient(schemas=[schema], ack="manual") as client:
            payload = client.read(lease.ticket)
            with pytest.raises(PayloadDamagedError, match=r"^text: these 2 bytes are not UTF-8"):
                payload["text"]
            with pytest.raises(PayloadDamagedError, match=r"^value: these 64 bytes are not a value"):
                payload["value"]
            assert payload["x"] == 3
            assert payload.ack()
            payload.release()


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.parametrize("wire", ["mapped", "tcp"])
def test_a_rollout_and_a_trainer_pass_them_on(wire: Any) -> None:
    run = f"rings:nested-{secrets.token_hex(4)}-"
    with (
        Rollout(SCHEMA, run, slots=8, server=ServerOptions(addresses=("127.0.0.1",))) as rollout,
        Trainer(SCHEMA, run, wire={wire}) as trainer,
    ):
        rollout.write(sample(1))
        rollout.write_many_to_buffer([sample(2), sample(3)])
        batch = trainer.take(3, 20.0, fill_s=20.0)
        assert batch is not None
        for number, payload in enumerate(batch, 1):
            check(payload, number)
        batch.consume()
        assert batch.accepted.tolist() == [True] * 3
        batch.release()


# --- batches -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["list", "padded", "packed"])
def test_batches_have_lists_of_text_bytes_and_values(layout: Any) -> None:
    numbers = list(range(1, 20))
    with SharedRingBuffer.create(SCHEMA, slots=32) as ring, UCXXServer(ring, mode="thread") as server:
        ring.write_many([sample(n) for n in numbers])
        with claim_batch(ring, 32, layout=layout) as batch:
            check_batch(batch, layout, numbers)
            assert batch.consume().all()
        ring.write_many([sample(n) for n in numbers])
        with Trainer(SCHEMA, f"rings://127.0.0.1:{server.ports[0]}", wire={"tcp"}, layout=layout) as trainer:
            taken = trainer.take(len(numbers), 20.0, fill_s=20.0)
            assert taken is not None
            check_batch(taken, "padded" if layout == "list" else layout, numbers)
            taken.consume()
            assert taken.accepted.all()


def check_batch(batch: Any, layout: str, numbers: list[int]) -> None:
    assert len(batch) == len(numbers)
    assert batch["prompt"] == [sample(n)["prompt"] for n in numbers]
    assert batch["raw"] == [sample(n)["raw"] for n in numbers]
    for at, number in enumerate(numbers):
        check(batch[at], number)
        image = batch["messages"][at][1]["image"]
        assert image.size == 0 or image.ctypes.data % 64 == 0
    assert batch.lengths["prompt"].tolist() == [len(sample(n)["prompt"].encode()) for n in numbers]
    if layout == "packed":
        assert set(batch.cu_seqlens) == {"tokens"}
    assert batch.arrays()["prompt"] == batch["prompt"]


def test_a_batch_names_the_payload_whose_text_is_damaged() -> None:
    schema = Schema.of(text=("text", UpTo(8)))
    with SharedRingBuffer.create(schema, slots=2) as ring:
        ring.write({"text": "good"})
        with ring.reserve({"text": 1}) as lease:
            lease["text"][:] = 0xFF
        with claim_batch(ring, 2, layout="packed") as batch:
            assert batch[0]["text"] == "good"
            with pytest.raises(PayloadDamagedError, match=r"^text of payload 1: "):
                batch["text"]


def test_out_is_for_tensors_only() -> None:
    with (
        SharedRingBuffer.create(SCHEMA, slots=2) as ring,
        pytest.raises(SchemaError, match="out= has arrays for prompt, which are no tensors"),
    ):
        claim_batch(ring, 2, layout="padded", out={"prompt": np.zeros((2, 9), np.uint8)})
