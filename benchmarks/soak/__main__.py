"""Soak: payloads flow while processes are killed and stopped, connections cut and ports taken.

    python benchmarks/soak --payloads 50000 --kills 100 --seed 1 --json build/soak.json

Every payload must be consumed exactly once by every rank it was written for, byte for byte. Exit status 1 if one was
lost, wrong or duplicated, if a process ended by itself, or if something was left behind.
docs/developers/TESTING.md has the rest.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "harness"))

from command import finish, isolated, new_folder, parser
from planted import PLANTS


def main() -> int:
    """The exit status."""
    options = parser(__doc__, "build/soak")
    options.add_argument("--plant", choices=PLANTS, default="", help="a fault that this run must find (planted.py)")
    options.add_argument("--stuck-s", type=float, default=90.0, help="without any payload for so long it has failed")
    options.add_argument("--payloads", type=int, default=50_000)
    options.add_argument("--kills", type=int, default=100)
    options.add_argument("--lapses", type=int, help="trainers stopped until their claims have lapsed, kills/20")
    options.add_argument("--build", type=Path, help="of native modules with fault points (make faults)")
    chosen = options.parse_args()
    alone = isolated()
    from run import Options, Soak  # not before the fork: numpy has threads

    soak = Soak(
        Options(
            folder=new_folder(chosen.folder),
            seed=chosen.seed,
            isolated=alone,
            stuck_s=chosen.stuck_s,
            plant=chosen.plant,
            payloads=chosen.payloads,
            kills=chosen.kills,
            lapses=chosen.kills // 20 if chosen.lapses is None else chosen.lapses,
            build=chosen.build and chosen.build.resolve(),
        )
    )
    report = soak.run()
    finish(report, chosen.json)
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
