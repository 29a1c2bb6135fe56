"""Memory that a read was given is its caller's again the moment the read ends, however it ends; the long version of
these tests is `make teardown`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from support import asynchronous, over_ucx

from transport import SharedRingBuffer, UCXXClient, UCXXServer

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks" / "teardown"))
import cycles

pytestmark = pytest.mark.ucx

ROUNDS = 12


@over_ucx
@asynchronous
async def test_a_buffer_reused_at_once_after_a_cancelled_or_late_read_is_never_written(wire: Any) -> None:
    reuse = cycles.Reuse()
    with (
        SharedRingBuffer.create(slots=cycles.SLOTS, slot_bytes=max(cycles.SIZES.values())) as ring,
        UCXXServer(ring, addresses=("127.0.0.1",), mode="thread", settings=cycles.SETTINGS),
    ):
        async with UCXXClient(wire={wire}, settings=cycles.SETTINGS) as client:
            for seed in range(ROUNDS):
                await cycles.instants(client, ring, wire, seed, reuse)
    assert reuse.reads == ROUNDS * cycles.SLOTS
    assert any("arrived" not in how for how in reuse.ended), "no read was disturbed"
    assert not reuse.wrong
    assert not reuse.written_afterwards
