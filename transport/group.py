"""What a ticket says of its payload's group: the group's name, of how many samples it is, and the sample's weight.

    metadata = in_group({"reward": 1.0}, "prompt 12", of=8, tokens=1234)
    group_of(metadata)                  # GroupOf(name="prompt 12", of=8, tokens=1234)

It stands in the metadata, under names that the transport keeps for itself: a planner needs no byte of the payload.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from transport.errors import UsageError

OWN: Final = "transport."  # how the transport's names in metadata begin; users are not shown these
GROUP: Final = "transport.group"  # [name, of, tokens], numbers or None
GROUP_END: Final = "transport.group_end"  # the name; of a slot without fields
MAX_NAME_BYTES: Final = 200
_LIMIT: Final = 1 << 63


class GroupOf(NamedTuple):
    """The group of a sample.

    Attributes:
        name: of the group, among all rings of the run.
        of: how many samples the group has; None: the end of the group says so.
        tokens: what the sample weighs when micro-batches are balanced; None: its bytes.
    """

    name: str
    of: int | None
    tokens: int | None


def in_group(
    metadata: Mapping[str, Any] | None, group: str | None, of: int | None = None, tokens: int | None = None
) -> Mapping[str, Any] | None:
    """Return the metadata of a sample of this group; without a group as it is. UsageError: it makes no sense."""
    if group is None:
        if of is not None or tokens is not None:
            raise UsageError(f"of={of!r:.40} and tokens={tokens!r:.40} are of a sample of a group: give group= as well")
        return metadata
    entry = [checked_name(group), _number(of, 1, "of"), _number(tokens, 0, "tokens")]
    return {**(metadata or {}), GROUP: entry}


def checked_name(name: object) -> str:
    """Return the name of a group. UsageError unless it is text of 1 to `MAX_NAME_BYTES` bytes."""
    if not _is_name(name):
        raise UsageError(f"group {name!r:.80}: give a name of 1 to {MAX_NAME_BYTES} bytes")
    return name  # type: ignore[return-value]  # a str


def group_of(metadata: Mapping[str, Any]) -> GroupOf | None:
    """Return the group that a ticket's metadata names; None: it names none, or not as `in_group` does."""
    match metadata.get(GROUP):
        case [name, of, tokens] if _is_name(name) and _counts(of, 1) and _counts(tokens, 0):
            return GroupOf(name, of, tokens)
    return None


def ended_group(metadata: Mapping[str, Any]) -> str | None:
    """Return the name of the group whose end a ticket's metadata says."""
    name = metadata.get(GROUP_END)
    return name if _is_name(name) else None


def users_own(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata without what the transport has put there."""
    return {name: value for name, value in metadata.items() if not name.startswith(OWN)}


def _is_name(name: object) -> bool:
    try:
        return isinstance(name, str) and 0 < len(name.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:  # half a surrogate pair
        return False


def _counts(number: object, least: int) -> bool:
    return number is None or (type(number) is int and least <= number < _LIMIT)


def _number(value: object, least: int, name: str) -> int | None:
    try:
        number = None if value is None else operator.index(value)  # type: ignore[arg-type]  # numpy's, too
    except TypeError:
        number = -1
    if not _counts(number, least):
        raise UsageError(f"{name}={value!r:.40}; give a whole number of at least {least}, or None")
    return number
