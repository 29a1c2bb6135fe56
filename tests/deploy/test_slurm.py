"""deploy/slurm on a real Slurm of two nodes, which are namespaces of this machine."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import eventually
from slurm_cluster import Cluster, slurm_cluster, why_not

pytestmark = [pytest.mark.ucx, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(f"Slurm is not tested: {reason}")
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a user would call sbatch: beside the examples."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def ended(cluster: Cluster, job: int) -> str:
    """Its last state; the time limit of the test bounds the wait, which is longer than that of `eventually`."""
    while (state := cluster.state(job)) not in ENDED:
        threading.Event().wait(0.1)
    return state


def secrets(folder: Path) -> list[Path]:
    return list(folder.glob(".transport-secret-*"))


@pytest.mark.timeout(200)
def test_the_job_trains_on_every_episode_of_every_node_once(cluster: Cluster, folder: Path) -> None:
    job = cluster.submit(ROOT / "deploy/slurm/job.sbatch", folder, PYTHON=sys.executable, EPISODES="40")
    state = ended(cluster, job)
    said = (folder / f"payload-transport-{job}.out").read_text()
    assert state == "COMPLETED", said
    assert "trained on 80 episodes of 2 rollouts" in said
    assert secrets(folder) == []


@pytest.mark.timeout(200)
def test_a_job_that_is_asked_to_end_leaves_in_order(cluster: Cluster, folder: Path) -> None:
    job = cluster.submit(ROOT / "deploy/slurm/job.sbatch", folder, PYTHON=sys.executable, EPISODES="1000000")
    said = folder / f"payload-transport-{job}.out"
    eventually(lambda: said.exists() and said.read_text().count("serves at port") == 2, "both play")
    cluster.run("scancel", str(job))  # SIGTERM to all steps, and SIGKILL half a minute later
    assert ended(cluster, job) == "CANCELLED"
    assert len(re.findall(r"rollout \d was asked to stop after \d+ episodes", said.read_text())) == 2
    assert re.search(r"no payload for 5 s; \d+ episodes were trained on", said.read_text())
    eventually(lambda: not secrets(folder), "the secret is gone")
