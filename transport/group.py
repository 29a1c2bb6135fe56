"""The group of a payload, as its ticket has it: the group's name, of how many samples it is, and the sample's weight.

    metadata = in_group({"reward": 1.0}, "prompt 12", of=8, tokens=1234)
    group_of(metadata)                  # GroupOf(name="prompt 12", of=8, tokens=1234)

It stands in the metadata, under names that the transport keeps for itself: a planner needs no byte of the payload.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from transport.errors import UsageError

OWN: Final = "transport."  # how the transport's names in metadata begin; users are not shown these
GROUP: Final = "transport.group"  # [name, of, tokens], numbers or None
GROUP_END: Final = "transport.group_end"  # [name, of, written], numbers or None; of a slot without fields
MAX_NAME_BYTES: Final = 128
_RETURNED: Final = "returned to its rollout: "  # with a name no longer than a reason in a ring may be
_LIMIT: Final = 1 << 63
_CONTROL: Final = re.compile("[\0-\x1f\x7f-\x9f]")  # spaces in reasons, which name the groups that are returned


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


class EndOf(NamedTuple):
    """The end of a group.

    Attributes:
        name: of the group.
        of: how many samples it has in all rings; None: as many as come.
        written: how many samples its writer has written before; None: not known.
    """

    name: str
    of: int | None
    written: int | None


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


def end_of(group: str, of: int | None = None, written: int | None = None) -> Mapping[str, Any]:
    """Return the metadata that says the end of a group. UsageError: it makes no sense."""
    return {GROUP_END: [checked_name(group), _number(of, 1, "of"), written]}


def returned(group: str) -> str:
    """Return why a sample was discarded, where its rollout is to make the group again."""
    return f"{_RETURNED}{group}"


def returned_group(why: str) -> str | None:
    """Return the group that its rollout is to make again, by why a sample was discarded; None: it is not returned."""
    return why.removeprefix(_RETURNED) if why.startswith(_RETURNED) else None


def checked_name(name: object) -> str:
    """Return the name of a group. UsageError unless it is one line of 1 to `MAX_NAME_BYTES` bytes."""
    if not _is_name(name):
        raise UsageError(f"group {name!r:.80}: give a name of 1 to {MAX_NAME_BYTES} bytes, without control characters")
    return name  # type: ignore[return-value]  # a str


def group_of(metadata: Mapping[str, Any]) -> GroupOf | None:
    """Return the group that a ticket's metadata names; None: it names none, or not as `in_group` does."""
    match metadata.get(GROUP):
        case [name, of, tokens] if _is_name(name) and _counts(of, 1) and _counts(tokens, 0):
            return GroupOf(name, of, tokens)
    return None


def ended_group(metadata: Mapping[str, Any]) -> EndOf | None:
    """Return the end of a group that a ticket's metadata says; None: it says none, or not as `end_of` does."""
    match metadata.get(GROUP_END):
        case [name, of, written] if _is_name(name) and _counts(of, 1) and _counts(written, 0):
            return EndOf(name, of, written)
    return None


def users_own(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata without what the transport has put there."""
    return {name: value for name, value in metadata.items() if not name.startswith(OWN)}


def _is_name(name: object) -> bool:
    try:
        return isinstance(name, str) and 0 < len(name.encode()) <= MAX_NAME_BYTES and not _CONTROL.search(name)
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
