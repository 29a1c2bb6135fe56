"""The documentation runs, names only what exists, and has the numbers that the code has.

* Every ``python`` block of README.md, CONTRIBUTING.md and docs/ runs, each in a namespace and an empty folder of its
  own; one after ``<!-- not run: reason -->`` is skipped with its reason, one after ``<!-- needs: package -->`` where
  that is not installed. Every file in examples/ runs as a program.
* Paths, modules, classes, attributes, settings, make targets and commands in backticks exist, and links resolve.
* No page has more than 2 000 words, but the CHANGELOG.
* Tables that repeat code (settings, rules, ceilings, layouts, status codes, transitions, UCX settings) equal it.

``python tests/docs/test_docs.py`` writes the generated tables anew.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import re
import struct
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))  # pytest has it on its path, a program has not

import api_page
import frame_codec

from transport import config, errors, wires
from transport.client.retry import attempts_of_read, backoff_ceiling, worst_case_attempts, worst_case_wait
from transport.observe import metrics
from transport.settings import DEFAULTS
from transport.wire import frames

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
MOST_WORDS = 2000
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
FOLDERS = ("transport", "native", "tests", "docs", "examples", "benchmarks", ".ci")

page_parameters = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


# --- code that runs -----------------------------------------------------------------------------------
def python_blocks() -> list[object]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.finditer(
            r"(?:<!-- (not run|needs): (.*?) -->\n+)?^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL
        ):
            line = text.count("\n", 0, block.start(3)) + 1
            foreign = block[1] == "needs"
            marks = (
                [pytest.mark.filterwarnings("ignore"), pytest.mark.adapters(block[2])] if foreign else []
            )  # of what it imports
            if block[1] == "not run" or (foreign and importlib.util.find_spec(block[2]) is None):
                reason = f"{block[2]} is not installed" if foreign else f"{block[1]}: {block[2]}"
                marks.append(pytest.mark.skip(reason=reason))
            found.append(pytest.param(page, line, block[3], marks=marks, id=f"{page.name}:{line}"))
    return found


@pytest.mark.ucx
@pytest.mark.parametrize(("page", "line", "code"), python_blocks())
def test_a_block_runs(page: Path, line: int, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile("\n" * (line - 1) + code, str(page), "exec"), {"__name__": "__main__"})


@pytest.mark.ucx
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_an_example_runs(example: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(example)], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


# --- names that exist ---------------------------------------------------------------------------------
def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def in_backticks(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", without_code(page.read_text(encoding="utf-8")))


@cache
def sources(*folders: str) -> str:
    """All source text, in which an identifier must occur to exist."""
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.*"))]
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for path in files
        if path.suffix in {".py", ".pyi", ".hpp", ".cpp", ".pml"} and path.name != Path(__file__).name
    )
    return text + (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@cache
def identifiers() -> frozenset[str]:
    return frozenset(re.findall(r"[A-Za-z_]\w*", sources("transport", "native", "tests", "benchmarks")))


@cache
def classes() -> dict[str, tuple[set[str], list[str]]]:
    """Every class of the package: what it has, and the names of its bases."""
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
                found[node.name] = members, [base.id for base in node.bases if isinstance(base, ast.Name)]
    return found


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
    return frozenset(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@page_parameters
def test_what_stands_in_backticks_exists(page: Path) -> None:
    problems = {word: problem for word in in_backticks(page) if (problem := problem_with(word, page))}
    assert not problems


@page_parameters
def test_commands_in_console_blocks_exist(page: Path) -> None:
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    for line in "".join(blocks).splitlines():
        words = line.removeprefix("$ ").split("#")[0].split()
        if words[:1] == ["make"] and len(words) > 1:
            assert words[1] in make_targets(), line
        for word in words:
            if word.startswith(tuple(f"{folder}/" for folder in FOLDERS)):
                assert (ROOT / word.split("::")[0]).exists(), line


def slugs(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@page_parameters
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), target
        assert not anchor or anchor in slugs(linked), target


@page_parameters
def test_a_page_is_short(page: Path) -> None:
    if page.name != "CHANGELOG.md":  # a list that grows, of which one reads a part
        assert len(page.read_text(encoding="utf-8").split()) <= MOST_WORDS


@page_parameters
def test_a_page_is_reached_from_the_readme(page: Path) -> None:
    assert page.resolve() in reached(), "no page that README.md leads to links to it"


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


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert [page for page in pages if not re.search(rf": {re.escape(page)}$", navigation, re.MULTILINE)] == []


# --- the interface ------------------------------------------------------------------------------------
DOORS = ("", ".queue", ".store", ".rendezvous", ".cooldown", ".testing", ".weights")


@pytest.mark.parametrize("door", [f"transport{door}" for door in DOORS])
def test_what_a_door_gives_is_described(door: str) -> None:
    assert set(importlib.import_module(door).__all__) == {
        name for module, name in api_page.described() if module == door
    }


@page_parameters
def test_what_a_page_imports_is_described(page: Path) -> None:
    described = {f"{module}.{name}" for module, name in api_page.described()}
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    imported = {
        f"{node.module}.{alias.name}"
        for block in blocks
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "transport"
        for alias in node.names
    }
    assert {name for name in imported if not name.startswith("transport.errors.")} <= described


def test_every_adapter_is_described() -> None:
    described = {module.removesuffix(".handler") for module, _ in api_page.described()}
    table = (ROOT / "docs" / "ADAPTERS.md").read_text(encoding="utf-8").partition("\n## ")[0]
    assert set(re.findall(r"`(transport\.adapters\.\w+)`", table)) <= described


# --- numbers that the code has ------------------------------------------------------------------------
def page_with(text: str) -> Path:
    """The one page of docs/ that has this text."""
    [page] = [page for page in PAGES if page.parent.name == "docs" and text in page.read_text(encoding="utf-8")]
    return page


def part(name: str) -> str:
    text = page_with(f"<!-- {name} -->").read_text(encoding="utf-8")
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", text, re.DOTALL)
    assert found, f"no page has a part between <!-- {name} --> and <!-- /{name} -->"
    return found[1]


def rows(table: str) -> list[list[str]]:
    """Cells of a Markdown table's rows, without head and rule."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def plain(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ") if value >= 1000 else f"{value:g}"


