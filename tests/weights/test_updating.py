"""A run of the steps, with members that answer as a test has them: what is asked of whom after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import asynchronous

from transport.errors import WeightsChecksumError, WeightsTimeoutError
from transport.weights import updating
from transport.weights.plan.steps import Limits, Policy, VersionProof
from transport.weights.updating import Run

VERSION = VersionProof(2, 7)


@pytest.fixture(autouse=True)
def of_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have changes sent unless the version is to be whole."""

    def topology(senders: int, replicas: int, _: object, *, whole: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"base": [None if whole else 1] * senders}, {"base": [None] * replicas}

    monkeypatch.setattr(updating, "build_topology", topology)


class Sends:
    """A trainer."""

    name = "trainer"

    async def prepare(self) -> dict[str, Any]:
        return {}

    async def init_process_group(self, arguments: dict[str, Any]) -> None: ...

    async def send_weights(self, version: int) -> VersionProof:
        return VERSION

    async def finalize(self) -> None: ...


class Lands(Sends):
    """A replica whose transfers raise these errors, one after the other, and then succeed."""

    lost = False

    def __init__(self, name: str, *errors: Exception) -> None:
        self.name = name
        self.errors = list(errors)
        self.prepared = 0

    async def prepare(self) -> dict[str, Any]:
        self.prepared += 1
        return await super().prepare()

    async def land(self, version: int) -> VersionProof:
        if self.errors:
            raise self.errors.pop(0)
        return VERSION

    async def load(self) -> VersionProof:
        return VERSION

    async def pause(self) -> None: ...

    async def restore(self) -> None: ...

    async def prove(self) -> None: ...

    async def resume(self, confirmed: bool) -> None: ...


def run_of_changes(
    replicas: dict[str, Any],
    policy: Policy,
    limits: Limits,
    *,
    trainer: Any = None,
    pausing: Callable[[str], None] = lambda _: None,
) -> Run:
    """An update of which changes are sent first."""
    return Run(
        {"trainer": trainer or Sends()},
        replicas,
        2,
        policy=policy,
        limits=limits,
        on_step=lambda *_: None,
        whole=False,
        old=dict.fromkeys(replicas),
        pausing=pausing,
    )


@asynchronous
async def test_a_replica_that_failed_for_another_reason_is_not_asked_for_the_whole_version() -> None:
    well, wrong = Lands("well"), Lands("wrong", WeightsChecksumError("of the changes"))
    full = Lands("full", RuntimeError("its disk is full"))
    replicas: dict[str, Any] = {each.name: each for each in (well, wrong, full)}
    run = run_of_changes(replicas, "exclude", Limits())
    await run.drive()
    assert run.fell_back
    assert run.proofs == {"well": VERSION, "wrong": VERSION}
    assert [each.member for each in run.failures] == ["full"]
    assert [each.prepared for each in (well, wrong, full)] == [2, 2, 1]


@asynchronous
async def test_a_whole_version_behind_its_changes_has_the_time_that_these_have_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(updating, "time", SimpleNamespace(monotonic=lambda: now))

    class Slow(Lands):
        async def prepare(self) -> dict[str, Any]:
            nonlocal now
            now += 60.0
            return await super().prepare()

    replicas: dict[str, Any] = {"slow": Slow("slow", WeightsChecksumError("of the changes"))}
    run = run_of_changes(replicas, "restore", Limits(total=100.0))
    await run.drive()
    assert run.fell_back
    assert [type(each.error) for each in run.failures] == [WeightsTimeoutError]


@asynchronous
async def test_an_update_that_is_cancelled_while_its_changes_are_wrong_sends_no_whole_version() -> None:
    class Cancels(Lands):
        async def land(self, version: int) -> VersionProof:
            run.cancel(asyncio.CancelledError())
            return await super().land(version)

    replica = Cancels("replica", WeightsChecksumError("of the changes"))
    run = run_of_changes({"replica": replica}, "restore", Limits())
    await run.drive()
    assert run.cancelled and not run.fell_back
    assert replica.prepared == 1


@asynchronous
async def test_a_replica_whose_load_is_late_is_asked_to_load_nothing_else() -> None:
    class Loads(Lands):
        restored = False

        async def load(self) -> VersionProof:
            return await asyncio.get_running_loop().create_future()

        async def restore(self) -> None:
            self.restored = True

    replica = Loads("replica")
    run = run_of_changes({"replica": replica}, "restore", Limits(load=0.01))
    await run.drive()
    assert [type(each.error) for each in run.failures] == [WeightsTimeoutError]
    assert not replica.restored


@asynchronous
async def test_only_replicas_that_land_in_place_are_paused_before_the_transfer() -> None:
    class InPlace(Lands):
        async def prepare(self) -> dict[str, Any]:
            return {"in_place": True}

    paused: list[str] = []

    class Watching(Sends):
        async def send_weights(self, version: int) -> VersionProof:
            assert paused == ["in place"]
            return await super().send_weights(version)

    replicas: dict[str, Any] = {"in place": InPlace("in place"), "beside": Lands("beside")}
    run = run_of_changes(replicas, "restore", Limits(), trainer=Watching(), pausing=paused.append)
    await run.drive()
    assert not run.failures
    assert sorted(paused) == ["beside", "in place"]
