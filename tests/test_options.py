"""No field of options, rules, limits or settings is without effect; the operator's settings reach who they are for.

What a field does is tested in its room. Here are the operator's choices, each with two values and what is seen.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import logging
import os
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers import dead_port, noise, serving, settings_with
from packers import Packer, Worker, collected

import transport
from transport import BlockingClient, Schema, Trainer, config
from transport.cli import run as command
from transport.errors import RetriesExhaustedError, TransportError
from transport.observe.metrics import configured_exporter
from transport.runtime.logs import set_up_logging
from transport.storage.urls import SQLiteURL
from transport.store import open_store

Configuration = config.Configuration
SCHEMA = Schema.of(step=("int64",))
HERE = Path(transport.__file__).parent


# --- no field is without effect -------------------------------------------------------------------------
def structs_of_options() -> list[type[msgspec.Struct]]:
    found = []
    for module in pkgutil.walk_packages(transport.__path__, "transport."):
        if module.name.endswith("__main__"):
            continue
        try:
            names = vars(importlib.import_module(module.name))
        except (ImportError, TransportError):
            continue  # of an optional library
        for name, thing in names.items():
            if not (isinstance(thing, type) and issubclass(thing, msgspec.Struct) and thing.__module__ == module.name):
                continue
            if name.endswith(("Options", "Rules", "Limits", "Settings", "Configuration", "Codes")):
                found.append(thing)
    return found


def test_every_field_of_options_is_read() -> None:
    read = {
        node.attr
        for file in HERE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    structs = structs_of_options()
    assert len(structs) > 8
    unread = {kind.__name__: sorted(set(kind.__struct_fields__) - read) for kind in structs}
    assert {name: fields for name, fields in unread.items() if fields} == {}


# --- what the operator chooses --------------------------------------------------------------------------
def wire_of_a_payload(found: Configuration) -> str:
    worker, packer = Worker(), Packer()
    try:
        worker.setup_ucxx(SCHEMA, slots=2, mode="thread")
        packer.setup_ucxx_packer(schemas=[SCHEMA])
        batch = collected(packer, [worker.write_to_buffer({"step": 3})])
        (payload,) = packer.consume(batch)
        payload.release()
        return payload.wire
    finally:
        packer.cleanup_ucxx_packer()
        worker.cleanup_ucxx()


def of_a_worker(look: Callable[[Worker], Any]) -> Callable[[Configuration], Any]:
    def seen(_: Configuration) -> Any:
        worker = Worker()
        try:
            worker.setup_ucxx(SCHEMA, slots=2, mode="thread")
            return look(worker)
        finally:
            worker.cleanup_ucxx()

    return seen


def server_of(worker: Worker) -> Any:
    assert worker._ucxx_server is not None
    return worker._ucxx_server._config


def address_of_metrics(found: Configuration) -> str | None:
    exporter = configured_exporter(found)
    if exporter is None:
        return None
    with exporter:
        assert exporter._shared is not None
        return str(exporter._shared._server.server_address[0])


def store_of_a_command(_: Configuration) -> int:
    """`transport cooldown status` finds the epochs of a store that is there, and refuses one that is not."""
    return command(["cooldown", "status"])


def logged(found: Configuration) -> tuple[int, bool]:
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    root.handlers.clear()
    try:
        set_up_logging(found.log_level, found.log_format, "test")
        record = logging.LogRecord("x", logging.ERROR, "", 1, "said", None, None)
        text = root.handlers[0].format(record)
        with contextlib.suppress(json.JSONDecodeError):
            return root.level, isinstance(json.loads(text), dict)
        return root.level, False
    finally:
        root.level, root.handlers[:] = before[0], before[1]


def whether_all_attempts_are_made(found: Configuration) -> bool:
    many = msgspec.structs.replace(found.settings, attempts_per_read=50, backoff_first_s=0.05, backoff_most_s=0.05)
    with serving() as (ring, _), dead_port() as port, BlockingClient(wire={"tcp"}, settings=many) as client:
        ticket = msgspec.structs.replace(ring.write_raw(noise(1)), ports=(port,))
        try:
            client.read(ticket)
        except RetriesExhaustedError as error:
            return error.attempts == 50
        except TimeoutError:
            return False
    raise AssertionError


# key → what is looked at; two values as text, each with what is seen; other settings that make it visible
EFFECTS: dict[str, tuple[Callable[[Configuration], Any], dict[str, Any], dict[str, str]]] = {
    "batch_deadline_s": (
        whether_all_attempts_are_made, {"0.5": False, "100": True}, {"read_timeout_s": "0.1"}
    ),
    "wires": (wire_of_a_payload, {"tcp": "tcp", "mapped,tcp": "mapped"}, {"addresses": "127.0.0.1"}),
    "bind": (of_a_worker(lambda worker: server_of(worker).bind), {"127.0.0.1": "127.0.0.1", "": ""}, {}),
    "addresses": (
        of_a_worker(lambda worker: worker.write_to_buffer({"step": 1}).addresses),
        {"10.0.0.7": ("10.0.0.7",), "10.0.0.7,10.0.0.8": ("10.0.0.7", "10.0.0.8")}, {},
    ),
    "secret_file": (
        of_a_worker(lambda worker: server_of(worker).secret), {"{folder}/secret": b"between us", "": None}, {}
    ),
    "metrics_port": (address_of_metrics, {"": None, "0": "127.0.0.1"}, {}),
    "metrics_bind": (
        address_of_metrics, {"127.0.0.2": "127.0.0.2", "127.0.0.1": "127.0.0.1"}, {"metrics_port": "0"}
    ),
    "store": (store_of_a_command, {"{store}": 0, "sqlite:/absent/store.db": 2}, {}),
    "run": (
        of_a_worker(lambda worker: worker.ring.name[:-16]),  # without the random rest
        {"": "/transport-rollout-", "seven": "/transport-run-seven@"}, {},
    ),
    "log_level": (lambda found: logged(found)[0], {"INFO": logging.INFO, "ERROR": logging.ERROR}, {}),
    "log_format": (lambda found: logged(found)[1], {"json": True, "text": False}, {}),
}  # fmt: skip


@pytest.mark.nightly(keep=5)
@pytest.mark.ucx
@pytest.mark.parametrize("key", EFFECTS)
def test_a_choice_of_the_operator_has_its_effect(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, cases, others = EFFECTS[key]
    (tmp_path / "secret").write_bytes(b"between us\n")
    store = SQLiteURL(tmp_path / "store.db").text
    open_store(store).close()
    monkeypatch.chdir(tmp_path)
    for other, value in others.items():
        monkeypatch.setenv(config.variable_of(other), value)
    for value, expected in cases.items():
        monkeypatch.setenv(config.variable_of(key), value.format(folder=tmp_path, store=store))
        found = config.configuration()
        found.settings.validate()
        assert seen(found) == expected, f"{config.variable_of(key)}={value}"


@pytest.mark.ucx
def test_the_operators_settings_reach_client_server_claims_and_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSPORT_LINGER_S", "250")
    monkeypatch.setenv("TRANSPORT_CONSUMED_RINGS", "2")
    monkeypatch.setenv("TRANSPORT_CLAIM_LEASE_S", "45")
    expected = settings_with(linger_s=250.0, consumed_rings=2, claim_lease_s=45.0)
    worker, packer = Worker(), Packer()
    with Trainer(SCHEMA, f"rings:options-{os.getpid()}-") as trainer:
        try:
            worker.setup_ucxx(SCHEMA, slots=2, mode="thread", rings=trainer.rings)
            packer.setup_ucxx_packer(schemas=[SCHEMA])
            assert server_of(worker).settings == expected
            assert packer._packer.client._settings == packer._packer.settings == expected
            assert packer.consumed_record()._most_rings == 2
        finally:
            packer.cleanup_ucxx_packer()
            worker.cleanup_ucxx()
        assert trainer.rings.lease_s == 45.0
