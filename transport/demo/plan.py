"""What a run of the demo is: its size, what moves in it, and the configuration of each of its processes."""

from __future__ import annotations

from typing import Final

import msgspec

from transport.client.client import WirePolicy
from transport.demo.policy import PARAMETER_SHAPES, Policy
from transport.schema import Schema, TensorSpec
from transport.settings import Settings
from transport.wires import Wire

POLICY_SCHEMA: Final = Schema(tuple(TensorSpec(name, "float32", shape) for name, shape in PARAMETER_SHAPES.items()))
POLICY_TOPIC: Final = "policy"
"""Topic under which the trainer announces the ticket of its newest parameters; the notice's version is theirs."""

BATCH: Final = 16  # episodes the policy is improved with
BACKLOG: Final = 4 * BATCH  # episodes on the way; from staler ones than that the policy learns badly

# A process that dies is not started again: what it left is read at once or never, and its listeners need not linger.
# The other two follow: a port's quarantine must end before linger_s does.
SETTINGS: Final = Settings(linger_s=2.0, port_quarantine_s=0.5, port_quarantine_most_s=1.0)


class EpochPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The epoch that the run is, when it ends with a checkpoint."""

    store: str  # URL of the store with the epochs' records
    run: str
    epoch: int
    destination: str


class ResumePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the run saves its model and snapshots, and the saved model that it goes on from; none if empty."""

    destination: str
    model: str = ""
    trained: int = 0  # episodes that the model was trained on


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The run that was asked for."""

    rollouts: int = 2
    trainers: int = 1  # ranks; each consumes every episode once, rank 0 learns from it
    episodes: int = 480
    wires: tuple[Wire, ...] = ()  # that may carry payloads; empty: any
    seed: int = 0
    policy: bytes = b""  # that the run begins with, as `Policy.saved` has it; empty: one made from the seed
    epoch: EpochPlan | None = None
    resume: ResumePlan | None = None

    def first_policy(self) -> Policy:
        """A new copy of the policy that the run begins with. Raises CheckpointDamagedError where it is none."""
        policy = Policy(self.seed)
        if self.policy:
            policy.restore(self.policy)
        return policy

    @property
    def wire_policy(self) -> WirePolicy:
        """As clients take it."""
        return self.wires or "auto"

    @property
    def slots(self) -> int:
        """Of each rollout's ring: its share of the backlog twice, as only half of a ring is lent out as views."""
        return 2 * (BACKLOG // self.rollouts + 1)

    @property
    def tenth(self) -> int:
        """Episodes at the beginning, and at the end, by which the learning is judged."""
        return max(1, self.episodes // 10)

    @property
    def trained_before(self) -> int:
        """Episodes that the run was trained on before it was resumed."""
        return self.resume.trained if self.resume is not None else 0

    def share(self, rollout: int) -> range:
        """Numbers of the episodes that a rollout plays; all shares together are exactly those asked for."""
        return range(rollout, self.episodes, self.rollouts)


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The configuration of one rollout or trainer: the first line of its standard input."""

    plan: Plan
    index: int  # of the rollout, or rank of the trainer
    queue: str  # the rings, as `open_queue` takes them
    ring: str  # name of the segment it makes, so that the parent can remove it after a crash
    directory: str  # temporary; a worker whose parent was killed removes it
    parent: int  # process id
    trace: str = ""  # file for the phases of its reads and writes; empty: none
