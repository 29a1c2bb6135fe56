"""The calls of a client that take payloads from a ring without tickets: one by one, or as one batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Unpack

from transport.claims.batch import TakenBatch
from transport.claims.connection import MOST_BYTES
from transport.claims.connections import ClaimConnections
from transport.claims.in_place import Plan, TakenPayloads, Taker, taken_in_place
from transport.client.connections.pool import port_of
from transport.errors import ClosedError
from transport.ring.batch_shape import ShapeArguments
from transport.ring.batches import MAX_DELIVERIES
from transport.schema import Schema


class TakeCalls(ABC):
    """`take` and `take_batch` of a client, which makes the parts."""

    _claims: ClaimConnections
    _verify: bool
    _closed: bool

    @abstractmethod
    def _check_open(self) -> None:
        """Raise unless the client is open, and called where it belongs."""

    async def take(
        self,
        address: str,
        n: int,
        *,
        most_bytes: int = MOST_BYTES,
        wait_s: float = 0.0,
        rank: int | str = 0,
        oldest_version: int | None = None,
        most_attempts: int = 0,
        fields: Sequence[str] | None = None,
    ) -> TakenBatch:
        """Take up to ``n`` payloads from the ring that is served at ``address`` ("host:port"), without tickets.

        No other consumer of this rank gets them until they are consumed or given back; a connection that is lost gives
        all of its payloads back. Without any for ``wait_s`` the batch is empty. Cancelling it loses nothing.

        Args:
            most_bytes: of all payloads together; a single larger one comes alone.
            oldest_version: payloads of an older policy are discarded instead.
            most_attempts: payloads that were claimed so often are discarded instead; 0: no limit.
            fields: names of those that are wanted; the bytes of others are not moved. The tickets of such a batch are
                of a payload that has these fields only, and ``most_bytes`` still counts whole payloads.

        Raises:
            SchemaError: a payload has no such field, or its schema is not known here; all are given back.
            BatchTooLargeError: there is no memory for what would come, or has come; all are given back.
            UsageError: nothing was asked.
            BusyError: the listener is shutting down, or this client has more demands or claims than it may.
            LinkError kinds: no connection, or it broke and the claims of its payloads have ended.
        """
        self._check_open()
        connection = await self._claims.of_port(port_of(address))
        return await connection.take(
            n,
            most_bytes=most_bytes,
            wait_s=wait_s,
            rank=rank,
            oldest_version=oldest_version,
            most_attempts=most_attempts,
            verify=self._verify,
            fields=fields,
        )

    async def take_batch(
        self,
        address: str,
        n: int,
        *,
        wait_s: float = 0.0,
        schema: Schema | None = None,
        most_bytes: int = MOST_BYTES,
        rank: int | str = 0,
        oldest_version: int | None = None,
        max_deliveries: int = MAX_DELIVERIES,
        **shape: Unpack[ShapeArguments],
    ) -> TakenPayloads:
        """`take`, as one batch; empty when nothing came in time. Each tensor is copied once, to where it belongs.

        What arrives with wrong bytes is left out and may be taken again, until ``max_deliveries``. The other arguments
        are those of `take`.

        Args:
            schema: of the payloads; None: the one that this client was given.
            shape: layout, fill, pad_to, out, memory, most_memory, verify and fields, as for
                `SharedRingBuffer.claim_batch`; the checksums of a list, and of some fields, are compared, too.

        Raises:
            SchemaError, UsageError, MissingDependencyError: nothing was asked; but SchemaError, too, for payloads of
                another schema, with which all are given back.
            BufferUnsuitableError, BatchTooLargeError: as for `SharedRingBuffer.claim_batch`. All
                payloads are given back.
            BusyError, LinkError kinds: as for `take`.
        """
        plan, take = self._batch_plan(
            address,
            n,
            schema,
            shape,
            wait_s,
            most_bytes=most_bytes,
            rank=rank,
            oldest_version=oldest_version,
            most_attempts=max_deliveries,
        )
        return await taken_in_place(plan, take)

    def _batch_plan(
        self, address: str, n: int, schema: Schema | None, shape: ShapeArguments, wait_s: float, **demand: Any
    ) -> tuple[Plan, Taker]:
        """What `take_batch` asks for, and how."""
        port = port_of(address)
        plan = Plan(schema, self._claims.schemas, self._verify, shape, wait_s)

        async def take(wait_s: float, verify: bool) -> TakenBatch:
            self._check_open()
            connection = await self._claims.of_port(port)
            return await connection.take(
                n, wait_s=wait_s, verify=verify, fields=plan.fields, schema=plan.whole, **demand
            )

        return plan, take

    @property
    def claims(self) -> ClaimConnections:
        """Connections that hold claims."""
        if self._closed:
            raise ClosedError("this client is closed")
        return self._claims
