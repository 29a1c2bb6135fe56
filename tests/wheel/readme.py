"""README.md and pyproject.toml as a release shows them: with the project's address, links of the README absolute.

The address is known to who makes the release: ``make wheels PROJECT_URL=https://…``. Without it links stay relative.
"""

from __future__ import annotations

import re

_LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)\s]+)(\))")


def absolute(text: str, url: str) -> str:
    """The README with its relative links below ``url``, as a host of repositories shows files of its main branch."""
    base = url.rstrip("/")
    return _LINK.sub(lambda link: f"{link[1]}{base}/blob/main/{link[2]}{link[3]}", text)


def with_urls(project: str, url: str) -> str:
    """pyproject.toml with the addresses of the project."""
    base = url.rstrip("/")
    if not re.fullmatch(r"https://[^\s\"\\]+", base):
        raise ValueError(f"PROJECT_URL={url}: give the address of the repository, as https://…")
    urls = {
        "Homepage": base,
        "Source": base,
        "Documentation": f"{base}/tree/main/docs",
        "Changelog": f"{base}/blob/main/CHANGELOG.md",
        "Issues": f"{base}/issues",
    }
    table = "\n".join(f'{name} = "{address}"' for name, address in urls.items())
    before, section, after = project.partition("[project.optional-dependencies]")
    return f"{before}[project.urls]\n{table}\n\n{section}{after}"
