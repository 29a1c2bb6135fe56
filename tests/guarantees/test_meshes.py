"""A mesh whose ranks are killed at any moment: every group is in every rank's weights once, in the same steps."""

from __future__ import annotations

import random
import secrets
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from found_rings import ring_of
from helpers import eventually
from mesh_run import MeshRun

from transport import Schema, Trainer, UpTo
from transport.store.open import open_store
from transport.training.assembling import Group
from transport.training.step_records import StepRecords

pytestmark = [pytest.mark.ucx, pytest.mark.slow]
SCHEMA = Schema.of(tokens=("int32", UpTo(4096)))


def killed(
    folder: Path, wire: str, *, seed: int, kills: int, of_all: int, groups: int, planner_alone: bool = False
) -> None:
    """Have a mesh of 2 x 2 learn from three rings, and compare what its ranks have learned with what was written."""
    prefix = f"mesh-{secrets.token_hex(4)}-"
    with ExitStack() as stack:
        names = [f"{prefix}{number}" for number in range(3)]
        rings = [stack.enter_context(ring_of(name, schema=SCHEMA, slot_bytes=None, slots=64)) for name in names]
        run = MeshRun(prefix, rings, folder, 2, 2, groups=6, wire=wire)
        stack.callback(run.stop)
        run.feed(groups)
        store = stack.enter_context(open_store(f"sqlite:///{folder}/steps.db"))
        records = StepRecords(store, "trainer", 4, 5, 1.0)  # no rank's
        victim = records.planner if planner_alone else lambda: None
        run.run(random.Random(seed), kills, 600, all_at_once=of_all, victim=victim)
        run.check(groups, tp=2)
        assert [ring.native.unread for ring in rings] == [0, 0, 0]


@pytest.mark.parametrize("wire", ["mapped", "tcp"])
def test_ranks_that_are_killed_at_any_moment_learn_every_group_once(tmp_path: Path, wire: str) -> None:
    killed(tmp_path, wire, seed=1, kills=4, of_all=1, groups=40)


def test_another_rank_plans_on_when_the_one_that_plans_is_killed(tmp_path: Path) -> None:
    killed(tmp_path, "mapped", seed=2, kills=3, of_all=0, groups=40, planner_alone=True)


WRITER = """
import sys
from transport import Rollout, Schema, UpTo
schema = Schema.of(tokens=("int32", UpTo(4096)))
with Rollout(schema, f"rings:{sys.argv[1]}", name="rollout", mode="thread", drain_s=0) as rollout:
    for group, count in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
        for _ in range(int(count)):
            rollout.write({"tokens": [1]}, group=group, of=4)
    print("written", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("comes_back", [False, True])
def test_the_group_of_a_killed_rollout_is_given_up_by_name_or_completed(comes_back: bool) -> None:
    prefix = f"mesh-{secrets.token_hex(4)}-"
    given_up: list[tuple[str, int]] = []

    def write(stack: ExitStack, *groups: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", WRITER, prefix, *groups]
        process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        stack.callback(process.communicate)  # ends it
        assert process.stdout is not None and process.stdout.readline() == b"written\n"
        return process

    def dropped(group: Group, why: str) -> None:
        given_up.append((group.name, len(group)))

    with ExitStack() as stack:
        writer = write(stack, "whole", "4", "part", "3")
        trainer = stack.enter_context(Trainer(SCHEMA, f"rings:{prefix}"))
        steps = iter(trainer.steps(1, group_timeout_s=None if comes_back else 1.0, dropped=dropped))
        step = next(steps)
        assert step.groups == ["whole"]
        step.consume()
        writer.kill()
        writer.wait()
        if comes_back:
            write(stack, "part", "1")
            step = next(steps)
            assert (step.groups, step.samples, given_up) == (["part"], 4, [])
        else:
            eventually(lambda: given_up == [("part", 3)])
            write(stack, "next", "4")
            assert next(steps).groups == ["next"]


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("wire", ["mapped", "tcp"])
@pytest.mark.timeout(900)
def test_a_mesh_outlives_kills_by_the_hundred(tmp_path: Path, wire: str, seed: int) -> None:
    killed(tmp_path, wire, seed=100 + seed, kills=50, of_all=5, groups=400)
