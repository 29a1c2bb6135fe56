"""A peer's writer, trainer or service in `python benchmarks/job`, in an environment that does not have this package.

    python harness.py WORK NAME ROLE

WORK is the path of benchmarks/job/work.py, which has everything that is the same for all: messages, payloads,
clock, verification. NAME.py beside this file has what differs, as classes that take a `work.Job`:

    Writer    address, helpers, prepare, write_many, close     (work.Writing)
    Trainer   claim, consume, close                            (work.Training)
    service   a context whose value is the place that writers and trainers get as job.place; only where one is needed
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any


def main() -> int:
    """The process; its answers are those of `work.main`."""
    path, name, role = sys.argv[1:]
    specification = importlib.util.spec_from_file_location("work", path)
    assert specification is not None
    assert specification.loader is not None
    work = sys.modules["work"] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(work)

    def make(job: Any) -> Any:
        peer = importlib.import_module(name)
        return getattr(peer, {"writer": "Writer", "trainer": "Trainer"}.get(role, role))(job)

    status: int = work.main(role, make)
    return status


if __name__ == "__main__":
    sys.exit(main())
