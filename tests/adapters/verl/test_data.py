"""verl's DataProto as a payload and back: equal with types, slices, some fields, rows that are put together by verl."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import verl_adapter  # noqa: F401  # first: what verl imports warns

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed: pip install verl", allow_module_level=True)

import sameness
import torch
from tensordict import TensorDict
from verl.protocol import DataProto

from transport import BlockingClient, Schema, SharedRingBuffer, UpTo
from transport.adapters.verl.data import data_proto_of, payload_of
from transport.errors import PayloadDamagedError, SchemaError, UsageError
from transport.joined import read_joined, with_parents

pytestmark = pytest.mark.ucx


def objects(*values: Any) -> np.ndarray:
    made = np.empty(len(values), object)
    for at, each in enumerate(values):
        made[at] = each
    return made


def a_batch(rows: int = 4) -> DataProto:
    return DataProto(
        batch=TensorDict(
            {
                "prompts": torch.arange(rows * 6).reshape(rows, 6),
                "responses": torch.arange(rows * 5, dtype=torch.int32).reshape(rows, 5),
                "attention_mask": torch.ones(rows, 11, dtype=torch.bool),
                "old_log_probs": torch.linspace(-3, 0, rows * 5).reshape(rows, 5).to(torch.bfloat16),
            },
            batch_size=[rows],
        ),
        non_tensor_batch={
            "uid": objects(*(f"prompt {at // 2}" for at in range(rows))),
            "raw_prompt": objects(*([{"role": "user", "content": f"{at}?"}] for at in range(rows))),
            "tools": objects(
                *({"names": ("sum",), "left": None, "image": np.full((at + 1, 2), at)} for at in range(rows))
            ),
            "reward": np.linspace(0, 1, rows),
            "words": np.array([f"word {at}" for at in range(rows)]),
            "bits": np.array([[True, False]] * rows, object),
        },
        meta_info={"temperature": 0.7, "eos": [1, 2], "timing": {"gen": 1.5}, "mean": torch.ones(2), "validate": False},
    )


def parts(value: Any) -> Any:
    if not isinstance(value, DataProto):
        return None
    return [dict(value.batch.items()), value.batch.batch_size, value.non_tensor_batch, value.meta_info]


def same(one: Any, other: Any) -> None:
    """Fail unless both are equal, with their types."""
    sameness.same(one, other, parts)


def test_a_batch_comes_back_equal_with_types(ring: SharedRingBuffer, client: BlockingClient) -> None:
    data = a_batch()
    payload = client.read(ring.write(payload_of(data)))
    back = data_proto_of(payload)
    payload.ack()
    payload.release()
    same(back, data)
    back.batch["prompts"] += 1  # its memory is its own, that of arrays too
    back.non_tensor_batch["tools"][2]["image"] += 1


@pytest.mark.parametrize(
    "data",
    [
        DataProto(batch=None, non_tensor_batch={"uid": objects("a", "b")}),
        DataProto.from_dict(tensors={"x": torch.zeros(0, 3)}),
        DataProto(meta_info={"only": 1}),
    ],
    ids=["no tensors", "no rows", "meta only"],
)
def test_batches_without_some_part_come_back(ring: SharedRingBuffer, data: DataProto) -> None:
    with BlockingClient() as client, client.read(ring.write(payload_of(data))) as payload:
        back = data_proto_of(payload)
    assert (back.batch is None) == (data.batch is None)
    same(back.non_tensor_batch, data.non_tensor_batch)
    same(back.meta_info, data.meta_info)
    assert len(back) == len(data)


def test_a_slice_is_written_from_where_it_lies(ring: SharedRingBuffer) -> None:
    data = a_batch(8)
    part = data[1:8:2]
    fields = payload_of(part)
    assert fields["batch.prompts"].data_ptr() == data.batch["prompts"][1].data_ptr()
    with BlockingClient() as client, client.read(ring.write(fields)) as payload:
        same(data_proto_of(payload), part)


def test_rows_are_payloads_that_verl_puts_together(ring: SharedRingBuffer, client: BlockingClient) -> None:
    data = a_batch()
    del data.meta_info["mean"]  # verl cannot compare tensors there
    tickets = ring.write_many(payload_of(data[at : at + 1]) for at in range(len(data)))
    payloads = [client.read(ticket) for ticket in tickets]
    same(DataProto.concat([data_proto_of(payload) for payload in payloads]), data)


def test_some_fields_are_a_smaller_batch(ring: SharedRingBuffer, client: BlockingClient) -> None:
    data = a_batch()
    wanted = ("batch.responses", "non_tensor_batch.uid", "structure")
    with client.read(ring.write(payload_of(data)), fields=wanted) as payload:
        same(data_proto_of(payload), data.select(["responses"], ["uid"], []))


def test_a_stage_adds_its_tensors(ring: SharedRingBuffer, client: BlockingClient) -> None:
    data = a_batch()
    rolled = ring.write(payload_of(data))
    added = client.read(rolled, fields=("batch.old_log_probs",))["batch.old_log_probs"].copy()  # the trainer acks
    referenced = ring.write(with_parents({"batch.ref_log_prob": added}, [rolled]))
    with read_joined(client, referenced) as payload:
        back = data_proto_of(payload)
    ref = back.pop(["ref_log_prob"])
    same(back, data)
    same(ref.batch["ref_log_prob"], data.batch["old_log_probs"])


def test_a_ring_with_a_schema_takes_them(client: BlockingClient) -> None:
    value = ("value", UpTo(4096))
    schema = Schema.of(
        **{
            "batch.x": ("float32", UpTo(8), 3),
            "non_tensor_batch.uid": value,
            "meta_info": value,
            "structure": value,
        }
    )
    data = DataProto.from_dict({"x": torch.ones(4, 3)}, {"uid": objects(*"abcd")}, {"step": 3})
    with SharedRingBuffer.create(schema, slots=1) as ring, BlockingClient(schemas=[schema]) as reader:
        same(data_proto_of(reader.read(ring.write(payload_of(data)))), data)


class Own:
    """A class that cannot travel."""


def test_what_cannot_travel_is_named(ring: SharedRingBuffer) -> None:
    data = a_batch(2)
    data.non_tensor_batch["broken"] = objects({"a": 1}, {"a": Own()})
    with pytest.raises(SchemaError, match=r"non_tensor_batch\.broken\.items\[1\]\.a: an Own cannot be sent"):
        ring.write(payload_of(data))
    with pytest.raises(SchemaError, match="expected a DataProto, got a dict"):
        payload_of({})
    assert ring.statistics().free == 8


def test_other_and_hostile_payloads_are_refused() -> None:
    with pytest.raises(UsageError, match="is no DataProto"):
        data_proto_of({"structure": {"is": "TensorDict", "marks": []}})
    shape = {"batch_size": [2], "device": None, "names": None}
    for hostile in (
        {"batch.x": np.ones(3), "structure": {"is": "DataProto", "marks": [["tensor", "batch.x"]], "batch": shape}},
        {"non_tensor_batch.x": "text", "structure": {"is": "DataProto", "marks": [], "batch": shape}},
        {"structure": {"is": "DataProto", "marks": [], "batch": {"batch_size": [1, 2], "device": None, "names": None}}},
        {"structure": {"is": "DataProto", "marks": []}},
        {"structure": {"is": "DataProto", "marks": [], "batch": 7}},
    ):
        with pytest.raises(PayloadDamagedError):
            data_proto_of(hostile)
