"""What stands in logs and tracebacks of records that carry keys, tokens and passwords: everything but these."""

from __future__ import annotations

import ast
import collections
import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.pretty import pretty_repr

import transport
from transport.client.connections.acknowledgements import Ack
from transport.config import Configuration, Loaded
from transport.errors import MissingDependencyError
from transport.packer.mixin import FetchedBatch, FetchedItem
from transport.packer.options import ClientOptions, ServerOptions
from transport.snapshots.manifest import ManifestEntry
from transport.storage.urls import RedisURL
from transport.store.base import Change, Entry
from transport.store.decision import Next
from transport.ticket import Ticket
from transport.training.assembling import Arrival
from transport.training.holding import HeldSample
from transport.training.joining import Child
from transport.training.mesh import Mesh
from transport.training.step_records import PlannedPart
from transport.weights import offers
from transport.weights.barrier import UpdateBarrier
from transport.weights.options import EngineOptions
from transport.weights.sharding import roles
from transport.weights.transfer import messages
from transport.wire import frames

KEY = 0x5EC2E7_5EC2E7
WORD = "sesame-sesame"
PLACE = f"redis://user:{WORD}@host:6379/0?run=run"
TICKET = Ticket(
    ring="ab" * 16, segment="/x", host="h", addresses=("127.0.0.1",), ports=(1,), slot=3, generation=9, key=KEY, size=8,
    checksum=1, readers=1, schema_fingerprint="0" * 32, schema=None, lengths=(), created=0.0, deadline=None,
    metadata={},
)  # fmt: skip
RECORDS = [
    Child(TICKET, 0, "tcp", TICKET.encode()),
    FetchedItem(TICKET, TICKET),
    FetchedBatch([FetchedItem(TICKET, TICKET)]),
    Entry(TICKET.encode(), 4),
    ManifestEntry(TICKET.encode(), (0,), None),
    Change("groups/g/claims/1", TICKET.encode()),
    Next(TICKET.encode()),
    RedisURL(PLACE, "run"),
    HeldSample(TICKET.identity, TICKET.encode(), 0, 1, 0, 8, None),
    PlannedPart([[TICKET.encode()]], [[None]]),
    Arrival(TICKET.identity, "g", 1, 1, None, TICKET.encode(), TICKET.identity),
    Mesh(store=f"redis://user:{WORD}@host:6379"),
    Ack("ab" * 16, 3, 9, 0, KEY),
    frames.Record(frames.Kind.READ, 3, 9, 0, KEY, 8),
    messages.FeedHello(WORD, "replica"),
    messages.Slices(0, 0, 0, TICKET.encode()),
    messages.Placed(0, TICKET.encode(), 0),
    offers.Offer(7, 0, TICKET.encode()),
    UpdateBarrier(store=PLACE, run="run", senders=1, receivers=1),
    Configuration(store=PLACE),
    Loaded(configuration=Configuration(store=PLACE), sources={}),
    roles.ShardDescription(name="p", host="h", address="127.0.0.1", port=1, token=WORD, layout="", bucket_bytes=1),
    roles.ParentRank("p", "127.0.0.1", 1, WORD),
    ServerOptions(secret=WORD.encode()),
    ClientOptions(secret=WORD.encode()),
    EngineOptions(secret=WORD.encode()),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_representation_shows_neither_keys_nor_tokens_nor_passwords(record: Any) -> None:
    assert record == record  # what is hidden still counts
    for shown in (repr(record), str(record), f"{record}", pretty_repr(record), pretty_repr([record]), repr([record])):
        assert str(KEY) not in shown and hex(KEY)[2:] not in shown
        assert WORD not in shown
        assert TICKET.encode()[40:60] not in shown.encode("unicode_escape").replace(b"\\\\", b"\\")
        assert repr(TICKET.encode())[2:60] not in shown
        assert type(record).__name__ in shown


# Fields of these names carry what whoever has it may use. Exempt is what is gone with its connection, or no secret.
_TELLING = ("key", "token", "secret", "data", "url", "value", "store")
_HARMLESS = {
    "transport.cooldown.destinations.base.Destination",
    "transport.snapshots.manifest.RingPart",  # `data` is a file's name and checksums
    "transport.ticket._Row",  # never leaves its module
    "transport.adapters.torchrun.options.RendezvousOptions",  # its URL hides the password itself
}


def records() -> Iterator[type]:
    for module in pkgutil.walk_packages(transport.__path__, "transport."):
        if module.name.startswith(("transport.bench", "transport.demo")) or module.name in ("transport._ucp",):
            continue  # the native module is loaded by transport.wire.library, after the library
        try:
            found = importlib.import_module(module.name)
        except MissingDependencyError:
            continue  # an adapter of what is not installed here
        except ModuleNotFoundError as error:
            if str(error.name).startswith("transport"):
                raise
            continue  # a file behind such an adapter
        for kind in vars(found).values():
            if inspect.isclass(kind) and kind.__module__ == found.__name__:
                yield kind


def fields_of(kind: type) -> collections.abc.Iterable[str]:
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind) if field.repr]
    found = getattr(kind, "__struct_fields__", None) or getattr(kind, "_fields", ())
    return found if isinstance(found, tuple) else ()  # a class of another kind may have a method of this name


