"""Tickets as ordinary objects of Ray: what it does to a ticket, and a real run where it is installed."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import serving

from transport.errors import TicketError
from transport.ring.buffer import SharedRingBuffer
from transport.schema import Schema, UpTo
from transport.ticket import Ticket

SCHEMA = Schema.of(tokens=("int32", UpTo(64)))


@pytest.mark.parametrize("schema", [SCHEMA, None], ids=["schema", "described by the ticket"])
def test_a_ticket_survives_rays_serialisation(schema: Schema | None) -> None:
    with SharedRingBuffer.create(schema, slots=1, slot_bytes=None if schema else 4096) as ring:
        ticket = ring.write({"tokens": np.arange(5, dtype=np.int32)}, metadata={"reward": 1.5})
    again = pickle.loads(pickle.dumps(ticket, protocol=5))
    assert (again, hash(again), again.encode()) == (ticket, hash(ticket), ticket.encode())
    assert copy.deepcopy(ticket) == ticket


def test_a_ticket_is_checked_where_it_is_unpickled() -> None:
    with SharedRingBuffer.create(SCHEMA, slots=1) as ring:
        ticket = ring.write({"tokens": np.arange(5, dtype=np.int32)})
    rebuild, (kind, fields) = ticket.__reduce__()
    assert kind is Ticket
    with pytest.raises(TicketError, match="slot"):
        rebuild(kind, {**fields, "slot": -1})


@pytest.mark.ucx
def test_no_secret_is_in_a_pickled_ticket() -> None:
    with serving(SCHEMA, secret=b"of the run") as (ring, _):
        assert b"of the run" not in pickle.dumps(ring.write({"tokens": np.arange(5, dtype=np.int32)}))


@pytest.mark.slow
@pytest.mark.timeout(280)  # Ray starts in ten seconds or in a minute
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install ray")
def test_actors_and_tasks_pass_tickets_and_read_by_them() -> None:
    script = Path(__file__).resolve().parents[1].joinpath("support", "ray_run.py")
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=270)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["same"] is True
    assert "key" not in found["shown"]
    (tcp_reader, tcp_sum, tcp_wire), (mapped_reader, mapped_sum, mapped_wire) = found["tcp"], found["mapped"]
    assert (tcp_sum, tcp_wire) == (sum(range(200)), "tcp")
    assert (mapped_sum, mapped_wire) == (sum(range(100)), "mapped")
    assert found["list"] == [1, 2, 3]
    assert found["again"] == "StaleSlotError"
    assert found["consumed"] == 5
    assert {tcp_reader, mapped_reader}.isdisjoint({found["driver"], found["rollout"]})


@pytest.mark.slow
@pytest.mark.ucx
@pytest.mark.timeout(280)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install ray")
def test_the_example_runs() -> None:
    program = Path(__file__).resolve().parents[2] / "examples" / "ray_job.py"
    # ray.init() would join the cluster of a test that runs beside this one.
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"}
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=270)
    assert done.returncode == 0, done.stderr
