"""WeightUpdate: runs updates of trainers and replicas, and decides which replica takes traffic.

    manager = WeightUpdate(trainers, replicas, policy="restore")
    outcome = await manager.update(version)       # raises the first error; `error.outcome` has the result for each
    manager.admitted                              # {"replica 0": 7, ...}: replicas with traffic, and their version

A version is staged first: it lands beside the one that is served, on every replica, and each proves what has landed.
Nobody is paused for that, and a failure leaves everybody as it was. Then it is committed: each replica is paused, loads
it, proves what it serves and goes on. Members are called within the step's limit; a late one is cancelled, and not
waited for. A commit that has begun is completed even if the update is cancelled.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

import msgspec

from transport.errors import ClosedError, UsageError, WeightsError
from transport.weights.plan.admission import Admission, AdmissionEvent, AdmissionState
from transport.weights.plan.steps import POLICIES, Limits, Policy, UpdateStep, VersionProof
from transport.weights.updating import ReplicaMember, Run, TrainerMember, text_of


class UpdateOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an update.

    Attributes:
        delta: whether only changes were sent.
        replicas: state of every replica afterwards.
        failures: one line each, in the order of time.
        steps_s: seconds of each step; of a step that replicas take by themselves those of the slowest.
        pause_s: seconds for which each replica that was paused did not generate.
    """

    version: int
    delta: bool
    replicas: dict[str, Admission]
    failures: list[str]
    steps_s: dict[str, float]
    pause_s: dict[str, float]
    seconds: float


class WeightsStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the manager was made, and the replicas by state now."""

    updates: int
    failed: int
    cancelled: int
    deltas: int
    fallbacks: int  # deltas that were sent again as a whole version
    seconds: float
    pause_s: dict[str, float]  # of each replica, its last pause
    replicas_by_state: dict[str, int]


class WeightUpdate:
    """The manager of one run. Belongs to one loop; one update at a time.

    Args:
        policy: "restore" commits only what every replica has landed and proven, and after a failure admits every
            replica with the version that it proves; "exclude" commits what some have landed, excludes those that fell
            behind, and succeeds if one has the new version; "fail_job" commits as "restore", and after a failure
            admits none.
        on_step: called at the beginning of each step, with the step and its members; in a commit for each replica.
    """

    def __init__(
        self,
        trainers: Sequence[TrainerMember],
        replicas: Sequence[ReplicaMember] = (),
        *,
        policy: Policy = "restore",
        limits: Limits | None = None,
        on_step: Callable[[UpdateStep, tuple[str, ...]], None] = lambda step, members: None,
    ) -> None:
        if policy not in POLICIES:
            raise UsageError(f"policy={policy!r}: choose {', '.join(map(repr, POLICIES))}")
        self._trainers = {trainer.name: trainer for trainer in trainers}
        self._replicas: dict[str, ReplicaMember] = {}
        self._policy: Policy = policy
        self._limits = limits or Limits()
        self._on_step = on_step
        self._admissions: dict[str, Admission] = {}
        self._proven: dict[str, VersionProof | None] = {}  # the last proof of each replica
        self._busy = False
        self._updating: frozenset[str] = frozenset()  # the replicas of the update that runs
        self._counts = dict.fromkeys(("updates", "failed", "cancelled", "deltas", "fallbacks"), 0)
        self._seconds = 0.0
        self._pause_s: dict[str, float] = {}
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
        before = self._admissions.get(replica.name)
        if before is None:
            self._admissions[replica.name] = Admission()
        elif before.state is AdmissionState.EXCLUDED:
            self._admissions[replica.name] = before.after(AdmissionEvent.READMIT, reason="it joined again")
        else:
            raise UsageError(f"{replica.name} is already a member; exclude it first")
        self._proven[replica.name] = None
        self._replicas[replica.name] = replica

    def exclude(self, name: str, reason: str) -> None:
        """Take a replica out of traffic and of updates, until it joins again.

        Raises UsageError while an update of it runs, also before it is paused.
        """
        if name not in self._admissions:
            raise UsageError(f"name={name!r:.80} is no member; these are: {sorted(self._admissions)}")
        if name in self._updating:
            raise UsageError(f"{name} is being updated; wait for the end of the update")
        self._admissions[name] = self._admissions[name].after(AdmissionEvent.EXCLUDE, reason=reason)

    def statistics(self) -> WeightsStatistics:
        """Counters at this moment."""
        states = [each.state for each in self._admissions.values()]
        return WeightsStatistics(
            **self._counts,
            seconds=self._seconds,
            pause_s=dict(self._pause_s),
            replicas_by_state={state.value: states.count(state) for state in AdmissionState},
        )

    # --- updates ------------------------------------------------------------------------------------------------------
    async def update(self, version: int, *, whole: bool = False) -> UpdateOutcome:
        """Bring every replica that is not excluded to ``version``.

        If a delta fails its checksum on one replica, none commits it, and the whole version is sent once more.
        ``whole``: send no delta.

        Raises:
            UsageError: an update is running, or there is no replica to update.
            Exception: the first error, of any member; its notes are the later errors, and its `outcome`, if it can have
                one, is the `UpdateOutcome`. CancelledError counts as a failure like any other.
        """
        if self._process != os.getpid():
            raise ClosedError("a forked child does not have its parent's members of an update; make them in the child")
        if self._busy:
            raise UsageError("an update is already running; wait for its end")
        if not self._trainers or self._trainers.keys() & self._replicas.keys() or not self._to_update():
            raise UsageError(
                f"{len(self._trainers)} trainers, {len(self._to_update())} replicas: give at least one of each, with "
                "different names"
            )
        self._busy = True
        try:
            outcome, error = await self._run(version, whole=whole)
            if error is not None:
                raise error
            return outcome
        finally:
            self._busy, self._updating = False, frozenset()

    def _to_update(self) -> dict[str, ReplicaMember]:
        return {
            name: replica
            for name, replica in self._replicas.items()
            if self._admissions[name].state is not AdmissionState.EXCLUDED
        }

    async def _run(self, version: int, *, whole: bool) -> tuple[UpdateOutcome, BaseException | None]:
        self._counts["updates"] += 1
        replicas = self._to_update()
        self._updating = frozenset(replicas)

        def pausing(name: str) -> None:
            self._admissions[name] = self._admissions[name].after(AdmissionEvent.BEGIN)

        run = Run(
            self._trainers,
            replicas,
            version,
            policy=self._policy,
            limits=self._limits,
            on_step=self._on_step,
            whole=whole,
            old=self._proven,
            pausing=pausing,
        )
        work = asyncio.get_running_loop().create_task(run.drive())
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError as error:
                if not run.cancelled:
                    run.cancel(error)
        work.result()  # raises only defects of this package
        self._admit(run)
        return self._conclude(run, version)

    def _conclude(self, run: Run, version: int) -> tuple[UpdateOutcome, BaseException | None]:
        failures = run.failures
        outcome = UpdateOutcome(
            version=version,
            delta=run.delta,
            replicas=self.admissions,
            failures=[f"{each.step}: {each.member or 'manager'}: {text_of(each.error)}" for each in failures],
            steps_s=run.steps_s,
            pause_s=run.pause_s,
            seconds=sum(run.steps_s.values()),
        )
        self._seconds += outcome.seconds
        self._pause_s |= run.pause_s
        self._counts["deltas"] += run.delta or run.fell_back
        self._counts["fallbacks"] += run.fell_back
        satisfied = self._policy == "exclude" and any(
            each.admitted and each.version == version for each in outcome.replicas.values()
        )
        if not failures or (satisfied and not run.cancelled):
            return outcome, None
        self._counts["cancelled" if run.cancelled else "failed"] += 1
        first = failures[0].error
        for each, line in list(zip(failures, outcome.failures, strict=True))[1:]:
            if each.error is not first:
                first.add_note(f"then {line}")
        if isinstance(first, WeightsError):
            first.outcome = outcome
        if run.cancelled and not isinstance(first, asyncio.CancelledError):
            # the caller that cancelled must get a CancelledError; the earlier failure is its cause
            cancelling = next(each.error for each in failures if isinstance(each.error, asyncio.CancelledError))
            cancelling.__cause__ = first
            return outcome, cancelling
        return outcome, first

    def _admit(self, run: Run) -> None:
        """Apply the verdicts, but a replica that could not resume takes no traffic, whatever its weights are."""
        resuming = {
            each.member: f"{each.step}: {text_of(each.error)}"
            for each in reversed(run.failures)
            if each.step is UpdateStep.RESUME
        }
        for name, verdict in run.verdicts.items():
            before = self._admissions[name]
            if verdict is None:
                why = run.reasons.get(name)
                if before.state is AdmissionState.PENDING and why:
                    self._admissions[name] = msgspec.structs.replace(before, reason=why)
                continue
            event, version, reason = verdict
            if event in (AdmissionEvent.PROVEN_NEW, AdmissionEvent.PROVEN_OLD):
                self._proven[name] = run.proofs[name]
                if name in resuming:
                    event, version, reason = AdmissionEvent.UNPROVEN, None, resuming[name]
            self._admissions[name] = before.after(event, version=version, reason=reason)
