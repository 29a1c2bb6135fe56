"""Processes that are killed at the end of a transaction of SQLite's queue: it was done as a whole, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import Child, eventually

from transport.queue import DeliveryState, QueuedTicket, SQLiteQueue

pytestmark = pytest.mark.slow
IDS = ["ring/0/1", "ring/1/1"]

# Stops before, or behind, the end of the transaction of one call, says so, and waits to be killed.
PROGRAM = """
import sys
from transport.queue import QueuedTicket, SQLiteQueue
path, call, point = sys.argv[1:]
queue = SQLiteQueue(path, lease_s=0.2)

def stop():
    print("at the point", flush=True)
    sys.stdin.readline()

claims = [] if call in ("publish", "claim") else queue.claim(2, consumer="victim")
if point == "before":
    with queue._database.reading() as connection:
        connection.set_trace_callback(lambda statement: stop() if statement == "COMMIT" else None)
if call == "publish":
    queue.publish([QueuedTicket(f"ring/{number}/1", b"") for number in range(2)], readers=2)
elif call == "claim":
    queue.claim(2, consumer="victim")
elif call == "ack":
    queue.ack_many(claims)
elif call == "arrival":
    queue.ack_many(claims, trained=False)
stop()
"""

# what another process finds then: before, behind
AFTERWARDS = {
    "publish": ({}, dict.fromkeys(IDS, (DeliveryState.READY,) * 2)),
    "claim": (dict.fromkeys(IDS, (DeliveryState.READY,)),) * 2,  # the lease ends
    "ack": (dict.fromkeys(IDS, (DeliveryState.READY,)), dict.fromkeys(IDS, (DeliveryState.DONE,))),
    "arrival": (dict.fromkeys(IDS, (DeliveryState.READY,)), dict.fromkeys(IDS, (DeliveryState.LOST,))),
}


@pytest.mark.parametrize("point", ["before", "behind"])
@pytest.mark.parametrize("call", AFTERWARDS)
def test_a_process_that_is_killed_before_or_behind_a_commit_has_done_nothing_or_everything(
    call: str, point: str, tmp_path: Path
) -> None:
    with SQLiteQueue(tmp_path / "queue.db") as queue:
        if call != "publish":
            queue.publish([QueuedTicket(each, b"") for each in IDS])
        with Child(PROGRAM, queue.path, call, point) as child:
            assert child.line() == "at the point"
            child.kill()
        wanted = AFTERWARDS[call][point == "behind"]
        # whose leases end with the next look
        eventually(lambda: queue.depth() and queue.known(IDS) == wanted, f"the queue knows {wanted}")
        left = queue.claim(4, consumer="next")
        ready = sum(state is DeliveryState.READY for states in wanted.values() for state in states[:1])
        assert len(left) == ready
        assert queue.ack_many(left) == left  # once: nothing is left of the victim's
