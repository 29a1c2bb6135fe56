"""The wheel holds the licence of everything that is linked into it."""

from __future__ import annotations

import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINKED = {
    "LICENSE": ("Apache-2.0", "Apache License"),
    "native/vendor/LICENSE.xxhash": ("BSD-2-Clause", "Yann Collet"),
    "native/vendor/LICENSE.nanobind": ("BSD-3-Clause", "Wenzel Jakob"),
    "native/vendor/LICENSE.robin_map": ("MIT", "Thibaut Goetghebuer-Planchon"),
}


def shipped() -> set[str]:
    """Files that the project's patterns name."""
    patterns = PROJECT.get("license-files", [])
    return {path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern)}


@pytest.mark.parametrize("path", LINKED)
def test_what_is_linked_in_comes_with_its_licence(path: str) -> None:
    kind, words = LINKED[path]
    assert path in shipped()
    assert words in (ROOT / path).read_text(encoding="utf-8")
    assert kind in PROJECT["license"].split(" AND ")


def test_the_list_is_complete() -> None:
    assert shipped() == set(LINKED)
    assert {path.name for path in (ROOT / "native" / "vendor").iterdir()} - {"xxhash.h"} == {
        Path(path).name for path in LINKED if path.startswith("native/vendor/")
    }


def test_what_is_installed_has_them() -> None:
    files = distribution("payload-transport").files or []
    licences = {file.as_posix().partition(".dist-info/licenses/")[2] for file in files} - {""}
    assert licences == set(LINKED)
