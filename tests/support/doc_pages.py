"""The pages of the documentation."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
page_parameters = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


OWN = ("test_docs.py", "test_names.py")  # whose words are not the code's


@cache
def sources(*folders: str) -> str:
    """All source text, in which an identifier must occur to exist."""
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.*"))]
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for path in files
        if path.suffix in {".py", ".pyi", ".hpp", ".cpp", ".pml"} and path.name not in OWN
    )
    return text + (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@cache
def classes() -> dict[str, tuple[set[str], list[str]]]:
    """Every class of the package: what it has, and the names of its bases; classes of one name are taken together."""
    found: dict[str, tuple[set[str], list[str]]] = {}
    for path in [*(ROOT / "transport").rglob("*.py"), *(ROOT / "transport").rglob("*.pyi")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                members = {
                    name
                    for each in ast.walk(node)
                    for name in (
                        [each.name]
                        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
                        else [each.id]
                        if isinstance(each, ast.Name)
                        else [each.attr]
                        if isinstance(each, ast.Attribute)
                        else []
                    )
                }
                known, bases = found.setdefault(node.name, (set(), []))
                known |= members
                bases += [base.id for base in node.bases if isinstance(base, ast.Name)]
    return found
