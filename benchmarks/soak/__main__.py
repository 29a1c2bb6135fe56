"""Soak: payloads flow while processes are killed and stopped, connections cut, ports taken and the disk filled.

    python benchmarks/soak --payloads 50000 --kills 100 --seed 1 --json build/soak.json

Every payload must be consumed exactly once by every rank it was written for, byte for byte. Exit status 1 if one was
lost, wrong or duplicated, if a process ended by itself, or if something was left behind.
docs/developers/TESTING.md has the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from fault_injection import ISOLATED, isolated
from planted import PLANTS
from run import Options, Soak

HERE = Path(__file__).resolve().parent


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--payloads", type=int, default=50_000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--queue", choices=("rings", "redis"), default="rings", help="redis: its own server")
    parser.add_argument("--lapses", type=int, help="trainers stopped until their claims have lapsed (default kills/20)")
    parser.add_argument("--plant", choices=PLANTS, default="", help="a fault that this run must find (planted.py)")
    parser.add_argument("--build", type=Path, default=None, help="of native modules with fault points (make faults)")
    parser.add_argument("--folder", type=Path, default=Path("build/soak"), help="journals and logs; made anew")
    parser.add_argument("--json", type=Path, default=None, help="where the report goes besides the table")
    parser.add_argument("--stuck-s", type=float, default=90.0, help="without any payload for so long it has failed")
    return parser.parse_args()


def main() -> int:
    """The exit status."""
    chosen = options()
    if ISOLATED not in os.environ:
        command = [sys.executable, str(HERE), *sys.argv[1:]]
        alone = isolated(command)
        os.environ[ISOLATED] = "1" if alone != command else "0"
        return subprocess.run(alone).returncode
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
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(report, indent=2) + "\n")
    for name, value in report.items():
        print(f"{name:>18}  {json.dumps(value)}")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
