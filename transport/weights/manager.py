"""WeightUpdate: runs updates of trainers and replicas, and decides which replica takes traffic.

    manager = WeightUpdate(trainers, replicas, policy="restore")
    outcome = await manager.update(version)       # raises the first error; `error.outcome` has the result for each
    manager.admitted                              # {"replica 0": 7, ...}: replicas with traffic, and their version

`UpdateMachine` decides the order of steps, and `verdicts` the result; this file carries them out. Members run a step
concurrently, each within the step's limit; a member that exceeds it is cancelled and not waited for. Closing steps also
run when the update is cancelled, and are waited for, at most for the sum of their limits.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence

import msgspec

from transport.errors import ClosedError, UsageError, WeightsChecksumError, WeightsError
from transport.runtime.arguments import named_kind
from transport.runtime.explaining import explained_calls
from transport.weights.plan.admission import Admission, Event, State
from transport.weights.plan.engine import WeightEngine
from transport.weights.plan.steps import Limits, Policy, Proof, Step, UpdateMachine, Verdict, verdicts
from transport.weights.ring_engine import RingEngine
from transport.weights.updating import ReplicaMember, Run, TrainerMember, text_of


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an update.

    Attributes:
        delta: whether only changes were sent.
        replicas: state of every replica afterwards.
        failures: one line each, in the order of time.
        steps_s: seconds of each step.
    """

    version: int
    delta: bool
    replicas: dict[str, Admission]
    failures: list[str]
    steps_s: dict[str, float]
    seconds: float


class WeightsStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the manager was made, and the replicas by state now."""

    updates: int
    failed: int
    cancelled: int
    deltas: int
    fallbacks: int  # deltas that were sent again as a whole version
    seconds: float
    replicas_by_state: dict[str, int]


@explained_calls
class WeightUpdate:
    """The manager of one run. Belongs to one loop; one update at a time.

    Args:
        policy: after a failure, "restore" admits every replica with the version that it proves; "exclude" excludes
            replicas that fell behind others, and succeeds if one has the new version; "fail_job" admits none.
        on_step: called at the beginning of each step, with the step and its members.
    """

    def __init__(
        self,
        trainers: Sequence[TrainerMember],
        replicas: Sequence[ReplicaMember] = (),
        *,
        policy: Policy = "restore",
        limits: Limits | None = None,
        engine: type[WeightEngine] = RingEngine,
        on_step: Callable[[Step, tuple[str, ...]], None] = lambda step, members: None,
    ) -> None:
        for trainer in trainers:
            _check_member(trainer, "a trainer")
        self._trainers = {trainer.name: trainer for trainer in trainers}
        self._replicas: dict[str, ReplicaMember] = {}
        self._policy: Policy = policy
        self._limits = limits or Limits()
        self._engine = engine
        self._on_step = on_step
        self._admissions: dict[str, Admission] = {}
        self._proven: dict[str, Proof | None] = {}  # the last proof of each replica
        self._busy = False
        self._counts = dict.fromkeys(("updates", "failed", "cancelled", "deltas", "fallbacks"), 0)
        self._seconds = 0.0
        self._process = os.getpid()
        for replica in replicas:
            self.join(replica)

    def __repr__(self) -> str:
        return f"<WeightUpdate {len(self._trainers)} trainers, {', '.join(map(str, self._admissions.values()))}>"

    # --- replicas that take traffic -------------------------------------------------------------------------------
    @property
    def admissions(self) -> dict[str, Admission]:
        """The state of every replica."""
        return dict(self._admissions)

    @property
    def admitted(self) -> dict[str, int]:
        """Replicas that may take requests, and the version that each has proven."""
        return {name: each.version for name, each in self._admissions.items() if each.admitted}

    def join(self, replica: ReplicaMember) -> None:
        """Add a replica, or one that was excluded: pending until the next update of it. Also during an update."""
        _check_member(replica, "a replica")
        before = self._admissions.get(replica.name)
        if before is None:
            self._admissions[replica.name] = Admission()
        elif before.state is State.EXCLUDED:
            self._admissions[replica.name] = before.after(Event.READMIT, reason="it joined again")
        else:
            raise UsageError(f"{replica.name} is already a member; exclude it first")
        self._proven[replica.name] = None
        self._replicas[replica.name] = replica

    def exclude(self, name: str, reason: str) -> None:
        """Take a replica out of traffic and of updates, until it joins again."""
        if name not in self._admissions:
            raise UsageError(f"name={name!r:.80} is no member; these are: {sorted(self._admissions)}")
        if self._admissions[name].state is State.UPDATING:
            raise UsageError(f"{name} is being updated; wait for the end of the update")
        self._admissions[name] = self._admissions[name].after(Event.EXCLUDE, reason=reason)

    def statistics(self) -> WeightsStatistics:
        """Counters at this moment."""
        states = [each.state for each in self._admissions.values()]
        return WeightsStatistics(
            **self._counts,
            seconds=self._seconds,
            replicas_by_state={state.value: states.count(state) for state in State},
        )

    # --- updates ------------------------------------------------------------------------------------------------------
    async def update(self, version: int, *, whole: bool = False) -> Outcome:
        """Bring every replica that is not excluded to ``version``.

        If a delta fails its checksum, the whole version is sent once more. ``whole``: send no delta.

        Raises:
            UsageError: an update is running, or there is no replica to update.
            Exception: the first error, of any member; its notes are the later errors, and its `outcome`, if it can have
                one, is the `Outcome`. CancelledError counts as a failure like any other.
        """
        if self._process != os.getpid():
            raise ClosedError("a forked child does not have its parent's members of an update; make them in the child")
        if self._busy:
            raise UsageError("an update is already running; wait for its end")
        names = tuple(name for name, each in self._admissions.items() if each.state is not State.EXCLUDED)
        machine = UpdateMachine(
            tuple(self._trainers), names, self._policy, self._limits, time.monotonic()
        )  # raises before any step begins
        self._busy = True
        try:
            outcome, error = await self._one(machine, names, version, whole=whole)
            wrong = any(isinstance(each.error, WeightsChecksumError) for each in machine.failures)
            if wrong and outcome.delta and not isinstance(error, asyncio.CancelledError):
                self._counts["fallbacks"] += 1
                names = tuple(name for name in names if self._admissions[name].state is not State.EXCLUDED)
                if names:
                    machine = UpdateMachine(tuple(self._trainers), names, self._policy, self._limits, time.monotonic())
                    outcome, error = await self._one(machine, names, version, whole=True)
            if error is not None:
                raise error
            return outcome
        finally:
            self._busy = False

    async def _one(
        self, machine: UpdateMachine, names: tuple[str, ...], version: int, *, whole: bool = False
    ) -> tuple[Outcome, BaseException | None]:
        self._counts["updates"] += 1
        for name in names:
            self._admissions[name] = self._admissions[name].after(Event.BEGIN)
        run = Run(machine, self._trainers, self._replicas, version, self._engine, self._on_step, whole)
        work = asyncio.get_running_loop().create_task(run.drive(self._judge))
        cancelled = False
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError as error:
                if not cancelled:
                    run.cancel(error)
                cancelled = True
        work.result()  # raises only defects of this package
        self._admit(run)
        return self._conclude(run, version)

    def _conclude(self, run: Run, version: int) -> tuple[Outcome, BaseException | None]:
        failures = run.machine.failures
        outcome = Outcome(
            version=version,
            delta=run.delta,
            replicas=self.admissions,
            failures=[f"{each.step}: {each.member or 'manager'}: {text_of(each.error)}" for each in failures],
            steps_s=run.steps_s,
            seconds=sum(run.steps_s.values()),
        )
        self._seconds += outcome.seconds
        self._counts["deltas"] += run.delta
        satisfied = self._policy == "exclude" and any(
            each.admitted and each.version == version for each in outcome.replicas.values()
        )
        cancelled = any(isinstance(each.error, asyncio.CancelledError) and not each.member for each in failures)
        if not failures or (satisfied and not cancelled):
            return outcome, None
        self._counts["cancelled" if cancelled else "failed"] += 1
        first = failures[0].error
        for each, line in list(zip(failures, outcome.failures, strict=True))[1:]:
            if each.error is not first:
                first.add_note(f"then {line}")
        if isinstance(first, WeightsError):
            first.outcome = outcome
        if cancelled and not isinstance(first, asyncio.CancelledError):
            # the caller that cancelled must get a CancelledError; the earlier failure is its cause
            cancelling = next(each.error for each in failures if isinstance(each.error, asyncio.CancelledError))
            cancelling.__cause__ = first
            return outcome, cancelling
        return outcome, first

    def _judge(self, run: Run) -> dict[str, Verdict]:
        """The verdict on every replica's proof."""
        return verdicts(
            self._policy,
            {name: run.proofs.get(name) for name in run.machine.begun.get(Step.PROVE, ())},
            run.new,
            self._proven,
            {each.member: f"{each.step}: {text_of(each.error)}" for each in reversed(run.machine.failures)},
            frozenset(name for name, replica in self._replicas.items() if getattr(replica, "lost", False)),
        )

    def _admit(self, run: Run) -> None:
        """Apply the verdicts, but a replica that could not resume takes no traffic, whatever its weights are."""
        for name, (event, version, reason) in run.verdicts.items():
            resuming = run.machine.failed_in(name, (Step.RESUME_KV, Step.RESUME_GENERATION))
            if event in (Event.PROVEN_NEW, Event.PROVEN_OLD):
                self._proven[name] = run.proofs[name]
                if resuming is not None:
                    lost = getattr(self._replicas[name], "lost", False)
                    event, version = Event.EXCLUDE if lost else Event.UNPROVEN, None
                    reason = f"{resuming.step}: {text_of(resuming.error)}"
            self._admissions[name] = self._admissions[name].after(event, version=version, reason=reason)


def _check_member(member: object, what: str) -> None:
    if not isinstance(getattr(member, "name", None), str):
        raise UsageError(f"{what} of a WeightUpdate got {named_kind(member)}: give a member, which has a name")
