"""What the site needs beside docs/*.md: pages that stand elsewhere in the repository, one from the docstrings."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = {  # in the repository → on the site
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "native/model/README.md": "model.md",
}
DOCUMENTED = (
    "transport",
    "transport.errors",
    "transport.store",
    "transport.store.directory",
    "transport.rendezvous",
    "transport.weights",
    "transport.cooldown",
    "transport.testing",
    "transport.config",
    "transport.settings",
)
"""Modules of which everything public is described; of others what docs/API.md names."""
_WIDE = "---\nhide: [navigation, toc]\n---\n"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def _on_the_site(path: str) -> str | None:
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else None


def _titles(nav: Any) -> dict[str, str]:
    """Return the title of each page of the navigation."""
    if isinstance(nav, list):
        return {page: title for each in nav for page, title in _titles(each).items()}
    found: dict[str, str] = {}
    for title, below in nav.items():
        found |= {below: title} if isinstance(below, str) else _titles(below)
    return found


def _relinked(text: str, folder: str, titles: dict[str, str]) -> str:
    """Write the links of a page in ``folder`` of the repository as links of the site; others become plain text.

    Where a link's text is the name of a file, the page's title stands there.
    """

    up = "../" * (len(PurePosixPath(folder).parts) - 1) if folder.startswith("docs/") else ""

    def link(match: re.Match[str]) -> str:
        mark, words, target, anchor = match.groups()
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        parts: list[str] = []
        for part in PurePosixPath(folder, target).parts:
            if part == "..":
                parts.pop()
            else:
                parts.append(part)
        page = _on_the_site("/".join(parts))
        if page is None:
            return words if mark == "" and "`" in words else f"{words} (`{'/'.join(parts)}`)"
        named = words in (target, PurePosixPath(target).name)
        return f"{mark}[{titles.get(page, words) if named else words}]({up}{page}{anchor or ''})"

    return _LINK.sub(link, text)


def _further_names() -> list[str]:
    """Names that docs/API.md lists of modules that are not described as a whole."""
    found: list[str] = []
    table = (ROOT / "docs" / "API.md").read_text("utf-8").partition("| what for |")[2]
    for module, names in re.findall(r"`(transport[\w.]*)`: ((?:`\w+`(?:, )?)+)", table):
        found += [f"{module}.{name}" for name in re.findall(r"\w+", names) if module not in DOCUMENTED]
    return found


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that stand outside of docs/."""
    for source, page in PAGES.items():
        text = _relinked((ROOT / source).read_text("utf-8"), str(PurePosixPath(source).parent), _titles(config.nav))
        text = f"{_WIDE}{text}" if page == "index.md" else text
        files.append(File.generated(config, page, content=text))
    names = "\n\n".join(f"::: {name}" for name in (*DOCUMENTED, *_further_names()))
    files.append(File.generated(config, "reference.md", content=f"# From the docstrings\n\n{names}\n"))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links out of docs/ lead to their page of the site."""
    if page.file.src_uri in (*PAGES.values(), "reference.md"):
        return markdown
    return _relinked(markdown, str(PurePosixPath("docs", page.file.src_uri).parent), _titles(config.nav))
