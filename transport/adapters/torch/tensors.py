"""A payload's arrays as torch tensors, over the memory in which they arrived.

torch has no read-only tensors: a write to a tensor of a mapped payload changes the slot for its other readers, or ends
the process with SIGSEGV. `clone()` a tensor before changing it in place.
"""

from __future__ import annotations

import warnings
from typing import Any

from transport.client.device_reads import DevicePayload
from transport.client.payload import Payload
from transport.devices.libraries import TORCH
from transport.errors import MissingDependencyError
from transport.joined.payloads import JoinedPayload
from transport.runtime.installing import install
from transport.runtime.releases import require_fitting

require_fitting("torch")
try:
    import torch
except ImportError as error:
    raise MissingDependencyError(
        f"this adapter needs torch ({error}): {install('torch')}, or your own build of it"
    ) from error


def tensors(payload: Payload) -> dict[str, Any]:
    """Return a payload's tensors by name, uncopied, each keeping the memory alive; text, bytes and values as they are.

    Raises:
        SchemaError: the payload has no description, as with `Payload.fields`.
        BufferUnsuitableError: torch has no such dtype.
        ClosedError: the payload was released.
    """
    fields = payload.fields
    if isinstance(fields, JoinedPayload):
        return {name: found for part in fields.parts for name, found in tensors(part).items() if name in fields}
    if isinstance(payload, DevicePayload):
        return dict(payload)
    data = payload.data
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the memory is only to be read
        flat = torch.from_numpy(data) if data.size else torch.empty(0, dtype=torch.uint8)
    return {
        placement.name: payload[placement.name] if placement.kind or placement.absent else TORCH.view(flat, placement)
        for placement in payload.layout().placements
    }
