"""Schemas: layout, fingerprint, encodings, and what they refuse."""

from __future__ import annotations

import contextlib

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import SchemaError
from transport.schema import ALIGNMENT, DTYPES, MAX_BYTES, MAX_TENSORS, Optional, Schema, TensorSpec, UpTo

EPISODE = Schema.of(obs=("float32", UpTo(500), 4), action=("int64", UpTo(500)), reward=("float32",))


@st.composite
def specs(draw: st.DrawFn, name: str) -> TensorSpec:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    ragged = bool(shape) and draw(st.booleans())
    return TensorSpec(name, draw(st.sampled_from(sorted(DTYPES))), shape, ragged, optional=draw(st.booleans()))


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    names = draw(st.lists(st.from_regex(r"[A-Za-z_][A-Za-z0-9_./-]{0,20}", fullmatch=True), min_size=1, unique=True))
    return Schema(tuple(draw(specs(name)) for name in names[:8]))


# --- notation --------------------------------------------------------------------------------
def test_notation_gives_specs_in_order() -> None:
    assert EPISODE.tensors == (
        TensorSpec("obs", "float32", (500, 4), ragged=True),
        TensorSpec("action", "int64", (500,), ragged=True),
        TensorSpec("reward", "float32", ()),
    )
    assert EPISODE.names == ("obs", "action", "reward")
    assert [spec.name for spec in EPISODE.ragged] == ["obs", "action"]


