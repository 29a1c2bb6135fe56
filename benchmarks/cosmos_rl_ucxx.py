"""cosmos-rl's own transport "ucxx" beside `replace_ucxx`, on the same work of the same script over two hosts.

    build/adapters/bin/python benchmarks/cosmos_rl_ucxx.py [--count 200] [--steps 1000] [--logs FOLDER]

As root, with redis-server. Two network namespaces with a /dev/shm each stand for two hosts: controller, rollout and
Redis on one, the policy on the other. Each is a process of its own that runs benchmarks/cosmos_rl_job.py. Prints a
Markdown table.

*In step*: half as many rollouts are under way as the ring has slots. *Ahead*: the rollout does not wait, and the policy
takes 50 ms for each batch. Lost: rollouts that the policy asked for and did not get; those that the controller drops
are not counted. Stale: payloads that are another rollout's. The times are means for each
payload; *whole* is the policy's time from its first message on, controller and rollout included; *free* is the
controller's, for each rollout that it drops.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from two_hosts import Host, two_hosts, why_not

ROOT = Path(__file__).resolve().parents[1]
PORT = 7379
WITHIN_S = 180.0
SLOTS = 32
CASES = {"in step": ["--credit", str(SLOTS // 2)], "ahead": ["--train-s", "0.05"]}
TRANSPORTS: dict[str, list[str]] = {"cosmos-rl's own": [], "replace_ucxx()": ["--replace"]}


@contextlib.contextmanager
def named(host: Host) -> Iterator[None]:
    """The host's name means its address there: cosmos-rl's own transport finds its address by it."""
    folder = Path("/etc/netns", host.name)
    folder.mkdir(parents=True)
    folder.joinpath("hosts").write_text(f"127.0.0.1 localhost\n{host.address} {socket.gethostname()}\n")
    try:
        yield
    finally:
        shutil.rmtree(folder)
        with contextlib.suppress(OSError):
            folder.parent.rmdir()


@contextlib.contextmanager
def redis_on(host: Host, folder: Path) -> Iterator[str]:
    words = ["redis-server", "--bind", host.address, "--port", str(PORT), "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(
        host.command(*words, "--protected-mode", "no"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        answers = ["redis-cli", "-h", host.address, "-p", str(PORT), "ping"]
        while subprocess.run(host.command(*answers), capture_output=True).stdout.strip() != b"PONG":
            if process.poll() is not None:
                raise SystemExit("redis-server did not start")
        yield f"{host.address}:{PORT}"
    finally:
        process.terminate()
        process.wait()


def run(hosts: tuple[Host, Host], options: list[str], logs: Path) -> dict[str, Any]:
    """One job: what its three processes report."""
    first, second = hosts
    environment = {name: value for name, value in os.environ.items() if not name.startswith("UCX")}
    logs.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(redis_on(first, logs))
        processes = []
        for role, host in (("Controller", first), ("Policy", second), ("Rollout", first)):
            log = stack.enter_context((logs / f"{role}.log").open("w", encoding="utf-8"))
            job = [sys.executable, "-W", "ignore", str(ROOT / "benchmarks" / "cosmos_rl_job.py"), "--redis", place]
            process = subprocess.Popen(
                host.command(*job, *options),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**environment, "COSMOS_ROLE": role},
            )
            stack.callback(process.kill)
            processes.append((role, process))
        for role, process in processes:
            out, _ = process.communicate(timeout=WITHIN_S)
            if process.returncode:
                raise SystemExit(f"{role} ended with {process.returncode}: see {logs / role}.log")
            found |= json.loads(out.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--steps", type=int, default=1000, help="of an episode, about 1 KiB each")
    parser.add_argument("--work", choices=CASES, action="append", help="only this one")
    parser.add_argument("--logs", type=Path, default=None)
    options = parser.parse_args()
    if reason := why_not():
        raise SystemExit(f"two hosts cannot be made here: {reason}")
    print(f"{options.count} rollouts of {options.steps * 1034 / 2**20:.1f} MiB, {SLOTS} slots, batches of 8\n")
    print("| work | transport | publish | fetch | whole | trained on | lost | stale | dropped, freed | free |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = stack.enter_context(two_hosts(folder))
        for host in hosts:
            stack.enter_context(named(host))
        for work in options.work or CASES:
            for transport, choice in TRANSPORTS.items():
                job = ["--count", str(options.count), "--steps", str(options.steps), "--slots", str(SLOTS)]
                found = run(hosts, [*job, *CASES[work], *choice], (options.logs or folder) / f"{work} {transport}")
                print(
                    f"| {work} | {transport} | {found['publish_ms']:.1f} ms | {found['fetch_ms']:.1f} ms "
                    f"| {1e3 * found['took_s'] / found['trained']:.1f} ms | {found['trained']} | {found['lost']} "
                    f"| {found['stale']} | {found['dropped']}, {found['freed']} "
                    f"| {found['free_ms']:.1f} ms |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
