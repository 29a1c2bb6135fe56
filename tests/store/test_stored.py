"""Records as bytes: nothing is written that its reader refuses, and what cannot be read hides itself alone."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import transport
from transport.errors import StoreUnsuitableError, UsageError
from transport.store.base import Entry
from transport.store.stored import decode, decode_each, encode, readable

WRITERS = "put", "compare_and_set", "Change"  # a value is their second argument


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
    assert readable(Counted, "bad", found["bad"]) is None
    assert readable(Counted, "absent", None) is None


@pytest.mark.parametrize("value", ["text", 7])
def test_texts_and_numbers_are_records_too(value: str | int) -> None:
    assert decode(type(value), "k", encode(value)) == value
    with pytest.raises(StoreUnsuitableError):
        decode(Counted, "k", encode(value))


def written(source: Path) -> Iterator[str]:
    """The values that a file writes into stores, as it spells them, but those that it has from `encode`."""
    text = source.read_text()
    for function in ast.walk(ast.parse(text)) if any(f"{name}(" in text for name in WRITERS) else ():
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        encoded = {"None"}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and "encode(" in ast.unparse(node.value):
                encoded |= {name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)}
        for node in ast.walk(function):
            if not isinstance(node, ast.Call):
                continue
            spelled = ast.unparse(node.func)
            owner, _, name = spelled.rpartition(".")
            if name in WRITERS and (name == "Change" or owner.endswith("store")):
                value = ast.unparse(node.args[1]) if len(node.args) > 1 else ""
                if value not in encoded and not value.startswith("encode("):
                    yield f"{source.name}:{node.lineno}: {spelled} writes {value}"


def test_every_record_that_the_package_writes_comes_from_encode() -> None:
    package = Path(transport.__file__).parent
    stores = {package / "store" / f"{name}.py" for name in ("base", "memory", "redis", "sqlite")}
    stores.add(package / "adapters" / "ray.py")
    files = [path for path in package.rglob("*.py") if path not in stores]
    assert [each for path in files for each in written(path)] == []
    assert list(written(Path(__file__)))  # of the function below


def writes_something_else(store: transport.store.Store) -> None:
    store.put("key", b"of another program")
