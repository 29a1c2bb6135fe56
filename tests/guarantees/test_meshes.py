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

from transport import Rollout, Schema, ServerOptions, Trainer, UpTo
from transport.errors import SnapshotError
from transport.packer.consumed_record import ConsumedRecord
from transport.snapshots import restore
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


@pytest.mark.nightly
@pytest.mark.guarantee("a rank of a mesh (`Trainer.steps`) is killed")
@pytest.mark.guarantee("all ranks of a mesh are killed")
@pytest.mark.guarantee("the data of a mesh ends")
@pytest.mark.parametrize("wires", ["mapped", "tcp"])
def test_ranks_that_are_killed_at_any_moment_learn_every_group_once(tmp_path: Path, wires: str) -> None:
    killed(tmp_path, wires, seed=1, kills=4, of_all=1)


@pytest.mark.verbs
def test_ranks_that_are_killed_at_any_moment_learn_every_group_once_over_rdma(tmp_path: Path) -> None:
    killed(tmp_path, "rdma", seed=1, kills=4, of_all=1)


@pytest.mark.nightly
@pytest.mark.guarantee("the rank of a mesh that plans is killed")
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


JOB = """
import sys
from pathlib import Path
from transport import ClientOptions, Mesh, Rollout, Schema, ServerOptions, Settings, Trainer, UpTo
from transport.snapshots import snapshot
schema = Schema.of(tokens=("int32", UpTo(4096)))

def roll_out(rings, groups):
    with (
        Rollout(schema, rings, drain_s=0, server=ServerOptions(linger_s=0)) as one,
        Rollout(schema, rings, drain_s=0, server=ServerOptions(linger_s=0)) as other,
    ):
        for group in range(int(groups)):
            for rollout in (one, other, other, one):
                rollout.write({"tokens": [group]}, group=f"p{group}", of=4)
        print("written", flush=True)
        sys.stdin.readline()

def train(rings, rank, folder, wire):
    place = Path(folder, "record")
    record = place.read_bytes() if place.exists() else None
    mesh = Mesh(2, 1, int(rank), store=f"sqlite:///{folder}/steps.db")
    client = ClientOptions(settings=Settings(claim_lease_s=5.0))
    with Trainer(schema, rings, mesh=mesh, record=record, wire={wire}, client=client) as trainer:
        for step in trainer.steps(2):
            step.accept()
            print(*step.groups, step.samples, flush=True)
            while sys.stdin.readline().strip() != "consume":
                taken = trainer.record.to_bytes()
                snapshot(trainer.rings, f"{folder}/snapshots", 1).wait()
                place.write_bytes(taken)
                print("kept", flush=True)
            trainer.consume()
    print("over", flush=True)

{"roll_out": roll_out, "train": train}[sys.argv[1]](*sys.argv[2:])
"""


