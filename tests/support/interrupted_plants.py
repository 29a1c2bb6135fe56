"""Planted faults that the accounts of an interrupted job have to show. Signals raise here as they do in the package."""

from __future__ import annotations

from typing import Any

from transport import Trainer
from transport.training.batch import Batch


def plant(name: str) -> None:
    """Plant the fault; "" plants none."""
    {"": lambda: None, "consumed too early": _consumed_too_early}[name]()


def _consumed_too_early() -> None:
    """A batch is consumed before it is returned."""
    take = Trainer.take

    def early(self: Any, *arguments: Any, **named: Any) -> Any:
        batch = take(self, *arguments, **named)
        if batch is not None:
            batch.consume()
        return batch

    Trainer.take = early  # type: ignore[method-assign]
    Batch.accept = lambda _: None  # type: ignore[method-assign]  # nothing is left to accept
