"""The order of an update's steps, and the handling of their failures. Pure: reports in, the next step out.

    abort → group → release KV → prepare → topology → init → transfer        forward, until the first failure
      → finalize (trainers, then replicas) → prove → resume KV → resume generation      closing, always, every step

A flag of intent is set *before* a step begins, so a step is undone even if its result is unknown: finalize for members
with a begun prepare, resume KV after a begun release, resume generation after a begun abort. If a closing step fails,
the next one still runs. The first failure is the update's error; later ones become its notes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from transport.errors import UsageError, WeightsTimeoutError
from transport.runtime.explaining import explained_calls
from transport.weights.plan.admission import Event

Policy = Literal["restore", "exclude", "fail_job"]


class Step(enum.StrEnum):
    """Steps of an update, in this order."""

    ABORT = "abort"
    GROUP = "group"
    RELEASE_KV = "release KV"
    PREPARE = "prepare"
    TOPOLOGY = "topology"
    INIT = "init"
    TRANSFER = "transfer"
    FINALIZE_TRAINERS = "finalize trainers"
    FINALIZE_REPLICAS = "finalize replicas"
    PROVE = "prove"
    RESUME_KV = "resume KV"
    RESUME_GENERATION = "resume generation"


FORWARD = tuple(Step)[: tuple(Step).index(Step.TRANSFER) + 1]
CLOSING = tuple(Step)[len(FORWARD) :]

_OF_TRAINERS = frozenset({Step.PREPARE, Step.INIT, Step.TRANSFER, Step.FINALIZE_TRAINERS})
_OF_NO_MEMBER = frozenset({Step.GROUP, Step.TOPOLOGY})  # the manager's own
_DROPS_ONE = frozenset({Step.ABORT, Step.RELEASE_KV, Step.PREPARE})  # a group without this replica can still be built
_UNDOES = {
    Step.FINALIZE_TRAINERS: Step.PREPARE,
    Step.FINALIZE_REPLICAS: Step.PREPARE,
    Step.PROVE: Step.ABORT,
    Step.RESUME_KV: Step.RELEASE_KV,
    Step.RESUME_GENERATION: Step.ABORT,
}


@explained_calls
class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits in seconds of each step, and of all forward steps together (``total``), without closing steps."""

    abort: float = 30.0
    release_kv: float = 30.0
    prepare: float = 60.0
    init: float = 60.0
    transfer: float = 600.0
    finalize: float = 30.0
    prove: float = 60.0
    resume: float = 60.0
    total: float = 900.0

    def of(self, step: Step) -> float:
        """The limit of one step."""
        return {
            Step.ABORT: self.abort,
            Step.GROUP: self.init,
            Step.RELEASE_KV: self.release_kv,
            Step.PREPARE: self.prepare,
            Step.TOPOLOGY: self.init,
            Step.INIT: self.init,
            Step.TRANSFER: self.transfer,
            Step.FINALIZE_TRAINERS: self.finalize,
            Step.FINALIZE_REPLICAS: self.finalize,
            Step.PROVE: self.prove,
            Step.RESUME_KV: self.resume,
            Step.RESUME_GENERATION: self.resume,
        }[step]


class Do(NamedTuple):
    """Begin a step for these members, all at once."""

    step: Step
    members: tuple[str, ...]
    limit_s: float


class Failure(NamedTuple):
    """A failure of a step. ``member`` "" is the manager itself."""

    step: Step
    member: str
    error: BaseException


