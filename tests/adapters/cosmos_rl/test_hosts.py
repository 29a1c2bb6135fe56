"""A job of cosmos-rl (support/cosmos_rl_job.py) between two hosts: its controller and rollout on one, its policy on the
other, with `replace_ucxx` and nothing else of ours."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from two_hosts import Host, two_hosts, why_not

if importlib.util.find_spec("cosmos_rl") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("cosmos-rl is not installed: pip install cosmos-rl", allow_module_level=True)

JOB = Path(__file__).resolve().parents[2] / "support" / "cosmos_rl_job.py"
PORT = 7379
WITHIN_S = 180.0

pytestmark = [pytest.mark.ucx, pytest.mark.slow, pytest.mark.adapters("cosmos_rl"), pytest.mark.timeout(400)]


@contextlib.contextmanager
def redis_on(host: Host, folder: Path) -> Iterator[str]:
    words = ["redis-server", "--bind", host.address, "--port", str(PORT), "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(
        host.command(*words, "--protected-mode", "no"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        answers = ["redis-cli", "-h", host.address, "-p", str(PORT), "ping"]
        while subprocess.run(host.command(*answers), capture_output=True).stdout.strip() != b"PONG":
            assert process.poll() is None, "redis-server did not start"
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
            process = subprocess.Popen(
                host.command(sys.executable, "-W", "ignore", str(JOB), "--redis", place, *options),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**environment, "COSMOS_ROLE": role},
            )
            stack.callback(process.kill)
            processes.append((role, process))
        for role, process in processes:
            out, _ = process.communicate(timeout=WITHIN_S)
            assert process.returncode == 0, f"{role}: {(logs / f'{role}.log').read_text()[-3000:]}"
            # UCX may print something behind it.
            found |= json.loads(next(line for line in reversed(out.splitlines()) if line.startswith("{")))
    return found


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="two hosts need redis-server for cosmos-rl's streams")
def test_every_rollout_of_a_job_is_trained_on_or_freed(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(f"two hosts cannot be made here: {reason}")
    with two_hosts(tmp_path) as hosts:
        job = ["--count", "40", "--steps", "50", "--slots", "16", "--replace"]
        found = run(hosts, job, tmp_path / "logs")
    assert (found["trained"], found["lost"], found["stale"]) == (36, 0, 0)
    assert (found["dropped"], found["freed"]) == (4, 4)
    assert (found["refused"], found["overwritten"]) == (0, 0)