@pytest.mark.parametrize(
    ("dimensions", "message"),
    [
        ((4, UpTo(500)), "only the leading dimension"),
        ((4.5,), "not ints"),
        ((UpTo(-1),), "outside 0"),
        ((-1,), "-1 is outside 0"),
        ((UpTo(0),), "room for nothing"),
        (("4",), "not ints"),
    ],
)
def test_notation_refuses_other_dimensions(dimensions: tuple[object, ...], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        Schema.of(obs=("float32", *dimensions))  # type: ignore[arg-type]


def test_every_dtype_is_named_as_numpy_or_ml_dtypes_names_it() -> None:
    assert len(DTYPES) == 23
    for name, dtype in DTYPES.items():
        assert dtype == np.dtype(getattr(ml_dtypes, name, None) or name)


# --- layout ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((3,), "expected 2 lengths, one for each ragged tensor"),
        ((3, 501), r"action: expected a length of 0\.\.500, got 501"),
        ((-1, 3), "obs: "),
    ],
)
def test_layout_refuses_lengths_that_do_not_fit(lengths: tuple[int, ...], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        EPISODE.layout(lengths)


@given(st.data(), schemas())
def test_layout_is_aligned_disjoint_and_within_the_maximum(data: st.DataObject, schema: Schema) -> None:
    lengths = tuple(data.draw(st.integers(0, spec.most)) for spec in schema.counted)
    layout = schema.layout(lengths)
    absent = {spec.name for spec, length in zip(schema.counted, lengths, strict=True) if spec.optional and not length}
    end = 0
    for placement, spec in zip(layout.placements, schema.tensors, strict=True):
        assert placement.offset % ALIGNMENT == 0
        assert 0 <= placement.offset - end < ALIGNMENT
        assert placement.nbytes == np.zeros(placement.shape, placement.dtype).nbytes
        assert placement.absent == (spec.name in absent)
        if placement.absent:
            assert placement.shape == (0,)
        else:
            assert placement.shape[spec.ragged :] == spec.shape[spec.ragged :]
        end = placement.offset + placement.nbytes
    assert layout.total == end <= schema.max_bytes


# --- fingerprint -----------------------------------------------------------------------------


def test_fingerprint_golden() -> None:
    # Rings and tickets of other versions of this package carry it: it changes only with the version in the text.
    assert EPISODE.fingerprint == "f95e5dcfe70cef7749a0936911ee0e9b"


def test_an_optional_tensor_has_a_question_mark_in_the_text_and_another_fingerprint() -> None:
    schema = Schema.of(obs=Optional("float32", UpTo(500), 4), reward="float32")
    assert "obs float32? (<=500,4)\n" in str(schema)
    assert schema.fingerprint != Schema.of(obs=("float32", UpTo(500), 4), reward="float32").fingerprint


# --- encodings -------------------------------------------------------------------------------
@given(schemas())
def test_encodings_round_trip(schema: Schema) -> None:
    for copy in (Schema.decode(schema.encode()), Schema.from_json(schema.to_json())):
        assert copy == schema
        assert hash(copy) == hash(schema)
        assert copy.fingerprint == schema.fingerprint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a schema"),
        ("[]", "not a schema"),
        ('{"tensors": []}', "1..256 tensors, not 0"),
        ('{"tensors": [], "verson": 1}', "verson"),
        ('{"tensors": [{"name": "a", "dtype": "int8", "shape": [1], "raged": true}]}', "raged"),
        ('{"tensors": [{"name": "a", "dtype": "int8", "shape": [1.5]}]}', "int"),
        ('{"tensors": [{"name": "a", "dtype": "int8", "shape": [-1]}]}', "outside 0"),
        ('{"tensors": [{"name": "a", "dtype": "int8", "shape": [1' + "0" * 5000 + "]}]}", "not a schema"),
        ('{"tensors": [{"name": "a", "dtype": "object", "shape": []}]}', "dtype 'object' is not one of"),
        ('{"tensors": [{"name": "a", "dtype": "int8", "shape": [], "ragged": true}]}', "leading dimension"),
        ('{"tensors": ' + "[" * 100_000, "not a schema"),
        ('{"tensors": "' + " " * (1 << 20) + '"}', "the limit is"),
        ('{"tensors": [{"name": "\ud800", "dtype": "int8", "shape": []}]}', "not a schema"),
    ],
)
def test_json_that_is_no_schema_is_refused(text: str, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        Schema.from_json(text)


def test_unknown_version_is_refused_by_name() -> None:
    with pytest.raises(SchemaError, match="unsupported schema version 9"):
        Schema.decode(msgspec.msgpack.encode((9, {"anything": 1})))


@given(st.binary(max_size=200))
def test_decoding_random_bytes_raises_nothing_but_schema_error(data: bytes) -> None:
    for decode in (Schema.decode, Schema.from_json):
        with pytest.raises(SchemaError):
            decode(data)


@given(schemas(), st.data())
def test_decoding_altered_bytes_raises_nothing_but_schema_error(schema: Schema, data: st.DataObject) -> None:
    altered = bytearray(schema.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        altered[data.draw(st.integers(0, len(altered) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(SchemaError):
        Schema.decode(bytes(altered))


# --- limits: none of these may allocate what it names ----------------------------------------
@pytest.mark.parametrize(
    "spec",
    [
        ("a", "int8", (MAX_BYTES + 1,)),
        ("a", "int16", (MAX_BYTES,)),
        ("a", "int8", (1 << 30, 1 << 30)),
        ("a", "int8", (1 << 40, 0, 1 << 40)),  # no bytes, but numpy refuses the shape
        ("a", "int8", (-1,)),
        ("a", "int8", (1,) * 33),
        ("a", "int8", (True,)),
        ("a", "int8", (10**5000,)),
        ("a", "int8", [1]),
        ("a", "float32 ", (1,)),
        ("a", "datetime64", (1,)),
        ("a", 7, (1,)),
        ("", "int8", (1,)),
        ("a" * 129, "int8", (1,)),
        ("a\n", "int8", (1,)),
        ("a b", "int8", (1,)),
        ("é", "int8", (1,)),
        ("1a", "int8", (1,)),
        (None, "int8", (1,)),
        ("a", "int8", (1,), 1),
    ],
)
def test_tensor_out_of_range_is_refused(spec: tuple[object, ...]) -> None:
    with pytest.raises(SchemaError):
        TensorSpec(*spec)  # type: ignore[arg-type]


def test_tensors_are_bounded_in_number_and_together() -> None:
    Schema(tuple(TensorSpec(f"t{i}", "int8", ()) for i in range(MAX_TENSORS)))
    with pytest.raises(SchemaError, match="not 257"):
        Schema(tuple(TensorSpec(f"t{i}", "int8", ()) for i in range(MAX_TENSORS + 1)))
    with pytest.raises(SchemaError, match="together"):
        Schema.of(a=("int8", MAX_BYTES), b=("int8", 1))


def test_thousands_of_encoded_tensors_are_refused() -> None:
    rows = [(f"t{i}", "int8", (1,), False) for i in range(5000)]
    with pytest.raises(SchemaError, match="not 5000"):
        Schema.decode(msgspec.msgpack.encode((1, rows)))


@pytest.mark.parametrize("given", [7, (), None, {"float32": 1}])
def test_what_is_neither_a_dtype_nor_one_with_dimensions_is_refused(given: object) -> None:
    with pytest.raises(SchemaError, match=r"reward: give \(dtype, \*dimensions\), or a dtype alone"):
        Schema.of(reward=given)
