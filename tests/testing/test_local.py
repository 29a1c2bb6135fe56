"""Payloads without UCX for users' unit tests: what is written is read, and no network is touched."""

from __future__ import annotations

import numpy as np
import pytest

from transport import Schema, StaleSlotError, Ticket, Trainer, UpTo
from transport.errors import RingFullError, TicketError, TransportError
from transport.testing import LocalTransport, a_ticket

SCHEMA = Schema.of(tokens=("int32", UpTo(16)), reward="float32")


def test_what_is_written_is_read_and_consumed_by_its_ticket() -> None:
    with LocalTransport(SCHEMA) as local:
        ticket = local.write({"tokens": np.arange(5, dtype=np.int32), "reward": 1.5}, metadata={"prompt": 7})
        with local.client.read(ticket) as payload:
            assert payload["tokens"].tolist() == [0, 1, 2, 3, 4]
            assert payload["reward"] == 1.5
            assert payload.metadata == {"prompt": 7}
        with pytest.raises(StaleSlotError):
            local.client.read(ticket)


@pytest.mark.parametrize("steps", [1, 5])
def test_a_trainer_takes_what_is_written_without_a_network(steps: int) -> None:
    with (
        LocalTransport(SCHEMA) as local,
        Trainer(SCHEMA, local.rings, wire={"mapped"}) as trainer,
    ):
        for step in range(steps):
            local.write({"tokens": np.arange(step, dtype=np.int32), "reward": float(step)})
        batch = trainer.take(steps, 20)
        assert batch is not None
        assert batch["reward"].tolist() == list(range(steps))
        batch.consume()
        assert batch.accepted.all() and local.ring.statistics().ready == 0


def test_a_full_ring_raises_where_a_rollout_would_wait() -> None:
    with LocalTransport(slots=1, slot_bytes=64) as local:
        local.write({"x": np.zeros(2)})
        with pytest.raises(RingFullError):
            local.write({"x": np.zeros(2)})


def test_each_rank_reads_what_is_written_for_two() -> None:
    with LocalTransport(SCHEMA, readers=2) as local:
        ticket = local.write({"tokens": np.ones(1, np.int32), "reward": 0.0})
        for rank in range(2):
            with local.client.read(ticket, rank=rank) as payload:
                assert payload["tokens"].tolist() == [1]
                payload.ack()


def test_a_made_up_ticket_travels_as_any_other_and_its_payload_is_nowhere() -> None:
    ticket = a_ticket(SCHEMA, metadata={"prompt": 7}, slot=3)
    assert Ticket.parse(ticket.encode()) == ticket
    assert (ticket.slot, ticket.metadata) == (3, {"prompt": 7})
    assert a_ticket().identity != a_ticket().identity
    with LocalTransport(SCHEMA) as local, pytest.raises(TransportError):
        local.client.read(ticket)
    with pytest.raises(TicketError, match="port"):
        a_ticket(ports=(0,))