class UpdateMachine:
    """One update. Call `next`, do it, `report` who failed (in the order of time), again until `next` is None."""

    def __init__(
        self, trainers: Sequence[str], replicas: Sequence[str], policy: Policy, limits: Limits, now: float
    ) -> None:
        if policy not in ("restore", "exclude", "fail_job"):
            raise UsageError(f"policy={policy!r}: choose 'restore', 'exclude' or 'fail_job'")
        if not trainers or not replicas or len({*trainers, *replicas}) != len(trainers) + len(replicas):
            raise UsageError(
                f"{len(trainers)} trainers, {len(replicas)} replicas: give at least one of each, with different names"
            )
        self._trainers = tuple(trainers)
        self._replicas = tuple(replicas)
        self._policy = policy
        self._limits = limits
        self._deadline = now + limits.total
        self._steps = iter(Step)
        self._forward = True
        self._under_way: Step | None = None
        self.failures: list[Failure] = []
        self.begun: dict[Step, frozenset[str]] = {}  # flags of intent
        self.dropped: set[str] = set()  # replicas that the update continues without
        self._admitted: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        return f"<UpdateMachine {self._under_way or 'not begun'}, {len(self.failures)} failures>"

    @property
    def group(self) -> tuple[str, ...]:
        """Replicas that are to receive the new version."""
        return tuple(name for name in self._replicas if name not in self.dropped)

    def next(self, now: float) -> Do | None:
        """The next step, with its flags of intent set. None: the update is over."""
        for step in self._steps:
            if step in FORWARD and not self._go_on(step, now):
                continue
            self._under_way = step
            members = self._members(step)
            if not members and step not in _OF_NO_MEMBER:
                continue
            self.begun[step] = frozenset(members)
            limit_s = self._limits.of(step)
            if step in FORWARD:
                limit_s = min(limit_s, self._deadline - now)
            return Do(step, members, limit_s)
        return None

    def _go_on(self, step: Step, now: float) -> bool:
        if self._forward and now >= self._deadline:
            self.fail(
                step,
                "",
                WeightsTimeoutError(f"timeout: the update took longer than {self._limits.total:g} s before {step}"),
            )
        return self._forward

    def _members(self, step: Step) -> tuple[str, ...]:
        if step in _OF_NO_MEMBER:
            return ()
        if step in FORWARD:
            return (self._trainers if step in _OF_TRAINERS else ()) + self.group
        among = self._trainers if step in _OF_TRAINERS else self._replicas
        due = self.begun.get(_UNDOES[step], frozenset())
        if step is Step.RESUME_GENERATION:
            due &= self._admitted
        return tuple(name for name in among if name in due)

    def report(self, failed: Iterable[tuple[str, BaseException]]) -> None:
        """Report the members that failed in the last step, in the order of time; empty: it succeeded."""
        assert self._under_way is not None
        for member, error in failed:
            self.fail(self._under_way, member, error)

    def fail(self, step: Step, member: str, error: BaseException) -> None:
        """Record a failure: of a member's step, or of the whole update (``member`` ""), such as a cancellation."""
        self.failures.append(Failure(step, member, error))
        if step in CLOSING:
            return
        if self._policy == "exclude" and step in _DROPS_ONE and member in self._replicas:
            self.dropped.add(member)
            self._forward &= bool(self.group)
        else:
            self._forward = False

    def admit(self, names: Iterable[str]) -> None:
        """Set the replicas that have proven what they serve: only these resume generation."""
        self._admitted = frozenset(names)

    def failed_in(self, member: str, steps: Iterable[Step]) -> Failure | None:
        """The first failure of a member in one of these steps."""
        wanted = frozenset(steps)
        return next((each for each in self.failures if each.member == member and each.step in wanted), None)


class Proof(msgspec.Struct, frozen=True):
    """A version and the checksum of all its bytes."""

    version: int
    checksum: int

    def __str__(self) -> str:
        return f"v{self.version} ({self.checksum:016x})"


class Verdict(NamedTuple):
    """The result of an update for one replica."""

    event: Event
    version: int | None
    reason: str


def verdicts(
    policy: Policy,
    proofs: dict[str, Proof | None],
    new: Proof | None,
    old: dict[str, Proof | None],
    reasons: dict[str, str],
    lost: frozenset[str] = frozenset(),
) -> dict[str, Verdict]:
    """The verdict on each replica. A pure function of what was proven, not of what was sent or skipped.

    Args:
        proofs: the proof of each replica now; None: no proof.
        new: the update's version; None: no member completed it.
        old: the previous proof of each replica.
        reasons: why a replica failed; a failed update of policy "fail_job" has at least one.
        lost: replicas whose process is gone.
    """
    arrived = {name for name, proof in proofs.items() if proof is not None and proof == new}
    found = {}
    for name, proof in proofs.items():
        reason = reasons.get(name) or reasons.get("") or "it did not receive the version"
        if name in lost:
            found[name] = Verdict(Event.EXCLUDE, None, reason)
        elif policy == "fail_job" and reasons:
            found[name] = Verdict(
                Event.EXCLUDE, None, f"the job failed: {reasons.get(name) or reasons.get('', reason)}"
            )
        elif name in arrived:
            found[name] = Verdict(Event.PROVEN_NEW, proof.version if proof else None, "")
        elif proof is None or proof != old.get(name):
            found[name] = Verdict(Event.UNPROVEN, None, reason)
        elif policy == "exclude" and arrived:  # if none has the new version, none fell behind
            found[name] = Verdict(Event.EXCLUDE, None, reason)
        else:
            found[name] = Verdict(Event.PROVEN_OLD, proof.version, reason)
    return found
