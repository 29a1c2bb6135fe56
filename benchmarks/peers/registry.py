"""The peers: what each is, what it needs, and whether that is installed.

`make bench-peers` gives each an environment of its own in build/peers (benchmarks/install_peers.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from transport.errors import MissingDependencyError, UsageError

_HERE = Path(__file__).resolve().parent
SCRIPTS = _HERE / "reads"
JOB_SCRIPTS = _HERE / "job"
ENVIRONMENTS = _HERE.parents[1] / "build" / "peers"
FLOOR = "ucx_floor"
REASON_FILE = "skipped"
STAMP_FILE = "installed"


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Something else that moves bytes between two processes.

    Attributes:
        script: its file in ``folder``; empty: a program of its own (ucx_floor).
        folder: where its script lies, and the harness that runs it.
        wire: what carries the bytes; empty: whatever wires are measured.
        environment: name of its virtual environment; empty: needs nothing that is not here.
        requirements: what pip installs there beside numpy, a call of pip for each, options included.
        libraries: Debian packages of system libraries that its wheel lacks, unpacked into the environment.
        variables: environment variables of its processes.
        floor: no peer, but what a machine can do at best.
        service: what runs beside the processes that are measured: "redis", or "own" for what its script starts.
    """

    name: str
    script: str
    wire: str
    environment: str = ""
    requirements: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    floor: bool = False
    folder: Path = SCRIPTS
    service: str = ""


_NIXL = "--no-deps nixl-cu12"  # what it would pull in (torch, CUDA) is for GPUs, and not imported
_ALL = (
    Peer(name="memcpy", script="memcpy", wire="memory", floor=True),
    Peer(name=FLOOR, script="", wire="", floor=True),
    Peer(name="socket", script="tcp_socket", wire="tcp"),
    Peer(name="pyzmq", script="pyzmq", wire="tcp", environment="pyzmq", requirements=("pyzmq",)),
    Peer(name="nixl", script="nixl_agent", wire="shm", environment="nixl", requirements=(_NIXL,)),
    Peer(
        name="nixl-tcp",
        script="nixl_agent",
        wire="tcp",
        environment="nixl",
        requirements=(_NIXL,),
        variables={"UCX_TLS": "tcp"},
    ),
    Peer(
        name="mooncake",
        script="mooncake_engine",
        wire="tcp",
        environment="mooncake",
        requirements=("mooncake-transfer-engine-non-cuda",),
        libraries=("libibverbs1", "libnl-3-200", "libnl-route-3-200"),
    ),
    Peer(name="ray", script="ray_objects", wire="shm", environment="ray", requirements=("ray",)),
    Peer(name="iceoryx2", script="iceoryx", wire="shm", environment="iceoryx2", requirements=("iceoryx2",)),
    Peer(name="flight", script="flight", wire="tcp", environment="flight", requirements=("pyarrow",)),
)
PEERS = {peer.name: peer for peer in _ALL}


def _for_job(name: str, script: str, wire: str, requirements: tuple[str, ...], service: str = "") -> Peer:
    # The redis peers share an environment. All hash payloads as our own processes do.
    return Peer(
        name=name,
        script=script,
        wire=wire,
        environment=f"job-{name.partition('-')[0]}",
        requirements=(*requirements, "xxhash"),
        folder=JOB_SCRIPTS,
        service=service,
    )


# Of benchmarks/job: whole payloads from writers to trainers.
_JOB = (
    _for_job("zmq", "zmq_push_pull", "tcp", ("pyzmq",)),
    _for_job("redis", "redis_list", "tcp", ("redis[hiredis]",), "redis"),
    _for_job("redis-stream", "redis_stream", "tcp", ("redis[hiredis]",), "redis"),
    _for_job("ray", "ray_references", "shm", ("ray",), "own"),
    # torch's wheel for processors is a tenth of the one for devices
    _for_job(
        "transferqueue",
        "transfer_queue_storage",
        "tcp",
        ("torch --index-url https://download.pytorch.org/whl/cpu", "TransferQueue"),
        "own",
    ),
)
JOB_PEERS = {peer.name: peer for peer in _JOB}


def chosen(names: str, among: Mapping[str, Peer] = PEERS) -> list[Peer]:
    """The peers of a comma-separated list, or "all".

    Raises:
        UsageError: a name that is none.
    """
    if names == "all":
        return list(among.values())
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in among:
            raise UsageError(f"unknown peer {name!r}; choose all, or some of {', '.join(among)}")
    return [peer for name, peer in among.items() if name in wanted]


def interpreter(peer: Peer) -> str:
    """The Python that has what the peer needs.

    Raises:
        MissingDependencyError: not installed, with the reason where one is known.
    """
    if not peer.environment:
        return sys.executable
    home = ENVIRONMENTS / peer.environment
    if (home / REASON_FILE).exists():
        raise MissingDependencyError((home / REASON_FILE).read_text(encoding="utf-8").strip())
    if not (home / STAMP_FILE).exists():
        raise MissingDependencyError("not installed; run: make bench-peers")
    return str(home / "bin" / "python")


def library_path(peer: Peer) -> str:
    """Where the system libraries lie that were unpacked for it; empty without any."""
    if not peer.libraries:
        return ""
    found = sorted({str(path.parent) for path in (ENVIRONMENTS / peer.environment / "system").rglob("*.so*")})
    return ":".join(found)
