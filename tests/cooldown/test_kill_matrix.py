"""Every role of a collective checkpoint is killed in every phase: nothing half-made is taken, nothing good deleted.

The victim is a process of its own that stops in the phase and is killed there. The other members run in this process.
An epoch before has a checkpoint, which must outlast all of it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cooldown_runs import passing
from cooldown_victims import COORDINATOR_PHASES, MEMBER_PHASES, together
from helpers import Child, asynchronous
from sharded_runs import HOSTS, ShardedRun, model, write

from transport.cooldown import Outcome, sharded
from transport.cooldown.epochs.election import elect
from transport.store.sqlite import SQLiteStore

ELECTED = elect([name for name, host in HOSTS.items() if host == "a"], seed=49, epoch=7)[0]
UNELECTED = next(name for name, host in HOSTS.items() if host == "a" and name != ELECTED)
ALONE = "b0"  # the only member of its host: nobody else has its files

DONE, NONE = Outcome.CHECKPOINTED, Outcome.TIMED_OUT
MATRIX = [
    *((ELECTED, phase, NONE if "sav" in phase else DONE) for phase in MEMBER_PHASES),
    *((UNELECTED, phase, NONE) for phase in MEMBER_PHASES if "sav" in phase),
    *((ALONE, phase, NONE if phase != "reported" else DONE) for phase in MEMBER_PHASES),
    *(("coordinator", phase, DONE) for phase in COORDINATOR_PHASES),
]
VICTIM = """
import runpy, sys
sys.argv = ["cooldown_victims", *sys.argv[1:]]
runpy.run_module("cooldown_victims", run_name="__main__")
"""
counted: dict[str, dict[str, int]] = {}


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    """Prints what was killed, and what became of it."""
    yield
    print("\nkill matrix: role, killed, checkpointed by others, timed out with nothing taken")
    for role, counts in counted.items():
        print(f"  {role:12} {sum(counts.values()):3} {counts.get('checkpointed', 0):3} {counts.get('timed_out', 0):3}")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShardedRun]:
    monkeypatch.setattr(sharded, "AGAIN_FIRST_S", 0.01)
    with SQLiteStore(tmp_path / "store.sqlite3") as store:
        yield ShardedRun(tmp_path, store)


def role_of(victim: str) -> str:
    names = {ELECTED: "elected", UNELECTED: "not elected", ALONE: "alone"}
    return names.get(victim, victim)


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "phase", "outcome"), MATRIX, ids=[f"{role_of(victim)} {phase}" for victim, phase, _ in MATRIX]
)
@asynchronous
async def test_killed(job: ShardedRun, victim: str, phase: str, outcome: Outcome) -> None:
    host = job.host()
    await host.open(6)
    await asyncio.gather(host.cooldown(6, 6, HOSTS), *(job.member(name).cooldown(6) for name in HOSTS))
    await host.open(7)

    def save(name: str, folder: Path, step: int) -> None:
        together(job.path, name)
        write(folder, model(name))

    others = [name for name in HOSTS if name != victim]
    members = [
        asyncio.create_task(
            job.member(name, takeover_s=0.3, save=lambda *given, name=name: save(name, *given)).cooldown(7)
        )
        for name in others
    ]
    leading = None if victim == "coordinator" else asyncio.create_task(host.cooldown(7, 30, HOSTS))
    environment = {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH", "")])
    }
    with Child(VICTIM, job.path, victim, phase, env=environment) as child:
        assert await asyncio.to_thread(child.line) == f"at {phase}"
        child.kill()
    if outcome is NONE:
        (job.path / "broken").touch()  # what a collective library finds out
    if leading is None:
        leading = asyncio.create_task(job.host().cooldown(7, 30, HOSTS))
    record = await (passing(job, leading) if outcome is NONE else leading)
    taken = await asyncio.gather(*members)
    assert record.outcome is outcome
    assert {each.record.outcome for each in taken} == {outcome}
    if outcome is DONE:
        job.check_restored(7)
    else:
        assert not list(job.root.glob("run/epoch-000000000007/*/*/manifest.json"))
    job.check_restored(6)
    for name in others:  # what they saved is where it was
        files = job.path / "scratch" / HOSTS[name] / "run" / name / "epoch-000000000006"
        assert {path.relative_to(files).as_posix() for path in files.rglob("*") if path.is_file()} == set(model(name))
    assert job.record(7) == record
    counts = counted.setdefault(role_of(victim), {})
    counts[record.outcome.value] = counts.get(record.outcome.value, 0) + 1
