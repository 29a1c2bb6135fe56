"""What a ticket says of its payload's group comes back as it was given, and nothing else is taken for a group."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import UsageError
from transport.group import (
    GROUP,
    GROUP_END,
    MAX_NAME_BYTES,
    end_of,
    ended_group,
    group_of,
    in_group,
    returned,
    returned_group,
    users_own,
)
from transport.ticket import NO_SCHEMA, Ticket

names = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=60).filter(
    lambda name: len(name.encode()) <= MAX_NAME_BYTES
)
counts = st.none() | st.integers(1, 2**63 - 1)
users = st.dictionaries(st.text("abc", min_size=1), st.integers(-5, 5) | st.text("xyz"), max_size=3)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | names,
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=6,
)


def ticket_with(metadata: Any, size: int = 8) -> Ticket:
    return Ticket(
        ring="ab" * 16,
        host="here",
        addresses=(),
        ports=(),
        slot=0,
        generation=1,
        key=1,
        size=size,
        created=0.0,
        metadata=metadata,
        schema_fingerprint=NO_SCHEMA,
    )


@given(users, names, counts, st.none() | st.integers(0, 2**63 - 1))
def test_a_group_comes_back_as_it_was_given(metadata: dict[str, Any], name: str, of: Any, tokens: Any) -> None:
    ticket = ticket_with(in_group(metadata, name, of, tokens))
    for came in (Ticket.decode(ticket.encode()), Ticket.from_json(ticket.to_json())):
        assert came.group == (name, of, tokens)
        assert came.users_metadata == metadata
        assert came.ends_group is None


@given(users, names, counts, st.none() | st.integers(0, 2**63 - 1))
def test_the_end_of_a_group_comes_back(metadata: dict[str, Any], name: str, of: Any, written: Any) -> None:
    said = {**metadata, **end_of(name, of, written)}
    came = Ticket.decode(ticket_with(said, size=0).encode())
    assert (came.ends_group, came.group, came.users_metadata) == ((name, of, written), None, metadata)
    assert ticket_with(said).ends_group is None  # a payload ends no group


@given(st.dictionaries(st.sampled_from([GROUP, GROUP_END, "mine"]), anything))
def test_what_a_strange_writer_says_is_a_group_with_its_limits_or_none(metadata: dict[str, Any]) -> None:
    encoded = msgspec.msgpack.decode(msgspec.msgpack.encode(metadata))
    group, ended = group_of(encoded), ended_group(encoded)
    if group is not None:
        assert in_group(None, *group) == {GROUP: [*group]} and list(encoded[GROUP]) == [*group]
    assert ended is None or (list(encoded[GROUP_END]) == [*ended] and end_of(*ended) == {GROUP_END: [*ended]})
    assert set(users_own(encoded)) <= {"mine"}


def test_without_a_group_metadata_stays_as_it_is() -> None:
    given = {"reward": 1.0}
    assert in_group(given, None) is given and in_group(None, None) is None
    assert group_of(given) is None and ended_group(given) is None


@given(names, st.text())
def test_a_returned_group_is_known_by_why_its_samples_were_discarded(name: str, other: str) -> None:
    assert returned_group(returned(name)) == name and len(returned(name).encode()) <= 160  # bytes of a reason in a ring
    assert returned_group(f"group {other}") is None


@pytest.mark.parametrize("name", ["", "two\nlines", "a\x7f", "a\x85b", "a" * (MAX_NAME_BYTES + 1), "\ud800", 12])
def test_a_name_that_a_reason_in_a_ring_would_change_is_refused(name: Any) -> None:
    with pytest.raises(UsageError, match="give a name"):
        in_group(None, name)
    assert group_of({GROUP: [name, None, None]}) is None
