"""A listener ends connections by asking its clients to close: one that closed first would look as if it had died."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
from helpers import PATIENCE_S, eventually, listener_pids, settings_with, until
from loopback import IPV6, LOOPBACK, at

from transport import SharedRingBuffer, Trainer, UCXXServer
from transport.packer.options import ClientOptions
from transport.testing import run
from transport.wire.ucx import Worker
from transport.wires import settings_for

pytestmark = pytest.mark.ucx
LONG_S = 30.0


@pytest.fixture
def other(prefix: str) -> Iterator[SharedRingBuffer]:
    made = SharedRingBuffer.create(prefix=prefix, slots=4, slot_bytes=64)
    with made, UCXXServer(made, addresses=(LOOPBACK,)):
        yield made


async def stall(ring: SharedRingBuffer) -> None:
    """Have the ring's listener begin anew, as one that receives nothing over shared memory."""
    [(port, before)] = listener_pids(ring).items()
    worker = Worker(settings_for(frozenset({"shm"}), ipv6=IPV6))
    try:
        for _ in range(3):
            await worker.connect(LOOPBACK, port)  # and says nothing
        await until(lambda: listener_pids(ring).get(port, before) != before, "another listener on that port")
    finally:
        worker.close()


@contextlib.contextmanager
def standing_still(trainer: Trainer) -> Iterator[None]:
    """While the block runs the loop of a trainer does nothing, as where a thread of Python keeps it from running."""
    begun, over = threading.Event(), threading.Event()

    def stand() -> None:
        begun.set()
        over.wait(PATIENCE_S)

    thread = trainer.rings._network._thread
    assert thread is not None
    thread.soon(stand)
    assert begun.wait(PATIENCE_S)
    try:
        yield
    finally:
        over.set()


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("how", ["restarted", "idle", "stopped", "stopped unheard"])
def test_a_listener_that_closes_a_connection_over_shared_memory_costs_no_claims_of_other_rings(
    prefix: str, other: SharedRingBuffer, how: str
) -> None:
    evicts = settings_with(pool_endpoint_max_age_s=0.5, listener_idle_eviction_s=1.0, handshake_timeout_s=1.1)
    client = ClientOptions(settings=settings_with(claim_lease_s=1e6))  # which says seldom that it lives
    with (
        SharedRingBuffer.create(prefix=prefix, slots=4, slot_bytes=64) as ring,
        UCXXServer(ring, addresses=(LOOPBACK,), settings=evicts) as server,
        Trainer(
            rings=f"rings://{at(ring.native.ports()[0])},{at(other.native.ports()[0])}", wire={"shm"}, client=client
        ) as trainer,
    ):
        for each in (ring, other):
            each.write_raw(b"one")
        held = trainer.take(2, LONG_S, fill_s=LONG_S)
        assert held is not None and len(held) == 2
        held.consume()
        assert held.accepted.all()
        other.write_raw(b"two")
        held = trainer.take(1, LONG_S)
        assert held is not None
        opened = trainer._client.statistics().links_opened
        if how == "idle":
            trainer.rings.rest_at_once()
            eventually(lambda: trainer._client.statistics().links_opened > opened, "it has come again")
        elif how == "restarted":
            run(stall(ring), PATIENCE_S)
            eventually(lambda: trainer._client.statistics().links_opened > opened, "it has come again")
        elif how == "stopped unheard":
            with standing_still(trainer):
                server.close()
            eventually(lambda: ring.ring_id not in trainer.rings.slots(), "it has seen that")
        else:
            server.close()
            eventually(lambda: ring.ring_id not in trainer.rings.slots(), "it has seen that")
        held.consume()
        assert held.accepted.all()
        assert trainer.statistics().lost_claims == 0
