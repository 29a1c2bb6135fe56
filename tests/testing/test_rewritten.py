"""Workers of pytest-xdist share the work of rewriting test files (tests/support/rewritten.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.assertion.rewrite import PYC_TAIL
from rewritten import rewrite_share


def test_each_worker_rewrites_a_share_of_the_files_that_are_asked_for(
    tmp_path: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("test_a", "test_b", "in_folder/test_c", "in_folder/test_d", "other/test_e")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).with_suffix(".py").write_text("def test_it(): assert True\n")
    (tmp_path / "test_b.py").write_text("def what collection reports")
    asked = ["test_a.py::test_it", "test_b.py", "in_folder"]
    monkeypatch.setattr(pytestconfig, "args", [str(tmp_path / each) for each in asked])

    def cached() -> set[str]:
        return {path.name.removesuffix(PYC_TAIL) for path in tmp_path.rglob("*.pyc")}

    rewrite_share(pytestconfig, 0, 2)
    share = cached()
    assert len(share) < 3
    rewrite_share(pytestconfig, 1, 2)
    assert share < cached() == {"test_a", "test_c", "test_d"}
