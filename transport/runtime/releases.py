"""Whether an installed framework is of a release that its adapter was written for."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Final

from transport.errors import MissingDependencyError
from transport.runtime.installing import install

# The first release that fits, and the first that does not: adapters use what changes between releases.
FITS: Final[dict[str, tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "verl": ((0, 9), (0, 10)),
    "cosmos-rl": ((0, 4, 7), (0, 5)),
    "TransferQueue": ((0, 1, 9), (0, 2)),
    "vllm": ((0, 33), (0, 34)),
    "sglang": ((0, 5, 23), (0, 6)),
    "torchft": ((0, 2), (0, 3)),
    "areal": ((1, 0, 4), (1, 1)),
}


def require_fitting(framework: str) -> None:
    """Raises MissingDependencyError for a release that does not fit, and names those that do. Absent: no error here."""
    try:
        found = metadata.version(framework)
    except metadata.PackageNotFoundError:
        return  # a checkout on the path has no version; its import says what is missing
    first, beyond = FITS[framework]
    release = tuple(int(part) for part in re.findall(r"\d+", found.partition("+")[0])[:3])
    if not first <= release < beyond:
        raise MissingDependencyError(
            f"{framework} {found} does not fit this adapter: it needs {_text(first)} or newer, below {_text(beyond)}: "
            f"{install(framework)}"
        )


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
