"""Runs one update: calls members within time limits, cancels late ones, collects their answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from transport.errors import (
    MemberFailedError,
    WeightsChecksumError,
    WeightsTimeoutError,
)
from transport.runtime import spans
from transport.runtime.error_text import error_text
from transport.weights.plan.admission import AdmissionEvent
from transport.weights.plan.steps import (
    DROPS_ONE,
    STAGE,
    Limits,
    Metadata,
    Policy,
    ReplicaVerdict,
    StepFailure,
    UpdateStep,
    VersionProof,
    known_alone,
    remoteness,
    verdicts,
)
from transport.weights.sharding.roles import build_topology
from transport.weights.worker_calls import check

log = logging.getLogger(__name__)

_GRACE_S = 2.0  # for a cancelled member to end; after that it is not waited for


class UpdateMember(Protocol):
    """A trainer or a replica, as an update calls both.

    One whose process is gone has an attribute ``lost``, and may have ``tidy()`` for what it left on its host.
    """

    @property
    def name(self) -> str: ...

    async def prepare(self) -> Metadata: ...

    async def init_process_group(self, arguments: dict[str, Any]) -> None: ...

    async def finalize(self) -> None: ...


class TrainerMember(UpdateMember, Protocol):
    """A trainer, here or in another process."""

    async def send_weights(self, version: int) -> VersionProof | None: ...


class ReplicaMember(UpdateMember, Protocol):
    """A replica, here (`worker.Replica`) or in another process."""

    async def land(self, version: int) -> VersionProof: ...

    async def pause(self) -> None: ...

    async def load(self) -> VersionProof | None: ...

    async def restore(self) -> VersionProof | None: ...

    async def prove(self) -> VersionProof | None: ...

    async def resume(self, generate: bool) -> None: ...


def text_of(error: BaseException) -> str:
    """Return an error in one line."""
    return error_text(error).partition("\n")[0]


class Run:
    """One update of these replicas. `drive` runs it; what it found is in the attributes.

    Args:
        old: the last proof of each replica.
        pausing: called with the name of each replica before it is paused.

    Attributes:
        failures: in the order of time.
        proofs: of the replicas that were paused; None: no proof.
        delta: whether only changes were sent.
        fell_back: whether they were, gave wrong bytes, and the whole version was sent after them.
        steps_s: seconds of each step; of a step that replicas take by themselves those of the slowest.
        pause_s: seconds of each replica that was paused, until it generated again or the update ended.
    """

    def __init__(
        self,
        trainers: Mapping[str, TrainerMember],
        replicas: Mapping[str, ReplicaMember],
        version: int,
        *,
        policy: Policy,
        limits: Limits,
        on_step: Callable[[UpdateStep, tuple[str, ...]], None],
        whole: bool,
        old: Mapping[str, VersionProof | None],
        pausing: Callable[[str], None],
    ) -> None:
        self.failures: list[StepFailure] = []
        self.proofs: dict[str, VersionProof | None] = {}
        self.steps_s: dict[str, float] = {}
        self.pause_s: dict[str, float] = {}
        self.new: VersionProof | None = None  # the version as its senders prove it
        self.delta = False
        self.fell_back = False
        self._trainers = dict(trainers)
        self._replicas = dict(replicas)
        self._members: dict[str, UpdateMember] = {**trainers, **replicas}
        self._version = version
        self._policy: Policy = policy
        self._limits = limits
        self._on_step = on_step
        self._whole = whole
        self._old = dict(old)
        self._pausing = pausing
        self._metadata: dict[str, Metadata] = {}
        self._arguments: dict[str, dict[str, Any]] = {}
        self._sent: set[VersionProof] = set()
        self._landed: dict[str, VersionProof] = {}
        self._dropped: set[str] = set()  # replicas that the stage went on without
        self._late: set[tuple[UpdateStep, str]] = set()
        self._prepared: set[str] = set()
        self._paused: dict[str, float] = {}  # since when
        self._under_way: set[asyncio.Task[Any]] = set()  # of the stage
        self._staging = True
        self._stopped = False  # the stage failed: nothing is committed
        self._step_now = UpdateStep.PREPARE
        self._judged = asyncio.Event()  # every paused replica has proven what it serves, or could not

    # --- failures -----------------------------------------------------------------------------------------------
    def cancel(self, error: asyncio.CancelledError) -> None:
        """End the stage now. A commit that has begun is completed, and the update then fails."""
        self._fail(self._step_now, "", error)
        for task in self._under_way:
            task.cancel()

    def _fail(self, step: UpdateStep, member: str, error: BaseException) -> None:
        self.failures.append(StepFailure(step, member, error))
        if self._staging:
            if self._policy == "exclude" and step in DROPS_ONE and member in self._replicas:
                self._dropped.add(member)
                self._stopped |= not self._group
            else:
                self._stopped = True

    @property
    def reasons(self) -> dict[str, str]:
        """The first failure of each member that failed; "" is the manager."""
        return {each.member: f"{each.step}: {text_of(each.error)}" for each in reversed(self.failures)}

    @property
    def cancelled(self) -> bool:
        """True if the update was cancelled."""
        return any(isinstance(each.error, asyncio.CancelledError) and not each.member for each in self.failures)

    @property
    def lost(self) -> frozenset[str]:
        """Replicas whose process is gone."""
        return frozenset(name for name, replica in self._replicas.items() if getattr(replica, "lost", False))

    @property
    def _group(self) -> tuple[str, ...]:
        return tuple(name for name in self._replicas if name not in self._dropped)

    # --- the phases -----------------------------------------------------------------------------------------------
    async def drive(self) -> None:
        """Run all steps. If changes gave wrong bytes, nothing is committed before the whole version has been sent."""
        with spans.span("transport.weights.update", version=self._version, replicas=len(self._replicas)):
            await self._drive()

    async def _drive(self) -> None:
        until = time.monotonic() + self._limits.total
        try:
            await self._stage(until)
            wrong = any(isinstance(each.error, WeightsChecksumError) for each in self.failures)
            if self.delta and wrong and not self.cancelled:
                await self._finalize()
                self._fall_back()
                await self._stage(until)
            self._staging = False
            committed = () if self._stopped else self._group
            names = list(dict.fromkeys([*self._paused, *committed]))
            self.proofs = dict.fromkeys(names)
            left = set(names)
            await asyncio.gather(*(self._commit(name, name in committed, left) for name in names))
        finally:
            await self._finalize()
            await self._tidy()

    async def _finalize(self) -> None:
        for step, members in (
            (UpdateStep.FINALIZE_TRAINERS, self._trainers),
            (UpdateStep.FINALIZE_REPLICAS, self._replicas),
        ):
            await self._step(step, [name for name in members if name in self._prepared], self._limits.of(step))

    def _fall_back(self) -> None:
        """Forget what came of the changes, but not a cancellation, nor replicas that were dropped for another failure.

        Replicas that are paused stay so.
        """
        log.warning("v%d: its changes gave wrong bytes, and the whole version is sent: %s", self._version, self.reasons)
        self._whole = self.fell_back = True
        of_changes = (each for each in self.failures if isinstance(each.error, WeightsChecksumError))
        relayed = (each for each in self.failures if remoteness(each.error) == 1)  # by who has wrong bytes
        again = {each.member for each in (*of_changes, *relayed)} - self.lost
        self._dropped -= again
        cancelled = [each for each in self.failures if isinstance(each.error, asyncio.CancelledError)]
        self.failures = [each for each in self.failures if each in cancelled or each.member in self._dropped]
        self._stopped = bool(cancelled) or not self._group
        self.new, self.delta = None, False
        self._sent.clear()
        self._landed.clear()

    async def _stage(self, until: float) -> None:
        for step in STAGE:
            left = until - time.monotonic()
            if left <= 0 and not self._stopped:
                text = f"timeout: the update took longer than {self._limits.total:g} s before {step}"
                self._fail(step, "", WeightsTimeoutError(text))
            if self._stopped:
                return
            members = [*self._trainers, *self._group]
            if step is UpdateStep.PAUSE_IN_PLACE:
                in_place = (name for name in self._group if self._metadata[name].get("in_place"))
                members = [name for name in in_place if name not in self._paused]
                for name in members:
                    log.info("%s lands versions in its own tensors, and is paused for the whole transfer", name)
                    self._begin_pause(name)
            await self._step(step, members, min(self._limits.of(step), left))
        self.new = self._sent.pop() if len(self._sent) == 1 else None
        for name in self._group:
            if self._landed.get(name) != self.new or self.new is None:
                what = f"{name} has landed {self._landed.get(name)}, and the senders sent {self.new}"
                self._fail(UpdateStep.TRANSFER, name, MemberFailedError(what))

    async def _commit(self, name: str, load: bool, left: set[str]) -> None:
        """Have one replica load what it has landed, or without ``load`` go on as it is; its version is proven."""
        ready = name in self._paused  # in place: paused before the transfer
        if not ready:
            self._begin_pause(name)
            ready = await self._one(UpdateStep.PAUSE, name)
        if load and ready:
            if await self._one(UpdateStep.LOAD, name) and self.proofs[name] != self.new:
                self._fail(UpdateStep.LOAD, name, MemberFailedError(f"{name} does not prove v{self._version}"))
            # A load that is late goes on: nothing can be loaded before it ends, and nothing is proven.
            if self.proofs[name] != self.new and (UpdateStep.LOAD, name) not in self._late:
                self.proofs[name] = None
                await self._one(UpdateStep.RESTORE, name)
        else:
            await self._one(UpdateStep.PROVE, name)
        left.discard(name)
        if not left:
            self._judged.set()
        if not known_alone(self._policy, self.proofs[name], self.new):
            await self._judged.wait()
        await self._one(UpdateStep.RESUME, name)
        self.pause_s[name] = time.monotonic() - self._paused[name]

    @property
    def verdicts(self) -> dict[str, ReplicaVerdict | None]:
        """The verdict on each replica; None: it was not paused, and stays what it was."""
        return verdicts(self._policy, self._replicas, self.proofs, self.new, self._old, self.reasons, self.lost)

    def _resumed(self, replica: ReplicaMember) -> Coroutine[Any, Any, None]:
        """Have a replica that was paused go on; it generates if it has proven a version."""
        verdict = self.verdicts[replica.name]
        return replica.resume(
            verdict is not None and verdict.event in (AdmissionEvent.PROVEN_NEW, AdmissionEvent.PROVEN_OLD)
        )

    def _begin_pause(self, name: str) -> None:
        self._paused[name] = time.monotonic()
        self._pausing(name)

    async def _tidy(self) -> None:
        """Remove the segments of killed members; not earlier, because other members of their host may map them."""
        for member in self._members.values():
            tidy = getattr(member, "tidy", None)
            if tidy is not None and getattr(member, "lost", False):
                try:
                    await tidy()
                except Exception:  # does not change the update's result; `transport reclaim` finds the segments
                    log.exception("the segments of %s were not removed; run: transport reclaim", member.name)

    # --- a step -----------------------------------------------------------------------------------------------
    async def _one(self, step: UpdateStep, name: str) -> bool:
        """Have one replica do a step; whether it did."""
        return not await self._step(step, [name], self._limits.of(step))

    async def _step(self, step: UpdateStep, members: Sequence[str], limit_s: float) -> list[tuple[str, BaseException]]:
        """Run a step with all these members at once; returns failures, causes first, then in the order of time."""
        if not members:
            return []
        self._step_now = step
        begun = time.monotonic()
        try:
            self._on_step(step, tuple(members))
        except Exception:  # an observer's error must not leave replicas paused
            log.exception("the on_step callback failed at step %s", step)
        with spans.span(f"transport.weights.{step}", members=list(members), version=self._version) as of_step:
            failed = self._topology() if step is UpdateStep.TOPOLOGY else await self._asking(step, members, limit_s)
            for _, error in failed:
                if of_step is not None:
                    of_step.record_exception(error)
        for name, error in failed:
            self._fail(step, name, error)
        before, took = self.steps_s.get(step.value, 0.0), time.monotonic() - begun
        self.steps_s[step.value] = before + took if self._staging else max(before, took)
        return failed

    async def _asking(
        self, step: UpdateStep, members: Sequence[str], limit_s: float
    ) -> list[tuple[str, BaseException]]:
        failed: list[tuple[str, BaseException]] = []

        async def one(name: str) -> None:
            try:
                await self._ask(step, name)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise  # the manager cancelled it, and records why
                cancelled = MemberFailedError(f"{name}: its {step} was cancelled, and not by the manager")
                cancelled.__cause__ = error
                failed.append((name, cancelled))
            except BaseException as error:
                failed.append((name, error))

        tasks = {asyncio.get_running_loop().create_task(one(name)): name for name in members}
        if self._staging:
            self._under_way = set(tasks)
        late = await self._over(step, limit_s, set(tasks), failed)
        self._under_way = set()
        gave_up = step is UpdateStep.CONNECT and bool(failed)
        for task in late:
            task.cancel()
            self._late.add((step, tasks[task]))
            if not gave_up:
                text = f"timeout: {tasks[task]} did not finish {step} in {limit_s:.4g} s"
                failed.append((tasks[task], WeightsTimeoutError(text)))
        if late:
            await asyncio.wait(late, timeout=_GRACE_S)
        # Several members detect one failure at almost the same time, in any order: its cause comes first.
        return sorted(failed, key=lambda each: remoteness(each[1]))

    async def _over(
        self, step: UpdateStep, limit_s: float, left: set[asyncio.Task[None]], failed: list[tuple[str, BaseException]]
    ) -> set[asyncio.Task[None]]:
        """Wait until the step is over; returns the members that have not ended.

        A member that cannot join ends the step for those that wait for it.
        """
        until = time.monotonic() + limit_s
        while left and (passed := until - time.monotonic()) > 0:
            when = asyncio.FIRST_COMPLETED if step is UpdateStep.CONNECT else asyncio.ALL_COMPLETED
            _, left = await asyncio.wait(left, timeout=passed, return_when=when)
            if step is UpdateStep.CONNECT and failed:
                _, left = await asyncio.wait(left, timeout=_GRACE_S) if left else (set(), left)
                break
        return left

    def _topology(self) -> list[tuple[str, BaseException]]:
        trainers, replicas = list(self._trainers), list(self._group)
        try:
            metadata = [self._metadata[name] for name in (*trainers, *replicas)]
            actor, rollout = build_topology(len(trainers), len(replicas), metadata, whole=self._whole)
            for names, columns in ((trainers, actor), (replicas, rollout)):
                for at, name in enumerate(names):
                    self._arguments[name] = {key: values[at] for key, values in columns.items()}
            self.delta = any(value is not None for value in actor.get("base", ()))
        except Exception as error:
            return [("", error)]
        return []

    async def _ask(self, step: UpdateStep, name: str) -> None:
        result = await self._call(step, name)
        check(result, step.value)
        if step is UpdateStep.PREPARE:
            if not isinstance(result, dict):
                raise MemberFailedError(f"{name}: prepare returned {result!r:.80}, expected a dict")
            self._metadata[name] = result
        elif step is UpdateStep.TRANSFER and isinstance(result, VersionProof):
            if name in self._replicas:
                self._landed[name] = result
            else:
                self._sent.add(result)
        elif step in (UpdateStep.LOAD, UpdateStep.RESTORE, UpdateStep.PROVE):
            self.proofs[name] = result if isinstance(result, VersionProof) else None

    def _call(self, step: UpdateStep, name: str) -> Coroutine[Any, Any, Any]:
        member, replica = self._members[name], self._replicas.get(name)
        if step is UpdateStep.PREPARE:
            self._prepared.add(name)
            return member.prepare()
        if step is UpdateStep.CONNECT:
            return member.init_process_group(self._arguments[name])
        if step in (UpdateStep.FINALIZE_TRAINERS, UpdateStep.FINALIZE_REPLICAS):
            return member.finalize()
        if replica is None:
            return self._trainers[name].send_weights(self._version)
        plain: dict[UpdateStep, Callable[[], Coroutine[Any, Any, Any]]] = {
            UpdateStep.PAUSE_IN_PLACE: replica.pause,
            UpdateStep.TRANSFER: lambda: replica.land(self._version),
            UpdateStep.PAUSE: replica.pause,
            UpdateStep.LOAD: replica.load,
            UpdateStep.RESTORE: replica.restore,
            UpdateStep.PROVE: replica.prove,
            UpdateStep.RESUME: lambda: self._resumed(replica),
        }
        return plain[step]()
