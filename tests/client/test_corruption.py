"""A segment whose bytes another process changes: errors, never a crash, a hang or a look outside of it."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from helpers import Child

# each a process that meets some hundred corruptions
SEEDS = range(int(os.environ.get("CORRUPTION_SEEDS", "4")))

# A victim uses a ring in every way while its bytes change. SIGALRM ends one that hangs, and a signal one that crashes.
VICTIM = """
import os, random, signal, sys
from corruption import corrupt, use
signal.alarm(60)
from transport import SharedRingBuffer
from transport.errors import TransportError
seed, while_attached = int(sys.argv[1]), sys.argv[2] == "while attached"
chance = random.Random(seed)
errors = uses = 0
for round_ in range(30):
    ring = SharedRingBuffer.create(slots=chance.randrange(1, 9), slot_bytes=chance.randrange(1, 9000))
    path = "/dev/shm" + ring.name
    outside = os.path.getsize(path)
    try:
        if while_attached:
            for _ in range(10):
                use(ring, chance)
                corrupt(path, chance)
                done, failed = use(ring, chance)
                uses, errors = uses + done, errors + failed
        else:
            corrupt(path, chance)
            try:
                with SharedRingBuffer.attach(ring.name, role="reader") as other:
                    done, failed = use(other, chance)
                    uses, errors = uses + done, errors + failed
            except TransportError:
                errors += 1
        assert os.path.getsize(path) == outside
    finally:
        ring.close()
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
print(uses, errors, flush=True)
os._exit(0)
"""


@pytest.mark.nightly(keep=3)
@pytest.mark.parametrize("when", ["before attaching", "while attached"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_segment_with_any_bytes_yields_errors_at_worst(seed: int, when: str) -> None:
    with Child(VICTIM, seed, when) as victim:
        uses, errors = map(int, victim.line().split())
        assert victim.wait() == 0
    assert uses + errors > 0


def test_corruption_does_change_what_is_read() -> None:
    """The tool of these tests: it reaches header, owners, controls, hints and notes, and not always in one bit."""
    from corruption import CONTROL_BYTES, changes

    chance = random.Random(1)
    places = [offset for _ in range(2000) for offset, _ in changes(10 * CONTROL_BYTES, chance)]
    assert min(places) < 64
    assert any(4096 <= place < 8192 for place in places)
    assert max(places) > 8192
    assert Path("/dev/shm").is_dir()
