"""Records whose secrets are hidden from logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


def hiding(*names: str) -> Callable[[type[T]], type[T]]:
    """Decorate a struct or a named tuple: its representation shows ``...`` for these fields, which must not be logged.

    Such fields would give a reader of the log access: keys of payloads, tokens, encoded tickets, passwords.
    """

    def fields(record: Any) -> Iterator[tuple[str, Any]]:
        for name in getattr(record, "__struct_fields__", None) or record._fields:
            yield name, _HIDDEN if name in names else getattr(record, name)

    def text(record: Any) -> str:
        return f"{type(record).__name__}({', '.join(f'{name}={value!r}' for name, value in fields(record))})"

    def decorated(kind: type[T]) -> type[T]:
        kind.__repr__ = text  # type: ignore[method-assign]
        kind.__rich_repr__ = fields  # type: ignore[attr-defined]  # what rich prints in tracebacks
        return kind

    return decorated


class _Hidden:
    def __repr__(self) -> str:
        return "..."


_HIDDEN = _Hidden()
