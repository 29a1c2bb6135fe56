"""TensorDicts as payloads and back: equal with types, some of their entries, hostile structures."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("tensordict") is None:
    pytest.skip("torch is not installed, and tensordict with it", allow_module_level=True)

import sameness
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from transport import BlockingClient, SharedRingBuffer
from transport.adapters.torch.tensor_dicts import payload_of, tensordict_of
from transport.errors import PayloadDamagedError, SchemaError, UsageError
from transport.joined import read_joined, with_parents

pytestmark = pytest.mark.ucx


def sent(ring: SharedRingBuffer, batch: Any) -> Any:
    """What a batch is after it went through a slot."""
    with BlockingClient() as client:
        payload = client.read(ring.write(payload_of(batch)))
        back = tensordict_of(payload)
        payload.release()
    return back


def parts(value: Any) -> Any:
    if isinstance(value, TensorDict):
        of = {key: value.get(key) for key in sorted(value.keys())}
        return [value.batch_size, value.device, list(value.names), of]
    if isinstance(value, NonTensorStack):
        return [value.batch_size, value.stack_dim, value.tolist()]
    return [value.batch_size, value.data] if isinstance(value, NonTensorData) else None


def same(one: Any, other: Any) -> None:
    """Fail unless both are equal, with their types."""
    sameness.same(one, other, parts)


def every_kind() -> TensorDict:
    batch = TensorDict(
        {
            "tokens": torch.arange(12).reshape(3, 4),
            "logprobs": torch.linspace(0, 1, 6, dtype=torch.bfloat16).reshape(3, 2),
            "mask": torch.tensor([True, False, True]),
            "empty": torch.zeros(3, 0),
            "a name that no field has": torch.ones(3),
            "structure": torch.ones(3, dtype=torch.int8),
            "sub": TensorDict({"inner": torch.ones(3, 1, dtype=torch.float16)}, batch_size=[3]),
            "config": NonTensorData({"scale": torch.ones(2), "names": ("a", None)}, batch_size=[3]),
            "uid": NonTensorStack(*[NonTensorData(each) for each in ("x", {"deep": [1, 2.5]}, None)]),
            "turns": NonTensorStack.from_list([NonTensorData([1, 2]), NonTensorData([]), NonTensorData([3])]),
            "arrays": NonTensorData(np.array([[1, "two"], [None, {"x": np.arange(3)}]], object), batch_size=[3]),
        },
        batch_size=[3],
    )
    batch["ragged"] = torch.nested.as_nested_tensor([torch.ones(2), torch.zeros(3), torch.ones(1)], layout=torch.jagged)
    return batch


def test_a_tensordict_comes_back_equal_with_types(ring: SharedRingBuffer, client: BlockingClient) -> None:
    batch = every_kind()
    payload = client.read(ring.write(payload_of(batch)))
    back = tensordict_of(payload)
    payload.ack()
    payload.release()
    same(back, batch)
    back["tokens"] += 1  # its memory is its own
    assert back["tokens"][0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "batch",
    [
        TensorDict({}, batch_size=[]),
        TensorDict({"x": torch.ones(2, 3, 4)}, batch_size=[2, 3], names=["time", None]),
        TensorDict({"x": torch.ones(2)}, batch_size=[2], device="cpu"),
        TensorDict({"x": torch.tensor(3.0)}, batch_size=[]),
        TensorDict({"x": torch.ones(0, 2)}, batch_size=[0]),
    ],
    ids=["empty", "two dimensions with names", "on a device", "no dimension", "no row"],
)
def test_shapes_and_names_come_back(ring: SharedRingBuffer, batch: TensorDict) -> None:
    same(sent(ring, batch), batch)


def test_what_requires_gradients_comes_back_without(ring: SharedRingBuffer) -> None:
    back = sent(ring, TensorDict({"x": torch.ones(2, requires_grad=True) * 2}, batch_size=[2]))
    assert back["x"].tolist() == [2, 2]
    assert not back["x"].requires_grad


def test_a_slice_is_written_from_where_it_lies(ring: SharedRingBuffer) -> None:
    batch = TensorDict({"x": torch.arange(40).reshape(10, 4), "y": torch.arange(10)}, batch_size=[10])
    every_second = batch[1:9:2]
    fields = payload_of(every_second)
    assert fields["x"].data_ptr() == batch["x"][1].data_ptr()
    assert not fields["x"].is_contiguous()
    same(sent(ring, every_second), every_second)


def test_some_entries_are_a_smaller_tensordict(ring: SharedRingBuffer, client: BlockingClient) -> None:
    ticket = ring.write(payload_of(every_kind()))
    payload = client.read(ticket, fields=("tokens", "uid", "structure"))
    back = tensordict_of(payload)
    assert set(back.keys()) == {"tokens", "uid"}
    same(back.get("uid"), every_kind().get("uid"))
    with pytest.raises(UsageError, match="has no field 'structure'"):
        tensordict_of(client.read(ticket, fields=("tokens",)))


def test_views_are_of_the_payloads_memory_where_no_copy_is_wanted(ring: SharedRingBuffer) -> None:
    batch = TensorDict({"x": torch.arange(4), "b": torch.ones(4, dtype=torch.bfloat16)}, batch_size=[4])
    with BlockingClient(ack="manual") as client:
        payload = client.read(ring.write(payload_of(batch)))
        views = tensordict_of(payload, copy=False)
        at = payload["x"].ctypes.data
        assert views["x"].data_ptr() == at
        assert tensordict_of(payload)["x"].data_ptr() != at
        same(views, batch)


def test_a_stage_adds_fields_without_knowing_of_tensordicts(ring: SharedRingBuffer) -> None:
    batch = TensorDict({"tokens": torch.arange(6).reshape(3, 2)}, batch_size=[3])
    first = ring.write(payload_of(batch))
    second = ring.write(with_parents({"ref_logprobs": torch.ones(3, 2, dtype=torch.bfloat16)}, [first]))
    with BlockingClient(ack="manual") as client:
        payload = read_joined(client, second)
        same(
            tensordict_of(payload),
            TensorDict({**batch, "ref_logprobs": torch.ones(3, 2, dtype=torch.bfloat16)}, batch_size=[3]),
        )
        payload.ack()
        payload.release()


def test_nested_tensors_of_one_shape_stay_of_one_shape(ring: SharedRingBuffer) -> None:
    parts = [torch.ones(2), torch.zeros(3)]
    one = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    batch = TensorDict({"a": one, "b": one * 2}, batch_size=[2])
    back = sent(ring, batch)
    same(list((back["a"] + back["b"]).unbind()), [each * 3 for each in parts])


def test_strided_nested_tensors_travel(ring: SharedRingBuffer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch prefers the other layout
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    batch = TensorDict({"config": NonTensorData({"n": nested})})
    same(sent(ring, batch), batch)


class Own:
    """A class that cannot travel."""


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (
            lambda: LazyStackedTensorDict(TensorDict({"x": torch.ones(1)}), TensorDict({"x": torch.ones(2)})),
            "contiguous",
        ),
        (lambda: NonTensorData({"deep": [0, Own()]}, batch_size=[2]), r"x\.data\.deep\[1\]: an Own cannot be sent"),
        (lambda: NonTensorStack(NonTensorData(1), NonTensorData(Own())), r"x\.items\[1\]: an Own cannot be sent"),
        (lambda: torch.ones(2, 2).to_sparse(), "x: this Tensor cannot be read as an array"),
        (lambda: torch.ones(2, 2, device="meta"), "not CUDA's|not accessible|cannot be read"),
    ],
    ids=["lazy", "data", "stack", "sparse", "meta"],
)
def test_what_cannot_travel_is_named(ring: SharedRingBuffer, value: Any, told: str) -> None:
    batch = TensorDict({"x": value()}, batch_size=[2])
    with pytest.raises(UsageError, match=told):
        ring.write(payload_of(batch))
    assert ring.statistics().free == 8


@pytest.mark.slow
def test_what_contains_itself_is_an_error(ring: SharedRingBuffer) -> None:
    loop: list[Any] = [1]
    loop += [loop, loop]
    with pytest.raises(SchemaError, match="contains itself"):
        ring.write(payload_of(TensorDict({"x": NonTensorData(loop)})))
    many: Any = 0
    for _ in range(40):
        many = [many, many]
    with pytest.raises(SchemaError, match="more than 4194304 values"):
        payload_of(TensorDict({"x": NonTensorData(many)}))


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "a much longer identity"])[:1],
        np.array([""]),
        np.empty(0, "U5"),
        np.array(["short"], "U32"),
        np.array([b"a"], "S8"),
    ],
    ids=["slice", "empty text", "none", "wide", "bytes"],
)
def test_an_array_of_text_may_be_wider_than_its_items(ring: SharedRingBuffer, array: np.ndarray) -> None:
    back = sent(ring, TensorDict({"x": NonTensorData(array)}))["x"]
    assert back.dtype == array.dtype
    assert back.tolist() == array.tolist()


def test_an_array_of_text_that_is_too_large_is_refused_as_it_is_written() -> None:
    array = np.broadcast_to(np.array(["x"], "U1000000"), (100,))
    with pytest.raises(SchemaError, match="dtype=object"):
        payload_of(TensorDict({"x": NonTensorData(array)}))


def test_lists_that_are_nested_too_deep_are_an_error() -> None:
    deep: list[Any] = []
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(SchemaError, match="deep"):
        payload_of(TensorDict({"x": NonTensorData(deep)}))


def test_other_payloads_and_values_are_refused(ring: SharedRingBuffer) -> None:
    with pytest.raises(SchemaError, match="expected a TensorDict, got a dict"):
        payload_of({"x": 1})
    with BlockingClient() as client:
        with pytest.raises(UsageError, match="has no field 'structure'"):
            tensordict_of(client.read(ring.write({"x": 1})))
        with pytest.raises(UsageError, match="is no TensorDict"):
            tensordict_of(client.read(ring.write({"x": 1, "structure": 5})))


def marked(*marks: list[Any], **fields: Any) -> dict[str, Any]:
    shape: dict[str, Any] = {"batch_size": [2], "device": None, "names": None}
    return {**fields, "structure": {"is": "TensorDict", "marks": list(marks), **shape}}


@pytest.mark.parametrize(
    "hostile",
    [
        marked(["os.system", "x"], x="true"),
        marked(["tensor", "x"], x="text"),
        marked(["tensor", "x", "a", "b"], x={"a": 1}),
        marked(["tensor", "x", "lacks"], x={"a": 1}),
        marked(["tensor", "x", -1], x=[np.ones(1)]),
        marked(["tensor", [1]], x=1),
        marked([], x=1),
        marked(["tensor", "x"], x=np.ones(5)),  # not of its batch size
        marked(["jagged", "x"], x={"values": np.ones(2), "offsets": np.array([0, 1 << 40, 2]), "lengths": None}),
        marked(["jagged", "x"], x={"values": np.ones(2), "offsets": np.array([-1, 1, 2]), "lengths": None}),
        marked(["jagged", "x"], x={"values": np.ones(2), "offsets": np.array([0, 2]), "lengths": np.array([9])}),
        marked(["array", "x"], x={"dtype": "<U999999999", "shape": [1], "items": ["a"]}),
        marked(["array", "x"], x={"dtype": "object", "shape": [1 << 50], "items": [1]}),
        marked(["array", "x"], x={"dtype": "V8", "shape": [1], "items": [1]}),
        marked(["TensorDict", "x"], x={"batch_size": [-4], "device": "cuda:9", "names": 4, "items": {}}),
        marked(["NonTensorStack", "x"], x={"dimension": 99, "items": [1, 2]}),
        marked(["NonTensorData", "x"], x={"data": 1, "batch_size": "no"}),
        {
            "x": 1,
            "structure": {"is": "TensorDict", "marks": [], "batch_size": [1 << 70], "device": None, "names": None},
        },
        {"x": 1, "structure": {"is": "TensorDict", "marks": []}},
    ],
)
def test_hostile_structures_are_damage(hostile: dict[str, Any]) -> None:
    with pytest.raises(PayloadDamagedError):
        tensordict_of(hostile)
