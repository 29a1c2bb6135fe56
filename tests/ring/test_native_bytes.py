"""Copies and checksums at memory speed."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import xxhash
from native_rings import refused

from transport import _ring

SIZES = [0, 1, 3, 16, 17, 128, 129, 240, 241, 1023, 65_535, 65_536, 65_537, 1_000_003, 9_000_001]


@pytest.mark.parametrize("size", SIZES)
def test_checksums_are_xxh3_and_copies_are_exact(size: int) -> None:
    source = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    expected = xxhash.xxh3_64_intdigest(source.tobytes())
    assert _ring.checksum(source) == expected
    copied = np.zeros(size + 2, dtype=np.uint8)
    _ring.copy(copied[1:-1], source)
    assert np.array_equal(copied[1:-1], source)
    assert copied[0] == copied[-1] == 0
    hasher = _ring.Checksum()
    target = np.zeros(size, dtype=np.uint8)
    cut = size // 3
    hasher.update(source[:cut])
    target[:cut] = source[:cut]
    hasher.copy(target[cut:], source[cut:])
    assert np.array_equal(target, source)
    assert hasher.digest() == expected == hasher.digest()


def test_buffers_that_do_not_fit_are_refused() -> None:
    refused(lambda: _ring.copy(bytearray(3), b"four"), _ring.FAULT_ARGUMENT)
    refused(lambda: _ring.Checksum().copy(bytearray(3), b"four"), _ring.FAULT_ARGUMENT)
    with pytest.raises(BufferError):
        _ring.copy(b"read-only", b"123456789")
    with pytest.raises((BufferError, ValueError)):
        _ring.checksum(np.zeros((4, 4), dtype=np.uint8)[:, ::2])
    with pytest.raises(TypeError):
        _ring.checksum("text")
    with pytest.raises(TypeError):
        _ring.checksum(5)


def test_one_checksum_survives_many_threads() -> None:
    hasher = _ring.Checksum()
    block = bytes(1 << 20)
    threads = [threading.Thread(target=lambda: [hasher.update(block) for _ in range(8)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hasher.digest() == xxhash.xxh3_64_intdigest(bytes(32 << 20))
