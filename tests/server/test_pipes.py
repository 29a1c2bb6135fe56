"""What a rollout's processes do with the pipe that its standard error is, and what it says at its start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from helpers import eventually, parent_of
from own_network import said_in_own_network

from transport._ring import segments
from transport.ring.attachment import attached

pytestmark = pytest.mark.ucx

# Serves a ring with an unread payload, and says the segment's name.
WRITER = """
import sys
from transport import Rollout
from transport.packer.options import RingOptions
rollout = Rollout(ring=RingOptions(slot_bytes=64), slots=2)
rollout.write_to_buffer({"x": 1})
print(rollout.ring.name, flush=True)
sys.stdin.readline()
"""

OFFLINE = """
from transport import Rollout
from transport.packer.options import RingOptions
with Rollout(ring=RingOptions(slot_bytes=64), slots=2, mode="thread"):
    pass
"""


@pytest.mark.nightly
def test_the_processes_of_a_killed_rollout_let_go_of_its_standard_error() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        assert writer.stderr is not None
        name = writer.stdout.readline().strip()
        writer.kill()
        writer.stderr.read()  # returns when the last process has let go of it
        with attached(name, "observer") as ring:
            listeners = [owner.pid for owner in ring.native.owners() if owner.alive and owner.port]
        assert listeners, "the payload is served still"
        os.kill(parent_of(listeners[0]), signal.SIGTERM)
    eventually(lambda: name not in segments(), "the segment is gone")


@pytest.mark.nightly
def test_a_rollout_without_a_route_says_that_others_do_not_reach_it() -> None:
    assert "TRANSPORT_ADDRESSES" in said_in_own_network(OFFLINE)
    assert "TRANSPORT_ADDRESSES" not in said_in_own_network(OFFLINE, TRANSPORT_ADDRESSES="127.0.0.1")
