"""Records as bytes: nothing is written that its reader refuses, and what cannot be read hides itself alone."""

from __future__ import annotations

import math

import msgspec
import pytest

from transport.errors import StoreUnsuitableError, UsageError
from transport.store.base import Entry
from transport.store.stored import decode, decode_each, encode


class Counted(msgspec.Struct, frozen=True):
    name: str
    count: int = 0
    seconds: float = 0.0


@pytest.mark.parametrize(
    "record",
    [
        Counted("a", 200.0),  # type: ignore[arg-type]
        Counted("half of a pair \udcff"),
        Counted("a", seconds=math.nan),
        Counted(object()),  # type: ignore[arg-type]
    ],
)
def test_what_could_not_be_read_is_not_written(record: Counted) -> None:
    with pytest.raises(UsageError, match="Counted"):
        encode(record)


def test_a_record_comes_back() -> None:
    record = Counted("é", 3, 1.5)
    assert decode(Counted, "k", encode(record)) == record


@pytest.mark.parametrize("value", [b"", b'{"name": "\xff"}', b"[" * 100_000, b'{"name": 1}'])
def test_what_is_no_record_is_refused_by_its_key(value: bytes) -> None:
    with pytest.raises(StoreUnsuitableError, match="run/7"):
        decode(Counted, "run/7", value)


def test_of_several_records_one_that_cannot_be_read_is_left_out_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    found = {"good": Entry(encode(Counted("a")), 1), "bad": Entry(b"\xff", 2)}
    for _ in range(3):
        assert decode_each(Counted, found) == {"good": Counted("a")}
    assert [record.getMessage().count("'bad'") for record in caplog.records] == [1]
