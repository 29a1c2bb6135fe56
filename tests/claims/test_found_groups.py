"""Several independent ranks over the rings of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers import NETWORK_WIRE, Child, eventually, free
from packers import Worker
from patience import PATIENCE

from transport.packer.options import RingOptions, ServerOptions
from transport.settings import DEFAULTS
from transport.store import SQLiteStore, Store

pytestmark = [pytest.mark.ucx, pytest.mark.slow]
both = pytest.mark.parametrize("wire", ["mapped", NETWORK_WIRE])
LONG_S = 30.0 * PATIENCE


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with SQLiteStore(tmp_path / "store.db") as made:
        yield made


RANK = """
import sys
from transport import Trainer
found = []
with Trainer(rank=int(sys.argv[1])) as trainer:
    while len(found) < int(sys.argv[2]):
        batch = trainer.take(5, 1.0)
        if batch is None:  # the other rank has not begun, and the ring is full
            continue
        steps = [int(payload["step"]) for payload in batch]
        batch.consume()
        found += [step for step, ours in zip(steps, batch.accepted.tolist()) if ours]
print(*found, flush=True)
"""


@pytest.mark.nightly(keep=1)
@both
def test_independent_ranks_each_consume_every_payload_once(wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSPORT_WIRES", wire)
    worker = Worker()
    try:
        with contextlib.ExitStack() as stack:
            ranks = [stack.enter_context(Child(RANK, rank, 40)) for rank in range(2)]
            worker.setup_ucxx(
                slots=8,
                readers=2,
                mode="thread",
                ring=RingOptions(slot_bytes=4096),
                server=ServerOptions(addresses=("127.0.0.1",), settings=DEFAULTS),
            )
            for step in range(40):
                worker.write_to_buffer({"step": np.int64(step)})
            for rank in ranks:
                assert sorted(map(int, rank.line().split())) == list(range(40))
                assert rank.wait() == 0
        eventually(lambda: free(worker.ring), "every slot is free")
    finally:
        worker.cleanup_ucxx()
