"""GroupNames: the names of the groups that a model has learned, in eight bytes each, for the life of a run."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt

from transport.errors import UsageError

_NUMBER: Final = np.dtype("<u8")
_RECENT: Final = 4096  # names that are not sorted in yet


class GroupNames:
    """Names, as numbers of 64 bits that are made of them. Not thread-safe.

    Of two names one number may be made: among ten million names with a chance of one in 400 000.
    """

    def __init__(self, data: bytes = b"") -> None:
        if len(data) % _NUMBER.itemsize:
            raise UsageError(f"names of groups: {len(data)} bytes are no whole number of names")
        self._sorted: npt.NDArray[np.uint64] = np.unique(np.frombuffer(data, _NUMBER)).astype(np.uint64)
        self._recent: set[int] = set()

    def __repr__(self) -> str:
        return f"<GroupNames {len(self)}>"

    def __len__(self) -> int:
        return len(self._sorted) + len(self._recent)

    def __contains__(self, name: str) -> bool:
        return self._has(_number(name))

    def _has(self, number: int) -> bool:
        if number in self._recent:
            return True
        at = int(np.searchsorted(self._sorted, np.uint64(number)))
        return at < len(self._sorted) and int(self._sorted[at]) == number

    def add(self, names: Iterable[str]) -> None:
        """Add the names of groups; "" is that of samples without one, which have no name."""
        self._recent.update(number for number in map(_number, filter(None, names)) if not self._has(number))
        if len(self._recent) > _RECENT:
            self._sort()

    def update(self, other: GroupNames) -> None:
        """Add what another one has."""
        self._sorted = np.union1d(self._all(), other._all())
        self._recent = set()

    def _sort(self) -> None:
        self._sorted, self._recent = self._all(), set()

    def _all(self) -> npt.NDArray[np.uint64]:
        return np.union1d(self._sorted, np.fromiter(self._recent, np.uint64, len(self._recent)))

    def copy(self) -> GroupNames:
        """Return another one with the same content."""
        copy = GroupNames()
        copy._sorted, copy._recent = self._sorted, set(self._recent)  # what is sorted is never changed in place
        return copy

    def to_bytes(self) -> bytes:
        """Return eight bytes for each name, in their order."""
        return self._all().astype(_NUMBER).tobytes()


def _number(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=_NUMBER.itemsize).digest(), "little")
