"""What messages tell users to install: nothing that a stranger could register, and what is needed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from transport.runtime.installing import PACKAGES, install

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize("what", sorted(PACKAGES))
def test_what_is_named_is_what_the_extra_would_install(what: str) -> None:
    extras = PROJECT["optional-dependencies"]
    if what in extras:
        assert list(PACKAGES[what]) == extras[what]
    elif what == "cmake":
        assert set(PACKAGES[what]) <= set(extras["test"])
    assert install(what).startswith("pip install ")


def test_nobody_is_told_to_install_this_package_by_its_name() -> None:
    """It is on no package index, so whoever registered the name there would be installed."""
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*"),
    ]
    sources = [*(ROOT / "transport").rglob("*.py"), *(path for path in pages if path.suffix in (".md", ".py", ".txt"))]
    named = re.compile(r"(pip|uv)[^\n]* install[^\n]*payload-transport|payload-transport\[")
    assert [path.name for path in sources if named.search(path.read_text(encoding="utf-8"))] == []
