"""Payloads within one process, and tickets of payloads that are nowhere: for unit tests without UCX."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Mapping
from typing import Any, Self

from transport.claims.open import given_rings
from transport.client.blocking import BlockingClient
from transport.ring.buffer import SharedRingBuffer
from transport.schema import Schema
from transport.ticket import Ticket


class LocalTransport:
    """A ring, a client that maps it, and what a trainer takes from. Closing it removes everything.

    The client is a real one, and so are checks of tickets and slots; only what needs a network is missing.

    Args:
        schema: of every payload; None: each payload brings its own description, and ``slot_bytes`` is needed.
        slots: payloads the ring holds.
        slot_bytes: payload bytes per slot; default the schema's largest payload.
        readers: how many ranks read each payload.

    Attributes:
        ring: of the test; `SharedRingBuffer`.
        client: `BlockingClient`, with ``ack="manual"`` as the packer has it.
        rings: what a `Trainer` takes the payloads from.
    """

    def __init__(
        self,
        schema: Schema | None = None,
        *,
        slots: int = 16,
        slot_bytes: int | None = None,
        readers: int = 1,
    ) -> None:
        self._readers = readers
        with contextlib.ExitStack() as stack:
            self.ring = stack.enter_context(
                SharedRingBuffer.create(schema, slots=slots, slot_bytes=slot_bytes, overflow="error")
            )
            self.rings = stack.enter_context(given_rings(self.ring))
            schemas = [] if schema is None else [schema]
            self.client = stack.enter_context(BlockingClient(schemas=schemas, wire={"mapped"}, ack="manual"))
            self._opened = stack.pop_all()

    def __repr__(self) -> str:
        return f"<LocalTransport of {self.ring!r}>"

    def write(self, arrays: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> Ticket:
        """Write one payload. Raises RingFullError where a rollout would wait."""
        return self.ring.write(arrays, metadata=metadata, readers=self._readers)

    def close(self) -> None:
        """Close client and ring. Idempotent."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def a_ticket(schema: Schema | None = None, **fields: Any) -> Ticket:
    """Return a valid ticket of a payload that is nowhere, for tests of code that stores, sorts or forwards tickets.

    Reading it ends in a clear error. ``fields``: those of `Ticket` that the test names; TicketError for a wrong one.
    """
    chosen: dict[str, Any] = {
        "ring": secrets.token_hex(16),
        "host": "nowhere",
        "addresses": ("127.0.0.1",),
        "ports": (1,),
        "slot": 0,
        "generation": 1,
        "key": secrets.randbits(64),
        "size": schema.max_bytes if schema is not None else 64,
        "created": time.time(),
    }
    if schema is not None:
        chosen["schema_fingerprint"] = schema.fingerprint
    return Ticket(**{**chosen, **fields})