def encoded_tickets(field: str, said: object) -> bool:
    """Whether a field holds tickets as bytes, which have their keys in them."""
    return field.startswith("ticket") and "bytes" in str(said)


def test_every_record_with_such_a_field_is_among_those_that_hide_it() -> None:
    tested = {type(record) for record in RECORDS}
    elsewhere = {"transport.ticket.Ticket", "transport.server.starting.ListenerConfig"}  # tests of their own
    for kind in records():
        name = f"{kind.__module__}.{kind.__name__}"
        said = inspect.get_annotations(kind)
        telling = {field for field in fields_of(kind) if field in _TELLING or encoded_tickets(field, said.get(field))}
        if telling and name not in _HARMLESS and name not in elsewhere and kind.__name__ != "DeviceTensor":
            assert kind in tested, f"{name} has {telling}: hide it from `repr`, and add it to RECORDS"


# --- what is imported only where its framework is installed -----------------------------------------------
ADAPTERS = sorted((Path(transport.__file__).parent / "adapters").rglob("*.py"))
_WITHIN_A_PROCESS = {"_Delivery"}  # its token names a batch of a worker process, to that process alone


def showing(source: str) -> list[str]:
    """Records of a module that have such a field, or how to reach an `UpdateBarrier`, and show it."""
    found = []
    for record in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)):
        bases = {ast.unparse(each) for each in (*record.bases, *record.decorator_list)}
        if not any(each.startswith(("NamedTuple", "msgspec.Struct", "dataclass")) for each in bases):
            continue
        hidden = "".join(each for each in bases if each.startswith("hiding("))
        for field in (node for node in record.body if isinstance(node, ast.AnnAssign)):
            name, said = ast.unparse(field.target), ast.unparse(field.annotation)
            telling = name in (*_TELLING, "barrier") or encoded_tickets(name, said)
            hides = f"'{name}'" in hidden or (field.value is not None and "repr=False" in ast.unparse(field.value))
            hides |= said in ("UpdateBarrier", "RedisURL | SQLiteURL")  # which hide it themselves
            if telling and not hides:
                found.append(f"{record.name}.{name}")
    return found


@pytest.mark.parametrize("path", ADAPTERS, ids=lambda path: path.stem)
def test_records_of_adapters_hide_such_fields(path: Path) -> None:
    assert [each for each in showing(path.read_text()) if each.partition(".")[0] not in _WITHIN_A_PROCESS] == []


def test_the_search_finds_a_record_that_shows_its_key() -> None:
    assert showing("class A(NamedTuple):\n    key: int\n    ticket: bytes") == ["A.key", "A.ticket"]
    assert showing("@hiding('key')\nclass A(msgspec.Struct):\n    key: int") == []
    assert showing("@dataclass\nclass A:\n    barrier: dict\n    token: str = field(repr=False)") == ["A.barrier"]
