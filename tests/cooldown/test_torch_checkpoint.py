"""A model that torch.distributed.checkpoint saves on all ranks: to a destination and back, on any number of ranks."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path

import pytest
from helpers import Child

from transport.cooldown import Ledger, Outcome, recorded_outcomes, restore
from transport.cooldown.destinations.folder import Folder
from transport.store.sqlite import SQLiteStore

pytestmark = [
    pytest.mark.adapters("torch"),
    pytest.mark.slow,
    pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed"),
]

RANK = """
import runpy, sys
sys.argv = ["checkpoint_rank", *sys.argv[1:]]
runpy.run_module("checkpoint_rank", run_name="__main__")
"""


@contextlib.contextmanager
def ranks(path: Path, world: int, what: str, *arguments: object, **env: str):  # type: ignore[no-untyped-def]
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Child(RANK, path, rank, world, what, *arguments, env=env)) for rank in range(world)]


@pytest.fixture(scope="module")
def restored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by four ranks on two hosts, uploaded by one of each, restored by one process."""
    path = tmp_path_factory.mktemp("torch")
    (path / "destination").mkdir()
    with ranks(path, 4, "save") as members:
        said = [member.line().split() for member in members]
        assert [member.wait() for member in members] == [0] * 4
    assert {outcome for outcome, _ in said} == {"checkpointed"}
    assert sorted(part for _, part in said) == ["not_elected", "not_elected", "won", "won"]
    destination = Folder(path / "destination")
    record = recorded_outcomes(destination, "run")[7]
    files = restore(record, destination, path / "restored").files
    assert sorted(files) == [".metadata", *(f"__{rank}_0.distcp" for rank in range(4))]
    return path


@pytest.mark.parametrize("world", [1, 3])
def test_it_is_loaded_on_any_number_of_ranks(restored: Path, world: int) -> None:
    with ranks(restored, world, "load", restored / "restored") as members:
        assert [member.line() for member in members] == ["equal"] * world
        assert [member.wait() for member in members] == [0] * world


@pytest.mark.parametrize("world", [1, 3])
def test_it_is_loaded_from_the_destination_on_any_number_of_ranks(restored: Path, world: int) -> None:
    with ranks(restored, world, "fetch") as members:
        assert [member.line() for member in members] == ["equal"] * world
        assert [member.wait() for member in members] == [0] * world


def test_a_rank_that_is_killed_while_all_save_leaves_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "destination").mkdir()
    with ranks(tmp_path, 3, "save", KILLED_IN_SAVE="2", COOLDOWN_S="3") as members:
        assert members[2].line() == "in save"
        members[2].kill()
        for member in members[:2]:  # their collective call fails with their peer
            assert member.line().split()[0] == "timed_out"
    with SQLiteStore(tmp_path / "store.sqlite3") as store:
        record = Ledger(store, "run").epochs()[7]
    assert record.outcome is Outcome.TIMED_OUT
    assert "save() of step 30 failed" in record.notes["rank-0"].detail
    assert not list((tmp_path / "destination").rglob("*.distcp"))
    assert not list((tmp_path / "destination").rglob("manifest.json"))
