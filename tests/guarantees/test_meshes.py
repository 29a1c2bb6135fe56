"""A mesh whose ranks are killed at any moment: every group is in every rank's weights once, in the same steps."""

from __future__ import annotations

import random
import secrets
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers import eventually
from mesh_run import MeshRun, ThisHost, mesh_run
from redis_server import needs_redis
from two_hosts import redis_at, two_hosts, why_not

from transport import Schema, Trainer, UpTo
from transport.store.open import open_store
from transport.training.assembling import Group
from transport.training.step_records import StepRecords

pytestmark = [pytest.mark.ucx, pytest.mark.slow]
SCHEMA = Schema.of(tokens=("int32", UpTo(4096)))


def killed(folder: Path, wires: str, *, seed: int, kills: int, of_all: int, planner_alone: bool = False) -> None:
    """Have a mesh of 2 x 2 on this host learn from three rings while its ranks are killed."""
    rings, url = f"rings:mesh-{secrets.token_hex(4)}-", f"sqlite:///{folder}/steps.db"
    with mesh_run([ThisHost()], rings, url, folder, wires=wires) as run, open_store(url) as store:
        records = StepRecords(store, "trainer", 4, 5, 1.0)  # no rank's
        victim = records.planner if planner_alone else lambda: None
        run.outlive(random.Random(seed), kills, all_at_once=of_all, victim=victim)
        run.end()


@pytest.mark.parametrize("wires", ["mapped", "tcp"])
def test_ranks_that_are_killed_at_any_moment_learn_every_group_once(tmp_path: Path, wires: str) -> None:
    killed(tmp_path, wires, seed=1, kills=4, of_all=1)


@pytest.mark.verbs
def test_ranks_that_are_killed_at_any_moment_learn_every_group_once_over_rdma(tmp_path: Path) -> None:
    killed(tmp_path, "rdma", seed=1, kills=4, of_all=1, groups=40)


def test_another_rank_plans_on_when_the_one_that_plans_is_killed(tmp_path: Path) -> None:
    killed(tmp_path, "mapped", seed=2, kills=3, of_all=0, planner_alone=True)


OF_PLANNER = ["before plan", "behind plan", "seen consumed", "before forget", "behind forget"]
"""Points of the planner alone: behind "seen consumed" it consumes at the rings; before "forget" they have answered."""
POINTS = [
    *OF_PLANNER,
    "reading",
    *("before read vote", "behind read vote"),
    *("before go", "behind go"),
    *("before checkpoint", "behind checkpoint"),
    *("before learned vote", "behind learned vote"),
    *("before consumed", "behind consumed"),
]


def kill_at(run: MeshRun, point: str, victims: str, chances: random.Random) -> None:
    """Kill the planner, another rank, or all, while one of them stands at this point."""
    halted = run.halt("planner" if point in OF_PLANNER else "any" if victims == "all" else victims, point)
    killed = [*range(4)] if victims == "all" else [halted]
    if victims == "other" and point in OF_PLANNER:
        killed = [chances.choice([rank for rank in range(4) if rank != halted])]
    for rank in killed:
        run.kill(rank)
    for rank in killed:
        run.start(rank)
    if halted not in killed:  # the one that was killed comes back while the planner stands at this point
        eventually(lambda: all(map(run.is_back, killed)), "those that were killed are back")
        run.go_on(halted)


@needs_redis
@pytest.mark.skipif(bool(why_not()), reason=f"two hosts are not tested: {why_not()}")
@pytest.mark.nightly  # a case takes minutes
@pytest.mark.parametrize("victims", ["planner", "other", "all"])
@pytest.mark.parametrize("wires", ["mapped,tcp", "tcp"])
@pytest.mark.timeout(900)
def test_ranks_on_two_hosts_that_are_killed_at_each_point_of_a_step(tmp_path: Path, wires: str, victims: str) -> None:
    with two_hosts(tmp_path) as hosts, ExitStack() as stack:
        kept = [stack.enter_context(host.kept()) for host in hosts]
        url = f"redis://{stack.enter_context(redis_at(kept[0], tmp_path))}/0?run=mesh"
        run = stack.enter_context(mesh_run(kept, f"rings+{url}", url, tmp_path, wires=wires))
        for point in POINTS:
            kill_at(run, point, victims, random.Random(point))
        run.end()


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
        assert why == "incomplete"
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
@pytest.mark.parametrize("wires", ["mapped", "tcp"])
@pytest.mark.timeout(900)
def test_a_mesh_outlives_kills_by_the_hundred(tmp_path: Path, wires: str, seed: int) -> None:
    killed(tmp_path, wires, seed=100 + seed, kills=50, of_all=5)
