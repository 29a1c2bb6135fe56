"""A mesh whose ranks are killed at any moment: every group is in every rank's weights once, in the same steps."""

from __future__ import annotations

import random
import secrets
from contextlib import ExitStack
from pathlib import Path

import pytest
from found_rings import ring_of
from mesh_run import MeshRun

from transport import Schema, UpTo

pytestmark = [pytest.mark.ucx, pytest.mark.slow]
SCHEMA = Schema.of(tokens=("int32", UpTo(4096)))


def killed(folder: Path, wire: str, *, seed: int, kills: int, of_all: int, groups: int) -> None:
    """Have a mesh of 2 x 2 learn from three rings, and compare what its ranks have learned with what was written."""
    prefix = f"mesh-{secrets.token_hex(4)}-"
    with ExitStack() as stack:
        names = [f"{prefix}{number}" for number in range(3)]
        rings = [stack.enter_context(ring_of(name, schema=SCHEMA, slot_bytes=None, slots=64)) for name in names]
        run = MeshRun(prefix, rings, folder, 2, 2, groups=6, wire=wire)
        stack.callback(run.stop)
        run.feed(groups)
        run.run(random.Random(seed), kills, 600, all_at_once=of_all)
        run.check(groups, tp=2)
        assert [ring.native.unread for ring in rings] == [0, 0, 0]


@pytest.mark.parametrize("wire", ["mapped", "tcp"])
def test_ranks_that_are_killed_at_any_moment_learn_every_group_once(tmp_path: Path, wire: str) -> None:
    killed(tmp_path, wire, seed=1, kills=4, of_all=1, groups=40)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("wire", ["mapped", "tcp"])
@pytest.mark.timeout(900)
def test_a_mesh_outlives_kills_by_the_hundred(tmp_path: Path, wire: str, seed: int) -> None:
    killed(tmp_path, wire, seed=100 + seed, kills=50, of_all=5, groups=400)
