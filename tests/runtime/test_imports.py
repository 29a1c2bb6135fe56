"""What is done behind the import of a module."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from transport.runtime.imports import after_import


def test_an_import_fails_until_what_comes_after_it_has_been_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_framework.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    errors = [ImportError("does not fit this release")]

    def act() -> None:
        if errors:
            raise errors.pop()

    after_import("some_framework", act)
    with pytest.raises(ImportError, match="does not fit"):
        importlib.import_module("some_framework")
    assert "some_framework" not in sys.modules
    monkeypatch.setitem(sys.modules, "some_framework", importlib.import_module("some_framework"))
    assert not errors
