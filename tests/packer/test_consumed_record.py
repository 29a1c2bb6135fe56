"""Record of what was consumed: accepts once, forgets within bounds, survives a checkpoint."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import UsageError
from transport.packer.consumed_record import GENERATION_BITS, ConsumedRecord
from transport.settings import DEFAULTS


def test_a_payload_is_accepted_once_per_rank() -> None:
    record = ConsumedRecord()
    assert not record.contains("ring", 3, 7, 0)
    assert record.accept("ring", 3, 7, 0)
    assert not record.accept("ring", 3, 7, 0)
    assert record.contains("ring", 3, 7, 0)
    assert record.accept("ring", 3, 7, 1)
    assert record.accept("ring", 4, 7, 0)
    assert record.accept("other", 3, 7, 0)
    assert repr(record) == "<ConsumedRecord 4 slots of 2 rings>"


def test_only_a_later_generation_of_a_slot_is_accepted() -> None:
    record = ConsumedRecord()
    assert record.accept("ring", 0, 5, 0)
    assert not record.accept("ring", 0, 4, 0)
    assert record.accept("ring", 0, 6, 0)
    assert record.contains("ring", 0, 5, 0)


def test_a_merged_record_has_what_any_of_the_records_has() -> None:
    first, second = ConsumedRecord(), ConsumedRecord()
    first.accept("ring", 0, 5, 0)
    first.accept("ring", 1, 2, 0)
    second.accept("ring", 0, 6, 0)
    second.accept("other", 0, 1, 1)
    merged = ConsumedRecord.merged([second, first])
    assert all(merged.contains(*each) for each in [("ring", 0, 6, 0), ("ring", 1, 2, 0), ("other", 0, 1, 1)])
    assert not merged.contains("ring", 0, 7, 0)
    assert len(second) == 2


def test_generations_may_wrap() -> None:
    record = ConsumedRecord()
    last = (1 << GENERATION_BITS) - 1
    assert record.accept("ring", 0, last, 0)
    assert record.accept("ring", 0, 0, 0)
    assert not record.accept("ring", 0, last, 0)


def test_the_ring_used_longest_ago_is_forgotten() -> None:
    record = ConsumedRecord(msgspec.structs.replace(DEFAULTS, consumed_rings=2))
    record.accept("a", 0, 1, 0)
    record.accept("b", 0, 1, 0)
    record.accept("a", 0, 1, 0)
    record.accept("c", 0, 1, 0)
    assert record.contains("a", 0, 1, 0)
    assert not record.contains("b", 0, 1, 0)


payloads = st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(1, 5), st.integers(0, 1))


@given(st.lists(payloads), st.lists(payloads))
def test_a_stored_record_decides_as_the_one_that_was_stored(before: list, after: list) -> None:
    record = ConsumedRecord()
    for payload in before:
        record.accept(*payload)
    restored = ConsumedRecord.from_bytes(record.to_bytes())
    assert [restored.accept(*payload) for payload in after] == [record.accept(*payload) for payload in after]
    assert restored.to_bytes() == record.to_bytes()


def test_restoring_keeps_to_the_bound_and_the_rings_used_last() -> None:
    record = ConsumedRecord()
    for ring in "abc":
        record.accept(ring, 0, 1, 0)
    restored = ConsumedRecord.from_bytes(record.to_bytes(), msgspec.structs.replace(DEFAULTS, consumed_rings=2))
    assert [restored.contains(ring, 0, 1, 0) for ring in "abc"] == [False, True, True]


def test_other_bytes_and_unknown_versions_are_refused() -> None:
    with pytest.raises(UsageError, match="not a record"):
        ConsumedRecord.from_bytes(b"\x80garbage")
    with pytest.raises(UsageError, match="version mismatch: found 9, this build reads 1"):
        ConsumedRecord.from_bytes(msgspec.msgpack.encode({"version": 9, "rings": []}))


@given(st.lists(st.text(min_size=1, alphabet="abcé")), st.lists(st.text(min_size=1, alphabet="abcé")))
def test_a_record_has_the_names_of_groups_that_were_added_and_no_others(before: list, after: list) -> None:
    record = ConsumedRecord()
    record.groups.add(before)
    copy, stored = record.copy(), ConsumedRecord.from_bytes(record.to_bytes())
    record.groups.add(after)
    merged = ConsumedRecord.merged([stored, record])
    names = {*before, *after, "x", ""}
    for found, had in [
        (copy, {*before}),
        (stored, {*before}),
        (record, {*before, *after}),
        (merged, {*before, *after}),
    ]:
        assert {name for name in names if name in found.groups} == had and len(found.groups) == len(had)


def test_many_names_are_eight_bytes_each() -> None:
    record = ConsumedRecord()
    for step in range(100):
        record.groups.add(f"step {step}, prompt {group}" for group in range(200))
    assert len(record.groups) == 20_000 and len(record.to_bytes()) < 8 * 20_000 + 200
    assert "step 50, prompt 100" in record.groups and "step 100, prompt 0" not in record.groups
