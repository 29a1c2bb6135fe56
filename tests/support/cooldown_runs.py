"""A cooldown of six clients in one process, on a clock of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transport.cooldown import CooldownClient, CooldownHost, Ledger, recorded_outcomes, restore
from transport.cooldown.destinations.folder import Folder
from transport.cooldown.epochs.records import EpochRecord
from transport.store import Store

CLIENTS = ("a", "b", "c", "d", "e", "f")
MODEL = {"weights": bytes(range(256)) * 40_000, "layers/0": b"zero", "layers/1": b"one"}


def save(folder: Path, step: int) -> None:
    for name, data in MODEL.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "step").write_text(str(step))


class Clock:
    """Moves when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class JumpingLoopTime:
    """The running loop's time, which jumps ahead when a test says so."""

    def __init__(self) -> None:
        self._loop: Any = asyncio.get_running_loop()

    def jump(self, by_s: float) -> None:
        time = self._loop.time
        self._loop.time = lambda: time() + by_s


class Run:
    """A run's store and destination, and hosts and clients of it."""

    def __init__(self, path: Path, store: Store) -> None:
        self.path = path
        self.store = store
        self.ledger = Ledger(self.store, "run")
        self.root = path / "destination"
        self.root.mkdir()
        self.clock = Clock()

    def host(self, **changed: Any) -> CooldownHost:
        options = {"cooldown_s": 6.0, "seed": 49, "clock": self.clock, **changed}
        return CooldownHost(self.store, "run", str(self.root), **options)

    async def leading(self, members: Sequence[str] | Mapping[str, str], **changed: Any) -> asyncio.Task[EpochRecord]:
        """A host that has opened epoch 7 and begins its cooldown."""
        host = self.host(**changed)
        await host.open(7)
        return asyncio.create_task(host.cooldown(7, 1, members))

    def client(self, name: str, **changed: Any) -> CooldownClient:
        options = {"save": save, "scratch": self.path / "scratch" / name, **changed}
        return CooldownClient(self.store, "run", name, **options)

    def record(self, epoch: int) -> EpochRecord:
        record, _ = self.ledger.look(epoch)
        assert record is not None
        return record

    def check_restored(self, epoch: int) -> None:
        """The epoch's checkpoint is what was saved, by the store's record and by the one at the destination."""
        destination = Folder(self.root)
        for number, record in enumerate((self.record(epoch), recorded_outcomes(destination, "run")[epoch])):
            restored = restore(record, destination, self.path / f"restored-{epoch}-{number}")
            found = {name: path.read_bytes() for name, path in restored.files.items()}
            assert found == {**MODEL, "step": str(record.step).encode()}

    def manifests(self) -> list[str]:
        return [path.parent.parent.name for path in sorted(self.root.rglob("manifest.json"))]

    async def time_out(self) -> None:
        """Let the clock run until the host has noticed."""
        while True:
            self.clock.now += 5.0
            await asyncio.sleep(0.01)


async def passing(run: Run, work: Awaitable[Any]) -> Any:
    """The work's result, while the clock runs fast."""
    clock = asyncio.create_task(run.time_out())
    try:
        return await work
    finally:
        clock.cancel()
        await asyncio.gather(clock, return_exceptions=True)
