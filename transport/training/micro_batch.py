"""MicroBatch: the payloads that a rank learns from at once, and the group of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from transport.ring.batch import ClaimedPart, Gathered
from transport.ring.batch_shape import Shape
from transport.schema import Schema
from transport.training.payloads import Numbers, Payloads


class MicroBatch(Payloads):
    """Payloads of a step that a rank learns from at once. There may be none: the arrays then have length 0.

        for micro in step:                  # as many on every rank
            micro["tokens"]                 # a tensor of all payloads: padded, or as the trainer's ``layout`` says
            micro.payloads                  # a mapping of fields for each payload; so does iterating over it
            micro.groups                    # of each payload the position of its group in ``step.groups``
            micro.lengths, micro.ages, micro.metadata

    The step ends it: when that was accepted or consumed, its payloads are gone as the next step is taken. Keep the
    arrays of what is needed longer. `Payloads` has what else can be looked at.

    Attributes:
        groups: of each payload the position of its group in `Step.groups` (int64).
    """

    groups: Numbers

    def __init__(
        self,
        parts: Sequence[ClaimedPart],
        gathered: Gathered | None,
        shape: Shape,
        schemas: Mapping[str, Schema],
        groups: Sequence[int],
    ) -> None:
        super().__init__(parts, gathered, shape, schemas)
        self.groups = np.array(groups, np.int64)
