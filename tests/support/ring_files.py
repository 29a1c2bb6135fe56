"""What the tests of rings in files share: where the names in /dev/shm lead, and payloads that are known by a number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from claimed import claim_each

from transport.packer.consumed_record import ConsumedRecord
from transport.ring.buffer import SharedRingBuffer
from transport.schema import Schema

SHM = Path("/dev/shm")
SIZE = 5000  # two pages
SCHEMA = Schema.of(number=("int64",), data=("uint8", SIZE))


def links_to(file: Path) -> list[Path]:
    """The names that lead to the file."""
    return [entry for entry in SHM.glob("transport-*") if entry.is_symlink() and entry.readlink() == file]


def forget(file: Path) -> None:
    """The names that lead to the file go, as with the host."""
    for link in links_to(file):
        link.unlink()


def payload(number: int) -> dict[str, object]:
    """Values with these bytes are nowhere else."""
    return {"number": number, "data": np.random.default_rng(number).integers(0, 256, SIZE, dtype=np.uint8)}


def take_all(ring: SharedRingBuffer, record: ConsumedRecord) -> list[int]:
    """Consume everything; the numbers of what the record has not, and now has."""
    fresh = []
    claims = claim_each(ring, ring.slot_count) if ring.statistics().ready else []
    for claim in claims:
        arrays = claim.payload
        number = int(arrays["number"])
        assert np.array_equal(arrays["data"], payload(number)["data"]), f"other bytes than those of {number}"
        if record.accept(*claim.ticket.identity, 0):
            fresh.append(number)
        del arrays
    assert sum(claim.consume() for claim in claims) == len(claims)
    return fresh
