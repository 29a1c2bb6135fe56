"""Payloads whose writer was killed before it had published their tickets: none is lost, and each is consumed once."""

from __future__ import annotations

import contextlib
import secrets

import numpy as np
import pytest
from delivery_accounts import gone
from helpers import Child, eventually
from packers import SCHEMA, Packer, Worker, collected
from redis_server import RedisServer
from ticket_queues import ticket_queue

from transport.errors import QueueFullError, QueueUnavailableError, RingFullError
from transport.packer.publisher import PublishMode
from transport.packer.republish import Republishing, republish
from transport.packer.rollout import queued, ticket_id
from transport.packer.unpublished import Finished
from transport.queue import Claim, QueueDepth, QueuedTicket, RedisQueue, TicketQueue, open_queue
from transport.queue.base import QueueAddress
from transport.queue.redis import open_address
from transport.ring.buffer import SharedRingBuffer

pytestmark = pytest.mark.ucx

# arguments: URL of the queue, how many payloads, bound of the queue
WRITER = """
import sys
from packers import SCHEMA, Worker
import numpy as np
from transport.packer.options import ServerOptions
from transport.queue import RedisQueue
from transport.storage.urls import parse_url
url, count = sys.argv[1], int(sys.argv[2])
worker = Worker()
queue = RedisQueue(parse_url(url), max_tickets=next(map(int, sys.argv[3:]), None))
ring = worker.setup_ucxx(SCHEMA, slots=64, queue=queue, server=ServerOptions(addresses=("127.0.0.1",), linger_s=120.0))
print(ring.name, flush=True)
sys.stdin.readline()
for step in range(count):
    ring.write({"obs": np.full((2, 4), step, np.float32), "step": step}, policy_version=7)
print("written", flush=True)
sys.stdin.readline()
"""


def consumed(queue: TicketQueue, count: int) -> tuple[list[int], set[int | None]]:
    """The steps of everything that a trainer gets and consumes, in their order, and the versions of the claims."""
    packer = Packer()
    packer.setup_ucxx_packer(schemas=[SCHEMA], queue=queue)
    steps: list[int] = []
    versions: set[int | None] = set()
    try:
        while claims := packer.claim_tickets(16, 60.0 if len(steps) < count else 0.2):
            versions |= {claim.policy_version for claim in claims}
            batch = collected(packer, claims)
            steps += [int(payload["step"]) for payload in packer.consume(batch)]
    finally:
        packer.cleanup_ucxx_packer()
    return steps, versions


def test_what_was_in_the_ring_and_not_in_the_queue_when_the_writer_was_killed_is_published(redis: RedisServer) -> None:
    place = redis.place(secrets.token_hex(4))
    with open_queue(place) as queue:
        with Child(WRITER, place, 20) as child:
            segment = child.line()
            child.tell()
            assert child.line() == "written"
            child.kill()
        assert consumed(queue, 20) == (list(range(20)), {7})
        assert queue.depth() == QueueDepth(done=20)
        eventually(lambda: gone(segment), "the ring is gone when everything is consumed")


def test_more_than_the_queue_takes_is_published_as_trainers_make_room(redis: RedisServer) -> None:
    place = redis.place(secrets.token_hex(4))
    with open_queue(place) as queue:
        with Child(WRITER, place, 20, 8) as child:
            segment = child.line()
            child.tell()
            assert child.line() == "written"
            child.kill()
        assert consumed(queue, 20) == (list(range(20)), {7})
        eventually(lambda: gone(segment), "the ring is gone when everything is consumed")


KILLED = """
import sys
import numpy as np
from packers import SCHEMA
from transport.ring.buffer import SharedRingBuffer
ring = SharedRingBuffer.create(SCHEMA, slots=int(sys.argv[2]), name=sys.argv[1])
for step in range(20):
    ring.write({"obs": np.full((2, 4), step, np.float32), "step": step})
print("written", flush=True)
sys.stdin.readline()
"""


def killed(slots: int) -> str:
    """The name of a ring whose writer was killed when it had written 20 payloads."""
    name = secrets.token_hex(8)
    with Child(KILLED, name, slots) as child:
        assert child.line() == "written"
        child.kill()
    return name


