"""Named consumers of a ring: stages that each see every payload once, by name; fixed when the ring is made.

    SharedRingBuffer.create(schema, slots=8, consumers={"reference": 1, "train": 4})

A name stands for one or several of the 16 ranks, in order: reference is rank 0, train are ranks 1 to 4. A number alone,
``consumers=4``, is that of ranks without names. Where a ring has neither, each write says for how many ranks it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from transport import _ring
from transport.errors import RankError, SharedMemoryError, UsageError

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,31}")
_MOST_BYTES: Final = 400  # as native/ring/segment.hpp has room for
_NUMBERS: Final = frozenset(map(str, range(1, _ring.MAX_READERS + 1)))

Consumers = Mapping[str, range]
"""Ranks by name, in order."""


def consumers_text(given: Any) -> str:
    """Return a segment's text of these consumers: names with one rank each, names with counts of ranks, or a number.

    UsageError for names that are none, and for more than 16 ranks.
    """
    if given is None:
        return ""
    if type(given) is int:
        if not 1 <= given <= _ring.MAX_READERS:
            raise RankError(f"readers={given}; a payload is written for 1 to {_ring.MAX_READERS} ranks")
        return str(given)
    if isinstance(given, str) or not isinstance(given, Mapping | Sequence):
        raise UsageError(
            f"consumers={given!r:.80}; give names in a list, names with how many ranks each has, or a number of ranks"
        )
    counts = dict(given) if isinstance(given, Mapping) else dict.fromkeys(given, 1)
    if len(counts) != len(given):
        raise UsageError(f"consumers={given!r:.80}: a name stands there twice")
    for name, ranks in counts.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(f"invalid consumer {name!r:.80}: give at most 32 letters, digits, _ and -")
        if type(ranks) is not int or ranks < 1:
            raise UsageError(f"consumer {name}: {ranks!r:.40} ranks; give 1 or more")
    if not 1 <= sum(counts.values()) <= _ring.MAX_READERS:
        raise UsageError(f"{sum(counts.values())} ranks of all consumers; a payload has 1 to {_ring.MAX_READERS}")
    text = ",".join(f"{name}:{ranks}" for name, ranks in counts.items())
    if len(text) > _MOST_BYTES:
        raise UsageError(f"the names of the consumers have {len(text)} bytes together; the limit is {_MOST_BYTES}")
    return text


def consumers_of(text: str) -> Consumers:
    """Return the named ranks that `consumers_text` has described. SharedMemoryError for any other text."""
    found: dict[str, range] = {}
    if not text or text in _NUMBERS:
        return found
    first = 0
    for each in text.split(","):
        name, _, ranks = each.partition(":")
        if not _NAME.fullmatch(name) or name in found or not ranks.isdecimal() or not 1 <= int(ranks[:3]) <= 16:
            raise SharedMemoryError(f"the ring's consumers are damaged: {text!r:.80}")
        found[name] = range(first, first + int(ranks))
        first += int(ranks)
    if first > _ring.MAX_READERS:
        raise SharedMemoryError(f"the ring's consumers are damaged: {text!r:.80}")
    return found


def ranks_of(text: str) -> int:
    """Return for how many ranks each payload is written; 0: each write says. SharedMemoryError as `consumers_of`."""
    return int(text) if text in _NUMBERS else sum(map(len, consumers_of(text).values()))


def check_consumer(rank: str, what: str) -> str:
    """Return a name that a ring may have, as ``what`` is one. RankError for other text: ``"0"`` is not rank 0."""
    name, colon, own = rank.partition(":")
    if not _NAME.fullmatch(name) or (colon and not (own.isdecimal() and len(own) < 3)):
        raise RankError(f"{what} got a str: give a whole number, or a consumer's name, not {rank!r:.80}")
    return rank


def rank_of(consumers: Consumers, consumer: str | int, rank: int | None = None) -> int:
    """Return the rank of the payload's readers that this consumer's own rank is; an int is a rank already.

    ``"train:2"`` is rank 2 of the consumer ``"train"``.

    RankError: no such consumer, it has fewer ranks, or several and none was given.
    """
    if not isinstance(consumer, str):
        return consumer
    name, colon, own = consumer.partition(":")
    if colon and rank is None and own.isdecimal() and len(own) < 3:
        consumer, rank = name, int(own)
    ranks = consumers.get(consumer)
    if ranks is None:
        known = f"it has {', '.join(consumers)}" if consumers else "it was made without names; give a rank"
        raise RankError(f"the ring has no consumer {consumer!r:.80}: {known}")
    if rank is None:
        if len(ranks) > 1:
            raise RankError(f"consumer {consumer} has {len(ranks)} ranks; say which one: '{consumer}:0', or rank_of()")
        rank = 0
    if type(rank) is not int or not 0 <= rank < len(ranks):
        raise RankError(f"consumer {consumer} has ranks 0..{len(ranks) - 1}, not {rank!r:.40}")
    return ranks[rank]
