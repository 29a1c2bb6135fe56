"""Lint of pages: names, commands and links in them exist, and README.md and the site lead to each (make lint)."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from doc_pages import PAGES, ROOT

from transport import config, wires

FOLDERS = ("transport", "native", "tests", "docs", "examples", "benchmarks", ".ci")
OWN = ("test_docs.py", "page_names.py")  # whose words are not the code's


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


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def in_backticks(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", without_code(page.read_text(encoding="utf-8")))


@cache
def identifiers() -> frozenset[str]:
    return frozenset(re.findall(r"[A-Za-z_]\w*", sources("transport", "native", "tests", "benchmarks")))


def has_member(class_name: str, member: str) -> bool:
    members, bases = classes().get(class_name, (set(), []))
    return member in members or any(has_member(base, member) for base in bases)


@cache
def type_aliases() -> frozenset[str]:
    return frozenset(re.findall(r"^([A-Z]\w*)(?:: TypeAlias)? = ", sources("transport"), re.MULTILINE))


@cache
def native_types() -> frozenset[str]:
    return frozenset(re.findall(r"(?:class|struct) (?:alignas\(\d+\) )?(\w+)", sources("native")))


def module_has(dotted: str) -> bool:
    """Whether ``transport.a.b`` is a module, or something that a module's file defines."""
    path = ROOT / dotted.replace(".", "/")
    if path.is_dir() or path.with_suffix(".py").exists() or path.with_suffix(".pyi").exists():
        return True
    home, _, name = dotted.rpartition(".")
    file = ROOT / f"{home.replace('.', '/')}.py"
    file = file if file.exists() else file.with_suffix("") / "__init__.py"
    return file.exists() and bool(re.search(rf"\b{re.escape(name)}\b", file.read_text(encoding="utf-8")))


def problem_with(word: str, page: Path) -> str | None:
    """Why a word in backticks does not exist; None where it does, or is not a name of this project."""
    if word == config.FILE_NAME:
        return None
    if word.startswith(config.PREFIX) and word.isupper() and word != "TRANSPORT_…":
        build = word in sources("native")
        known = build or word == config.FILE_VARIABLE or word.removeprefix(config.PREFIX).lower() in config.MEANINGS
        return None if known else "no such setting"
    path = re.fullmatch(r"([\w./-]+?)(?:::\w+)?", word)
    if path and (
        word.startswith(tuple(f"{folder}/" for folder in FOLDERS)) or re.search(r"\.(py|hpp|cpp|md)$", path[1])
    ):
        places = (ROOT, page.parent, ROOT / "transport", ROOT / "native", ROOT / "tests")
        return None if any((place / path[1]).exists() for place in places) else "no such file"
    room = re.fullmatch(r"([a-z]+)(?:/\w+)+", word)
    if room and (ROOT / "transport" / room[1]).is_dir():  # as the pages on the code name a file
        exists = (ROOT / "transport" / word).is_dir() or (ROOT / "transport" / f"{word}.py").exists()
        return None if exists else "no such file in transport/"
    if re.fullmatch(r"transport(\.\w+)+", word):
        return None if module_has(word) else "no such module, nor a name in one"
    if command := re.fullmatch(r"make (\S+).*", word):
        return None if command[1] in make_targets() else "no such target in the Makefile"
    if command := re.fullmatch(r"transport ([a-z]\w*)\b.*", word):
        return None if (ROOT / "transport" / "cli" / f"{command[1]}.py").exists() else "no such command"
    if named := re.fullmatch(r"([A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*)(?:(?:\.|::)(\w+))?(?:\(.*\))?", word):
        name, member = named[1], named[2]
        if name in native_types() or name in type_aliases() or hasattr(builtins, name):
            return None
        if name not in classes():
            return "no such class"
        return None if member is None or has_member(name, member) else f"{name} has no {member}"
    if named := re.fullmatch(r"(_?[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)+)(?:\(.*\))?(?:=.*)?", word):
        foreign = named[1].startswith(("UCX_", "RAPIDS_", "LD_"))
        chosen = named[1] in wires._CHOSEN
        return None if foreign or chosen or named[1] in identifiers() else "no such name in the source"
    return None


@cache
def make_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def slugs(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def wrong_words(page: Path) -> Iterator[str]:
    """What stands in backticks and does not exist."""
    for word in in_backticks(page):
        if problem := problem_with(word, page):
            yield f"`{word}`: {problem}"


def wrong_commands(page: Path) -> Iterator[str]:
    """Lines of console blocks whose target or file does not exist."""
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for line in "".join(blocks).splitlines():
        words = line.removeprefix("$ ").split("#")[0].split()
        targets = words[1:2] if words[:1] == ["make"] else []
        files = [word.split("::")[0] for word in words if word.startswith(tuple(f"{folder}/" for folder in FOLDERS))]
        if not make_targets().issuperset(targets) or not all((ROOT / file).exists() for file in files):
            yield f"{line}: no such target or file"


def wrong_links(page: Path) -> Iterator[str]:
    """Links to what is not there."""
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        if not re.match(r"https?://", target) and not (linked.exists() and (not anchor or anchor in slugs(linked))):
            yield f"{target}: leads nowhere"


@cache
def reached() -> set[Path]:
    """Pages that links lead to, from README.md on."""
    found, new = {ROOT / "README.md"}, [ROOT / "README.md"]
    while new:
        page = new.pop()
        for target in re.findall(r"\]\(([^)\s#]+\.md)", page.read_text(encoding="utf-8")):
            linked = (page.parent / target).resolve()
            if linked.exists() and linked not in found:
                found.add(linked)
                new.append(linked)
    return found


def unreached(page: Path) -> Iterator[str]:
    """Say that nothing leads to the page, where it is so."""
    if page.resolve() not in reached():
        yield "no page that README.md leads to links to it"
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    docs = ROOT / "docs"
    if page.is_relative_to(docs) and f": {page.relative_to(docs).as_posix()}\n" not in f"{navigation}\n":
        yield "it is not in the navigation of mkdocs.yml"


def main() -> int:
    """Print what is wrong with the pages; return the exit status."""
    checks = (wrong_words, wrong_commands, wrong_links, unreached)
    found = [f"{page.relative_to(ROOT)}: {each}" for page in PAGES for check in checks for each in check(page)]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
