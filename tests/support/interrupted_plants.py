"""Planted faults that the accounts of an interrupted job have to show. Signals raise here as they do in the package."""

from __future__ import annotations

from typing import Any

from transport.errors import UsageError
from transport.packer.mixin import UCXXDataPackerMixin


def plant(name: str) -> None:
    """Plant the fault; "" plants none."""
    {"": lambda: None, "consumed too early": _consumed_too_early}[name]()


def _consumed_too_early() -> None:
    """A batch counts as consumed before its payloads are returned."""
    consume = UCXXDataPackerMixin.consume

    def early(self: Any, batch: Any) -> Any:
        if getattr(self, "_begun", None) is batch:
            raise UsageError("this batch was already consumed")
        self._begun = batch
        return consume(self, batch)

    UCXXDataPackerMixin.consume = early  # type: ignore[method-assign]
