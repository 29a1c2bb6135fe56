"""Runs one update: calls members within time limits, cancels late ones, collects their answers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from transport.errors import ChildrenLostError, MemberFailedError, ParentLostError, WeightsTimeoutError
from transport.weights.plan.admission import Event
from transport.weights.plan.engine import Metadata, WeightEngine
from transport.weights.plan.steps import CLOSING, Do, Proof, Step, UpdateMachine, Verdict
from transport.weights.worker import check

log = logging.getLogger(__name__)

_GRACE_S = 2.0  # for a cancelled member to end; after that it is not waited for


class TrainerMember(Protocol):
    """A trainer, here or in another process."""

    @property
    def name(self) -> str: ...

    async def prepare(self) -> Metadata: ...

    async def init_process_group(self, arguments: dict[str, Any]) -> None: ...

    async def send_weights(self, version: int) -> Proof | None: ...

    async def finalize(self) -> None: ...


class ReplicaMember(Protocol):
    """A replica, here (`worker.Replica`) or in another process.

    One whose process is gone has an attribute ``lost``, and may have ``tidy()`` for what it left on its host.
    """

    @property
    def name(self) -> str: ...

    async def abort(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def prepare(self) -> Metadata: ...

    async def init_process_group(self, arguments: dict[str, Any]) -> None: ...

    async def receive_weights(self, version: int) -> Proof: ...

    async def finalize(self) -> None: ...

    async def prove(self) -> Proof | None: ...

    async def resume_kv_cache(self) -> None: ...

    async def resume_generation(self) -> None: ...


def text_of(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".strip(": ").partition("\n")[0]


class Run:
    """Carries out the machine's steps and keeps their results."""

    def __init__(
        self,
        machine: UpdateMachine,
        trainers: Mapping[str, TrainerMember],
        replicas: Mapping[str, ReplicaMember],
        version: int,
        engine: type[WeightEngine],
        on_step: Callable[[Step, tuple[str, ...]], None],
        whole: bool,
    ) -> None:
        self.machine = machine
        self.proofs: dict[str, Proof | None] = {}
        self.verdicts: dict[str, Verdict] = {}
        self.steps_s: dict[str, float] = {}
        self.delta = False
        self._trainers = trainers
        self._replicas = replicas
        self._version = version
        self._engine = engine
        self._on_step = on_step
        self._whole = whole
        self._metadata: dict[str, Metadata] = {}
        self._arguments: dict[str, dict[str, Any]] = {}
        self._sent: list[Proof] = []
        self._received: dict[str, Proof] = {}
        self._forward: set[asyncio.Task[Any]] = set()
        self._closing = False

    @property
    def new(self) -> Proof | None:
        """The new version as its sender proves it; if the sender is gone, as all receivers prove it."""
        claimed = set(self._sent) or set(self._received.values())
        return claimed.pop() if len(claimed) == 1 else None

    def cancel(self, error: asyncio.CancelledError) -> None:
        """Begin the closing steps now. A cancellation during closing steps only makes the update fail."""
        step = self.machine._under_way or Step.ABORT
        if not self._closing:
            self.machine.fail(Step.ABORT if step in CLOSING else step, "", error)
            for task in self._forward:
                task.cancel()
        else:
            self.machine.fail(step, "", error)

    async def drive(self, judge: Callable[[Run], dict[str, Verdict]]) -> None:
        """Run all steps."""
        while (do := self.machine.next(time.monotonic())) is not None:
            self._closing = do.step in CLOSING
            begun = time.monotonic()
            try:
                self._on_step(do.step, do.members)
            except Exception:  # an observer's error must not leave replicas paused
                log.exception("the on_step callback failed at step %s", do.step)
            self.machine.report(await self._step(do))
            self.steps_s[do.step.value] = time.monotonic() - begun
            if do.step is Step.PROVE:
                self.verdicts = judge(self)
                proven = (Event.PROVEN_NEW, Event.PROVEN_OLD)
                self.machine.admit(name for name, verdict in self.verdicts.items() if verdict.event in proven)
        await self._tidy()

    async def _tidy(self) -> None:
        """Remove the segments of killed members; not earlier, because other members of their host may map them."""
        members: list[TrainerMember | ReplicaMember] = [*self._trainers.values(), *self._replicas.values()]
        for member in members:
            tidy = getattr(member, "tidy", None)
            if tidy is not None and getattr(member, "lost", False):
                try:
                    await tidy()
                except Exception:  # does not change the update's result; `transport reclaim` finds the segments
                    log.exception("the segments of %s were not removed; run: transport reclaim", member.name)

    async def _step(self, do: Do) -> list[tuple[str, BaseException]]:
        """Run a step with all its members at once; returns failures, causes first, then in the order of time."""
        if do.step is Step.GROUP:
            return []
        if do.step is Step.TOPOLOGY:
            return self._topology()
        failed: list[tuple[str, BaseException]] = []

        async def one(name: str) -> None:
            try:
                await self._ask(do.step, name)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise  # the manager cancelled it, and records why
                cancelled = MemberFailedError(f"{name}: its {do.step} was cancelled, and not by the manager")
                cancelled.__cause__ = error
                failed.append((name, cancelled))
            except BaseException as error:
                failed.append((name, error))

        tasks = {asyncio.get_running_loop().create_task(one(name)): name for name in do.members}
        if not self._closing:
            self._forward = set(tasks)
        late = await self._over(do, set(tasks), failed)
        self._forward = set()
        gave_up = do.step is Step.INIT and bool(failed)
        for task in late:
            task.cancel()
            if not gave_up:
                failed.append(
                    (
                        tasks[task],
                        WeightsTimeoutError(f"timeout: {tasks[task]} did not finish {do.step} in {do.limit_s:.4g} s"),
                    )
                )
        if late:
            await asyncio.wait(late, timeout=_GRACE_S)
        # Several members detect one failure at almost the same time, in any order: its cause comes first.
        return sorted(failed, key=lambda each: isinstance(each[1], ParentLostError | ChildrenLostError))

    async def _over(
        self, do: Do, left: set[asyncio.Task[None]], failed: list[tuple[str, BaseException]]
    ) -> set[asyncio.Task[None]]:
        """Wait until the step is over; returns the members that have not ended.

        A member that cannot join ends the step for those that wait for it.
        """
        until = time.monotonic() + do.limit_s
        while left and (passed := until - time.monotonic()) > 0:
            when = asyncio.FIRST_COMPLETED if do.step is Step.INIT else asyncio.ALL_COMPLETED
            _, left = await asyncio.wait(left, timeout=passed, return_when=when)
            if do.step is Step.INIT and failed:
                _, left = await asyncio.wait(left, timeout=_GRACE_S) if left else (set(), left)
                break
        return left

    def _topology(self) -> list[tuple[str, BaseException]]:
        trainers, replicas = list(self._trainers), list(self.machine.group)
        try:
            metadata = [self._metadata[name] for name in (*trainers, *replicas)]
            if self._whole:
                metadata = [{**each, "version": -1} for each in metadata]
            actor, rollout = self._engine.build_topology(len(trainers), len(replicas), metadata)
            for names, columns in ((trainers, actor), (replicas, rollout)):
                for at, name in enumerate(names):
                    self._arguments[name] = {key: values[at] for key, values in columns.items()}
            self.delta = any(value is not None for value in actor.get("base", ()))
        except Exception as error:
            return [("", error)]
        return []

    async def _ask(self, step: Step, name: str) -> None:
        result = await self._call(step, name)
        check(result, step.value)
        if step is Step.PREPARE:
            if not isinstance(result, dict):
                raise MemberFailedError(f"{name}: prepare returned {result!r:.80}, expected a dict")
            self._metadata[name] = result
        elif step is Step.TRANSFER:
            if isinstance(result, Proof):
                if name in self._trainers:
                    self._sent.append(result)
                else:
                    self._received[name] = result
            elif name not in self._trainers:
                raise MemberFailedError(f"{name}: receive_weights returned {result!r:.80}, expected a Proof")
        elif step is Step.PROVE:
            self.proofs[name] = result if isinstance(result, Proof) else None

    def _call(self, step: Step, name: str) -> Coroutine[Any, Any, Any]:
        trainer, replica = self._trainers.get(name), self._replicas.get(name)
        if trainer is not None:
            if step is Step.PREPARE:
                return trainer.prepare()
            if step is Step.INIT:
                return trainer.init_process_group(self._arguments[name])
            if step is Step.TRANSFER:
                return trainer.send_weights(self._version)
            return trainer.finalize()
        assert replica is not None
        if step is Step.INIT:
            return replica.init_process_group(self._arguments[name])
        if step is Step.TRANSFER:
            return replica.receive_weights(self._version)
        plain: dict[Step, Callable[[], Coroutine[Any, Any, Any]]] = {
            Step.ABORT: replica.abort,
            Step.RELEASE_KV: replica.release_kv_cache,
            Step.PREPARE: replica.prepare,
            Step.FINALIZE_REPLICAS: replica.finalize,
            Step.PROVE: replica.prove,
            Step.RESUME_KV: replica.resume_kv_cache,
            Step.RESUME_GENERATION: replica.resume_generation,
        }
        return plain[step]()
