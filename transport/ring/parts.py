"""Some fields of a payload: which of its bytes they are, and how they lie when they alone were moved."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from transport import _ring
from transport.errors import UsageError
from transport.schema import PayloadLayout, Schema
from transport.ticket import Ticket


class Range(NamedTuple):
    """Bytes of one field: where they begin in the payload, where in the part, how many."""

    offset: int
    place: int
    nbytes: int


class PayloadPart(NamedTuple):
    """The fields of one payload that are wanted, in the order of its schema.

    Attributes:
        schema: of these fields alone.
        layout: of the part on its own, packed as a payload of that schema.
        inside: the same fields where they lie in the whole payload.
        ranges: of fields that have bytes.
    """

    schema: Schema
    layout: PayloadLayout
    inside: PayloadLayout
    ranges: tuple[Range, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the fields, without gaps."""
        return sum(each.nbytes for each in self.ranges)

    def copied(self, whole: Any) -> memoryview:
        """Return the part alone, cut out of the whole payload's bytes."""
        memory = memoryview(bytearray(self.layout.total))
        source = memoryview(whole).cast("B")
        for begin, place, nbytes in self.ranges:
            _ring.copy(memory[place : place + nbytes], source[begin : begin + nbytes])
        return memory


def field_names(fields: Any) -> tuple[str, ...]:
    """Names of fields as the caller gave them. UsageError unless they are several names, at least one."""
    names = (
        isinstance(fields, Sequence) and not isinstance(fields, str) and all(isinstance(each, str) for each in fields)
    )
    if not names or not fields:
        raise UsageError(f"fields={fields!r:.80}; give the names of one or more fields, in a tuple")
    return tuple(fields)


def part_of(ticket: Ticket, schema: Schema | None, fields: tuple[str, ...]) -> PayloadPart:
    """Return what of a payload these fields are. SchemaError: one of them is unknown, or there is no schema."""
    whole = ticket.layout(schema)  # which agrees with the ticket
    chosen = ticket.schema or schema
    assert chosen is not None
    return _part(chosen, whole, ticket.lengths, fields)


@lru_cache(maxsize=64)
def _chosen(schema: Schema, fields: tuple[str, ...]) -> tuple[Schema, tuple[int, ...]]:
    part = schema.only(fields)
    return part, tuple(at for at, spec in enumerate(schema.counted) if spec.name in set(part.names))


def _part(schema: Schema, whole: PayloadLayout, lengths: tuple[int, ...], fields: tuple[str, ...]) -> PayloadPart:
    part, counted = _chosen(schema, fields)
    layout = part.layout(tuple(lengths[at] for at in counted))
    names = set(part.names)
    inside = PayloadLayout(tuple(each for each in whole.placements if each.name in names), whole.total)
    ranges = tuple(
        Range(old.offset, new.offset, old.nbytes)
        for old, new in zip(inside.placements, layout.placements, strict=True)
        if old.nbytes
    )
    return PayloadPart(part, layout, inside, ranges)
