"""Programs to be copied, the demo and examples/, import public names alone."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest
from doc_pages import ROOT

PROGRAMS = [ROOT / "transport" / "demo" / "cartpole.py", *sorted((ROOT / "examples").rglob("*.py"))]


@cache
def rows() -> dict[str, set[str]]:
    """Names that docs/API.md lists, by module."""
    found: dict[str, set[str]] = {}
    for module, names in re.findall(
        r"`(transport[.\w]*)`: ((?:`\w+`(?:, )?)+)", (ROOT / "docs" / "API.md").read_text()
    ):
        found.setdefault(module, set()).update(re.findall(r"\w+", names))
    return found


@cache
def whole_modules() -> frozenset[str]:
    """Modules all of whose exported names are public."""
    paragraph = (ROOT / "docs" / "API.md").read_text().partition("**Public**")[2].partition("| what for")[0]
    return frozenset(re.findall(r"`(transport[.\w]*)`", paragraph))


def is_public(module: str, name: str) -> bool:
    if name in rows().get(module, ()):
        return True
    if module not in whole_modules():
        return False
    return name in getattr(importlib.import_module(module), "__all__", (name,))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.name)
def test_a_program_to_be_copied_imports_public_names_alone(program: Path) -> None:
    imported = [
        (node.module or "", each.name)
        for node in ast.walk(ast.parse(program.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        for each in node.names
    ]
    ours = [(module, name) for module, name in imported if module.partition(".")[0] == "transport"]
    assert [f"{module}.{name}" for module, name in ours if not is_public(module, name)] == []


def test_a_name_that_is_not_public_is_found() -> None:
    assert is_public("transport", "Trainer") and is_public("transport.errors", "RingFullError")
    assert is_public("transport.runtime.signals", "until_stopped")
    assert not is_public("transport.runtime.installing", "install")
    assert not is_public("transport", "config")
