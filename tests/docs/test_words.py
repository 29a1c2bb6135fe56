"""The lint of names and docstrings sees what it is for."""

from __future__ import annotations

import pytest
from words import problems

TWICE = {"a.py": "class One: ...\nclass _Two: ...\n", "b.py": "def f() -> None:\n    class _Two: ...\n"}


def test_a_name_of_two_classes_is_a_problem_in_whichever_room_they_are() -> None:
    assert list(problems(TWICE)) == ["b.py:2: _Two is another class, too: a.py:2"]


@pytest.mark.parametrize(("begins", "found"), [("What is left.", 1), ("While it is.", 1), ("Return what is left.", 0)])
def test_a_docstring_without_verb_or_noun_in_front_is_a_problem(begins: str, found: int) -> None:
    assert len(list(problems({"a.py": f'def f() -> None:\n    """{begins}"""\n'}))) == found
