"""A rollout worker and a data packer as tests of the mixins have them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from helpers import PATIENCE_S

from transport.packer.mixin import FetchedBatch, UCXXDataPackerMixin
from transport.packer.rollout import UCXXRolloutMixin
from transport.schema import Schema, UpTo
from transport.settings import DEFAULTS
from transport.ticket import Ticket

SCHEMA = Schema.of(obs=("float32", UpTo(64), 4), step=("int64",))
FAST = msgspec.structs.replace(DEFAULTS, backoff_first_s=1e-4, backoff_most_s=1e-3)


class Packer(UCXXDataPackerMixin):
    """The mixin alone."""


class Worker(UCXXRolloutMixin):
    """The mixin alone."""


def write(worker: Worker, step: int) -> Ticket:
    return worker.write_to_buffer(
        {"obs": np.full((step + 1, 4), step, np.float32), "step": step}, metadata={"reward": float(step)}
    )


def collected(packer: UCXXDataPackerMixin, tickets: Sequence[Ticket]) -> FetchedBatch:
    packer.start_prefetch(tickets)
    batch = packer.collect_prefetch(timeout=PATIENCE_S)
    assert batch is not None
    return batch
