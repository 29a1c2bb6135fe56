"""The steps of an update, what each may take, and what its proofs mean. Pure.

    stage    prepare → topology → connect → (pause in place) → transfer    nobody is paused; a failure ends it
    commit   pause → load and prove → (restore and prove) → resume
    end      finalize trainers → finalize replicas                          always

Every replica proves in *transfer* what has landed beside the version that it serves. Only then, and only if the policy
has what it asks for, replicas are paused and load it: each by itself, so that none waits for a slow one. A commit that
began is completed, also when the update is cancelled. A replica whose versions land in its own tensors cannot hold two:
it is paused before the transfer.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from transport.errors import ChildrenLostError, ParentLostError
from transport.weights.plan.admission import AdmissionEvent

Policy = Literal["restore", "exclude", "fail_job"]
POLICIES: tuple[str, ...] = get_args(Policy)
Weights = Iterable[tuple[str, Any]] | AsyncIterator[tuple[str, Any]]
Metadata = dict[str, Any]  # what a member's `prepare` returns


class UpdateStep(enum.StrEnum):
    """Steps of an update, in this order."""

    PREPARE = "prepare"
    TOPOLOGY = "topology"
    CONNECT = "connect"
    PAUSE_IN_PLACE = "pause in place"
    TRANSFER = "transfer"
    PAUSE = "pause"
    LOAD = "load"
    RESTORE = "restore"
    PROVE = "prove"
    RESUME = "resume"
    FINALIZE_TRAINERS = "finalize trainers"
    FINALIZE_REPLICAS = "finalize replicas"


STAGE = (UpdateStep.PREPARE, UpdateStep.TOPOLOGY, UpdateStep.CONNECT, UpdateStep.PAUSE_IN_PLACE, UpdateStep.TRANSFER)
DROPS_ONE = frozenset(
    {UpdateStep.PREPARE, UpdateStep.TRANSFER}
)  # the others can go on without a replica that fails here


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits in seconds of each step, and of the stage as a whole (``total``)."""

    pause: float = 60.0
    prepare: float = 60.0
    connect: float = 60.0
    transfer: float = 600.0
    load: float = 180.0
    finalize: float = 30.0
    prove: float = 60.0
    resume: float = 60.0
    total: float = 900.0

    def of(self, step: UpdateStep) -> float:
        """Return the limit of one step."""
        return {
            UpdateStep.PREPARE: self.prepare,
            UpdateStep.TOPOLOGY: self.connect,
            UpdateStep.CONNECT: self.connect,
            UpdateStep.PAUSE_IN_PLACE: self.pause,
            UpdateStep.TRANSFER: self.transfer,
            UpdateStep.PAUSE: self.pause,
            UpdateStep.LOAD: self.load,
            UpdateStep.RESTORE: self.load,
            UpdateStep.PROVE: self.prove,
            UpdateStep.RESUME: self.resume,
            UpdateStep.FINALIZE_TRAINERS: self.finalize,
            UpdateStep.FINALIZE_REPLICAS: self.finalize,
        }[step]


class StepFailure(NamedTuple):
    """A failure of a step. ``member`` "" is the manager itself."""

    step: UpdateStep
    member: str
    error: BaseException


def remoteness(error: BaseException) -> int:
    """Return how far an error is from its cause: 0, 1 for what members say when others fail, 2 for a cancellation."""
    if isinstance(error, asyncio.CancelledError):
        return 2
    return int(isinstance(error, ParentLostError | ChildrenLostError))


class VersionProof(msgspec.Struct, frozen=True):
    """A version and the checksum of all its bytes."""

    version: int
    checksum: int

    def __str__(self) -> str:
        return f"v{self.version} ({self.checksum:016x})"


class ReplicaVerdict(NamedTuple):
    """The result of an update for one replica."""

    event: AdmissionEvent
    version: int | None
    reason: str


def verdicts(
    policy: Policy,
    replicas: Collection[str],
    proofs: Mapping[str, VersionProof | None],
    new: VersionProof | None,
    old: Mapping[str, VersionProof | None],
    reasons: Mapping[str, str],
    lost: Collection[str] = (),
) -> dict[str, ReplicaVerdict | None]:
    """Return the verdict on each replica: a function of what it proves, not of what was sent or skipped.

    None: it was not paused, and stays what it was.

    Args:
        proofs: the proof of each replica that was paused, now; None: no proof.
        new: the update's version; None: no member completed it.
        old: the previous proof of each replica.
        reasons: why a replica failed; a failed update of policy "fail_job" has at least one.
        lost: replicas whose process is gone.
    """
    behind = policy == "exclude" and any(proof is not None and proof == new for proof in proofs.values())
    found: dict[str, ReplicaVerdict | None] = {}
    for name in replicas:
        proof = proofs.get(name)
        reason = reasons.get(name) or reasons.get("") or "it did not receive the version"
        if name in lost:
            found[name] = ReplicaVerdict(AdmissionEvent.EXCLUDE, None, reason)
        elif policy == "fail_job" and reasons:
            found[name] = ReplicaVerdict(AdmissionEvent.EXCLUDE, None, f"the job failed: {reason}")
        elif name not in proofs:
            found[name] = ReplicaVerdict(AdmissionEvent.EXCLUDE, None, reason) if behind else None
        elif proof is not None and proof == new:
            found[name] = ReplicaVerdict(AdmissionEvent.PROVEN_NEW, proof.version, "")
        elif proof is None or proof != old.get(name):
            found[name] = ReplicaVerdict(AdmissionEvent.UNPROVEN, None, reason)
        elif behind:  # others have the new version; if none has it, none fell behind
            found[name] = ReplicaVerdict(AdmissionEvent.EXCLUDE, None, reason)
        else:
            found[name] = ReplicaVerdict(AdmissionEvent.PROVEN_OLD, proof.version, reason)
    return found


def known_alone(policy: Policy, proof: VersionProof | None, new: VersionProof | None) -> bool:
    """Return whether the verdict on a replica is independent of the others: then it resumes without them."""
    return policy == "restore" or (policy == "exclude" and proof is not None and proof == new)
