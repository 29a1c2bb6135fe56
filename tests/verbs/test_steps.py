"""Two ranks on two hosts that train one model together, by payloads of a ring that both read over RDMA."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import Child, eventually, free
from redis_server import RedisServer, needs_redis
from second_guest import HERE, SecondGuest

from transport import Schema, SharedRingBuffer, UCXXServer, UpTo
from transport.group import in_group

pytestmark = [pytest.mark.verbs, pytest.mark.ucx, pytest.mark.slow, needs_redis]

GROUPS, OF, TOKENS = 6, 4, 20_000
SCHEMA = Schema.of(tokens=("int32", UpTo(TOKENS)))
RANK = f"""
import sys
import numpy as np
from transport import Schema, Trainer, UpTo
from transport.training.mesh import Mesh

rings, store, rank = sys.argv[1:]
schema = Schema.of(tokens=("int32", UpTo({TOKENS})))
with Trainer(schema, rings, mesh=Mesh(2, 1, int(rank), store=store), wire={{"rdma"}}) as trainer:
    for step in trainer.steps(2, group_timeout_s=None):
        tokens = [payload["tokens"] for micro in step for payload in micro]
        assert all(len(each) == {TOKENS} and (each == each[0]).all() for each in tokens)
        print(step.number, *step.groups, "have", *(each[0] for each in tokens), flush=True)
        step.consume()
print("over", flush=True)
"""


def test_ranks_on_two_hosts_have_the_same_steps_and_divide_their_samples(there: SecondGuest, tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--bind", "0.0.0.0", "--protected-mode", "no")
    store = f"redis://{HERE}:{server.port}/0?run=steps"
    try:
        with (
            SharedRingBuffer.create(SCHEMA, slots=2 * GROUPS * OF) as ring,
            UCXXServer(ring, addresses=(HERE,), mode="thread"),
            Child(RANK, rings := f"rings://{HERE}:{ring.native.ports()[0]}", store, 0) as first,
            Child(RANK, rings, store, 1, host=there) as second,
        ):
            for number in range(GROUPS * OF):
                fields = {"tokens": np.full(TOKENS, number, np.int32)}
                ring.write(fields, metadata=in_group(None, f"p{number // OF}", OF, TOKENS))
            ring.end_data()
            told = [list(iter(rank.line, "over")) for rank in (first, second)]
            assert [rank.wait() for rank in (first, second)] == [0, 0]
            eventually(lambda: free(ring), "every slot is free")
            sent = ring.statistics()
    finally:
        server.kill()
    parted = [[line.partition(" have ") for line in lines] for lines in told]
    assert [step for step, *_ in parted[0]] == [step for step, *_ in parted[1]]
    groups = [name for step, *_ in parted[0] for name in step.split()[1:]]
    assert sorted(groups) == [f"p{number}" for number in range(GROUPS)]
    trained = sorted(int(each) for lines in parted for *_, mine in lines for each in mine.split())
    assert trained == list(range(GROUPS * OF))
    assert sent.bytes_rdma >= GROUPS * OF * TOKENS * 4
    assert sent.bytes_tcp == 0
