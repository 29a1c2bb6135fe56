"""A client whose call is cancelled, or whose save fails: what it leaves, and what it tells."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cooldown_runs import CLIENTS, Run, save
from helpers import PATIENCE_S, asynchronous, until

from transport.cooldown import Outcome, Part, Phase, coordination
from transport.cooldown.epochs.records import Refusal, ReportKind, UploadReport
from transport.store.sqlite import SQLiteStore


@pytest.fixture
def cooling(tmp_path: Path) -> Iterator[Run]:
    with SQLiteStore(tmp_path / "store.sqlite3") as store:
        yield Run(tmp_path, store)


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("verdict", ["none", "comes too late"])
@asynchronous
async def test_a_client_that_is_cancelled_takes_its_complete_upload_back(
    cooling: Run, monkeypatch: pytest.MonkeyPatch, verdict: str
) -> None:
    """Nobody verifies it, or a coordinator has verified it and not yet written so."""
    begun, go_on = threading.Event(), threading.Event()
    real = coordination.verified

    def verified(*arguments: Any) -> Any:
        found = real(*arguments)
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return found

    monkeypatch.setattr(coordination, "verified", verified)
    leading = await cooling.leading(CLIENTS)
    await until(lambda: cooling.record(7).phase is Phase.COOLDOWN)
    if verdict == "none":
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)
    taking = asyncio.create_task(cooling.client("c").cooldown(7))
    await until(cooling.manifests if verdict == "none" else begun.is_set)
    await until(lambda: [each.kind for each in cooling.ledger.reports(7)] == [ReportKind.UPLOADED])
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    assert cooling.manifests() == []
    assert not [path for path in cooling.root.rglob("*") if path.is_file() and "epoch-" in str(path)]
    assert [each.kind for each in cooling.ledger.reports(7)] == [ReportKind.CANCELLED]
    assert cooling.record(7).notes["c"].refusal is Refusal.WITHDRAWN
    go_on.set()
    leading = leading if verdict != "none" else asyncio.create_task(cooling.host().cooldown(7, 1, CLIENTS))
    taken = await cooling.client("e").cooldown(7)  # the other elected one
    assert taken.part is Part.WON
    assert (await leading).outcome is Outcome.CHECKPOINTED
    cooling.check_restored(7)


@asynchronous
async def test_a_client_that_is_cancelled_leaves_the_checkpoint_that_it_has_become(cooling: Run) -> None:
    record = (await asyncio.gather(await cooling.leading(["c"]), cooling.client("c").cooldown(7)))[0]
    assert record.checkpoint is not None
    report = UploadReport(run="run", epoch=7, client="c", kind=ReportKind.CANCELLED, attempt=record.checkpoint.attempt)
    assert not cooling.ledger.withdraw(report)
    assert cooling.record(7) == record
    other = msgspec.structs.replace(report, attempt="f" * 16)
    assert cooling.ledger.withdraw(other)
    assert cooling.record(7) == record


class Unsayable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("error", [RuntimeError("/data/\udcff"), RuntimeError("x" * (40 << 20)), Unsayable()])
@asynchronous
async def test_a_save_that_fails_is_told_and_tried_again_whatever_it_says(cooling: Run, error: Exception) -> None:
    failures = [error]

    def once(folder: Path, step: int) -> None:
        if failures:
            raise failures.pop()
        save(folder, step)

    leading = await cooling.leading(["c"], cooldown_s=60)
    taken = await cooling.client("c", save=once).cooldown(7)
    assert taken.part is Part.WON
    assert (await leading).outcome is Outcome.CHECKPOINTED
