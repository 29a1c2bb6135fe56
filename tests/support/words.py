"""Lint of names and docstrings: two rules of how the package is written that a program can check (make lint).

A docstring begins with a verb and its object, or with a noun: not with a word that is neither, as in a clause without
its noun ("How long …", "Where …"), a genitive, or a sentence about "it". Such words are few, and no noun or verb is
among them. Of functions ruff demands the imperative besides (D401). One name is one class: no other class of the
package has it, in whichever room; what native code exports has names of its own.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = {"How", "What", "When", "Where", "Whether", "Which", "Who", "Whom", "Whose", "Why"}
CONJUNCTIONS = {"After", "As", "Because", "Before", "If", "Since", "So", "Though", "Unless", "Until", "While"}
PREPOSITIONS = {"At", "Behind", "By", "For", "From", "In", "Of", "On", "Over", "To", "Up", "With", "Within", "Without"}
PRONOUNS = {"Anything", "Everything", "It", "Its", "None", "Nothing", "Something", "They"}
HEADLESS = QUESTIONS | CONJUNCTIONS | PREPOSITIONS | PRONOUNS
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def problems(sources: dict[str, str]) -> Iterator[str]:
    """Yield each breach of a rule in these sources, by file name, as FILE:LINE: text."""
    classes: dict[str, str] = {}
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and not name.endswith(".pyi"):
                place = f"{name}:{node.lineno}"
                if (other := classes.setdefault(node.name, place)) != place:
                    yield f"{place}: {node.name} is another class, too: {other}"
            if isinstance(node, Documented) and (text := ast.get_docstring(node)):
                first = text.split()[0].rstrip(",:;.")
                if first in HEADLESS:
                    yield f"{name}:{node.body[0].lineno}: a docstring begins with {first!r}: give a verb, or a noun"


def main() -> int:
    """Print all problems of the package; return the exit status."""
    files = sorted(path for path in (ROOT / "transport").rglob("*.py*") if path.suffix in (".py", ".pyi"))
    found = list(problems({str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}))
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
