"""StepCounts: what a trainer counts of its steps and of its waits, from its beginning to its end."""

from __future__ import annotations

from collections import Counter

from transport.training.assembling import Reason


class StepCounts:
    """Counters. The planner's thread and the trainer's each add to their own.

    Attributes:
        waited_s: for which the trainer's thread has waited for data.
        steps: that the loop was given.
        lag: versions by which the samples of the last step were older than the trainer's, on average.
        planned: groups for a step, perhaps again where that was void.
        dropped: groups that no step gets, by reason.
        stale_samples: of groups that were too old.
        surplus: samples beyond the size of their groups.
        void_steps: whose groups came again.
    """

    def __init__(self) -> None:
        self.waited_s = self.lag = 0.0
        self.steps = self.planned = self.stale_samples = self.surplus = self.void_steps = 0
        self.dropped: Counter[Reason] = Counter()
