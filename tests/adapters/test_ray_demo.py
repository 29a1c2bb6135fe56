"""`transport demo --on ray` on a cluster of three nodes, which are processes of this host, of which one is killed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from demos import AT_WORK, Demo

from transport import _ring
from transport.errors import UsageError
from transport.ring.buffer import SharedRingBuffer

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install ray", allow_module_level=True)

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray
from ray.cluster_utils import Cluster

from transport.adapters.ray import NAMESPACE, RayStore
from transport.demo.display import Display
from transport.demo.plan import Plan
from transport.demo.ray_job import run_on_ray
from transport.demo.ray_record import nodes_of, records
from transport.demo.worker import Progress

# Ray leaves sockets and files of its own to the garbage collector.
pytestmark = [
    pytest.mark.adapters("ray"),
    pytest.mark.slow,
    pytest.mark.ucx,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

EPISODES = 288
KILLED_AT = 64
# Ray's own defaults find a dead node after half a minute.
HEALTH = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 4}


@pytest.fixture(autouse=True)
def leak_check() -> None:
    """Not here: Ray opens descriptors and starts threads whenever it likes."""


@pytest.fixture
def cluster() -> Iterator[tuple[Cluster, list[Any]]]:
    """The driver's node has no CPUs, hence no actors but the directory; two more have them."""
    small = {"object_store_memory": 80 << 20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": HEALTH, **small})
    nodes = [made.add_node(num_cpus=1, object_store_memory=80 << 20) for _ in range(2)]
    made.wait_for_nodes()
    ray.init(address=made.address, logging_level="ERROR", log_to_driver=False)
    try:
        yield made, nodes
    finally:
        ray.shutdown()
        made.shutdown()


class Killing(Display):
    """Kills the node of an actor when so many episodes are trained on: raylet, workers, listeners, shared memory."""

    def __init__(self, cluster: tuple[Cluster, list[Any]], actor: str) -> None:
        super().__init__(EPISODES)
        self._cluster, self._nodes = cluster
        self._actor = actor
        self.killed: dict[str, str] = {}  # actors that were on the node, with it
        self.lost: set[int] = set()  # episodes that were in rings of the node
        self.placed: dict[str, str] = {}
        self.trained: list[list[int]] = []

    def show(self, ranks: Sequence[Progress]) -> None:
        super().show(ranks)
        (name,) = [each["name"] for each in ray.util.list_named_actors(True) if each["namespace"] == NAMESPACE]
        with RayStore(name) as store:
            self.placed = nodes_of(store)
            self.trained = [record.episodes for record in records(store, Plan())]
        if min(rank.consumed for rank in ranks) >= KILLED_AT and not self.killed:
            victim = self.placed[self._actor]
            self.killed = {actor: node for actor, node in self.placed.items() if node == victim}
            self._kill(next(node for node in self._nodes if node.node_id == victim))

    def _kill(self, node: Any) -> None:
        raylet = node.all_processes["raylet"][0].process.pid
        for pid in [raylet, *below(raylet)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name in _ring.segments():
            if node.node_id[:12] in name:
                if "rollout" in name:
                    ring = SharedRingBuffer.attach(name, role="observer")
                    self.lost |= {int(str(unread.ticket.metadata["episode"])) for unread in ring.unread()}
                    ring.native.close()
                (Path("/dev/shm") / name.lstrip("/")).unlink()
        self._cluster.remove_node(node, allow_graceful=False)


def below(raylet: int) -> list[int]:
    """The processes of a node: Ray's workers and what they have started carry the raylet's number."""
    mark = f"RAY_RAYLET_PID={raylet}".encode()
    found = []
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            with contextlib.suppress(OSError):
                if mark in (each / "environ").read_bytes().split(b"\0"):
                    found.append(int(each.name))
    return found


@pytest.mark.timeout(280)
@pytest.mark.parametrize("actor", ["rollout-0", "trainer-0"])
def test_a_killed_node_loses_no_episode_and_none_is_trained_on_twice(
    cluster: tuple[Cluster, list[Any]], actor: str
) -> None:
    with Killing(cluster, actor) as display:
        summary = run_on_ray(Plan(rollouts=2, trainers=1, episodes=EPISODES, wires=("tcp",)), display)
    assert summary.problems(EPISODES, target=0) == []
    assert [sorted(trained) for trained in display.trained] == [list(range(EPISODES))]
    assert display.killed
    assert {display.placed[each] for each in display.killed}.isdisjoint(display.killed.values())  # they moved
    assert summary.restarts == len(display.killed)  # and no other actor was started again
    assert (
        summary.replayed <= len(display.lost) + 1
    )  # only what was in the lost rings, or being written, is played again


class KillingProcess(Display):
    """Kills the process of one actor, and nothing else of its node."""

    def __init__(self, kind: str) -> None:
        super().__init__(EPISODES)
        self._kind = kind
        self.killed = 0

    def show(self, ranks: Sequence[Progress]) -> None:
        super().show(ranks)
        if min(rank.consumed for rank in ranks) >= KILLED_AT and not self.killed:
            raylet = ray._private.worker._global_node.all_processes["raylet"][0].process.pid
            title = f"ray::{self._kind}".encode()
            self.killed = next(
                pid for pid in below(raylet) if Path(f"/proc/{pid}/cmdline").read_bytes()[:99].startswith(title)
            )
            os.kill(self.killed, signal.SIGKILL)


@pytest.mark.timeout(280)
@pytest.mark.parametrize("kind", ["RolloutActor", "TrainerActor"])
def test_an_actor_that_is_killed_alone_goes_on_with_its_ring(kind: str) -> None:
    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR", object_store_memory=80 << 20)
    try:
        with KillingProcess(kind) as display:
            summary = run_on_ray(Plan(rollouts=2, trainers=1, episodes=EPISODES), display)
    finally:
        ray.shutdown()
    assert display.killed
    assert summary.problems(EPISODES, target=0) == []
    assert (summary.restarts, summary.nodes) == (1, 1)
    assert summary.replayed <= 1  # but for one that was being written, the ring has kept them


@pytest.mark.timeout(280)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_ends_in_order_and_leaves_no_segment(number: signal.Signals, tmp_path: Path) -> None:
    before = set(_ring.segments())
    # Not in a temporary folder of its own, as other demos: Ray's sockets do not fit into long paths.
    command = [sys.executable, "-m", "transport", "demo", "--on", "ray", "--episodes", AT_WORK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        demo = Demo(process, "", tmp_path)
        demo.until_at_work()
        process.send_signal(number)
        status, _, said = demo.finished()
    assert (status, set(_ring.segments()) - before) == (128 + number, set())
    how = "interrupted" if number == signal.SIGINT else "stopped by SIGTERM"
    assert f"{how}; nothing is left behind" in said


def test_a_ray_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(**_: Any) -> None:
        raise Exception("The current node timed out during startup.")  # as Ray does it

    monkeypatch.setattr(ray, "init", late)
    with Display(1) as display, pytest.raises(UsageError, match="--on ray: Ray did not start here: The current node"):
        run_on_ray(Plan(episodes=1), display)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", r"--ray-address 127\.0\.0\.1:1: no cluster answers \(.*refused\); give host:port"),
        ("ray://127.0.0.1:10001", "give host:port of the cluster's head, or auto"),
        ("head", "--ray-address head: give host:port"),
    ],
)
def test_an_address_without_a_cluster_is_refused(address: str, said: str) -> None:
    with Display(1) as display, pytest.raises(UsageError, match=said):
        run_on_ray(Plan(episodes=1), display, address)
