"""Folders are rooms, listed by docs/developers/DESIGN.md in the order of imports: a room imports only rooms above it.

The front doors (``__init__`` and ``__main__`` of the package, and the ``__init__`` of a room) are not counted: they
name what is behind them and import it on first use. Imports under TYPE_CHECKING count as all others.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

from rooms import FILES, imported_rooms, imports, inner_files, listed_rooms, room


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
