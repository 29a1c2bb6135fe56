"""A writer or a trainer of ours: `python -m transport.bench.job.participant writer|trainer`."""

from __future__ import annotations

import sys
from typing import Any

from transport.bench.job.queues import KINDS
from transport.bench.job.work import Job, main


def _make(job: Job) -> Any:
    kind = KINDS[job.queue]
    return kind.writer(job) if sys.argv[1] == "writer" else kind.trainer(job)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], _make))
