"""A TensorDict as a payload and back: each of its entries is a field, so that some can be read without the others.

    ring.write(payload_of(batch))
    batch = tensordict_of(client.read(ticket))

Tensors are copied once, from where they are into the slot, slices and other strided views too. TensorDicts in it,
NonTensorData, NonTensorStacks, nested (jagged) tensors and arrays of objects travel as well.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from transport.adapters.torch.nested import Apart, Models, Together, shape_of
from transport.adapters.torch.nested import tensordict_of as _made
from transport.errors import MissingDependencyError, PayloadDamagedError, SchemaError, UsageError
from transport.runtime.installing import install

STRUCTURE: Final = "structure"
"""The field that says what the others are. Read it with those that are wanted: ``fields=("tokens", "structure")``."""

_REST: Final = "rest"  # entries whose names no field can have
_PARENTS: Final = "parents"
_OWN: Final = (STRUCTURE, _REST, _PARENTS)
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]{0,127}")


def tensordict_class() -> Any:
    """Return the class TensorDict. MissingDependencyError: its package is not installed."""
    try:
        from tensordict import TensorDict
    except ImportError as error:
        raise MissingDependencyError(f"a TensorDict needs tensordict ({error}): {install('tensordict')}") from error
    return TensorDict


class Fields:
    """The fields of a payload under way.

    Attributes:
        found: by name, as they are to be written.
        apart: has taken them apart.
    """

    def __init__(self, models: Models | None = None) -> None:
        self.found: dict[str, Any] = {}
        self.apart = Apart(models or {})
        self._rest: dict[str, Any] = {}

    def add(self, entries: Iterable[tuple[Any, Any]], prefix: str = "") -> None:
        """Each of these entries becomes a field; SchemaError: a name is no text."""
        for key, value in entries:
            if type(key) is not str:
                raise SchemaError(f"{prefix}{key!r:.80}: give names that are text")
            name = f"{prefix}{key}"
            if _NAME.fullmatch(name) and name not in _OWN:
                self.found[name] = self.apart.of(value, name)
            else:
                self._rest[name] = self.apart.of(value, _REST, name)

    def payload(self, kind: str, **said: Any) -> dict[str, Any]:
        """All fields, with the one that says what they are."""
        rest = {_REST: self._rest} if self._rest else {}
        return {**self.found, **rest, STRUCTURE: {"is": kind, "marks": self.apart.marks, **said}}


def found_fields(
    payload: Mapping[str, Any], kind: str, *, copy: bool, models: Models | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what `Fields.payload` was made of: (what was said, entries by name), of the fields that were read.

    Raises:
        UsageError: the payload is not of this kind, or was read without its field `STRUCTURE`.
        PayloadDamagedError: its structure does not fit its fields.
    """
    if STRUCTURE not in payload:
        raise UsageError(f"this payload has no field {STRUCTURE!r}: read that field, too, or use the payload as it is")
    said = payload[STRUCTURE]
    if type(said) is not dict or type(said.get("marks")) is not list or said.get("is") != kind:
        is_kind = said.get("is") if type(said) is dict else type(said).__name__
        raise UsageError(f"this payload is no {kind}: its field {STRUCTURE!r} says {is_kind!r:.40}")
    made = Together(said["marks"], copy=copy, models=models or {})
    entries = {name: made.field(name, payload[name]) for name in payload if name not in _OWN}
    if _REST in payload:
        rest = made.field(_REST, payload[_REST])
        if type(rest) is not dict:
            raise PayloadDamagedError(f"{_REST}: this is a {type(rest).__name__}, not a dict")
        entries |= rest
    return said, entries


@contextlib.contextmanager
def fitting(*further: type[Exception]) -> Iterator[None]:
    """Make a structure of a payload's fields in the block. PayloadDamagedError: it does not fit them.

    ``further``: what the framework raises then, besides the usual errors.
    """
    misfits: tuple[type[Exception], ...] = (ValueError, TypeError, LookupError, RuntimeError, *further)
    try:
        yield
    except misfits as error:
        raise PayloadDamagedError(f"{STRUCTURE}: this does not fit the payload's fields: {error}") from error


def payload_of(batch: Any) -> dict[str, Any]:
    """Return the fields of a TensorDict, for `SharedRingBuffer.write`; gradients, locks and devices stay behind.

    SchemaError: a class of tensordict that would come back as another one (lazy stacks, tensor classes).
    """
    kind = tensordict_class()
    if type(batch) is not kind:
        raise SchemaError(f"expected a TensorDict, got a {type(batch).__name__}; its to_tensordict() gives one")
    fields = Fields()
    fields.add(batch.items())
    return fields.payload("TensorDict", **shape_of(batch))


def tensordict_of(payload: Mapping[str, Any], *, copy: bool = True) -> Any:
    """Return the TensorDict that a payload was made of, or the entries of it that were read.

    Args:
        payload: with the field ``structure``.
        copy: give it memory of its own. False: its tensors are views of the payload's memory, which must not be
            written to: torch has no read-only memory, and a write to a mapped slot ends the process.

    Raises:
        UsageError: the payload was not made of a TensorDict.
        PayloadDamagedError: its structure does not fit its fields.
    """
    tensordict_class()
    said, entries = found_fields(payload, "TensorDict", copy=copy)
    with fitting():
        return _made(said, entries, copy=copy)
