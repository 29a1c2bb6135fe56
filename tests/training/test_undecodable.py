"""A payload whose ticket cannot be decoded ends with its reason, and the others are trained on."""

from __future__ import annotations

import secrets

import numpy as np
import pytest
from found_rings import LONG_S
from helpers import NETWORK_WIRE, eventually

from transport import Schema, SharedRingBuffer, Trainer, UCXXServer
from transport.ticket import ORIGIN

pytestmark = pytest.mark.ucx
LARGE = (9 << 20) // 8  # beyond what one answer to a demand brings: read under its claim


@pytest.mark.nightly(keep=2)
@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize(("wire", "count"), [("mapped", 4), (NETWORK_WIRE, 4), (NETWORK_WIRE, LARGE)])
def test_a_ticket_of_another_version_fails_alone_and_the_others_are_trained_on(
    wire: str, count: int, described: bool
) -> None:
    schema = Schema.of(x=("int64", count))
    prefix = f"undecodable-{secrets.token_hex(4)}-"
    with (
        SharedRingBuffer.create(schema, slots=4, prefix=prefix) as ring,
        UCXXServer(ring, mode="thread"),
        Trainer(schema if described else [schema, Schema.of(y="int8")], f"rings:{prefix}", wire={wire}) as trainer,  # type: ignore[arg-type]
    ):
        first = ring.write({"x": np.zeros(count, np.int64)})
        loan = ring.native.try_take()
        loan.publish(first.size, first.checksum or 0, 1, 0, b"TK\xff" + bytes(40))
        last = ring.write({"x": np.ones(count, np.int64)})
        names = []
        while len(names) < 2:
            batch = trainer.take(2 - len(names), LONG_S)
            assert batch is not None
            names += [payload.name for payload in batch]
            batch.consume()
            assert batch.accepted.all()
        assert names == [f"{each.ring}/{each.slot}/{each.generation}" for each in (first, last)]
        batch.release()
        eventually(lambda: ring.native.depth(0)["dead"] == 1, "it has ended")
        [failure] = trainer.rings.failures()
        assert failure.ticket_id == f"{ring.ring_id}/{loan.slot}/{loan.generation}" and failure.reason
        eventually(lambda: trainer.statistics().failed == 1, "it is counted")
        eventually(lambda: ring.statistics().free == 4, "every slot is free")


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize("wire", ["mapped", NETWORK_WIRE])
def test_a_restored_payload_with_a_damaged_ticket_fails_alone_also_where_a_record_is_kept(
    wire: str, described: bool
) -> None:
    schema = Schema.of(x="int64")
    prefix = f"undecodable-{secrets.token_hex(4)}-"
    with (
        SharedRingBuffer.create(schema, slots=8, prefix=prefix) as ring,
        UCXXServer(ring, mode="thread"),
        Trainer(schema if described else [schema, Schema.of(y="int8")], f"rings:{prefix}", wire={wire}) as trainer,  # type: ignore[arg-type]
    ):
        for damaged in (False, True):
            ticket = ring.write({"x": 0}, metadata={ORIGIN: f"{'ab' * 16}/{int(damaged)}/1"})
            if damaged:
                loan = ring.native.try_take()
                loan.publish(ticket.size, ticket.checksum or 0, 1, 0, ticket.encode()[:-1] + b"\xc1")
            batch = trainer.take(1, LONG_S)
            assert batch is not None
            batch.accept()  # from here on the trainer looks at what each payload was first
            batch.consume()
            assert batch.accepted.tolist() == [True]
        eventually(lambda: trainer.take(1) or ring.native.depth(0)["dead"] == 1, "the damaged one has ended")
        assert len(trainer.record) == 2
