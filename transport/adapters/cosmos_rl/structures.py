"""cosmos-rl's RLPayload, Rollout, RolloutResult and ChatMessage as payloads and back: each of their fields is a field.

    ticket = ring.write(payload_of(result))
    result = structure_of(client.read(ticket))

They come back equal, messages in them too. A payload has the fields that were set, with those that cosmos-rl excludes
from its own messages. Nothing is validated again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cosmos_rl.dispatcher.data.schema import ChatMessage, RLPayload, Rollout, TrainingCompletionIdentity
from cosmos_rl.rollout.schema import RolloutResult

from transport.adapters.torch.tensor_dicts import STRUCTURE, Fields, found_fields
from transport.errors import SchemaError, UsageError

__all__ = ["STRUCTURE", "payload_of", "structure_of"]

_MODELS: Final[Mapping[str, type]] = {
    kind.__name__: kind for kind in (ChatMessage, RLPayload, Rollout, RolloutResult, TrainingCompletionIdentity)
}


def payload_of(structure: Any) -> dict[str, Any]:
    """Return the fields of a cosmos-rl structure, for `SharedRingBuffer.write`. SchemaError: it is none of them."""
    kind = type(structure)
    if _MODELS.get(kind.__name__) is not kind:
        raise SchemaError(f"expected one of {', '.join(_MODELS)}, got a {kind.__name__}")
    fields = Fields(_MODELS)
    given = structure.model_fields_set
    fields.add(
        (name, value)
        for name, value in structure.__dict__.items()
        if name in given or value is not kind.model_fields[name].default
    )
    return fields.payload(kind.__name__, given=sorted(given))


def structure_of(payload: Mapping[str, Any], *, copy: bool = True) -> Any:
    """Return what `payload_of` was given; of some fields only, the others have their defaults.

    Args:
        payload: with the field ``structure``.
        copy: give tensors and arrays memory of their own. False: they are views of the payload's memory, which must
            not be written to.

    Raises:
        UsageError: the payload was made of something else.
        PayloadDamagedError: its structure does not fit its fields.
    """
    said = payload.get(STRUCTURE)
    kind = _MODELS.get(str(said.get("is"))) if isinstance(said, dict) else None
    if kind is None:
        raise UsageError(f"this payload is none of cosmos-rl's structures: give one that has the field {STRUCTURE!r}")
    said, entries = found_fields(payload, kind.__name__, copy=copy, models=_MODELS)
    given = said.get("given")
    names = set(given) & entries.keys() if isinstance(given, list) else set(entries)
    return kind.model_construct(names, **entries)  # type: ignore[attr-defined]  # cosmos_rl is not there for mypy
