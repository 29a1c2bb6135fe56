"""Reading order is import order: docs/DESIGN.md lists the modules, and each imports only what stands above it.

Imports under TYPE_CHECKING are not counted, because they run nothing. The package's own front door (``__init__``,
``__main__``) stands below everything, and that of a folder below its files.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "transport"
FILES = sorted(path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py"))


def reading_order() -> list[str]:
    """Modules ("ring", "queue/base") and whole folders ("cli/") in the order of the page."""
    page = (ROOT / "docs" / "DESIGN.md").read_text(encoding="utf-8")
    block = re.search(r"^Reading order.*?\n\n((?:    .*\n)+)", page, re.MULTILINE)
    assert block, "docs/DESIGN.md has no list after 'Reading order'"
    return [name for line in block[1].splitlines() for name in re.split(r" {3,}", line.strip())[0].split()]


ORDER = reading_order()


def place(module: str) -> int | None:
    """Where a module stands; a folder's ``__init__`` and the folder itself stand with its last file."""
    if module in ("__init__", "__main__"):
        return len(ORDER)
    module = module.removesuffix("/__init__").removesuffix("/__main__")
    places = [
        at for at, name in enumerate(ORDER) if name == module or (name.endswith("/") and f"{module}/".startswith(name))
    ]
    within = [at for at, name in enumerate(ORDER) if name.startswith(f"{module}/")]
    return max(places + within, default=None)


class _Imports(ast.NodeVisitor):
    def __init__(self, module: str) -> None:
        self.package = ["transport", *module.split("/")[:-1]]
        self.found: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self.package[: len(self.package) + 1 - node.level] if node.level else []
        source = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            # "from transport import wire" names a module, "from transport.wire.frames import tag" something in one.
            self.add(f"{source}.{alias.name}" if is_module(f"{source}.{alias.name}") else source)

    def add(self, dotted: str) -> None:
        if dotted.startswith("transport."):
            self.found.add(dotted.removeprefix("transport.").replace(".", "/"))


def is_module(dotted: str) -> bool:
    path = ROOT / dotted.replace(".", "/")
    return any(path.with_suffix(suffix).exists() for suffix in (".py", ".pyi")) or (path / "__init__.py").exists()


def imports(module: str) -> set[str]:
    visitor = _Imports(module)
    visitor.visit(ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8")))
    return visitor.found


def test_every_listed_name_exists() -> None:
    missing = [name for name in ORDER if not (PACKAGE / name).is_dir() and not is_module(f"transport/{name}")]
    assert not missing, f"docs/DESIGN.md lists what is not there: {missing}"


@pytest.mark.parametrize("module", FILES)
def test_a_file_imports_only_what_stands_above_it(module: str) -> None:
    own = place(module)
    assert own is not None, f"{module} is not in the reading order of docs/DESIGN.md: put it where it belongs"
    for imported in sorted(imports(module)):
        other = place(imported)
        assert other is not None, f"{module} imports {imported}, which is not in the reading order of docs/DESIGN.md"
        same_folder = other == own and "/" in module
        assert other < own or same_folder, f"{module} imports {imported}, which stands below it in docs/DESIGN.md"


def test_only_one_file_imports_ucxx() -> None:
    importers = [
        module
        for module in FILES
        if re.search(r"^\s*(import|from) ucxx", (PACKAGE / f"{module}.py").read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert importers == ["ucx"]


@pytest.mark.parametrize("module", FILES)
def test_nothing_is_pickled(module: str) -> None:
    text = (PACKAGE / f"{module}.py").read_text(encoding="utf-8")
    assert not re.search(r"^\s*(import|from) (pickle|cloudpickle|marshal|shelve|dill)", text, re.MULTILINE)
