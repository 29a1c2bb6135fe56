"""A member is killed, or stands still, at the beginning of every step of both phases; all members are processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable

import pytest
from helpers import asynchronous
from member_groups import MemberGroup
from process_member import ProcessMember

from transport.errors import MemberFailedError, MemberLostError, WeightsTimeoutError
from transport.weights.manager import UpdateOutcome
from transport.weights.plan.admission import AdmissionState
from transport.weights.plan.steps import STAGE, Limits, UpdateStep

pytestmark = [pytest.mark.ucx, pytest.mark.slow]

# Replicas 0 and 1 share a host: 0 lands what comes, 1 maps it.
STAGED = [step for step in STAGE if step is not UpdateStep.PAUSE_IN_PLACE]
COMMITTED = [UpdateStep.PAUSE, UpdateStep.LOAD, UpdateStep.RESUME]
ENDED = [UpdateStep.FINALIZE_TRAINERS, UpdateStep.FINALIZE_REPLICAS]
STEPS = [*STAGED, *COMMITTED, *ENDED]
SHORT = Limits(**dict.fromkeys(("pause", "prepare", "connect", "transfer", "load", "finalize", "prove", "resume"), 3))


@contextlib.asynccontextmanager
async def group_of(replicas: int, resident: str = "mapped") -> AsyncIterator[MemberGroup]:
    group = await MemberGroup.start(replicas, resident=resident)
    try:
        await group.update()
        yield group
    finally:
        await group.close()


def at(
    step: UpdateStep, victim: ProcessMember, number: signal.Signals
) -> Callable[[UpdateStep, tuple[str, ...]], None]:
    """Signals the victim at the beginning of a step; of one that replicas take by themselves, at its own."""
    done = False

    def begins(now: UpdateStep, names: tuple[str, ...]) -> None:
        nonlocal done
        its_own = step not in COMMITTED or victim.name in names or victim.name == "trainer"
        if now is step and its_own and not done:
            os.kill(victim.process.pid, number)
            done = True

    return begins


@pytest.mark.nightly(keep=1)
@pytest.mark.parametrize("name", ["trainer", "replica 0", "replica 1"])
@pytest.mark.parametrize("step", STEPS)
@asynchronous
async def test_a_member_killed_at_any_step_costs_only_itself(step: UpdateStep, name: str) -> None:
    async with group_of(3) as group:
        killed = next(each for each in (group.trainer, *group.replicas) if each.name == name)
        group.manager._on_step = at(step, killed, signal.SIGKILL)
        if (step, name) == (UpdateStep.FINALIZE_REPLICAS, "trainer"):
            outcome = await group.update()  # it had done everything
        else:
            with pytest.raises(MemberLostError, match=name) as caught:
                await group.update()
            assert isinstance(caught.value.outcome, UpdateOutcome)
            outcome = caught.value.outcome
        version = 1 if step in STAGED else 2
        alive = [each for each in group.replicas if each is not killed]
        if step in STAGED:
            assert outcome.pause_s == {}
        else:
            assert outcome.pause_s.keys() >= {each.name for each in alive}
        await group.serves(*(-1 if each is killed else version for each in group.replicas))
        assert group.manager.admitted == {each.name: version for each in alive}
        for each in alive:
            assert (await each.call("told", "look"))[2:] == [True, True], f"{each.name} does not generate"
        if killed in group.replicas:
            assert group.manager.admissions[name].state is AdmissionState.EXCLUDED
            await group.update()
            assert group.manager.admitted == {each.name: 3 for each in alive}


@pytest.mark.nightly
@asynchronous
async def test_a_replica_killed_while_it_goes_back_to_the_version_before_costs_only_itself() -> None:
    async with group_of(2, "in_place") as group:
        await group.replicas[0].call("told", "half", "raise")
        group.manager._on_step = at(UpdateStep.RESTORE, group.replicas[0], signal.SIGKILL)
        with pytest.raises(MemberFailedError):
            await group.update()
        await group.serves(-1, 2)
        assert group.manager.admitted == {"replica 1": 2}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["replica 0", "replica 1"])
@pytest.mark.parametrize("step", STEPS)
@asynchronous
async def test_a_replica_that_stands_still_at_any_step_takes_no_traffic_with_weights_that_it_did_not_prove(
    step: UpdateStep, name: str
) -> None:
    async with group_of(3) as group:
        stopped = next(each for each in group.replicas if each.name == name)
        group.manager._on_step = at(step, stopped, signal.SIGSTOP)
        group.manager._limits = SHORT
        try:
            with pytest.raises(WeightsTimeoutError, match=name) as caught:
                await group.update()
        finally:
            os.kill(stopped.process.pid, signal.SIGCONT)
        assert isinstance(caught.value.outcome, UpdateOutcome)
        version = 1 if step in STAGED else 2
        assert bool(caught.value.outcome.pause_s) == (step not in STAGED)
        others = {each.name: version for each in group.replicas if each is not stopped}
        if step in COMMITTED:
            assert group.manager.admitted == others
            assert group.manager.admissions[name].state is AdmissionState.PENDING
        else:
            assert group.manager.admitted == {**others, name: version}
        group.manager._limits = Limits()
        outcome = await group.update()  # whatever it does late is over, or does not touch this version
        assert outcome.failures == []
        await group.serves(3, 3, 3)
        assert await group.running() == [True] * 3
