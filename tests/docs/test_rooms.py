"""Folders are rooms: docs/DESIGN.md lists them in the order of their imports, and a room imports only rooms above it.

The front doors (``__init__`` and ``__main__`` of the package, and the ``__init__`` of a room) are not counted: they
name what is behind them and import it on first use. Imports under TYPE_CHECKING count as all others.
"""

from __future__ import annotations

import re
from graphlib import CycleError, TopologicalSorter

from rooms import FILES, PACKAGE, ROOT, imported_rooms, imports, inner_files, listed_rooms, room


def test_every_folder_is_a_room_of_the_page_and_every_room_a_folder() -> None:
    assert {room(module) for module in FILES} == set(listed_rooms())


def test_a_room_imports_only_rooms_above_it() -> None:
    order = listed_rooms()
    wrong = [
        f"{name} imports {target}, which stands below it"
        for name, targets in imported_rooms().items()
        for target in targets
        if order.index(target) > order.index(name)
    ]
    assert not wrong


def test_no_two_files_import_each_other_not_even_round_corners() -> None:
    graph = {module: {each for each in imports(module) if each in FILES} for module in inner_files()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" → ".join(error.args[1])) from None


def test_the_tests_of_a_room_stand_in_a_folder_of_its_name() -> None:
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and not path.name.startswith("_")}
    own = {"support", "docs", "gpu", "benchmarks", "wheel", "deploy", "misuse", "guarantees"}
    assert folders - own <= {name.partition("/")[0] for name in listed_rooms()}


def test_only_one_file_imports_ucxx() -> None:
    importers = [
        module
        for module in FILES
        if re.search(r"^\s*(import|from) ucxx", (PACKAGE / f"{module}.py").read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert importers == ["wire/library"]


def test_nothing_is_pickled() -> None:
    unsafe = re.compile(r"^\s*(import|from) (pickle|cloudpickle|marshal|shelve|dill)", re.MULTILINE)
    assert [module for module in FILES if unsafe.search((PACKAGE / f"{module}.py").read_text("utf-8"))] == []
