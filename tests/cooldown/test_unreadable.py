"""Arguments and records that nobody could read: refused, or hiding themselves alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cooldown_runs import Run
from helpers import asynchronous

from transport.cooldown import Outcome, Part, Phase, open_destination, pruning, recorded_outcomes
from transport.cooldown.destinations.folder import Folder
from transport.cooldown.epochs.records import outcomes_folder
from transport.errors import UsageError
from transport.store.sqlite import SQLiteStore


@pytest.fixture
def cooling(tmp_path: Path) -> Iterator[Run]:
    with SQLiteStore(tmp_path / "store.sqlite3") as store:
        yield Run(tmp_path, store)


@asynchronous
async def test_what_nobody_could_read_is_not_recorded(cooling: Run) -> None:
    host = cooling.host()
    await host.open(7)
    with pytest.raises(TypeError):
        await host.cooldown(7, 200.0, ["c"])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="give several"):
        await host.cooldown(7, 200, "node1")
    assert cooling.record(7).phase is Phase.TRAINING
    record = (await asyncio.gather(host.cooldown(7, np.int64(200), ["c"]), cooling.client("c").cooldown(7)))[0]
    assert cooling.ledger.newest_checkpoint() == record


@asynchronous
async def test_a_record_that_cannot_be_read_hides_its_epoch_alone(cooling: Run) -> None:
    record = (await asyncio.gather(await cooling.leading(["c"]), cooling.client("c").cooldown(7)))[0]
    cooling.store.put(f"cooldown/run/epoch/{8:012d}", b'{"run": "\xff"}')
    for name in ("000000000008.json", "000000000009.json"):
        (cooling.root / outcomes_folder("run") / name).write_bytes(b"\xff")
    (cooling.root / outcomes_folder("run") / "000000000010.json").mkdir()
    assert cooling.ledger.epochs() == {7: record}
    assert cooling.ledger.newest_checkpoint() == record
    assert recorded_outcomes(Folder(cooling.root), "run") == {7: record}
    assert (await cooling.host().open()).epoch == 11  # all of those were opened once
    with pytest.raises(UsageError, match=r"epoch/0+8'"):
        await cooling.host().open(8)


@asynchronous
async def test_what_nobody_here_wrote_hides_nothing(cooling: Run) -> None:
    record = (await asyncio.gather(await cooling.leading(["c"]), cooling.client("c").cooldown(7)))[0]
    outcomes = cooling.root / outcomes_folder("run")
    for name in ("a\nb.json", "8.json", ".DS_Store"):
        (outcomes / name).write_bytes(b"{}")
    (outcomes / "link.json").symlink_to("/etc/hostname")
    with (outcomes / "000000000009.json").open("wb") as large:
        large.truncate(1 << 30)
    (cooling.root / "run" / "epoch-000000000007" / "a\nb").mkdir()
    with open_destination(str(cooling.root)) as destination:
        assert recorded_outcomes(destination, "run") == {7: record}
        assert pruning.plan(cooling.ledger.epochs(), destination, "run", 1).surplus == []
    cooling.check_restored(7)


@asynchronous
async def test_a_link_that_leads_to_itself_at_the_destination_is_a_missing_file(cooling: Run) -> None:
    spoiled = []

    def spoil(*_: Any) -> None:
        for path in [] if spoiled else cooling.root.glob("run/epoch-*/c/*/files/step"):
            path.unlink()
            path.symlink_to(path)
            spoiled.append(path)

    leading = await cooling.leading(["c"], cooldown_s=60)
    taken = await cooling.client("c", progress=lambda done, files, size: spoil() if done == files else None).cooldown(7)
    assert (await leading).outcome is Outcome.CHECKPOINTED
    assert taken.part is Part.WON
    (cooling.root / "run" / "epoch-000000000007" / "loop").symlink_to("loop")
    with open_destination(str(cooling.root)) as destination:
        assert pruning.plan(cooling.ledger.epochs(), destination, "run", 1).surplus == []
    cooling.check_restored(7)
    assert spoiled
