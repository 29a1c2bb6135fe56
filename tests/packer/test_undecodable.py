"""What a trainer cannot decode: a ticket, which is discarded with its reason; a payload, which others can train on."""

from __future__ import annotations

import secrets

import numpy as np
import pytest
from helpers import eventually
from packers import FAST

from transport import Schema, SharedRingBuffer, UCXXServer
from transport.claims.places import OnThisHost
from transport.errors import SchemaError, TicketError
from transport.packer.mixin import TicketTrainer
from transport.queue import FoundRings

pytestmark = pytest.mark.ucx
LARGE = (9 << 20) // 8  # beyond what one answer to a demand brings: read under its claim


@pytest.mark.parametrize(("wire", "count"), [("mapped", 4), ("tcp", 4), ("tcp", LARGE)])
def test_a_ticket_of_another_version_fails_alone_and_the_others_are_trained_on(
    wire: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = Schema.of(x=("int64", count))
    monkeypatch.setenv("TRANSPORT_WIRES", wire)
    prefix = f"undecodable-{secrets.token_hex(4)}-"
    with (
        SharedRingBuffer.create(schema, slots=4, prefix=prefix) as ring,
        UCXXServer(ring, mode="thread"),
        FoundRings(OnThisHost(prefix)) as queue,
        TicketTrainer(schemas=[schema], queue=queue) as trainer,
    ):
        first = ring.write({"x": np.zeros(count, np.int64)})
        loan = ring.native.try_take()
        loan.publish(first.size, first.checksum or 0, 1, 0, b"TK\xff" + bytes(40))
        last = ring.write({"x": np.ones(count, np.int64)})
        claims = []
        while len(claims) < 3:
            claims += trainer.claim_tickets(3 - len(claims), timeout_s=30.0)
        trainer.start_prefetch(claims)
        batch = trainer.collect_prefetch(30.0)
        assert batch is not None
        assert [payload.ticket.identity for payload in trainer.consume(batch)] == [first.identity, last.identity]
        [(claim, error)] = batch.undecodable
        assert claim.ticket_id == f"{ring.ring_id}/{loan.slot}/{loan.generation}"
        assert isinstance(error, TicketError)
        [failure] = queue.failures()
        assert (failure.ticket_id, failure.reason) == (claim.ticket_id, f"TicketError: {error}")
        assert trainer.ucxx_statistics().failed == 1
        batch.release()
        eventually(lambda: ring.statistics().free == 4, "every slot is free")


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize(("wire", "count"), [("mapped", 4), ("tcp", 4), ("tcp", LARGE)])
def test_a_payload_of_an_unknown_schema_fails_and_is_trained_on_by_who_knows_it(
    wire: str, count: int, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = Schema.of(x=("int64", count))
    monkeypatch.setenv("TRANSPORT_WIRES", wire)
    prefix = f"unknown-{secrets.token_hex(4)}-"
    with (
        SharedRingBuffer.create(schema, slots=1, prefix=prefix) as ring,
        UCXXServer(ring, mode="thread"),
        FoundRings(OnThisHost(prefix)) as queue,
    ):
        ticket = ring.write({"x": np.zeros(count, np.int64)})
        with TicketTrainer(queue=queue, joined=joined, settings=FAST) as trainer:
            trainer.start_prefetch(trainer.claim_tickets(1, timeout_s=30.0))
            batch = trainer.collect_prefetch(30.0)
            assert batch is not None
            [failure] = batch.failures
            assert isinstance(failure.error, SchemaError)
            assert trainer.consume(batch) == [] and ring.statistics().free == 0
        with TicketTrainer(schemas=[schema], queue=queue) as trainer:
            trainer.start_prefetch(trainer.claim_tickets(1, timeout_s=30.0))
            batch = trainer.collect_prefetch(30.0)
            assert batch is not None
            assert [payload.ticket.identity for payload in trainer.consume(batch)] == [ticket.identity]
            batch.release()
