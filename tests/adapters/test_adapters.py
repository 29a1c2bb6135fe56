"""Adapters without the framework they are for: one line says what to install."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata

import pytest

from transport.adapters.versions import FITS, require_fitting
from transport.errors import MissingDependencyError


@pytest.mark.parametrize(
    ("adapter", "missing", "remedy"),
    [
        ("torch", "torch", "pip install 'torch>=2.3'"),
        ("tensors", "torch", "pip install 'torch>=2.3'"),
        ("cosmos_rl", "torch", "pip install 'torch>=2.3'"),
        ("ray", "ray", r"pip install 'ray>=2\.40'"),
    ],
)
def test_a_missing_framework_is_named(adapter: str, missing: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "tensors", "cosmos_rl", "ray"):
        monkeypatch.delitem(sys.modules, f"transport.adapters.{name}", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)  # as if it were not installed
    with pytest.raises(MissingDependencyError, match=remedy):
        importlib.import_module(f"transport.adapters.{adapter}")


def test_cosmos_rl_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is missing as well, which is said first")
    monkeypatch.delitem(sys.modules, "transport.adapters.cosmos_rl", raising=False)
    monkeypatch.setitem(sys.modules, "cosmos_rl.utils.payload_transport", None)
    monkeypatch.setitem(sys.modules, "cosmos_rl", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'cosmos-rl>=0\.4\.7,<0\.5'"):
        importlib.import_module("transport.adapters.cosmos_rl")


@pytest.mark.parametrize("framework", ["verl", "cosmos-rl"])
@pytest.mark.parametrize("at", ["before the first", "the first", "the last", "beyond"])
def test_a_release_that_does_not_fit_is_named_with_those_that_do(
    framework: str, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, beyond = FITS[framework]
    found = {
        "before the first": (*first[:-1], first[-1] - 1, 7),
        "the first": (*first, 0),
        "the last": (*beyond[:-1], beyond[-1] - 1, 99),
        "beyond": (*beyond, 0),
    }[at]
    text = ".".join(map(str, found))
    monkeypatch.setattr(metadata, "version", {framework: text}.__getitem__)
    if at.startswith("the "):
        require_fitting(framework)
        return
    with pytest.raises(MissingDependencyError) as caught:
        require_fitting(framework)
    first_text, beyond_text = (".".join(map(str, each)) for each in (first, beyond))
    assert str(caught.value) == (
        f"{framework} {text} does not fit this adapter: it needs {first_text} or newer, below {beyond_text}: "
        f"pip install '{framework}>={first_text},<{beyond_text}'"
    )


def test_an_adapter_of_a_release_that_does_not_fit_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is missing as well, which is said first")
    monkeypatch.delitem(sys.modules, "transport.adapters.cosmos_rl", raising=False)
    monkeypatch.setattr(metadata, "version", {"cosmos-rl": "0.3.9"}.__getitem__)
    with pytest.raises(MissingDependencyError, match=r"cosmos-rl 0\.3\.9 does not fit"):
        importlib.import_module("transport.adapters.cosmos_rl")
