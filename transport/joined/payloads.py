"""Reading joined payloads: each part from where it lies, all of them one mapping with one acknowledgement.

    payload = read_joined(client, ticket)      # a BlockingClient with ack="manual"; `join` with an UCXXClient
    payload["tokens"], payload["ref_logprobs"] # of the rollout, and of the reference model
    payload.ack()                              # every part

Parts are acknowledged before the payload that names them: who dies in between leaves a payload that cannot be read
again, and no part that is never freed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from transport.client.blocking import BlockingClient
from transport.client.client import UCXXClient
from transport.client.payload import Payload, ReadPayload, no_field
from transport.errors import PayloadDamagedError, RankError, SchemaError, TransportError, UsageError
from transport.joined.parents import FIELD, Parent, check_rank, parents_of
from transport.ring.parts import field_names
from transport.schema import PayloadLayout
from transport.ticket import Identity, Ticket

MAX_DEPTH: Final = 4
"""Generations of parents above a payload."""

MAX_PARTS: Final = 16
"""Of one payload, itself included."""


class JoinedPart(NamedTuple):
    """One payload of those that are joined; ``payload``: None where it was not read."""

    ticket: Ticket
    rank: int
    payload: Payload | None

    def ack(self, client: UCXXClient | BlockingClient) -> bool:
        """Acknowledge it. False: it was acknowledged before."""
        return client.ack(self.ticket, self.rank) if self.payload is None else self.payload.ack()


class JoinedPayload(ReadPayload):
    """Fields of a payload and of all its parents, by name. Bytes, schema and layout are those of each part alone.

    `ack` acknowledges every part, the payload itself last.

    Attributes:
        ticket: of the payload that was asked for.
        parts: the payloads that were read, the one that was asked for first.
        to_acknowledge: ticket and rank of each part, in the order of their acknowledgement.
    """

    def __init__(
        self, client: UCXXClient | BlockingClient, parts: Sequence[JoinedPart], to_acknowledge: Sequence[JoinedPart]
    ) -> None:
        first = parts[0]
        self.parts = [part.payload for part in parts if part.payload is not None]
        wire = first.payload.wire if first.payload is not None else self.parts[0].wire
        self.to_acknowledge = list(to_acknowledge)
        super().__init__(first.ticket, first.rank, wire, None, None, partial(_acknowledge, client, self.to_acknowledge))
        self._count = len(parts)
        self._owners: dict[str, Payload] = {}
        for payload in self.parts:
            for name in (each.name for each in payload.layout().placements):
                if name == FIELD:
                    continue
                if name in self._owners:
                    raise SchemaError(
                        f"payload {self.ticket.name}: the field {name!r} is in two of its parts, "
                        f"{self._owners[name].ticket.name} and {payload.ticket.name}"
                    )
                self._owners[name] = payload

    def __repr__(self) -> str:
        return f"<JoinedPayload {self.ticket.name} of {self._count} parts>"

    @property
    def nbytes(self) -> int:
        """Bytes of all payloads that it was read from, each as a whole."""
        return sum(payload.ticket.size for payload in self.parts)

    @property
    def data(self) -> Any:
        """Refused: each part has bytes of its own. UsageError."""
        raise self._in_parts("bytes")

    @property
    def fields(self) -> Mapping[str, Any]:
        """Every field by name: the payload itself."""
        return self

    def layout(self) -> PayloadLayout:
        """Raise UsageError: each part has a layout of its own."""
        raise self._in_parts("a layout")

    def _in_parts(self, what: str) -> UsageError:
        return UsageError(
            f"payload {self.ticket.name} is joined of {self._count} parts, each with {what} of its own: use its "
            "fields by name, or its parts; for batches the layout 'list' with a collate of yours"
        )

    def __getitem__(self, name: str) -> Any:
        if name not in self._owners:
            raise no_field(name, self)
        return self._owners[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)

    def release(self) -> None:
        """Drop the references to the memory of all parts. Idempotent."""
        for payload in self.parts:
            payload.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.ack()
            self.release()
            return
        for payload in self.parts:
            payload.__exit__(kind, error, trace)


class _Joining:
    """Decision what is read next; no I/O.

    Args:
        kept: how many parts, from the first on, are the caller's, who releases them.
    """

    def __init__(
        self,
        client: UCXXClient | BlockingClient,
        ticket: Ticket,
        rank: int,
        fields: Sequence[str] | None,
        kept: int = 0,
    ) -> None:
        self._kept = kept
        if client.acknowledges == "on_arrival":
            raise UsageError(
                'joined payloads need a client with ack="manual": with "on_arrival" a part would be consumed before '
                "the others have come"
            )
        self._client = client
        self._wanted = None if fields is None else set(field_names(fields))
        self._found: set[str] = set()
        self._ticket = ticket
        self._seen = {ticket.identity}
        self._rank = rank
        self._named: dict[Identity, list[Parent]] = {}  # by payloads that were read
        self._left: list[tuple[Parent, int, int]] = [(Parent(ticket, 0), rank, 0)]  # part, rank of it, depth
        self.parts: list[JoinedPart] = []

    def next(self) -> tuple[Ticket, int, tuple[str, ...] | None] | None:
        """(ticket, rank, fields) to read, after all parts that are only acknowledged; None: that was all."""
        while self._left:
            part, rank, _ = self._left[0]
            fields = self._fields(part.ticket)
            if fields is None or fields:
                return part.ticket, rank, fields
            self.came(None)
        if self._wanted is not None and (missing := self._wanted - self._found):
            raise SchemaError(f"payload {self._ticket.name}: no part of it has {', '.join(sorted(missing))}")
        return None

    def _fields(self, ticket: Ticket) -> tuple[str, ...] | None:
        if self._wanted is None:
            return None
        schema = ticket.schema or self._client.schema_of(ticket)
        if schema is None:
            raise SchemaError(f"payload {ticket.name}: this client does not know its schema; pass it: schemas=[…]")
        here = {name for name in schema.names if name in self._wanted}
        self._found |= here
        return tuple(name for name in schema.names if name in here or name == FIELD)

    def came(self, payload: Payload | None) -> None:
        """Note that the first of those that are left is here."""
        part, rank, depth = self._left.pop(0)
        self.parts.append(JoinedPart(part.ticket, rank, payload))
        layout = () if payload is None else payload.layout().placements
        if payload is None or not any(each.name == FIELD for each in layout):
            return
        self._named[part.ticket.identity] = parents_of(payload[FIELD], part.ticket)
        for parent in self._named[part.ticket.identity]:
            its_rank = check_rank(parent, rank, part.ticket)
            if parent.ticket.identity in self._seen:
                continue  # two stages have added to the same payload
            if depth >= MAX_DEPTH or len(self._seen) >= MAX_PARTS:
                raise PayloadDamagedError(
                    f"payload {self._ticket.name} has more than {MAX_PARTS} parts, or parents of parents more than "
                    f"{MAX_DEPTH} deep"
                )
            self._seen.add(parent.ticket.identity)
            self._left.append((parent, its_rank, depth + 1))

    def to_acknowledge(self) -> list[JoinedPart]:
        """All parts, each after its own parents, once for each rank by which it is reached."""
        read = {(part.ticket.identity, part.rank): part.payload for part in self.parts}
        ordered: dict[tuple[Identity, int], JoinedPart] = {}
        self._order(self._ticket, self._rank, set(), ordered, read)
        return list(ordered.values())

    # A method: a function that calls itself keeps what it refers to until the collector runs, here memory of slots.
    def _order(
        self,
        ticket: Ticket,
        rank: int,
        begun: set[tuple[Identity, int]],
        ordered: dict[tuple[Identity, int], JoinedPart],
        read: Mapping[tuple[Identity, int], Payload | None],
    ) -> None:
        reached = ticket.identity, rank
        if reached in begun:
            return
        begun.add(reached)
        for parent in self._named.get(ticket.identity, ()):
            try:
                its_rank = check_rank(parent, rank, ticket)
            except RankError:
                continue  # the parent has no reader that stands for this one
            self._order(parent.ticket, its_rank, begun, ordered, read)
        ordered[reached] = JoinedPart(ticket, rank, read.get(reached))

    def failed(self, ticket: Ticket, error: TransportError) -> TransportError:
        """Return the error for an unreadable part; what was read before is released, and stays unacknowledged."""
        self.drop()
        if ticket is self._ticket:
            return error
        return type(error)(f"payload {self._ticket.name} cannot be read: its part {ticket.name}: {error}")

    def others(self) -> list[JoinedPart]:
        """All parts that are known but the payload itself, in the order of their acknowledgement."""
        return self.to_acknowledge()[:-1]

    def joined(self) -> JoinedPayload:
        """All parts, once they have come."""
        return JoinedPayload(self._client, self.parts, self.to_acknowledge())

    def drop(self) -> None:
        """Release what was read, and forget it."""
        for at, part in enumerate(self.parts):
            if at >= self._kept and part.payload is not None:
                part.payload.release()
                self.parts[at] = part._replace(payload=None)


def _acknowledge(client: UCXXClient | BlockingClient, parts: Sequence[JoinedPart]) -> bool:
    """Acknowledge every part, the payload itself last. False: that one was acknowledged before."""
    accepted = False
    for part in parts:
        accepted = part.ack(client)
    return accepted


def names_parents(client: UCXXClient, ticket: Ticket) -> bool:
    """Return whether the payload has the field that names its parents, as far as its schema is known here."""
    schema = client.schema_of(ticket)
    return schema is not None and FIELD in schema.names


async def join_to(
    client: UCXXClient, payload: Payload, known: list[JoinedPart], timeout: float | None = None
) -> JoinedPayload:
    """Read the parents of a payload that was read already. Where it raises, the payload is as it was.

    Raises what `read_joined` raises.

    Args:
        known: gets the other parts, which end with the payload, as far as they are known; also where it raises.
    """
    joining = _Joining(client, payload.ticket, payload.rank, None, kept=1)
    try:
        joining.came(payload)
        return await _joined(client, joining, timeout)
    finally:
        known[:] = joining.others()


async def find_parts(
    client: UCXXClient, ticket: Ticket, rank: int, known: list[JoinedPart], timeout: float | None = None
) -> None:
    """Find the other parts of a payload that is not read again, for ``known`` as of `join_to`.

    Reads of each part the field that names its parents alone. Raises what `read_joined` raises.
    """
    joining = _Joining(client, ticket, rank, (FIELD,))
    try:
        await _read(client, joining, timeout)
    finally:
        joining.drop()
        known[:] = joining.others()


def read_joined(
    client: BlockingClient,
    ticket: Ticket | str | bytes,
    *,
    rank: int = 0,
    fields: Sequence[str] | None = None,
    timeout: float | None = None,
) -> JoinedPayload:
    """Fetch a payload and all of its parents. One without parents is a joined payload of one part.

    Args:
        client: with ``ack="manual"``, which knows the schemas of all parts.
        fields: names of those that are wanted, of whichever parts; parts without any are not read, but acknowledged.
        timeout: seconds for each part.

    Raises:
        UsageError: the client acknowledges on arrival.
        SchemaError: two parts have a field of the same name, or none has one of ``fields``.
        StaleSlotError, and what `BlockingClient.read` raises: of a part, which the message names; nothing is
            acknowledged.
        PayloadDamagedError: parents that are none, or more of them than a payload may have.
    """
    joining = _Joining(client, Ticket.of(ticket), rank, fields)
    return client._thread.run(_joined(client._client, joining, timeout))


async def join(
    client: UCXXClient,
    ticket: Ticket | str | bytes,
    *,
    rank: int = 0,
    fields: Sequence[str] | None = None,
    timeout: float | None = None,
) -> JoinedPayload:
    """`read_joined` for an `UCXXClient`."""
    return await _joined(client, _Joining(client, Ticket.of(ticket), rank, fields), timeout)


async def _joined(reader: UCXXClient, joining: _Joining, timeout: float | None) -> JoinedPayload:
    try:
        await _read(reader, joining, timeout)
        return joining.joined()
    except BaseException:
        joining.drop()
        raise


async def _read(reader: UCXXClient, joining: _Joining, timeout: float | None) -> None:
    while (step := joining.next()) is not None:
        ticket, rank, fields = step
        try:
            payload = await reader.read(ticket, rank=rank, timeout=timeout, fields=fields)
        except TransportError as error:
            if (failure := joining.failed(ticket, error)) is error:
                raise
            raise failure from error
        joining.came(payload)
