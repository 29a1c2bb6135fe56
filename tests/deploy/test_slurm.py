"""deploy/slurm on a real Slurm of two nodes, which are namespaces of this machine."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import eventually
from two_hosts import why_not as why_no_namespaces

# A Slurm cluster of two nodes on one machine: real daemons, in namespaces as two hosts would be.
#
# Each node has a network namespace with an interface to a bridge, a host name, /dev/shm, IPC and boot id of its own.
# The controller is at the bridge.
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")
NODES = {"tnode1": "10.203.78.1", "tnode2": "10.203.78.2"}
CONTROLLER = "10.203.78.254"

_CONFIG = """\
ClusterName=two
SlurmctldHost={host}({controller})
AuthInfo=socket={folder}/munge/socket
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort={port}
SlurmdPort={port_of_nodes}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=1
PartitionName=all Nodes={names} Default=YES MaxTime=10 State=UP
"""

# slurmd wants a hierarchy of cgroups to be mounted, although it is told to use none.
_NODE = """
hostname "$1" && mount -t tmpfs -o size=512m tmpfs /dev/shm && mount --bind "$2" /etc/hosts &&
mount --bind "$3" /proc/sys/kernel/random/boot_id &&
mount -t tmpfs tmpfs /sys/fs/cgroup && mkdir /sys/fs/cgroup/cpu && mount -t cgroup -o cpu none /sys/fs/cgroup/cpu &&
exec slurmd -D -N "$1" -f "$4"
"""


def why_not() -> str:
    """Why there can be no cluster here; empty if there can."""
    for program in PROGRAMS:
        if shutil.which(program) is None:
            return f"{program} is missing (apt-get install slurm-wlm munge)"
    if reason := why_no_namespaces():
        return reason
    tried = _NODE.partition("mount --bind")[0] + _NODE.partition("random/boot_id &&")[2].partition("exec")[0] + "true"
    within = ["unshare", "--mount", "--uts", "--ipc", "--propagation", "private", "sh", "-c", tried, "sh", "probe"]
    probe = subprocess.run(within, capture_output=True, text=True)
    if probe.returncode:
        return f"a node cannot be made here: {probe.stderr.strip()}"
    return ""


class Cluster:
    """The commands of a user of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: str, cwd: Path | None = None) -> str:
        return subprocess.run(
            command, cwd=cwd, env=self.environment, check=True, capture_output=True, text=True, timeout=60
        ).stdout

    def submit(self, script: Path, folder: Path, *options: str, **variables: str) -> int:
        """The job's number. ``folder`` is where sbatch is called."""
        given = ",".join(["ALL", *(f"{name}={value}" for name, value in variables.items())])
        return int(self.run("sbatch", "--parsable", f"--export={given}", *options, str(script), cwd=folder))

    def state(self, job: int) -> str:
        (state,) = (
            word.removeprefix("JobState=")
            for word in self.run("scontrol", "show", "job", str(job)).split()
            if word.startswith("JobState=")
        )
        return state

    def states(self) -> list[str]:
        """The nodes' states; empty while the controller does not answer."""
        done = subprocess.run(("sinfo", "-hNo", "%T"), env=self.environment, capture_output=True, text=True, timeout=60)
        return done.stdout.split() if done.returncode == 0 else []

    def logs(self) -> str:
        return "\n".join(f"{log.name}:\n{log.read_text()[-1500:]}" for log in sorted(self._folder.glob("*.log")))


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """Start it, and end it again."""
    number = os.getpid() % 10_000
    bridge = f"trb{number}"
    host = os.uname().nodename.split(".")[0]
    config = folder / "slurm.conf"
    ports = {"port": 12_000 + number, "port_of_nodes": 22_000 + number}  # below those of outgoing connections
    nodes = "".join(f"NodeName={name} NodeAddr={at} NodeHostname={name} CPUs=1\n" for name, at in NODES.items())
    text = _CONFIG.format(host=host, controller=CONTROLLER, folder=folder, names=",".join(NODES), **ports)
    config.write_text(text.replace("PartitionName", f"{nodes}PartitionName"))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n")
    names = {"localhost": "127.0.0.1", host: CONTROLLER, **NODES}
    hosts = folder / "hosts"
    hosts.write_text("".join(f"{address} {name}\n" for name, address in names.items()))
    cluster = Cluster(folder)
    with contextlib.ExitStack() as stack:
        _munge(folder / "munge", stack)
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "delete", bridge)
        _ip("address", "add", f"{CONTROLLER}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        _daemon(stack, ["slurmctld", "-D", "-f", str(config)], cluster)
        for at, (name, address) in enumerate(NODES.items()):
            space = f"{bridge}n{at}"
            _ip("netns", "add", space)
            stack.callback(_ip, "netns", "delete", space)
            _ip("link", "add", f"{bridge}v{at}", "type", "veth", "peer", "name", "cable0", "netns", space)
            _ip("link", "set", f"{bridge}v{at}", "master", bridge, "up")
            _ip("-n", space, "address", "add", f"{address}/24", "dev", "cable0")
            for interface in ("lo", "cable0"):
                _ip("-n", space, "link", "set", interface, "up")
            (folder / f"spool-{name}").mkdir()
            identity = folder / f"{name}.boot_id"
            identity.write_text(f"{uuid.uuid4()}\n")
            within = ["unshare", "--mount", "--uts", "--ipc", "--propagation", "private", "sh", "-c", _NODE, "sh"]
            words = [name, str(hosts), str(identity), str(config)]
            _daemon(stack, ["ip", "netns", "exec", space, *within, *words], cluster)
        try:
            eventually(lambda: cluster.states() == ["idle"] * len(NODES), "both nodes are idle")
        except AssertionError:
            raise AssertionError(cluster.logs()) from None
        yield cluster


def _munge(folder: Path, stack: contextlib.ExitStack) -> None:
    """The daemon that proves to Slurm's who is who. It refuses folders that others may write to."""
    folder.mkdir(mode=0o755)
    key = folder / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={folder / name}" for option, name in names.items()]
    _daemon(stack, ["munged", "--foreground", "--force", *options], None)
    eventually(lambda: (folder / "socket").exists(), "munged serves")


def _daemon(stack: contextlib.ExitStack, command: list[str], cluster: Cluster | None) -> None:
    environment = None if cluster is None else cluster.environment
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def end() -> None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


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


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_the_job_trains_on_every_episode_of_every_node_once(cluster: Cluster, folder: Path) -> None:
    job = cluster.submit(ROOT / "deploy/slurm/job.sbatch", folder, PYTHON=sys.executable, EPISODES="40")
    state = ended(cluster, job)
    said = (folder / f"payload-transport-{job}.out").read_text()
    assert state == "COMPLETED", said
    assert "trained on 80 episodes of 2 rollouts" in said
    assert secrets(folder) == []


@pytest.mark.nightly
@pytest.mark.timeout(200)
def test_a_job_that_is_asked_to_end_leaves_in_order(cluster: Cluster, folder: Path) -> None:
    job = cluster.submit(ROOT / "deploy/slurm/job.sbatch", folder, PYTHON=sys.executable, EPISODES="1000000")
    said = folder / f"payload-transport-{job}.out"
    eventually(lambda: said.exists() and said.read_text().count("serves at port") == 2, "both play")
    cluster.run("scancel", str(job))  # SIGTERM to all steps, and SIGKILL half a minute later
    assert ended(cluster, job) == "CANCELLED"
    assert len(re.findall(r"rollout \d was asked to stop after \d+ episodes", said.read_text())) == 2
    assert re.search(r"no payload for \d+ s; \d+ episodes were trained on", said.read_text())
    eventually(lambda: not secrets(folder), "the secret is gone")
