"""A payload's parents: a field named `parents`, with the ticket of each and the rank by which it is acknowledged.

    schema = Schema.of(ref_logprobs=("float32", UpTo(8192)), parents=PARENTS)
    ring.write(with_parents({"ref_logprobs": values}, [rollout_ticket]))

Nothing is written into a published slot: the field is of the child. A child has at most 8 parents; theirs count when a
reader joins them.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from transport import _ring
from transport.errors import ClosedError, PayloadDamagedError, RankError, TicketError, UsageError
from transport.ring.buffer import MAX_READERS, SharedRingBuffer
from transport.ring.writes import Tickets
from transport.schema import UpTo
from transport.ticket import Ticket

FIELD: Final = "parents"
MAX_PARENTS: Final = 8
PARENTS: Final = ("value", UpTo(MAX_PARENTS * (_ring.NOTE_CAPACITY + 64) + 64))
"""What a schema says of the field."""


class Parent(NamedTuple):
    """A part of a payload that another stage wrote.

    Attributes:
        first: the reader of the child's rank r acknowledges the parent as its rank ``first + r``.
    """

    ticket: Ticket
    first: int = 0


def with_parents(values: Mapping[str, Any], parents: Sequence[Ticket | Parent]) -> dict[str, Any]:
    """Return the values of a child: its new fields, and the field that names its parents.

    Raises:
        UsageError: no parents, more than 8, one twice, or the values have a field of this name.
        RankError: a parent was not written for rank ``first``.
    """
    if FIELD in values:
        raise UsageError(f"the field {FIELD!r} names a payload's parents; give yours another name")
    if not isinstance(parents, list | tuple) or not 1 <= len(parents) <= MAX_PARENTS:
        raise UsageError(f"parents={parents!r:.80}; give 1 to {MAX_PARENTS} tickets, in a list")
    given = [each if isinstance(each, Parent) else Parent(each) for each in parents]
    named = [Parent(ticket, operator.index(first)) for ticket, first in given]  # numpy's numbers are none to a reader
    for ticket, first in named:
        if not isinstance(ticket, Ticket):
            raise UsageError(f"a parent is a {type(ticket).__name__}; give its Ticket")
        ticket.check_rank(first)
    if len({each.ticket.identity for each in named}) != len(named):
        raise UsageError("the same payload is named twice as a parent")
    return {**values, FIELD: [[ticket.encode(), first] for ticket, first in named]}


def parents_of(found: Any, child: Ticket) -> list[Parent]:
    """Return what the field of a child says. PayloadDamagedError: it is not what `with_parents` makes."""
    what = f"payload {child.name}: its field {FIELD!r}"
    if type(found) is not list or not 1 <= len(found) <= MAX_PARENTS:
        raise PayloadDamagedError(f"{what} does not name 1 to {MAX_PARENTS} parents")
    parents = []
    for each in found:
        if type(each) is not list or len(each) != 2 or type(each[0]) is not bytes or type(each[1]) is not int:
            raise PayloadDamagedError(f"{what} has something else than tickets and ranks")
        try:
            parents.append(Parent(Ticket.decode(each[0]), each[1]))
        except TicketError as error:
            raise PayloadDamagedError(f"{what} has a ticket that is none: {error}") from error
        if not 0 <= each[1] < MAX_READERS:
            raise PayloadDamagedError(f"{what} names rank {each[1]!r:.40} of a parent")
    return parents


def write_group(
    ring: SharedRingBuffer,
    common: Mapping[str, Any],
    samples: Sequence[Mapping[str, Any]],
    *,
    samples_ring: SharedRingBuffer,
    readers: int = 1,
    metadata: Mapping[str, Any] | Iterable[Mapping[str, Any] | None] | None = None,
    **options: Any,
) -> list[Ticket]:
    """Write what the samples of a group share once, and each sample with it as its parent; the samples' tickets.

    The common payload is free when the readers of all samples have acknowledged it.

    Args:
        ring: for what they share.
        samples_ring: for the samples, from which they are claimed. Its schema has the field `parents`.
        readers: ranks that read each sample; ``readers * len(samples)`` is at most 16.
        metadata: of the samples: one mapping for all, or one for each.
        options: further ones of `SharedRingBuffer.write_many`, for both rings.

    Raises:
        UsageError: too many samples for 16 ranks, or none.
        What `SharedRingBuffer.write_many` raises, or what interrupts the call: what was written by then is discarded.
            ``written`` has the tickets of samples that readers had consumed before, which cannot be taken back.
    """
    count, readers = len(samples), operator.index(readers)
    if not 1 <= count * readers <= MAX_READERS:
        raise UsageError(
            f"{count} samples for {readers} ranks each; a common payload has 1 to {MAX_READERS} readers: write larger "
            "groups as several"
        )
    try:
        shared = ring.write_many([common], readers=count * readers, **options)[0]
    except BaseException as error:
        _discard(ring, error)
        raise
    try:
        children = [with_parents(each, [Parent(shared, at * readers)]) for at, each in enumerate(samples)]
        return list(samples_ring.write_many(children, readers=readers, metadata=metadata, **options))
    except BaseException as error:
        _discard(samples_ring, error)
        with contextlib.suppress(ClosedError):
            ring.discard(shared)
        raise


def _discard(ring: SharedRingBuffer, error: BaseException) -> None:
    """Discard what a call had written when this ended it; ``written`` of the error is then what was consumed before."""
    consumed: list[bytes] = []
    with contextlib.suppress(ClosedError):  # what a closed ring had unread is discarded
        consumed += [ticket.encode() for ticket in getattr(error, "written", ()) if not ring.discard(ticket)]
    error.written = Tickets(consumed)  # type: ignore[attr-defined]


def check_rank(part: Parent, rank: int, child: Ticket) -> int:
    """Return the rank by which a reader of the child's ``rank`` reads this part. RankError: there is none."""
    try:
        part.ticket.check_rank(part.first + rank)
    except RankError as error:
        raise RankError(f"payload {child.name}: its part cannot be read by rank {rank} of it: {error}") from error
    return part.first + rank
