"""Local copies, prune and links: what is good is neither mistaken for another run's, nor removed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import asynchronous

from transport.cooldown import CooldownClient, CooldownHost, EpochRecord, Ledger, open_destination, restore
from transport.cooldown.destinations.base import Destination
from transport.cooldown.epochs.records import Outcome, Phase
from transport.cooldown.pruning import carry_out, plan
from transport.errors import DestinationError
from transport.store import Store, open_store

ATTEMPT = "0123456789abcdef"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(f"sqlite://{tmp_path}/store.sqlite3") as opened:
        yield opened


@pytest.fixture
def destination(tmp_path: Path) -> Iterator[Destination]:
    (tmp_path / "destination").mkdir()
    with open_destination(str(tmp_path / "destination")) as opened:
        yield opened


async def checkpoint(store: Store, destination: Destination, run: str, step: int, scratch: Path) -> EpochRecord:
    def save(into: Path, step: int) -> None:
        (into / "model.bin").write_text(f"{run} step {step}")

    host = CooldownHost(store, run, destination.url, cooldown_s=60, seed=0)
    client = CooldownClient(store, run, "node", save=save, scratch=scratch)
    epoch = (await host.open()).epoch
    record, _ = await asyncio.gather(host.cooldown(epoch, step, ["node"]), client.cooldown(epoch))
    assert record.outcome is Outcome.CHECKPOINTED
    return record


def model(record: EpochRecord, destination: Destination, into: Path) -> str:
    return restore(record, destination, into).files["model.bin"].read_text()


@asynchronous
async def test_a_local_copy_of_another_run_is_not_uploaded(
    store: Store, destination: Destination, tmp_path: Path
) -> None:
    await checkpoint(store, destination, "a", 100, tmp_path / "scratch")
    record = await checkpoint(store, destination, "b", 7, tmp_path / "scratch")
    assert model(record, destination, tmp_path / "restored") == "b step 7"


@asynchronous
async def test_prune_keeps_a_checkpoint_that_can_be_restored(
    store: Store, destination: Destination, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        await checkpoint(store, destination, "run", step, tmp_path / "scratch")
    newest = next((tmp_path / "destination/run/epoch-000000000003").rglob("manifest.json"))
    newest.write_bytes(newest.read_bytes()[:-3])
    records = Ledger(store, "run").epochs()
    found = plan(records, destination, "run", 1)
    assert {each.epoch for each in found.surplus} == {1}
    assert any("damaged" in why for _, why in found.kept)
    carry_out(found, destination, "run")
    assert model(records[2], destination, tmp_path / "restored") == "run step 2"


def ended(destination: Destination, **fields: object) -> EpochRecord:
    given = {"run": "run", "epoch": 1, "destination": destination.url, "cooldown_s": 5.0, "seed": 0}
    given |= {"phase": Phase.ENDED, "outcome": Outcome.TIMED_OUT, "clients": ("a",)}
    return EpochRecord(**{**given, **fields})  # type: ignore[arg-type]


def test_prune_keeps_shares_of_a_set_that_was_not_verified_in_time(destination: Destination) -> None:
    record = ended(destination, clients=("a", "b"), hosts={"a": "one", "b": "two"}, refused={f"b/{ATTEMPT}": "size"})
    for client in ("a", "b"):
        destination.put(f"run/epoch-000000000001/{client}/{ATTEMPT}/files/part", b"part")
    found = plan({1: record}, destination, "run", 1)
    assert [each.path for each in found.surplus] == [f"run/epoch-000000000001/b/{ATTEMPT}"]
    assert plan({1: record}, destination, "run", 1, unverified=True).kept == []


def test_a_link_that_leads_out_of_the_folder_is_not_followed(destination: Destination, tmp_path: Path) -> None:
    precious = tmp_path / f"elsewhere/a/{ATTEMPT}/files/precious"
    precious.parent.mkdir(parents=True)
    precious.write_text("of somebody else")
    (tmp_path / "destination/run").mkdir()
    (tmp_path / "destination/run/epoch-000000000001").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DestinationError, match="leads out of the folder"):
        plan({1: ended(destination)}, destination, "run", 1)
    with pytest.raises(DestinationError, match="leads out of the folder"):
        destination.put(f"run/epoch-000000000001/a/{ATTEMPT}/files/precious", b"")
    assert precious.read_text() == "of somebody else"
    destination.delete("run/epoch-000000000001")  # the link itself
    assert precious.exists()


_DYING = """
import os, signal, sys
from pathlib import Path
from transport.cooldown.destinations.base import check_permissions
from transport.cooldown.destinations.folder import Folder

die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
folder = Folder(Path(sys.argv[1]))
if sys.argv[2] == "put":
    Path.replace = die
    folder.put(sys.argv[3], b"{}")
Folder.delete = die
check_permissions(folder)
"""


def dies(*arguments: object) -> bool:
    command = [sys.executable, "-P", "-c", _DYING, *map(str, arguments)]
    return subprocess.run(command, check=False).returncode == -signal.SIGKILL


@pytest.mark.nightly
@asynchronous
async def test_prune_removes_what_killed_processes_left_in_a_folder(
    store: Store, destination: Destination, tmp_path: Path
) -> None:
    record = await checkpoint(store, destination, "run", 1, tmp_path / "scratch")
    root = tmp_path / "destination"
    before = sorted(root.rglob("*"))
    upload = f"run/epoch-{record.epoch:012d}/{record.checkpoint.client}/{record.checkpoint.attempt}"
    written = [f"run/outcomes/{record.epoch:012d}.json", f"{upload}/manifest.json"]
    for arguments in (*(("put", path) for path in written), ("probe",)):
        assert await asyncio.to_thread(dies, root, *arguments)
    assert len(sorted(root.rglob("*"))) == len(before) + 3
    carry_out(plan({record.epoch: record}, destination, "run", 1), destination, "run")
    assert sorted(root.rglob("*")) == before
    assert model(record, destination, tmp_path / "restored") == "run step 1"


@asynchronous
async def test_the_store_keeps_of_earlier_epochs_only_their_own_records(
    store: Store, destination: Destination, tmp_path: Path
) -> None:
    for step in range(3):
        await checkpoint(store, destination, "run", step, tmp_path / "scratch")
    await checkpoint(store, destination, "run-2", 0, tmp_path / "scratch-2")
    found = [key.split("/")[2:] for key in store.scan("cooldown/run/")]
    assert {epoch for _, epoch, *_ in found} == {f"{epoch:012d}" for epoch in (1, 2, 3)}
    assert {kind for kind, epoch, *_ in found if epoch != f"{3:012d}"} == {"epoch"}
    assert {kind for kind, epoch, *_ in found if epoch == f"{3:012d}"} == {"epoch", "report", "bell"}
    assert len(Ledger(store, "run-2").reports(1)) == 1
