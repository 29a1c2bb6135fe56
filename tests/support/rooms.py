"""The package's rooms and imports, read from the code: their lint, and docs/house.svg drawn from them.

Folders are rooms, listed by docs/developers/DESIGN.md in the order of imports: a room imports only rooms above it. The
front doors (``__init__`` and ``__main__`` of the package, and the ``__init__`` of a room) are not counted: they name
what is behind them and import it on first use. Imports under TYPE_CHECKING count as all others.

python tests/support/rooms.py            says what breaks this (make lint)
python tests/support/rooms.py picture    writes the picture (make house)
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "transport"
PICTURE = ROOT / "docs" / "house.svg"
FILES = sorted(path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py"))


def listed_rooms() -> list[str]:
    """The rooms in the order of the page. The first line lists the files of the package's own folder, room "."."""
    page = (ROOT / "docs" / "developers" / "DESIGN.md").read_text(encoding="utf-8")
    block = re.search(r"^## Rooms\n(?:(?!    )[^\n]*\n)*((?:    [^\n]+\n)+)", page, re.MULTILINE)
    assert block, "docs/developers/DESIGN.md has no list of rooms"
    return [".", *(line.split()[0] for line in block[1].splitlines()[1:])]


def room(module: str) -> str:
    return module.rpartition("/")[0] or "."


def is_module(dotted: str) -> bool:
    path = ROOT / dotted.replace(".", "/")
    return path.with_suffix(".py").exists() or path.with_suffix(".pyi").exists() or (path / "__init__.py").exists()


@cache
def imports(module: str) -> frozenset[str]:
    """Modules of this package that a module imports, wherever in it the import stands."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{module} has a relative import"
            for alias in node.names:
                named = f"{node.module}.{alias.name}"
                found.add(named if is_module(named) else node.module)
    return frozenset(
        name.removeprefix("transport.").replace(".", "/") for name in found if name.startswith("transport.")
    )


def inner_files() -> list[str]:
    return [module for module in FILES if module.rpartition("/")[2] not in ("__init__", "__main__")]


def imported_rooms() -> dict[str, set[str]]:
    """For each room the rooms that its files import, without itself."""
    rooms: dict[str, set[str]] = {name: set() for name in listed_rooms()}
    for module in inner_files():
        for imported in imports(module):
            target = imported if (PACKAGE / imported).is_dir() else room(imported)
            if target != room(module):
                rooms[room(module)].add(target)
    return rooms


def problems() -> Iterator[str]:
    """Yield what the page and the imports do not agree on."""
    order = listed_rooms()
    if strangers := {room(module) for module in FILES}.symmetric_difference(order):
        yield f"a folder without a line of the page, or a line without a folder: {', '.join(sorted(strangers))}"
    for name, targets in imported_rooms().items():
        for target in targets:
            if order.index(target) > order.index(name):
                yield f"{name} imports {target}, which stands below it"
    graph = {module: {each for each in imports(module) if each in FILES} for module in inner_files()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield f"files import each other: {' → '.join(error.args[1])}"


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same without what follows from the rest: a → c where there is a → b → c."""

    @cache
    def below(name: str) -> frozenset[str]:
        return frozenset(graph[name]).union(*(below(each) for each in graph[name]))

    return {name: {each for each in near if not any(each in below(b) for b in near)} for name, near in graph.items()}


_ROW, _BOX, _LEFT, _NAME, _ROOM, _WIDTH = 34, 26, 16, 190, 1110, 1430


def picture() -> str:
    """The house as SVG: a row for each room with its files; an arc leads from a room to each that it builds on."""
    order, graph = listed_rooms(), reduced(imported_rooms())
    files = {name: [m.rpartition("/")[2] for m in inner_files() if room(m) == name] for name in order}
    middle = {name: 40 + at * _ROW for at, name in enumerate(order)}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {40 + len(order) * _ROW}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        '<text x="16" y="18" fill="#555">A room builds on the rooms that its arcs lead to, above it.</text>',
    ]
    for name in order:
        y = middle[name]
        shown = "(root)" if name == "." else name
        lines.append(f'<rect x="{_LEFT}" y="{y - _BOX // 2}" width="{_ROOM}" height="{_BOX}" rx="4" fill="#eef3f8"/>')
        lines.append(f'<text x="{_LEFT + 8}" y="{y + 5}" font-weight="bold" fill="#123">{escape(shown)}</text>')
        names = ", ".join(files[name])
        lines.append(f'<text x="{_LEFT + _NAME}" y="{y + 4}" font-size="10" fill="#345">{escape(names)}</text>')
    edge = _LEFT + _ROOM
    for name in order:
        for target in sorted(graph[name], key=order.index):
            a, b = middle[name] - 4, middle[target] + 4
            bulge = edge + 30 + 8 * abs(order.index(name) - order.index(target))
            lines.append(
                f'<path d="M{edge} {a} C{bulge} {a} {bulge} {b} {edge + 3} {b}" fill="none" stroke="#4a7fb0"/>'
            )
            lines.append(f'<path d="M{edge + 1} {b} l7 -3 l0 6 z" fill="#4a7fb0"/>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> int:
    """Write the picture, or print all problems; return the exit status."""
    if sys.argv[1:] == ["picture"]:
        PICTURE.write_text(picture(), encoding="utf-8")
        return 0
    found = list(problems())
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