def settings_table() -> str:
    lines = ["| setting | default | what it bounds |", "|---|---|---|"]
    lines += [
        f"| `{name}` | {plain(getattr(DEFAULTS, name))} | {config.MEANINGS[name]} |"
        for name in DEFAULTS.__struct_fields__
    ]
    return "\n".join(lines) + "\n"


def rules_list() -> str:
    return "".join(f"* `{rule}`\n" for _, rule in DEFAULTS._rules())


def ceilings_table() -> str:
    lines = ["| ports | attempts | wait for 64 KiB | for 16 MiB | for 1 GiB |", "|---|---|---|---|---|"]
    for ports in (1, 2, 3, 4):
        waits = (worst_case_wait(DEFAULTS, size, ports) for size in (64 << 10, 16 << 20, 1 << 30))
        cells = [str(ports), str(worst_case_attempts(DEFAULTS, ports)), *(f"{wait:.1f} s" for wait in waits)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + f"\n{worked_example()}"


def worked_example() -> str:
    """The formula with the default numbers, for one port and 64 KiB; the test of the page is a test of it."""
    attempts = worst_case_attempts(DEFAULTS)
    calls, rounds, size = DEFAULTS.calls_per_ticket, DEFAULTS.rounds_per_batch, 64 << 10
    connect, handshake, read = DEFAULTS.connect_timeout_s, DEFAULTS.handshake_timeout_s, DEFAULTS.read_timeout(size)
    of_read, of_calls, of_rounds = (
        sum(backoff_ceiling(failures, DEFAULTS) for failures in range(1, n))
        for n in (attempts_of_read(DEFAULTS, 1), calls, rounds)
    )
    total = attempts * (connect + handshake + read) + rounds * calls * of_read + rounds * of_calls + of_rounds
    assert min(total, DEFAULTS.batch_deadline_s) == pytest.approx(worst_case_wait(DEFAULTS, size))
    return (
        f"\nOne port, 64 KiB: {attempts} × ({connect:g} + {handshake:g} + {read:.4f}) "
        f"+ {rounds} × {calls} × {of_read:g} + {rounds} × {of_calls:g} + {of_rounds:g} = {total:.1f} s.\n"
    )


def metrics_table() -> str:
    lines = ["| metric | kind | labels | what it says |", "|---|---|---|---|"]
    lines += [
        f"| `{name}` | {family.kind} | {', '.join(family.labels)} | {family.says} |"
        for name, family in metrics.FAMILIES.items()
    ]
    return "\n".join(lines) + "\n"


def test_the_reference_is_that_of_the_docstrings() -> None:
    made = api_page.pages()
    assert sorted((ROOT / "docs" / "api").iterdir()) == sorted(page for page in made if page.parent.name == "api")
    for page, text in made.items():
        assert page.read_text(encoding="utf-8") == text, f"python tests/docs/test_docs.py writes {page.name} anew"


def test_every_setting_has_a_meaning() -> None:
    assert set(config.MEANINGS) == set(config.Configuration.__struct_fields__)


def test_the_settings_tables_are_those_of_the_code() -> None:
    assert part("settings") == settings_table(), "python tests/docs/test_docs.py writes it anew"
    assert part("configuration") == config.table(), "python tests/docs/test_docs.py writes it anew"


def test_the_table_of_metrics_is_that_of_the_code() -> None:
    assert part("metrics") == metrics_table(), "python tests/docs/test_docs.py writes it anew"


def test_the_rules_and_ceilings_are_those_of_the_code() -> None:
    assert part("rules") == rules_list()
    assert part("ceilings") == ceilings_table()


@pytest.mark.parametrize("name", ["_PREFIX", "_HEADER", "_RECORD", "_ANSWER"])
def test_the_layouts_are_those_of_the_frames(name: str) -> None:
    layout: struct.Struct = frames._PREFIX if name == "_PREFIX" else getattr(frame_codec, name.removeprefix("_"))
    expected, offset = [], 0
    for code in layout.format.lstrip("<"):
        size = struct.calcsize(f"<{code}")
        expected.append([str(offset), str(size)])
        offset += size
    mark = f"<!-- layout {name} -->\n"
    table = page_with(mark).read_text(encoding="utf-8").partition(mark)[2].partition("\n\n")[0]
    assert [row[:2] for row in rows(table)] == expected
    for kind, number in re.findall(r"\b([A-Z]{3,}) (0x\d\d)", table):
        assert frames.Kind[kind] == int(number, 16)


def section(title: str) -> str:
    """What stands under this heading, or the whole page that has this title."""
    page = ROOT / "docs" / f"{title.upper()}.md"
    if page.exists() and page.read_text(encoding="utf-8").startswith(f"# {title}\n"):
        return page.read_text(encoding="utf-8")
    text = page_with(f"\n## {title}\n").read_text(encoding="utf-8")
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_status_codes_are_those_of_the_errors() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and getattr(kind, "status", 0)]
    expected = {str(kind.status): (f"`{kind.__name__}`", kind.retryable) for kind in kinds}
    table = (ROOT / "docs" / "WIRE.md").read_text(encoding="utf-8").partition("| code | error")[2]
    written = {row[0]: (row[1], row[2] != "no") for row in rows("| code | error" + table)}
    assert written == expected


