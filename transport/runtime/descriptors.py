"""Descriptors of this process. A reserve is kept: where none is left, UCX aborts the process, and nothing else works.

What does not fit is refused with the limit's name, and others go on. A listener has a gate of its own
(native/ucp/sockets.hpp).
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from transport.errors import OpenFilesError

OF_A_RING: Final = 3  # while it is attached; one stays
OF_A_WORKER: Final = 24  # UCX's, and the libraries that it loads
OF_A_CONNECTION: Final = 8  # over tcp it has three
_RESERVE: Final = 64  # at most a quarter of the limit, as of a listener

_promises: Final[dict[object, int]] = {}  # to what is being opened


@contextlib.contextmanager
def promised(wanted: int, what: str) -> Iterator[None]:
    """Set so many descriptors aside while ``what`` is opened.

    OpenFilesError: beside the reserve there are too few.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY:
        used, kept = _used(limit), min(_RESERVE, limit // 4)
        if used + sum(list(_promises.values())) + wanted + kept > limit:
            raise OpenFilesError(
                f"{what} needs up to {wanted} open files; this process may have {limit} (ulimit -n), has {used}, and "
                f"keeps {kept} in reserve: raise the limit"
            )
    promise = object()
    _promises[promise] = wanted
    try:
        yield
    finally:
        del _promises[promise]


def _used(limit: int) -> int:
    try:
        return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1
    except OSError:  # none is left to look with
        return limit
