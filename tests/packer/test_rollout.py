"""UCXXRolloutMixin: tickets published with payloads, nothing left that nobody knows of, take-over, reconciling."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
from packers import Worker
from redis_server import RedisServer
from ticket_queues import run_of

from transport.errors import BusyPortError, ClosedError, QueueError, SchemaError
from transport.packer.options import RingOptions, ServerOptions
from transport.packer.rollout import ticket_id
from transport.queue import RedisQueue
from transport.queue.base import DeliveryState
from transport.ring.buffer import SharedRingBuffer
from transport.schema import Schema, UpTo
from transport.server.server import UCXXServer
from transport.ticket import Ticket

SCHEMA = Schema.of(obs=("float32", UpTo(16), 2))
VALUES = {"obs": np.ones((3, 2), np.float32)}

pytestmark = pytest.mark.ucx


@pytest.fixture
def worker(queue: RedisQueue) -> Iterator[Worker]:
    worker = Worker()
    worker.setup_ucxx(SCHEMA, slots=4, queue=queue, mode="thread", ring=RingOptions(overflow="error"))
    yield worker
    worker.cleanup_ucxx()


def test_a_written_trajectory_is_a_published_ticket(worker: Worker, queue: RedisQueue) -> None:
    ticket = worker.write_to_buffer(VALUES, metadata={"reward": 2.5}, policy_version=7)
    (claim,) = queue.claim(1, 20, consumer="test")
    assert Ticket.decode(claim.data) == ticket
    assert claim.policy_version == 7
    assert claim.ticket_id == ticket_id(ticket)
    assert ticket.metadata == {"reward": 2.5}
    assert len(ticket.ports) == 1
    assert ticket.addresses


def test_a_groups_payload_is_one_delivery_for_all_its_ranks(queue: RedisQueue) -> None:
    worker = Worker()
    worker.setup_ucxx(SCHEMA, slots=2, readers=3, grouped=True, queue=queue, mode="thread")
    try:
        ticket = worker.write_to_buffer(VALUES)
        assert ticket.readers == 3
        assert queue.known([ticket_id(ticket)]) == {ticket_id(ticket): (DeliveryState.READY,)}
        worker.ring.write(VALUES)
        assert worker.reconcile() == (1, 0)
        assert queue.depth().ready == 2
    finally:
        worker.cleanup_ucxx()


def test_one_payload_that_does_not_fit_publishes_none_of_its_call(worker: Worker, queue: RedisQueue) -> None:
    slots = worker.ring.slot_count
    with pytest.raises(SchemaError):
        worker.write_many_to_buffer([*[VALUES] * slots, {"obs": np.ones((17, 2), np.float32)}])
    worker.flush_ucxx()
    assert (queue.depth().ready, worker.ring_statistics().free) == (0, slots)


class FailingQueue(RedisQueue):
    """A queue whose disk is gone."""

    def publish(self, *_: object, **__: object) -> int:
        raise QueueError("disk gone")


def test_where_publishing_fails_the_payload_is_discarded(redis: RedisServer) -> None:
    worker = Worker()
    with FailingQueue(run_of(redis)) as queue:
        worker.setup_ucxx(SCHEMA, slots=2, queue=queue, mode="thread")
        with pytest.raises(QueueError, match="disk gone"):
            worker.write_to_buffer(VALUES)
        assert (worker.ring_statistics().free, worker.ring_statistics().discards) == (2, 1)
        worker.cleanup_ucxx()


def test_reconciling_publishes_the_unknown_and_frees_the_finished(worker: Worker, queue: RedisQueue) -> None:
    finished, waiting = worker.write_to_buffer(VALUES), worker.write_to_buffer(VALUES)
    unknown = worker.ring.write(VALUES)
    (claim,) = queue.claim(1, 20, consumer="test")
    assert claim.ticket_id == ticket_id(finished)
    assert queue.ack(claim)  # and the trainer dies before the slot hears of it
    assert worker.reconcile() == (1, 1)
    assert worker.reconcile() == (0, 0)
    claims = queue.claim(4, 20, consumer="test")
    assert {each.ticket_id for each in claims} == {ticket_id(waiting), ticket_id(unknown)}
    assert worker.ring.get_ready_count() == 2


def test_a_ring_full_of_finished_payloads_is_reconciled_instead_of_waited_for(
    worker: Worker, queue: RedisQueue
) -> None:
    for _ in range(4):
        worker.write_to_buffer(VALUES)
    for claim in queue.claim(4, 20, consumer="a trainer that dies before it tells the ring"):
        assert queue.ack(claim)
    worker.write_to_buffer(VALUES)
    assert (worker.ring_statistics().free, worker.ring_statistics().discards) == (3, 4)


def test_before_setup_and_after_cleanup_writing_is_refused(queue: RedisQueue) -> None:
    worker = Worker()
    worker.cleanup_ucxx()
    with pytest.raises(ClosedError, match="setup_ucxx"):
        worker.write_to_buffer(VALUES)
    worker.setup_ucxx(SCHEMA, slots=2, mode="thread")
    worker.cleanup_ucxx()
    worker.cleanup_ucxx()
    with pytest.raises(ClosedError, match="setup_ucxx"):
        worker.write_to_buffer(VALUES)


def test_a_port_in_use_leaves_no_ring_behind() -> None:
    with SharedRingBuffer.create(SCHEMA, slots=2) as ring, UCXXServer(ring, mode="thread") as server:
        worker = Worker()
        with pytest.raises(BusyPortError, match=str(server.ports[0])):
            worker.setup_ucxx(SCHEMA, slots=2, mode="thread", server=ServerOptions(ports=server.ports))
        with pytest.raises(ClosedError):
            _ = worker.ring


WRITER = """
    import sys
    import numpy as np
    from transport.packer.rollout import UCXXRolloutMixin
    from transport.schema import Schema, UpTo
    worker = UCXXRolloutMixin()
    worker.setup_ucxx(Schema.of(obs=("float32", UpTo(16), 2)), slots=4, name=sys.argv[1], mode="thread")
    for step in range(2):
        worker.write_to_buffer({"obs": np.full((3, 2), step, np.float32)})
    print("written", flush=True)
    sys.stdin.read()
"""


def ring_of_a_killed_writer(name: str) -> str:
    """The ring's id; it has two unread payloads, of four slots."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "written\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()
    with SharedRingBuffer.attach(f"/transport-{name}", role="observer") as ring:
        return ring.ring_id


class UnavailableQueue(RedisQueue):
    """A queue that fails at the first question what it knows."""

    failure: BaseException | None = None

    def known(self, ticket_ids: Iterable[str]) -> dict[str, tuple[DeliveryState, ...]]:
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        return super().known(ticket_ids)


def test_a_ring_taken_over_keeps_its_payloads_where_the_queue_cannot_be_asked(redis: RedisServer) -> None:
    failure = QueueError("disk full")
    name = f"rollout-test-{id(failure):x}"
    ring_id = ring_of_a_killed_writer(name)
    worker = Worker()
    with UnavailableQueue(run_of(redis)) as queue:
        queue.failure = failure
        with pytest.raises(type(failure)):
            worker.setup_ucxx(SCHEMA, slots=4, name=name, queue=queue, mode="thread")
        with pytest.raises(ClosedError):
            _ = worker.ring
        assert worker.setup_ucxx(SCHEMA, slots=4, name=name, queue=queue, mode="thread").ring_id == ring_id
        assert queue.depth().ready == 2
        worker.cleanup_ucxx()
