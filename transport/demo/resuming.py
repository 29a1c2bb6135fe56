"""``--resume``: every few updates the policy, what it was trained on and what the rings held are saved together.

The first trainer saves: between two updates it takes its record and a snapshot of the rings, and writes the model with
the snapshot's name. A run that was killed as a whole goes on from the newest model whose snapshot is complete: the
rollouts restore it, each its share, and play the episodes that neither the model nor the snapshot has.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import msgspec

from transport.cooldown.destinations.base import Destination, folder_of, normalise
from transport.cooldown.destinations.open import open_destination
from transport.demo.plan import Plan, ResumePlan
from transport.demo.policy import Policy
from transport.demo.tally import Tally
from transport.errors import CheckpointDamagedError, TransportError, UsageError
from transport.packer.consumed_record import ConsumedRecord
from transport.packer.rollout import UCXXRolloutMixin
from transport.queue import FoundRings
from transport.queue.notices import RingNotices
from transport.ring.attachment import remove_dead
from transport.runtime.decoders import ready
from transport.snapshots import Saved, Snapshot, prune, snapshot, steps

log = logging.getLogger(__name__)

EVERY: Final = 2  # updates
_RUN: Final = "demo-resume"
_MODELS: Final = f"{_RUN}/models"
_MOST_MODEL: Final = 64 << 20
_KEPT: Final = 2


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the first trainer is between two updates."""

    episodes: int
    seed: int
    version: int
    attempt: str  # of the snapshot that belongs to it
    trained: list[int]  # episodes, in the order of training
    returns: list[float]  # of these
    record: bytes
    policy: bytes  # as `Policy.saved` has it


ready(Model)


def found(plan: Plan, url: str) -> Plan:
    """The plan with where the run saves, and what it goes on from; the folder is made.

    Raises UsageError where what is there is of a run with other episodes or another seed.
    """
    url = normalise(url)
    if (folder := folder_of(url)) is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with open_destination(url) as destination:
        complete = steps(url, _RUN)
        for name in reversed(destination.names(_MODELS)):
            version, _, attempt = name.partition("-")
            if version.isdecimal() and attempt in complete.get(int(version), []):
                model = _read(destination, name)
                if (model.episodes, model.seed) != (plan.episodes, plan.seed):
                    raise UsageError(
                        f"--resume: the run at {url} has --episodes {model.episodes} --seed {model.seed}; give these, "
                        f"or remove {_RUN} there to begin anew"
                    )
                _remove_rings(url, model)
                resume = ResumePlan(destination=url, model=name, trained=len(model.trained))
                return msgspec.structs.replace(plan, policy=model.policy, resume=resume)
    return msgspec.structs.replace(plan, resume=ResumePlan(destination=url))


def _remove_rings(url: str, model: Model) -> None:
    """The segments of the killed run, where they are on this host and no process uses them: it is restored instead."""
    with Saved(url, model.version, run=_RUN, attempt=model.attempt) as saved:
        for ring in saved.manifest.rings:
            prefix = ring.segment.removeprefix("/transport-").rpartition("rollout-")[0]
            if prefix:
                remove_dead(prefix)
                RingNotices(prefix).close()


def model_of(plan: Plan) -> Model | None:
    """What the run goes on from; None: it begins."""
    if plan.resume is None or not plan.resume.model:
        return None
    with open_destination(plan.resume.destination) as destination:
        return _read(destination, plan.resume.model)


def _read(destination: Destination, name: str) -> Model:
    data = destination.read(f"{_MODELS}/{name}", _MOST_MODEL)
    try:
        return msgspec.msgpack.decode(data or b"", type=Model)
    except msgspec.MsgspecError as error:
        raise CheckpointDamagedError(f"{destination.url}/{_MODELS}/{name} is no model of this demo: {error}") from error


def restored(plan: Plan, into: UCXXRolloutMixin, index: int) -> tuple[set[int], int, int]:
    """Write a rollout's share of the snapshot into its ring.

    Returns the episodes that are trained on or in the snapshot, how many are in it, and how many this call has written.
    """
    model = model_of(plan)
    if plan.resume is None or model is None:
        return set(), 0, 0
    with Saved(plan.resume.destination, model.version, run=_RUN, attempt=model.attempt) as saved:
        there = episodes_of(saved)
        record = ConsumedRecord.from_bytes(model.record)
        done = saved.restore(into, share=(index, plan.rollouts), consumed=[record])
    return there | set(model.trained), len(there), len(done.tickets)


def episodes_of(saved: Saved) -> set[int]:
    """The episodes that are in a snapshot."""
    return {int(str(each.ticket.metadata["episode"])) for each in saved.payloads}


class Saver:
    """Saves model and snapshot. Belongs to the first trainer."""

    def __init__(self, plan: Plan, queue: FoundRings, model: Model | None) -> None:
        self._plan = plan
        self._queue: Any = queue
        self._taken: Snapshot | None = None
        self._missing: set[int] = set()  # episodes of the last snapshot: some rollouts may not have restored them yet
        if plan.resume is not None and model is not None:
            with Saved(plan.resume.destination, model.version, run=_RUN, attempt=model.attempt) as saved:
                self._missing = episodes_of(saved)

    def save(self, policy: Policy, record: ConsumedRecord, tally: Tally) -> None:
        """Between two updates, where nothing is consumed that is not learned. Failures are logged: the run goes on."""
        resume = self._plan.resume
        self._missing -= set(tally.episodes)
        if resume is None or policy.version % EVERY or self._missing:
            return
        try:
            self.settle()
            kept = record.to_bytes()
            self._taken = snapshot(self._queue, resume.destination, policy.version, run=_RUN)
            model = Model(
                episodes=self._plan.episodes,
                seed=self._plan.seed,
                version=policy.version,
                attempt=self._taken.attempt,
                trained=tally.episodes,
                returns=tally.returns,
                record=kept,
                policy=policy.saved(),
            )
            with open_destination(resume.destination) as destination:
                name = f"{policy.version:012d}-{self._taken.attempt}"
                destination.put(f"{_MODELS}/{name}", msgspec.msgpack.encode(model))
        except TransportError as error:
            log.warning("version %d is not saved: %s", policy.version, error)

    def settle(self) -> None:
        """Wait for the last snapshot, and remove old ones with their models. Raises what it raised."""
        taken, self._taken = self._taken, None
        resume = self._plan.resume
        if taken is None or resume is None:
            return
        taken.wait()
        prune(resume.destination, _KEPT, _RUN)
        complete = steps(resume.destination, _RUN)
        with open_destination(resume.destination) as destination:
            for name in destination.names(_MODELS):
                if name.partition("-")[2] not in complete.get(int(name.partition("-")[0]), []):
                    destination.delete(f"{_MODELS}/{name}")


def forget(plan: Plan) -> None:
    """The run has come to its end: nothing is to be resumed."""
    if plan.resume is not None:
        with open_destination(plan.resume.destination) as destination:
            destination.delete(_RUN)
