"""Options of verl's engine as its configuration has them: texts and lists where bytes and sets are meant."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import verl_adapter  # noqa: F401  # first: what verl imports warns

from transport.adapters.engines.options import ring_arguments
from transport.errors import ConfigurationError
from transport.weights.options import EngineOptions

PAGE = Path(__file__).resolve().parents[3] / "docs" / "ADAPTERS.md"


def test_the_configuration_to_paste_is_accepted(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="verl is not installed, and PyYAML with it")
    block = PAGE.read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
    rollout = yaml.safe_load(block)["actor_rollout_ref"]["rollout"]
    engine = rollout["checkpoint_engine"]
    assert importlib.util.find_spec(rollout["checkpoint_manager_class"].rpartition(".")[0])
    assert engine["backend"] == importlib.import_module(engine["custom_backend_module"]).BACKEND
    given = engine["engine_kwargs"][engine["backend"]]
    secret = tmp_path / "secret"
    secret.write_bytes(b"of the run, thirty-two bytes long")
    secret.chmod(0o600)
    arguments = ring_arguments({**given, "secret_file": str(secret)})
    assert arguments["delta"] is True
    assert arguments["options"].wires == {"mapped", "tcp"}


def options_of(**engine_kwargs: Any) -> EngineOptions:
    options = ring_arguments(engine_kwargs)["options"]
    assert isinstance(options, EngineOptions)
    return options


@pytest.mark.parametrize("wires", [["tcp", "mapped"], "tcp, mapped", ("tcp", "mapped"), {"tcp", "mapped"}])
def test_wires_are_a_list_or_a_text(wires: Any) -> None:
    assert options_of(wires=wires).wires == frozenset({"tcp", "mapped"})


def test_numbers_may_be_texts_as_yaml_reads_some_of_them() -> None:
    found = options_of(rate="1e9", fanout="3", stall_s=5)
    assert (found.rate, found.fanout, found.stall_s) == (1e9, 3, 5.0)


def test_the_secret_is_a_text_bytes_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("of the run\n")
    for given in ({"secret": "of the run"}, {"secret": b"of the run"}, {"secret_file": str(file)}):
        assert options_of(**given).secret == b"of the run"


def test_arguments_of_the_engine_pass_through() -> None:
    assert ring_arguments({"address": "127.0.0.1"}) == {"address": "127.0.0.1", "options": EngineOptions()}


@pytest.mark.parametrize(
    ("engine_kwargs", "message"),
    [
        ({"wire": "tcp"}, "engine_kwargs: no option wire; there are address, delta"),
        ({"wires": ["carrier pigeon"]}, "Invalid enum value 'carrier pigeon'.*wires"),
        ({"shape": "ball"}, "Invalid enum value 'ball'.*shape"),
        ({"rate": "fast"}, "rate"),
        ({"secret": "a", "secret_file": "b"}, "either secret or secret_file"),
        ({"secret_file": "/does/not/exist"}, "secret_file /does/not/exist: No such file"),
    ],
)
def test_a_wrong_option_is_named(engine_kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ring_arguments(engine_kwargs)


def test_the_value_of_a_wrong_secret_is_not_shown() -> None:
    with pytest.raises(ConfigurationError, match="secret is a int") as caught:
        ring_arguments({"secret": 12345678})
    assert "12345678" not in str(caught.value)
