"""A check that an installed framework is of a release that its adapter was written for, as installing.py asks."""

from __future__ import annotations

import re
from importlib import metadata

from transport.errors import MissingDependencyError
from transport.runtime.installing import PACKAGES, install


def require_fitting(what: str) -> None:
    """Raise MissingDependencyError for a release that does not fit, which names those that do. Absent: no error here.

    what: of `PACKAGES`, whose first requirement has the first release that fits, and for most the first that does not.
    """
    name, first, beyond = bounds(what)
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return  # a checkout on the path has no version; its import says what is missing
    release = _release(found.partition("+")[0])
    if release < _release(first) or (beyond and release >= _release(beyond)):
        below = f", below {beyond}" if beyond else ""
        raise MissingDependencyError(
            f"{name} {found} does not fit this adapter: it needs {first} or newer{below}: {install(what)}"
        )


def bounds(what: str) -> tuple[str, str, str]:
    """Return the distribution, the first release that fits, and the first that does not ("": none is known)."""
    match = re.fullmatch(r"([\w-]+)>=([\d.]+)(?:,<([\d.]+))?", PACKAGES[what][0])
    assert match is not None, PACKAGES[what]
    return match[1], match[2], match[3] or ""


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
