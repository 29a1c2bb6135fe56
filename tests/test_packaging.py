"""The wheel holds the licence of everything that is linked into it; what builds and checks it is pinned."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import tomllib
from importlib.metadata import distribution, distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
VENDOR = ROOT / "native" / "vendor"
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
    assert {path.name for path in VENDOR.iterdir()} - {"xxhash.h", "README.md"} == {
        Path(path).name for path in LINKED if path.startswith("native/vendor/")
    }


def test_what_is_installed_has_them() -> None:
    files = distribution("payload-transport").files or []
    licences = {file.as_posix().partition(".dist-info/licenses/")[2] for file in files} - {""}
    assert licences == set(LINKED)


def test_origin_and_version_of_what_is_vendored_are_recorded() -> None:
    page, source = (VENDOR / "README.md").read_text(encoding="utf-8"), (VENDOR / "xxhash.h").read_bytes()
    numbers = re.findall(rb"#define XXH_VERSION_(?:MAJOR|MINOR|RELEASE) +([0-9]+)", source)
    assert f"| xxHash | {b'.'.join(numbers).decode()} |" in page
    assert hashlib.sha256(source).hexdigest() in page


def pinned() -> dict[str, str]:
    """Versions by name, as constraints.txt has them."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def installed_by_make() -> list[Requirement]:
    """What the Makefile has pip install: to build, to run, and its extras, for either variant of ucxx."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    lists = re.findall(r"^(?:DEMO_)?EXTRAS := (?:\$\(UCXX\),)?(\S+)$", makefile, re.MULTILINE)
    extras = [each for found in lists for each in found.split(",")]
    optional = PROJECT["optional-dependencies"]
    lines = [*PYPROJECT["build-system"]["requires"], *PROJECT["dependencies"]]
    return [
        Requirement(line) for line in lines + [line for each in (*extras, "cu12", "cu13") for line in optional[each]]
    ]


def test_what_make_installs_has_one_version_which_the_project_admits() -> None:
    versions = pinned()
    wrong = [
        f"{each} is {versions.get(canonicalize_name(each.name), 'not pinned')}"
        for each in installed_by_make()
        if not each.specifier.contains(versions.get(canonicalize_name(each.name), "0"))
    ]
    assert not wrong, "make constraints writes constraints.txt"


def test_what_is_installed_admits_every_python_that_the_project_admits() -> None:
    oldest = PROJECT["requires-python"].removeprefix(">=")
    pythons = {oldest + ".0"} | {f"{each.rpartition(' ')[2]}.0" for each in PROJECT["classifiers"] if ":: 3." in each}
    refused = {
        (each.name, each.version, python)
        for each in distributions()
        if canonicalize_name(each.name) in pinned()
        for python in pythons
        if not SpecifierSet("".join(each.metadata.get_all("Requires-Python") or ())).contains(python)
    }
    assert not refused, "make constraints writes constraints.txt"


# --- what a release says of itself -----------------------------------------------------------------
def release_text() -> Any:
    spec = importlib.util.spec_from_file_location("readme", ROOT / "tests" / "wheel" / "readme.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_metadata_name_authors_keywords_and_pythons() -> None:
    assert PROJECT["authors"]
    assert PROJECT["keywords"]
    pythons = {each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python :: 3." in each}
    assert pythons == {"3.11", "3.12", "3.13"}
    assert not [each for each in PROJECT["classifiers"] if each.startswith("License")]  # the SPDX expression says it


def test_with_an_address_links_of_the_readme_are_absolute_and_metadata_have_it() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = release_text().absolute(readme, "https://example.org/group/project/")
    assert "](https://example.org/group/project/blob/main/docs/TUTORIAL.md)" in shown
    assert re.findall(r"\]\((?!https://)[^)]+\)", shown) == []
    project = tomllib.loads(
        release_text().with_urls((ROOT / "pyproject.toml").read_text(encoding="utf-8"), "https://example.org/p")
    )["project"]
    assert project["urls"]["Source"] == "https://example.org/p"
    assert {**project, "urls": None} == {**PROJECT, "urls": None}
    with pytest.raises(ValueError, match="PROJECT_URL=ftp"):
        release_text().with_urls("", "ftp://example.org")
