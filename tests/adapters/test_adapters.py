"""Adapters without the framework they are for: one line says what to install."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata

import pytest

from transport.errors import MissingDependencyError


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no adapter had been imported."""
    for name in [name for name in sys.modules if name.startswith("transport.adapters.")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    ("adapter", "missing", "remedy"),
    [
        ("torch", "torch", "pip install 'torch>=2.6'"),
        ("torch.tensors", "torch", "pip install 'torch>=2.6'"),
        ("cosmos_rl", "torch", "pip install 'torch>=2.6'"),
        ("ray", "ray", r"pip install 'ray>=2\.40'"),
    ],
)
def test_a_missing_framework_is_named(adapter: str, missing: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    monkeypatch.setitem(sys.modules, missing, None)  # as if it were not installed
    with pytest.raises(MissingDependencyError, match=remedy):
        importlib.import_module(f"transport.adapters.{adapter}")


def test_cosmos_rl_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is missing as well, which is said first")
    forget(monkeypatch)
    monkeypatch.setitem(sys.modules, "cosmos_rl.utils.payload_transport", None)
    monkeypatch.setitem(sys.modules, "cosmos_rl", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'cosmos-rl>=0\.4\.7,<0\.5'"):
        importlib.import_module("transport.adapters.cosmos_rl")


def test_an_adapter_of_a_release_that_does_not_fit_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is missing as well, which is said first")
    forget(monkeypatch)
    monkeypatch.setattr(metadata, "version", {"cosmos-rl": "0.3.9", "torch": "2.13.0"}.__getitem__)
    with pytest.raises(MissingDependencyError, match=r"cosmos-rl 0\.3\.9 does not fit"):
        importlib.import_module("transport.adapters.cosmos_rl")
