"""Payloads that were read one by one, as one batch of torch tensors: each tensor copied once, to where it belongs.

    {"tokens": …, "tokens.lengths": …, "tokens.cu_seqlens": …, "reward": …}

lengths (int64) and, where it is packed, cu_seqlens (int32) stand beside each ragged tensor under its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from transport import _ring
from transport.client.device_reads import DevicePayload
from transport.client.payload import ReceivedPayload
from transport.devices.host_tensors import as_tensors
from transport.errors import InternalError, SchemaError, UsageError
from transport.ring.batch import Batch
from transport.ring.batch_shape import Shape


def tensor_batch(payloads: Sequence[ReceivedPayload], shape: Shape) -> dict[str, Any]:
    """Tensors of all payloads by name; they do not refer to the payloads' memory.

    Raises:
        SchemaError: the payloads have different schemas, or one has no description.
        BatchTooLargeError, MissingDependencyError: as for `SharedRingBuffer.claim_batch`.
    """
    for payload in payloads:
        if isinstance(payload, DevicePayload):
            raise UsageError("payloads that are on a device already make no batch; read them to the host")
        payload.layout()  # raises where there is no schema, or it does not fit
    schema = payloads[0].schema
    assert schema is not None
    for payload in payloads:
        if payload.schema != schema:
            raise SchemaError(
                f"payload {payload.ticket.name} has schema {payload.ticket.schema_fingerprint}, and payload "
                f"{payloads[0].ticket.name} of the same batch {payloads[0].ticket.schema_fingerprint}; for several "
                "schemas use collate= with the layout list, or a queue for each"
            )
    batch = Batch.gathered([_Payloads(payloads)], schema, shape)
    found = batch.torch()
    beside = {f"{name}.lengths": lengths for name, lengths in batch.lengths.items()}
    beside |= {f"{name}.cu_seqlens": ends for name, ends in batch.cu_seqlens.items()}
    if taken := beside.keys() & found.keys():
        raise SchemaError(f"the schema's tensor {', '.join(sorted(taken))} has the name of what stands beside another")
    return found | as_tensors(beside)


class _Payloads:
    """A `Part` without claims: who fetched the payloads acknowledges them."""

    def __init__(self, payloads: Sequence[ReceivedPayload]) -> None:
        tickets = [payload.ticket for payload in payloads]
        notes = [ticket.encode() for ticket in tickets]
        self._tickets = tickets
        rows = np.zeros((len(_ring.RECEIVED_ROWS), len(payloads)), np.uint64)
        rows[0] = np.arange(len(payloads))
        rows[2] = [ticket.size for ticket in tickets]
        rows[3] = np.arange(len(payloads)) + len(payloads)
        rows[5] = [len(note) for note in notes]
        rows[7] = 1  # they were verified as they were read
        self._received = _ring.ReceivedPayloads([*(payload.data for payload in payloads), *notes], rows)

    def __len__(self) -> int:
        return len(self._received)

    def columns(self, out: npt.NDArray[np.int64]) -> None:
        """See `Part`; nothing is known of attempts."""
        out[:] = 0
        out[0], out[1] = ([getattr(each, name) for each in self._tickets] for name in ("slot", "generation"))
        out[4] = [each.size for each in self._tickets]

    def measure(self, fields: _ring.BatchFields, out: Any) -> list[int]:
        """See `Part`."""
        return self._received.measure(fields, out)

    def gather(
        self, fields: _ring.BatchFields, targets: list[tuple[Any, int, int, bool, bytes] | None], verify: bool
    ) -> list[int]:
        """See `Part`."""
        return self._received.gather(fields, targets, verify)

    def verify(self) -> list[int]:
        """See `Part`."""
        return []

    def note(self, index: int) -> bytes:
        """See `Part`."""
        return self._received.note(index)

    def drop(self, index: int, reason: str, dead: bool, consumer: str = "", delay_s: float = 0.0) -> None:
        """Never: the layout of each payload was looked at before."""
        raise InternalError(f"payload {self._tickets[index].name} does not fit a batch: {reason}")

    def release(self, delay_s: float = 0.0, in_vain: bool = True) -> None:
        """See `Part`."""
