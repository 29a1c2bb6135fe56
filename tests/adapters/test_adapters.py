"""Adapters without the framework they are for: one line says what to install."""

from __future__ import annotations

import importlib
import sys

import pytest

from transport.errors import MissingDependencyError


@pytest.mark.parametrize(
    ("adapter", "missing", "remedy"),
    [
        ("torch", "torch", "pip install 'torch>=2.3'"),
        ("tensors", "torch", "pip install 'torch>=2.3'"),
        ("cosmos_rl", "torch", "pip install 'torch>=2.3'"),
    ],
)
def test_a_missing_framework_is_named(adapter: str, missing: str, remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "tensors", "cosmos_rl"):
        monkeypatch.delitem(sys.modules, f"transport.adapters.{name}", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)  # as if it were not installed
    with pytest.raises(MissingDependencyError, match=remedy):
        importlib.import_module(f"transport.adapters.{adapter}")


def test_cosmos_rl_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="torch is missing as well, which is said first")
    monkeypatch.delitem(sys.modules, "transport.adapters.cosmos_rl", raising=False)
    monkeypatch.setitem(sys.modules, "cosmos_rl.utils.payload_transport", None)
    monkeypatch.setitem(sys.modules, "cosmos_rl", None)
    with pytest.raises(MissingDependencyError, match="pip install cosmos-rl"):
        importlib.import_module("transport.adapters.cosmos_rl")
