"""TAKE and the ends of claims that are refused: wrong arguments, malformed records, others' claims, older listeners."""

from __future__ import annotations

import frame_codec
import pytest
from helpers import asynchronous, until
from scripted_peer import Stage
from takes import SLOTS, addresses, depth, tcp

from transport import SharedRingBuffer, UCXXServer
from transport.errors import (
    UsageError,
)
from transport.wire.frames import Kind, Record

pytestmark = pytest.mark.ucx


@asynchronous
async def test_arguments_that_cannot_be_are_refused_before_anything_is_asked(ring: SharedRingBuffer) -> None:
    with UCXXServer(ring, mode="thread"):
        [address] = addresses(ring)
        async with tcp() as client:
            for wrong in (
                {"n": 0},
                {"n": 257},
                {"n": 1, "most_bytes": -1},
                {"n": 1, "most_bytes": 1 << 31},
                {"n": 1, "rank": 16},
                {"n": 1, "most_attempts": 2048},
                {"n": 1, "wait_s": -1.0},
                {"n": 1, "wait_s": float("nan")},
            ):
                with pytest.raises(UsageError):
                    await client.take(address, **wrong)  # type: ignore[arg-type]
            for nowhere in ("", "host", "host:", ":1", "host:0", "host:99999"):
                with pytest.raises(UsageError, match="host:port"):
                    await client.take(nowhere, 1)


GOOD = Record(Kind.TAKE, slot=1, rank=0, length=100)


@pytest.mark.parametrize(
    "records",
    [
        [GOOD._replace(slot=0)],
        [GOOD._replace(slot=257)],
        [GOOD._replace(slot=2**32 - 1)],
        [GOOD._replace(length=(1 << 30) + 1)],
        [GOOD._replace(length=2**64 - 1)],
        [GOOD._replace(rank=16)],
        [GOOD._replace(rank=255)],
        [GOOD._replace(attempts=2048)],
        [GOOD, GOOD],
        [Record(Kind.STATE), GOOD],
        [GOOD, Record(Kind.BYE)],
    ],
    ids=str,
)
@asynchronous
async def test_a_malformed_demand_ends_its_connection_and_takes_nothing(
    ring: SharedRingBuffer, records: list[Record]
) -> None:
    ring.write_raw(b"not for them")
    async with Stage(ring) as stage:
        peer = await stage.connected()
        peer.send(frame_codec.encode_control(0, records))
        await until(lambda: peer.task.done(), "the connection has ended")
        assert depth(ring) == (1, 0)


@asynchronous
async def test_claims_that_are_not_the_connections_own_are_refused(ring: SharedRingBuffer) -> None:
    ring.write_raw(b"somebody else's")
    async with Stage(ring) as stage, tcp() as client:
        batch = await client.take(f"127.0.0.1:{stage.port}", 1)
        row = batch.rows[0]
        peer = await stage.connected()
        own = Record(Kind.FINISH, int(row["slot"]), int(row["generation"]), int(row["rank"]), attempts=1)
        records = [
            own,
            own._replace(kind=Kind.GIVE_BACK),
            own._replace(attempts=2),
            own._replace(slot=SLOTS),
            own._replace(slot=2**32 - 1),
            own._replace(rank=255),
        ]
        answers = await peer.ask(*records)
        assert [answer.code for answer in answers] == [1] * len(records)
        assert depth(ring) == (0, 1)
        assert (await batch.consume()).tolist() == [True]
