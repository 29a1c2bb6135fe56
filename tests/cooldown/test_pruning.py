"""Local copies, prune and links: what is good is neither mistaken for another run's, nor removed."""

from __future__ import annotations

import asyncio
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
