"""A process of a sharded cooldown that stops at a phase, where the test kills it.

    python -m cooldown_victims PATH ROLE PHASE

ROLE is "coordinator" or a member's name. Before the phase's call the process prints "at PHASE" and waits for a line.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from helpers import until
from sharded_runs import HOSTS, model, write

from transport.cooldown import CooldownHost, ShardedClient, coordination
from transport.cooldown.epochs.coordinator import Coordinator
from transport.cooldown.epochs.ledger import Ledger
from transport.store.sqlite import SQLiteStore

MEMBER_PHASES = {
    "before the save": (Ledger, "decide"),
    "in the save": (None, "save"),
    "saved, not recorded": (Ledger, "put_saved"),
    "in the upload": (None, "progress"),
    "uploaded, not reported": (Ledger, "put_share"),
    "reported": (Ledger, "wait_for_host"),  # the first wait after its share was reported
}
COORDINATOR_PHASES = {
    "members save": (None, "save"),
    "before the manifest": (CooldownHost, "_verify"),
    "manifest written": (coordination, "verified"),
    "verified, not recorded": (Coordinator, "verified"),
    "recorded, not copied": (coordination, "put_outcome"),
}


def stop(phase: str) -> None:
    print(f"at {phase}", flush=True)
    sys.stdin.readline()


def stopping(owner: Any, name: str, phase: str, when: Callable[..., bool] = lambda *_: True) -> None:
    real = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if when(*arguments):
            stop(phase)
        return real(*arguments, **options)

    setattr(owner, name, call)


async def member(path: Path, name: str, phase: str, store: SQLiteStore) -> None:
    owner, call = MEMBER_PHASES[phase]
    uploaded: list[object] = []
    if phase == "reported":
        real = Ledger.put_share
        Ledger.put_share = lambda *arguments: (real(*arguments), uploaded.append(1))[0]  # type: ignore[method-assign]
        stopping(owner, call, phase, lambda *_: bool(uploaded))
    elif owner is not None:
        stopping(owner, call, phase)

    def save(folder: Path, step: int) -> None:
        files = model(name)
        first = dict([files.popitem()])
        write(folder, first)
        if call == "save":
            stop(phase)
        together(path, name)
        write(folder, files)

    def progress(done: int, files: int, size: int) -> None:
        if call == "progress" and size:
            stop(phase)

    client = ShardedClient(
        store, "run", name, save=save, scratch=path / "scratch" / HOSTS[name], launch="first", progress=progress
    )
    await client.cooldown(7)


def together(path: Path, name: str) -> None:
    """The collective call, between processes."""
    (path / f"saving-{name}").touch()
    while not all((path / f"saving-{each}").exists() for each in HOSTS):
        if (path / "broken").exists():
            raise RuntimeError("a peer was lost")
        os.sched_yield()


async def coordinator(path: Path, phase: str, store: SQLiteStore) -> None:
    owner, call = COORDINATOR_PHASES[phase]
    if owner is not None:
        stopping(owner, call, phase)
    host = CooldownHost(store, "run", str(path / "destination"), cooldown_s=60, seed=49)
    leading = asyncio.create_task(host.cooldown(7, 30, HOSTS))
    if phase == "members save":
        await until(lambda: any((path / f"saving-{each}").exists() for each in HOSTS))
        stop(phase)
    await leading


def main() -> None:
    path, role, phase = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    with SQLiteStore(path / "store.sqlite3") as store:
        if role == "coordinator":
            asyncio.run(coordinator(path, phase, store))
        else:
            asyncio.run(member(path, role, phase, store))


if __name__ == "__main__":
    main()