def test_a_queue_that_cannot_be_reached_is_tried_again(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    name = killed(64)
    errors = [QueueUnavailableError("its server is away"), QueueUnavailableError("still")]

    def opened(address: QueueAddress) -> RedisQueue:
        if errors:
            raise errors.pop()
        return open_address(address)

    monkeypatch.setattr("transport.packer.republish.open_address", opened)
    with ticket_queue(redis) as queue:
        assert (address := queue.address) is not None
        assert republish(Republishing(segment=f"/transport-{name}", queue=address)) == 20
        assert queue.depth().ready == 20
    with SharedRingBuffer.create(SCHEMA, slots=64, name=name) as ring:  # takes it over, and gives it up
        assert ring.get_ready_count() == 20


@pytest.mark.parametrize("publish", ["background", "immediate"])
def test_a_ring_is_taken_over_beside_a_full_queue_which_gets_its_payloads_later(
    redis: RedisServer, publish: PublishMode
) -> None:
    name = killed(64)
    worker = Worker()
    with ticket_queue(redis, max_tickets=8) as queue:
        queue.publish([QueuedTicket(f"other/{number}/1", b"") for number in range(8)])
        ring = worker.setup_ucxx(SCHEMA, slots=64, name=name, queue=queue, mode="thread", publish=publish)
        try:
            waiting = [ticket_id(ticket) for ticket in ring.tickets()]
            assert len(waiting) == 20
            claims: list[Claim] = []
            while len(claims) < 28:
                claims += queue.ack_many(queue.claim(8, 20.0, consumer="a"))
                with contextlib.suppress(QueueFullError):
                    worker.flush_ucxx()
            assert [claim.ticket_id for claim in claims[8:]] == waiting
        finally:
            worker.cleanup_ucxx()


def test_a_full_ring_that_was_taken_over_beside_a_full_queue_is_published_by_the_next_write(redis: RedisServer) -> None:
    name = killed(20)
    worker = Worker()
    with ticket_queue(redis, max_tickets=20) as queue:
        queue.publish([QueuedTicket(f"other/{number}/1", b"") for number in range(20)])
        ring = worker.setup_ucxx(SCHEMA, slots=20, name=name, queue=queue, mode="thread", publish="immediate")
        try:
            payload = {"obs": np.zeros((1, 4), np.float32), "step": 20}
            with pytest.raises(QueueFullError):
                worker.write_to_buffer(payload, timeout_s=0.0)
            assert len(queue.ack_many(queue.claim(20, consumer="a"))) == 20
            with pytest.raises(RingFullError):  # trainers make room, now that they can claim
                worker.write_to_buffer(payload, timeout_s=0.0)
            assert [claim.ticket_id for claim in queue.claim(20, consumer="a")] == list(map(ticket_id, ring.tickets()))
        finally:
            worker.cleanup_ucxx()


def test_a_new_writer_that_took_the_ring_over_is_left_alone(redis: RedisServer) -> None:
    with ticket_queue(redis) as queue, SharedRingBuffer.create(SCHEMA, slots=4) as ring:
        ring.write({"obs": np.zeros((1, 4), np.float32), "step": 1})
        address = queue.address
        assert address is not None
        assert republish(Republishing(segment=ring.name, queue=address)) == 0
        assert queue.depth() == QueueDepth()


def test_a_finished_payload_whose_slot_was_not_freed_is_not_published_again_when_the_queue_has_forgotten_it(
    redis: RedisServer,
) -> None:
    worker = Worker()
    with ticket_queue(redis, keep_finished=2500) as queue:
        ring = worker.setup_ucxx(SCHEMA, slots=64, queue=queue, mode="thread")
        try:
            values = {"obs": np.zeros((1, 4), np.float32), "step": 1}
            stuck = worker.write_to_buffer(values)
            worker.flush_ucxx()
            assert queue.ack_many(queue.claim(1, consumer="killed before it told the ring"))
            for _ in range(125):
                tickets = worker.write_many_to_buffer([values] * 32)
                worker.flush_ucxx()
                assert len(queue.ack_many(queue.claim(32, consumer="a"))) == 32
                for ticket in tickets:
                    ring.acknowledge(ticket)
            assert queue.known([ticket_id(stuck)]) == {}
            assert worker.reconcile() == (0, 0)
        finally:
            worker.cleanup_ucxx()


def test_reconciling_keeps_the_policy_version_of_a_payload(redis: RedisServer) -> None:
    worker = Worker()
    with ticket_queue(redis) as queue:
        ring = worker.setup_ucxx(SCHEMA, slots=4, queue=queue, mode="thread")
        try:
            ring.write({"obs": np.zeros((1, 4), np.float32), "step": 1}, policy_version=3)
            ring.write({"obs": np.zeros((1, 4), np.float32), "step": 2})
            assert worker.reconcile() == (2, 0)
            assert [claim.policy_version for claim in queue.claim(4, consumer="a")] == [3, None]
        finally:
            worker.cleanup_ucxx()


def test_a_slot_is_freed_when_its_payload_is_found_finished_for_the_second_time(redis: RedisServer) -> None:
    with ticket_queue(redis) as queue, SharedRingBuffer.create(SCHEMA, slots=4) as ring:
        queue.publish(queued(ring.write({"obs": np.zeros((1, 4), np.float32), "step": 1})))
        assert queue.ack_many(queue.claim(1, consumer="about to tell the ring"))
        finished = Finished(ring, queue)
        assert (finished.look(), ring.get_ready_count()) == (0, 1)
        assert (finished.look(), ring.get_ready_count()) == (1, 0)