def test_the_transitions_are_those_of_the_slot_word() -> None:
    header = (ROOT / "native" / "ring" / "slot_word.hpp").read_text(encoding="utf-8")
    operations = set(re.findall(r"^constexpr Step (\w+)\(", header, re.MULTILINE)) - {"refuse", "settled"}
    assert {row[0].strip("`") for row in rows(section("Slots"))} == operations


def test_the_ucx_settings_are_those_chosen() -> None:
    written = {row[0].strip("`"): row[1] for row in rows(section("UCX settings")) if row[0].count("`") == 2}
    assert {name: written[name] for name in wires._CHOSEN} == wires._CHOSEN
    assert f"| `RNDV_THRESH` with InfiniBand | {wires._RDMA['RNDV_THRESH']} |" in section("UCX settings")
    admitted = {row[0].strip("`"): tuple(row[2].split(", ")) for row in rows(section("Wires"))}
    assert {name: admitted[name] for name in wires._TRANSPORTS} == wires._TRANSPORTS


@cache
def literals() -> str:
    """What the package says: its string literals, implicit concatenation resolved, expressions as a bar."""
    found = []
    for path in (ROOT / "transport").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(each.value if isinstance(each, ast.Constant) else "¦" for each in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found) + sources("native")


def test_the_messages_of_the_troubleshooting_table_are_those_of_the_code() -> None:
    table = section("Troubleshooting").partition("\n\n| symptom |")[0]
    assert len(rows(table)) > 20
    for kind, message, *_ in rows(table):
        assert kind.strip("`") in classes(), kind
        for fragment in message.split("…"):
            assert fragment.strip() in literals(), f"{kind}: {fragment.strip()!r} is not said anywhere"


# --- writing the generated parts ----------------------------------------------------------------------
def main() -> None:
    parts = [
        ("settings", settings_table()),
        ("rules", rules_list()),
        ("ceilings", ceilings_table()),
        ("configuration", config.table()),
        ("metrics", metrics_table()),
    ]
    for name, content in parts:
        page = page_with(f"<!-- {name} -->")
        text = page.read_text(encoding="utf-8")
        before, opening, rest = text.partition(f"<!-- {name} -->\n")
        _, closing, after = rest.partition(f"<!-- /{name} -->")
        page.write_text(before + opening + content + closing + after, encoding="utf-8")
    (ROOT / "docs" / "api").mkdir(exist_ok=True)
    for page, text in api_page.pages().items():
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
