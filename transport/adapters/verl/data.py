"""verl's DataProto as a payload and back: each tensor, and each array of its non_tensor_batch, is a field.

    tickets = ring.write_many(payload_of(data[at : at + 1]) for at in range(len(data)))
    data = DataProto.concat([data_proto_of(payload) for payload in payloads])

A slice is written from where it lies: nothing is gathered before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from transport.adapters.torch.nested import shape_of
from transport.adapters.torch.nested import tensordict_of as _tensordict
from transport.adapters.torch.tensor_dicts import STRUCTURE, Fields, fitting, found_fields, tensordict_class
from transport.errors import MissingDependencyError, SchemaError
from transport.runtime.installing import install

__all__ = ["STRUCTURE", "data_proto_of", "payload_of"]

_BATCH: Final = "batch."
_OTHERS: Final = "non_tensor_batch."
_META: Final = "meta_info"


def _data_proto() -> Any:
    try:
        from verl.protocol import DataProto
    except ImportError as error:
        raise MissingDependencyError(f"a DataProto needs verl 0.9 ({error}): {install('verl')}") from error
    return DataProto


def payload_of(data: Any) -> dict[str, Any]:
    """Return a DataProto's fields, for `SharedRingBuffer.write`: ``batch.NAME``, ``non_tensor_batch.NAME``, meta_info.

    SchemaError: it is none, or has a TensorDict of a class that would come back as another one.
    """
    if type(data) is not _data_proto():
        raise SchemaError(f"expected a DataProto, got a {type(data).__name__}")
    fields = Fields()
    if data.batch is not None:
        if type(data.batch) is not tensordict_class():
            raise SchemaError(f"batch: a {type(data.batch).__name__} cannot be sent; its to_tensordict() gives another")
        fields.add(data.batch.items(), _BATCH)
    fields.add((data.non_tensor_batch or {}).items(), _OTHERS)
    fields.add([(_META, data.meta_info)])
    return fields.payload("DataProto", batch=None if data.batch is None else shape_of(data.batch))


def data_proto_of(payload: Mapping[str, Any], *, copy: bool = True) -> Any:
    """Return the DataProto that a payload was made of; of some fields only, what of it was read.

    Args:
        payload: with the field ``structure``.
        copy: give it memory of its own. False: its tensors are views of the payload's memory, which must not be
            written to: torch has no read-only memory, and a write to a mapped slot ends the process.

    Raises:
        UsageError: the payload was not made of a DataProto.
        PayloadDamagedError: its structure does not fit its fields.
    """
    kind = _data_proto()
    said, entries = found_fields(payload, "DataProto", copy=copy)
    batch, others = (
        {name.removeprefix(prefix): each for name, each in entries.items() if name.startswith(prefix)}
        for prefix in (_BATCH, _OTHERS)
    )
    with fitting(AssertionError):
        found = None if said["batch"] is None else _tensordict(said["batch"], batch, copy=copy)
        return kind(found, others, entries.get(_META, {}))
