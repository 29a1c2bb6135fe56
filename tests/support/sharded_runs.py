"""A job of four members on two hosts whose save is collective: it returns once every member has called it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cooldown_runs import Run
from helpers import PATIENCE_S

from transport.cooldown import ShardedClient, recorded_outcomes, restore
from transport.cooldown.destinations.folder import Folder
from transport.store import Store

HOSTS = {"a0": "a", "a1": "a", "a2": "a", "b0": "b"}


def model(member: str) -> dict[str, bytes]:
    """What one member saves."""
    return {
        f"__{member}_0.distcp": member.encode() * 200_000,
        f"{member}/__{member}_1.distcp": b"second" + member.encode(),
        "config.json": b"{}",  # of every member, the same
        **({".metadata": b"of all"} if member == "a0" else {}),
    }


MODEL = {name: data for member in HOSTS for name, data in model(member).items()}


def write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


class ShardedRun(Run):
    """Its store and destination, its coordinators and members, all in one process."""

    def __init__(self, path: Path, store: Store) -> None:
        super().__init__(path, store)
        self.together = threading.Barrier(len(HOSTS))
        self.saves: list[str] = []

    def save(self, member: str, folder: Path, step: int) -> None:
        """Collective: waits for all members."""
        self.saves.append(member)
        self.together.wait(PATIENCE_S)
        write(folder, model(member))

    def member(self, name: str, **changed: Any) -> ShardedClient:
        options = {
            "save": lambda folder, step: self.save(name, folder, step),
            "scratch": self.path / "scratch" / HOSTS[name],
            "launch": "first",
            **changed,
        }
        return ShardedClient(self.store, "run", name, **options)

    def check_restored(self, epoch: int, files: Mapping[str, bytes] = MODEL) -> None:
        """The epoch's checkpoint is what was saved, by the store's record and by the one at the destination."""
        destination = Folder(self.root)
        for number, record in enumerate((self.record(epoch), recorded_outcomes(destination, "run")[epoch])):
            restored = restore(record, destination, self.path / f"restored-{epoch}-{number}")
            assert {name: path.read_bytes() for name, path in restored.files.items()} == dict(files)

    def uploads(self) -> set[str]:
        """Members that have files at the destination."""
        return {path.parts[-3] for path in self.root.glob("run/epoch-*/*/*/files")}
