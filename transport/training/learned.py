"""Learned: what the model of a trainer has learned of its steps, and what it was begun with."""

from __future__ import annotations

import _thread
from collections.abc import Sequence
from typing import Protocol

from transport.errors import UsageError
from transport.packer.consumed_record import ConsumedRecord
from transport.ticket import Delivery


class LearnedStep(Protocol):
    """A step as a model has learned it."""

    number: int
    groups: list[str]

    @property
    def deliveries(self) -> Sequence[Delivery]: ...

    def consume(self) -> None: ...


class Learned:
    """The payloads that a trainer's model has learned, whichever `Steps` gave it out. Changed by one thread at a time.

    Args:
        given: the record of the checkpoint with which the model begins; None: there is none, and steps that an earlier
            start of the job has consumed count as learned.

    Attributes:
        trusts: whether they do.
        record: of what is consumed; what is learned is added.
        mesh: id of the mesh's records; "": they end with the trainer.
        accepted: steps that are not consumed yet, by number.
        voted: numbers of those that this rank has consumed.
        given_out: numbers of those that are neither.
        samples: of this rank, in steps that it has consumed.
        version: of the policy in training, as the user says.
        closed: the trainer is closed; with it end the records of a trainer without a mesh.
    """

    def __init__(self, given: ConsumedRecord | None, record: ConsumedRecord) -> None:
        self.trusts = given is None
        self._lock = _thread.allocate_lock()  # of the record: a planner copies it
        self.record = record
        self.mesh = ""
        self._begun_with = -1
        self.accepted: dict[int, LearnedStep] = {}
        self.voted: set[int] = set()
        self.given_out: set[int] = set()
        self.samples = 0
        self.version: int | None = None
        self.closed = False

    def of(self, mesh: str) -> None:
        """Note of which mesh the steps are, before the first of them."""
        self.mesh = mesh
        self._begun_with = self.record.steps.get(mesh, -1)

    def has(self, number: int) -> bool:
        """Tell whether a step is accepted or consumed by this rank; any thread."""
        return number in self.accepted or number in self.voted

    @property
    def last(self) -> int:
        """Number of the last step that the model has; -1: it has none of this mesh."""
        return max(self.record.steps.get(self.mesh, -1), *self.accepted, -1)

    def is_of_model(self, number: int) -> bool:
        """Tell whether the model has a consumed step; any thread. Not that of a start which was ahead of its record."""
        return self.trusts or number <= self._begun_with or self.has(number) or number in self.given_out

    def check_order(self, number: int, call: str) -> None:
        """UsageError where an earlier step is neither accepted nor consumed: a record has all steps up to one."""
        before = min(self.given_out, default=number)
        if before < number:
            raise UsageError(f"{call}() of step {number} before step {before}: steps are learned in their order")

    def copied(self) -> ConsumedRecord:
        """Return a copy of the record; any thread."""
        with self._lock:
            return self.record.copy()

    def note_accepted(self, record: ConsumedRecord) -> None:
        """Add what is accepted to a record for a checkpoint."""
        for step in self.accepted.values():
            self._note(record, step)

    def note(self, step: LearnedStep, samples: int) -> None:
        """Note that this rank has consumed a step, and its share of the samples; after an interrupt once more."""
        with self._lock:
            self._note(self.record, step)
        self.given_out.discard(step.number)
        if step.number not in self.voted:
            self.voted.add(step.number)
            self.samples += samples
        self.accepted.pop(step.number, None)  # last: what stays accepted is consumed by the next call

    def _note(self, record: ConsumedRecord, step: LearnedStep) -> None:
        record.accept_all(step.deliveries)
        record.groups.add(step.groups)
        if self.mesh:
            record.steps[self.mesh] = max(step.number, record.steps.get(self.mesh, -1))
