"""A run of the steps, with members that answer as a test has them: what is asked of whom after a failure."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from helpers import asynchronous

from transport.errors import WeightsChecksumError, WeightsTimeoutError
from transport.weights import updating
from transport.weights.plan.steps import Limits, Policy, VersionProof
from transport.weights.updating import Run

VERSION = VersionProof(2, 7)


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


def run_of_changes(replicas: dict[str, Any], policy: Policy, limits: Limits) -> Run:
    """An update of which changes are sent first."""
    return Run(
        {"trainer": Sends()},  # type: ignore[dict-item]
        replicas,
        2,
        policy=policy,
        limits=limits,
        on_step=lambda *_: None,
        whole=False,
        old=dict.fromkeys(replicas),
        pausing=lambda _: None,
    )


@asynchronous
async def test_a_replica_that_failed_for_another_reason_is_not_asked_for_the_whole_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        updating,
        "build_topology",
        lambda senders, replicas, _, whole: ({"base": [1] * senders}, {"base": [None] * replicas}),
    )
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
    monkeypatch.setattr(
        updating,
        "build_topology",
        lambda senders, replicas, _, whole: ({"base": [1] * senders}, {"base": [None] * replicas}),
    )

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
