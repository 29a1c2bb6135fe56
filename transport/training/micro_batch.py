"""MicroBatch: the payloads that a rank learns from at once, and the group of each."""

from __future__ import annotations

import numpy as np

from transport.training.payloads import Numbers, Payloads


class MicroBatch(Payloads):
    """The payloads of a micro-batch; there may be none.

    Attributes:
        groups: of each payload the position of its group in `Step.groups` (int64).
    """

    groups: Numbers = np.zeros(0, np.int64)
