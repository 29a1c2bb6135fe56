"""Changes between versions: what is encoded is what differs, and applying it gives the new version."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import noise
from hypothesis import given
from hypothesis import strategies as st

from transport.errors import ProtocolError
from transport.weights.versions import delta
from transport.weights.versions.delta import BLOCK, RAW, DeltaRecord


def encoded(new: np.ndarray, old: np.ndarray, itemsize: int, offset: int = 0) -> tuple[DeltaRecord | None, np.ndarray]:
    out = np.full(len(new) + 8, 0xEE, np.uint8)
    record = delta.encode(offset, new, old, itemsize, out)
    return record, out[: record.encoded_bytes] if record is not None else out[:0]


@given(
    itemsize=st.sampled_from([1, 2, 4, 8, 16]),
    elements=st.integers(1, 300),
    changes=st.integers(0, 300),
    seed=st.integers(0, 9),
    before=st.integers(0, 3),
)
def test_old_and_changes_give_new(itemsize: int, elements: int, changes: int, seed: int, before: int) -> None:
    size = itemsize * elements
    old, new = noise(size, seed), noise(size, seed)
    places = np.random.default_rng(seed).integers(0, elements, changes)
    new.reshape(elements, itemsize)[places] = noise(itemsize * changes, seed + 1).reshape(changes, itemsize)
    row = np.concatenate([noise(before * 8), old, noise(24)])
    expected = row.copy()
    expected[before * 8 : before * 8 + size] = new
    record, data = encoded(new, old, itemsize, before * 8)
    np.testing.assert_array_equal(old, new)  # the sender's copy has become the new version
    if record is None:
        np.testing.assert_array_equal(row, expected)
        return
    assert record.encoded_bytes <= -(-size // 8) * 8  # never longer than all of it
    delta.apply(record, data, row)
    np.testing.assert_array_equal(row, expected)


def test_one_changed_element_in_a_hundred_costs_two_bytes_beside_itself() -> None:
    elements = 4 * BLOCK
    old = noise(2 * elements)
    new = old.copy()
    new.view(np.uint16)[::100] += 1
    record, data = encoded(new, old, 2)
    assert record is not None
    assert record.changes == -(-elements // 100)
    assert len(data) <= 4 * record.changes + 4 * 4 + 16


def test_blocks_without_changes_and_changes_at_their_edges() -> None:
    old = np.zeros(4 * (3 * BLOCK + 5), np.uint8)
    new = old.copy()
    places = [0, BLOCK - 1, 2 * BLOCK, 3 * BLOCK + 4]
    new.view(np.uint32)[places] = 7
    row = old.copy()
    record, data = encoded(new, old, 4)
    assert record is not None
    delta.apply(record, data, row)
    assert np.flatnonzero(row.view(np.uint32)).tolist() == places


def test_what_changed_almost_everywhere_is_sent_raw() -> None:
    old, new = noise(4096, 1), noise(4096, 2)
    record, data = encoded(new.copy(), old, 2)
    assert record == DeltaRecord(0, 4096, 2, RAW)
    np.testing.assert_array_equal(data, new)


def test_elements_are_compared_as_bits() -> None:
    old = np.array([np.nan, 0.0, 1.0] + [2.0] * 61, np.float32)
    new = old.copy()
    new[1] = -0.0
    record, _ = encoded(new.view(np.uint8), old.copy().view(np.uint8), 4)
    assert record is not None
    assert record.changes == 1


@pytest.mark.parametrize(
    ("record", "size"),
    [
        (DeltaRecord(0, 72, 2, 1), None),
        (DeltaRecord(-2, 8, 2, 1), None),
        (DeltaRecord(0, 7, 2, 1), None),
        (DeltaRecord(0, 8, 3, 1), None),
        (DeltaRecord(0, 8, 2, 1), 7),
        (DeltaRecord(0, 8, 2, RAW), 9),
    ],
    ids=str,
)
def test_records_that_do_not_fit_are_refused(record: DeltaRecord, size: int | None) -> None:
    data = np.zeros(record.encoded_bytes if size is None else size, np.uint8)
    with pytest.raises(ProtocolError):
        delta.apply(record, data, np.zeros(64, np.uint8))


@pytest.mark.parametrize(("at", "value"), [(0, 2), (8, 200)], ids=["count", "position"])
def test_altered_changes_are_refused_and_write_nothing_outside_the_record(at: int, value: int) -> None:
    old, new = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    new[4] = 1
    record, data = encoded(new, old, 2)
    assert record is not None
    altered = data.copy()
    altered[at] = value
    row = np.zeros(128, np.uint8)
    with pytest.raises(ProtocolError):
        delta.apply(record, altered, row)
    assert not row[64:].any()
