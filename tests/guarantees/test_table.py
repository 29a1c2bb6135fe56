"""Every row of the table of docs/GUARANTEES.md has tests, one of them in this room; each names it by its first words.

The tests of this room have a trainer and a writer as processes and compare the account of a run exactly.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_HEADER = "| what happens | consumed twice | lost | how |"


def rows() -> list[str]:
    """The first cell of each row."""
    table = (_ROOT / "docs" / "GUARANTEES.md").read_text(encoding="utf-8").partition(_HEADER)[2].partition("\n\n")[0]
    return [line.split("|")[1].strip() for line in table.splitlines()[2:]]


def rooms_by_case() -> dict[str, set[str]]:
    """Rooms of the tests that are marked ``guarantee(case)``."""
    found = defaultdict(set)
    for file in (_ROOT / "tests").rglob("test_*.py"):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "mark.guarantee" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.guarantee":
                found[ast.literal_eval(node.args[0])].add(file.parent.name)
    return found


def test_every_row_of_the_table_has_a_test_of_this_room_and_every_marked_case_is_a_row() -> None:
    rooms = rooms_by_case()
    cases = [max((case for case in rooms if row.startswith(case)), key=len, default=row) for row in rows()]
    assert sorted(cases) == sorted(rooms), "each case is of one row"
    assert [case for case in cases if "guarantees" not in rooms[case]] == []
