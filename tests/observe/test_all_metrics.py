"""Every family of metrics, of a run in which each thing is done a number of times that no other thing is done."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable

import msgspec
import numpy as np
import pytest
from claimed import claim_each
from helpers import Child, dead_port, eventually, settings_with

from transport import BlockingClient, Schema, SharedRingBuffer, Trainer, UCXXServer
from transport.claims.open import given_rings
from transport.errors import RetriesExhaustedError, RingFullError, StaleSlotError, TransportError
from transport.group import in_group
from transport.observe.metrics import (
    FAMILIES,
    client_samples,
    packer_samples,
    queue_samples,
    ring_samples,
    trainer_samples,
)
from transport.packer.consumed_record import ConsumedRecord
from transport.training.batch import Batch

pytestmark = pytest.mark.ucx

SIZE = 1000
SLOTS = 64
Seen = dict[tuple[str, tuple[str, ...]], float]
CHECKED: set[str] = set()


def seen(samples: Iterable[tuple[str, tuple[str, ...], float]], own_labels: int) -> Seen:
    """Samples by name and by the labels behind those that say of what they are."""
    return {(name, labels[own_labels:]): value for name, labels, value in samples}


def check(found: Seen, expected: dict[str, float | dict[str, float]]) -> None:
    """That each family has these values, by its label where it has one."""
    by_name: dict[str, dict[str, float]] = defaultdict(dict)
    for (name, labels), value in found.items():
        by_name[name]["".join(labels)] = value
    for name, value in expected.items():
        wanted = value if isinstance(value, dict) else {"": value}
        assert {label: by_name[name].get(label) for label in wanted} == wanted, name
        CHECKED.add(name)


_DIES = """
import os, signal, sys
from transport import SharedRingBuffer, Ticket
role, name, *tickets = sys.argv[1:]
ring = SharedRingBuffer.attach(name, role=role)
held = [ring.native.try_take() for _ in range(2)] if role == "writer" else None
held = held or [ring.read_raw(Ticket.parse(each)) for each in tickets]
os.kill(os.getpid(), signal.SIGKILL)
"""


def of_a_ring() -> None:
    with SharedRingBuffer.create(slots=SLOTS, slot_bytes=SIZE) as ring, UCXXServer(ring, mode="process") as server:
        tickets = [ring.write_raw(bytes(SIZE)) for _ in range(40)]
        for wire, count in (("mapped", 2), ("shm", 3), ("tcp", 5)):
            with BlockingClient(wire={wire}) as client:  # type: ignore[arg-type]
                for ticket in tickets[:count]:
                    client.read(ticket).release()
                del tickets[:count]
        eventually(lambda: ring.statistics().consumes == 10)
        for ticket in tickets[:4]:
            ring.discard(ticket)
        for ticket in tickets[:4]:
            with pytest.raises(StaleSlotError):
                ring.read_raw(ticket)
        assert not any(ring.native.consume(t.slot, t.generation, 0) for t in tickets[:3])
        del tickets[:4]
        for _ in range(6):
            with contextlib.suppress(ZeroDivisionError), ring.reserve(Schema.of(x=("uint8", 8))):
                raise ZeroDivisionError
        for role, named in (("writer", []), ("reader", [tickets[0], tickets[1], tickets[2]])):
            with Child(_DIES, role, ring.name, *(ticket.to_text() for ticket in named)) as child:
                child.wait()
        eventually(lambda: ring.reclaim() == 0)
        ready = ring.get_ready_count()
        for _ in range(SLOTS - ready):
            ring.write_raw(bytes(SIZE))
        for _ in range(7):
            with pytest.raises(RingFullError):
                ring.write_raw(b"", timeout_s=0.0)
        ring.overflow = "overwrite"
        for _ in range(8):
            ring.write_raw(bytes(SIZE))
        ring.discard(ring.tickets()[0])
        published = 40 + (SLOTS - ready) + 8
        found = seen(ring_samples(ring, time.monotonic_ns() + 1000 * 10**9), 2)
        check(
            found,
            {
                "transport_ring_slots": {"free": 1, "writing": 0, "ready": SLOTS - 1, "reading": 0},
                "transport_ring_slot_capacity_bytes": SIZE,
                "transport_ring_published_total": published,
                "transport_ring_published_bytes_total": published * SIZE,
                "transport_ring_reads_total": 2 + 3 + 5 + 3,
                # mapped: by a client, and by the reader that died with three leases
                "transport_ring_read_bytes_total": {"mapped": 5 * SIZE, "shm": 3 * SIZE, "tcp": 5 * SIZE, "rdma": 0},
                "transport_ring_consumed_total": 10,
                "transport_ring_stale_reads_total": 4,
                "transport_ring_late_acknowledgements_total": 3,
                "transport_ring_overwritten_total": 8,
                "transport_ring_discarded_total": 5,
                "transport_ring_aborted_total": 6,
                "transport_ring_full_waits_total": 7,
                "transport_ring_reclaimed_slots_total": {"writing": 2, "reading": 3},
                "transport_ring_listeners": 1,
            },
        )
        age_s = found["transport_listener_heartbeat_age_seconds", (str(server.ports[0]),)]
        assert 1000 <= age_s < 1060
        CHECKED.add("transport_listener_heartbeat_age_seconds")


def of_a_client() -> None:
    settings = settings_with(
        ack_delay_s=30.0,
        ack_timeout_s=3000.0,
        backoff_first_s=0.001,
        backoff_most_s=0.001,
        attempts_per_read=3,
        port_quarantine_s=60.0,
    )
    with (
        SharedRingBuffer.create(slots=16, slot_bytes=SIZE) as ring,
        UCXXServer(ring, mode="thread", addresses=("127.0.0.1",)) as server,
        dead_port() as dead,
        BlockingClient(wire={"tcp"}, ack="manual", settings=settings) as client,
    ):
        tickets = [ring.write_raw(bytes(SIZE)) for _ in range(6)]
        for ticket in tickets[:5]:
            client.read(ticket).release()
        for ticket in tickets[:2]:
            client.ack(ticket)
        ring.discard(tickets[5])
        with pytest.raises(StaleSlotError):
            client.read(tickets[5])
        wrong = msgspec.structs.replace(ring.write_raw(bytes(SIZE)), checksum=1)
        with pytest.raises(RetriesExhaustedError):
            client.read(wrong)  # three attempts, of which each brings other bytes
        nowhere = msgspec.structs.replace(tickets[0], ring="0" * 32, host="elsewhere", ports=(dead,))
        with pytest.raises(TransportError):
            client.read(nowhere)  # three attempts
        assert client.warm(f"127.0.0.1:{dead}", f"127.0.0.1:{server.ports[0]}") > 0
        statistics = client.statistics()
        check(
            seen(client_samples("trainer", statistics), 1),
            {
                "transport_client_reads_total": 5,
                "transport_client_read_bytes_total": {"tcp": 5 * SIZE},
                "transport_client_retries_total": 2 + 2,
                "transport_client_stale_total": 1,
                "transport_client_failed_reads_total": 2,
                "transport_client_checksum_failures_total": 3,
                "transport_client_links_opened_total": statistics.links_opened,
                "transport_client_warm_up_failures_total": 1,
                "transport_client_links": {"idle": statistics.links_idle, "in_use": 0},
            },
        )
        given_up = msgspec.structs.replace(statistics, acks_dropped=7)  # no test waits for 65 536 of them
        check(seen(client_samples("trainer", given_up), 1), {"transport_client_acknowledgements_dropped_total": 7})
        assert statistics.links_opened > statistics.links_idle > 0
        quarantined, pending, unconfirmed = (
            len(statistics.quarantined_ports),
            statistics.acks_pending,
            statistics.acks_unconfirmed,
        )
        assert quarantined == 2  # the dead one, and the one whose bytes are wrong
        assert pending + unconfirmed <= 2
        check(
            seen(client_samples("trainer", statistics), 1),
            {
                "transport_client_quarantined_ports": quarantined,
                "transport_client_acknowledgements": {"pending": pending, "unconfirmed": unconfirmed},
            },
        )


def of_a_trainer_and_its_rings() -> None:
    schema = Schema.of(x=("int64", 4))
    one = {"x": np.arange(4)}
    with SharedRingBuffer.create(schema, slots=32) as ring, given_rings(ring, max_deliveries=2) as rings:
        record = ConsumedRecord()
        for ticket in ring.write_many([one] * 5):
            record.accept(*ticket.origin, 0)
        with Trainer(schema, rings, wire={"mapped"}, record=record) as trainer:

            def take(count: int) -> Batch:
                ring.write_many([one] * count)
                batch = trainer.take(count)
                assert batch is not None and len(batch) == count
                return batch

            assert trainer.take(5) is None  # all of them were consumed before
            take(1).consume()
            ring.write_many([one] * 6)
            for _ in range(2):
                ring.native.claim_batch(6, 0.0).release()
            assert trainer.take(6) is None  # each was delivered twice in vain
            take(2).give_back()
            for claim in claim_each(ring, 2):
                claim.part.drop(0, "by another", True)
            ring.write_many([one] * 2, policy_version=1)
            assert not ring.native.claim_batch(1, 0.0, oldest_version=2)
            lost = take(3)
            for payload in lost:
                assert ring.native.consume(payload.ticket.slot, payload.ticket.generation, 0)
            lost.consume()
            assert not lost.accepted.any()
            lost.release()
            for _ in range(4):
                loan = ring.native.try_take()
                assert loan is not None and loan.publish(32, 0, 1, 0, b"no ticket")
            assert trainer.take(4) is None
            check(
                seen(packer_samples("trainer", trainer.statistics()), 1),
                {
                    "transport_packer_batches_total": 3,
                    "transport_packer_payloads_total": {
                        "consumed": 1,
                        "duplicate": 5,
                        "failed": 4,
                        "returned": 2,
                        "claim_lost": 3,
                    },
                },
            )
            ring.write_many([one] * 2)
            with SharedRingBuffer.attach(ring.name, role="reader") as reader:
                reader.set_lease(1e-9)
                held = claim_each(reader, 2)
                waiting = claim_each(ring, 1, 30.0)  # the claims of who was silent are over
                assert (len(held), len(waiting)) == (2, 1)
            check(
                seen(queue_samples("queue", rings.depth(), {"held": 1}), 1),
                {
                    "transport_queue_deliveries": {"ready": 1, "claimed": 1},
                    "transport_queue_finished_total": {"done": 9, "discarded": 2, "dead": 12},
                    "transport_queue_retried_total": 2 + 12 + 4 + 2,
                    "transport_queue_expired_total": 2,
                    "transport_queue_nothing_total": {"held": 1},
                },
            )
            del held


def of_steps() -> None:
    schema = Schema.of(x=("int64", 4))
    with (
        SharedRingBuffer.create(schema, slots=64) as ring,
        given_rings(ring) as rings,
        Trainer(schema, rings, wire={"mapped"}, max_age=4) as trainer,
    ):
        trainer.version = 10
        for kind, groups, samples, of, version in (
            *(("surplus", 1, 6, 2, 7), ("whole", 2, 2, 2, 7), ("open", 8, 1, 2, 7)),
            *(("stale", 5, 1, 1, 1), ("refused", 6, 1, 1, 7)),
        ):
            for number in range(groups):
                for _ in range(samples):
                    said = in_group(None, f"{kind} {number}", of)
                    ring.write({"x": np.arange(4)}, metadata=said, policy_version=version)
        steps = iter(trainer.steps(1, choose=lambda group: not group.name.startswith("refused")))
        for _ in range(2):
            next(steps).consume()
        # The last one is read ahead, and what came besides is looked at between two of them.
        eventually(lambda: (trainer.statistics().groups["planned"], trainer.statistics().surplus) == (3, 4), "all seen")
        statistics = trainer.statistics()
        assert statistics.waited_s > 0.0
        check(
            seen(trainer_samples("trainer", statistics), 1),
            {
                "transport_trainer_wait_seconds_total": statistics.waited_s,
                "transport_trainer_steps_total": {"given": 2, "void": 0},
                "transport_trainer_policy_lag": 3,
                "transport_trainer_groups_total": {"planned": 3, "stale": 5, "not chosen": 6, "incomplete": 0},
                "transport_trainer_open_groups": 8,
                "transport_trainer_surplus_samples_total": 4,
            },
        )


def test_every_family_counts_what_was_done() -> None:
    of_a_ring()
    of_a_client()
    of_a_trainer_and_its_rings()
    of_steps()
    assert FAMILIES.keys() == CHECKED