class Worker:
    """A process of `JOB`, which is told lines and says some."""

    def __init__(self, stack: ExitStack, *words: object) -> None:
        command = [sys.executable, "-c", JOB, *map(str, words)]
        pipe = subprocess.PIPE
        self.process = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        stack.callback(self.process.kill)

    def told(self, words: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{words}\n")
        self.process.stdin.flush()

    def says(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()


def restored(folder: Path, rollout: Rollout) -> None:
    """Restore as soon as the rings of before are gone."""

    def done() -> bool:
        try:
            restore(f"{folder}/snapshots", 1, rollout, consumed=[ConsumedRecord.from_bytes(kept)])
        except SnapshotError:
            return False
        return True

    kept = (folder / "record").read_bytes()
    eventually(done)


@pytest.mark.nightly
@pytest.mark.guarantee("a job of a mesh goes back to a snapshot")
@pytest.mark.parametrize("wire", ["mapped", "tcp"])
def test_a_job_that_goes_back_to_a_snapshot_with_its_store_learns_every_group_once(tmp_path: Path, wire: str) -> None:
    """The store has steps behind the checkpoint: consumed, learned by one rank, and read ahead."""
    (tmp_path / "snapshots").mkdir()
    prefix = f"mesh-{secrets.token_hex(4)}-"
    found: list[list[str]] = []
    with ExitStack() as stack:
        writer = Worker(stack, "roll_out", f"rings:{prefix}", 14)
        assert writer.says() == ["written"]
        ranks = [Worker(stack, "train", f"rings:{prefix}", rank, tmp_path, wire) for rank in range(2)]
        for number in range(5):
            said = [rank.says() for rank in ranks]
            assert said[0] == said[1] and said[0][-1] == "8"
            if number == 1:
                ranks[0].told("keep")
                assert ranks[0].says() == ["kept"]
            found += [said[0][:-1]] if number <= 1 else []
            for rank in ranks[: 1 if number == 4 else 2]:
                rank.told("consume")
        for each in [*ranks, writer]:
            each.process.kill()
            each.process.wait()
    with ExitStack() as stack:
        server = ServerOptions(linger_s=0)
        rollout = stack.enter_context(Rollout(SCHEMA, f"rings:{prefix}", slots=64, drain_s=0, server=server))
        restored(tmp_path, rollout)
        rollout.ring.end_data()
        ranks = [Worker(stack, "train", f"rings:{prefix}", rank, tmp_path, wire) for rank in range(2)]
        while (said := [rank.says() for rank in ranks]) != [["over"]] * 2:
            assert said[0] == said[1] and said[0][-1] == "8"
            found.append(said[0][:-1])
            for rank in ranks:
                rank.told("consume")
    assert sorted(name for names in found for name in names) == sorted(f"p{group}" for group in range(14))


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


def started(stack: ExitStack, prefix: str, *groups: str) -> subprocess.Popen[bytes]:
    """Start a rollout that writes so many samples of these groups, and wait until it has."""
    command = [sys.executable, "-c", WRITER, prefix, *groups]
    process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    stack.callback(process.communicate)  # ends it
    assert process.stdout is not None and process.stdout.readline() == b"written\n"
    return process


@pytest.mark.nightly
@pytest.mark.guarantee("a rollout of a mesh is killed behind a group")
def test_a_group_that_a_killed_rollout_writes_anew_is_learned_once() -> None:
    prefix = f"mesh-{secrets.token_hex(4)}-"
    with ExitStack() as stack:
        writer = started(stack, prefix, "first", "4", "second", "4")
        trainer = stack.enter_context(Trainer(SCHEMA, f"rings:{prefix}"))
        steps = iter(trainer.steps(1))
        first = next(steps)
        writer.kill()
        writer.wait()
        started(stack, prefix, "first", "4", "second", "4", "third", "4")  # while one is learned, and one is read
        found = []
        for step in (first, next(steps), next(steps)):
            found += step.groups
            step.consume()
        assert found == ["first", "second", "third"]
        eventually(lambda: trainer.statistics().surplus == 8)


@pytest.mark.nightly(keep=1)
@pytest.mark.guarantee("a rollout is killed before a group is complete")
@pytest.mark.parametrize("comes_back", [False, True])
def test_the_group_of_a_killed_rollout_is_given_up_by_name_or_completed(comes_back: bool) -> None:
    prefix = f"mesh-{secrets.token_hex(4)}-"
    given_up: list[tuple[str, int]] = []

    def dropped(group: Group, why: str) -> None:
        assert why == "incomplete"
        given_up.append((group.name, len(group)))

    with ExitStack() as stack:
        writer = started(stack, prefix, "whole", "4", "part", "3")
        trainer = stack.enter_context(Trainer(SCHEMA, f"rings:{prefix}"))
        steps = iter(trainer.steps(1, group_timeout_s=None if comes_back else 1.0, dropped=dropped))
        step = next(steps)
        assert step.groups == ["whole"]
        step.consume()
        writer.kill()
        writer.wait()
        if comes_back:
            started(stack, prefix, "part", "1")
            step = next(steps)
            assert (step.groups, step.samples, given_up) == (["part"], 4, [])
        else:
            eventually(lambda: given_up == [("part", 3)])
            started(stack, prefix, "next", "4")
            assert next(steps).groups == ["next"]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("wires", ["mapped", "tcp"])
@pytest.mark.timeout(900)
def test_a_mesh_outlives_kills_by_the_hundred(tmp_path: Path, wires: str, seed: int) -> None:
    killed(tmp_path, wires, seed=100 + seed, kills=50, of_all=5)
