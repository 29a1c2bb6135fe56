"""WithBlock: ``with`` for the two mixins, which clean up at its end. A base class keeps a ``with`` of its own."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Self

from transport.errors import StopRequestedError


def ends_normally(kind: type[BaseException] | None) -> bool:
    """Return whether a ``with`` that this exception leaves (None: none does) ended as the program meant it to."""
    return kind is None or issubclass(kind, StopRequestedError)


class WithBlock:
    """Base of the mixins. The ``with`` of a class behind them runs as well: it is entered first and left last."""

    def __enter__(self) -> Self:
        enter = getattr(super(), "__enter__", None)
        if enter is not None:
            enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        leave = getattr(super(), "__exit__", None)
        answer = None
        try:
            with contextlib.ExitStack() as stack:  # one class may have both mixins: a failure of one spares the other
                self._ucxx_ends = ends_normally(kind)
                for name in ("cleanup_ucxx", "cleanup_ucxx_packer"):
                    if hasattr(self, name):
                        stack.callback(getattr(self, name))
        finally:
            if leave is not None:
                answer = leave(kind, error, trace)
        return answer
