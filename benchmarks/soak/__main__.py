"""Soak: payloads flow while processes are killed and stopped, connections cut, ports taken and the disk filled.

    python benchmarks/soak --payloads 50000 --kills 100 --seed 1 --json build/soak.json

Every payload must be consumed exactly once by every rank it was written for, byte for byte. Exit status 1 if one was
lost, wrong or duplicated, if a process ended by itself, or if something was left behind.
docs/developers/TESTING.md has the rest.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from command import finish, parser, status_of_isolated_run
from fault_injection import ISOLATED
from run import Options, Soak

HERE = Path(__file__).resolve().parent


def options() -> argparse.Namespace:
    """The command line."""
    options = parser(__doc__, "build/soak")
    options.add_argument("--payloads", type=int, default=50_000)
    options.add_argument("--kills", type=int, default=100)
    options.add_argument("--queue", choices=("rings", "redis"), default="rings", help="redis: its own server")
    options.add_argument("--lapses", type=int, help="trainers stopped until their claims have lapsed, kills/20")
    options.add_argument("--build", type=Path, default=None, help="of native modules with fault points (make faults)")
    return options.parse_args()


def main() -> int:
    """The exit status."""
    chosen = options()
    if (status := status_of_isolated_run(str(HERE))) is not None:
        return status
    soak = Soak(
        Options(
            payloads=chosen.payloads,
            kills=chosen.kills,
            seed=chosen.seed,
            folder=chosen.folder.resolve(),
            stuck_s=chosen.stuck_s,
            build=chosen.build.resolve() if chosen.build is not None else None,
            isolated=os.environ[ISOLATED] == "1",
            queue=chosen.queue,
            lapses=chosen.kills // 20 if chosen.lapses is None else chosen.lapses,
            plant=chosen.plant,
        )
    )
    report = soak.run()
    finish(report, chosen.json)
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
