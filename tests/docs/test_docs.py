"""The documentation runs, and has the numbers that the code has.

* Every ``python`` block of README.md, CONTRIBUTING.md and docs/ runs, each in a namespace and an empty folder of its
  own; one after ``<!-- not run: reason -->`` is skipped with its reason, one after ``<!-- needs: package -->`` where
  that is not installed. Every file in examples/ runs as a program.
* Tables that repeat code (settings, wires) equal it.

``make lint`` looks whether what the pages name exists. ``python tests/docs/test_docs.py`` writes the table of
settings anew.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))  # pytest has it on its path, a program has not

from doc_pages import PAGES, ROOT

from transport import _ring, config, ticket, wires

TORCH = pytest.mark.adapters("torch"), pytest.mark.timeout(400)
EXAMPLES = [
    pytest.param(path, id=path.name, marks=TORCH if "import torch" in path.read_text(encoding="utf-8") else ())
    for path in sorted((ROOT / "examples").glob("*.py"))
    if "import ray" not in path.read_text(encoding="utf-8")  # tests/adapters/test_ray.py runs those
]


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


@pytest.mark.nightly
@pytest.mark.ucx
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs(example: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    options, timeout_s = ["-W", "error"], 100.0
    if request.node.get_closest_marker("adapters"):
        if importlib.util.find_spec("torch") is None:
            pytest.skip("torch is not installed")
        options, timeout_s = [], 350.0  # importing torch warns
    done = subprocess.run(
        [sys.executable, *options, str(example)], cwd=tmp_path, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


# --- numbers that the code has ------------------------------------------------------------------------
def page_with(text: str) -> Path:
    """The one page of docs/ that has this text."""
    [page] = [page for page in PAGES if page.is_relative_to(ROOT / "docs") and text in page.read_text(encoding="utf-8")]
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


def configuration_table() -> str:
    plain = config.Configuration()
    lines = ["| key | default | what it bounds or says |", "|---|---|---|"]
    lines += [
        f"| `{key}` | {config.shown(getattr(plain, key))} | {config.MEANINGS[key]} |" for key in plain.__struct_fields__
    ]
    return "\n".join(lines) + "\n"


def test_every_setting_has_a_meaning() -> None:
    assert set(config.MEANINGS) == set(config.Configuration.__struct_fields__)


def test_the_table_of_settings_is_that_of_the_code() -> None:
    assert part("configuration") == configuration_table(), "python tests/docs/test_docs.py writes it anew"


def section(title: str) -> str:
    """What stands under this heading."""
    text = page_with(f"\n## {title}\n").read_text(encoding="utf-8")
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_wires_admit_the_transports_of_the_code() -> None:
    admitted = {row[0].strip("`"): tuple(row[2].split(", ")) for row in rows(section("Wires"))}
    assert {name: admitted[name] for name in wires._TRANSPORTS} == wires._TRANSPORTS


def test_the_versions_that_upgrades_compare_are_those_of_the_code() -> None:
    text = " ".join(section("Rolling upgrades").split())
    found = re.search(r"wire and ticket, now (\d+) and (\d+) .* layout, now (\d+),", text)
    assert found and tuple(map(int, found.groups())) == (_ring.WIRE_VERSION, ticket.VERSION, _ring.LAYOUT_VERSION)


# --- writing the generated part -----------------------------------------------------------------------
def main() -> None:
    page = page_with("<!-- configuration -->")
    text = page.read_text(encoding="utf-8")
    before, opening, rest = text.partition("<!-- configuration -->\n")
    _, closing, after = rest.partition("<!-- /configuration -->")
    page.write_text(before + opening + configuration_table() + closing + after, encoding="utf-8")


if __name__ == "__main__":
    main()
