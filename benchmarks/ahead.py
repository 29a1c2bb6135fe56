"""Steps that wait while a trainer learns from its first one: what `Rollout(ahead=)` lets through beyond its number.

    python benchmarks/ahead.py                # on one host, and with a directory in SQLite
    python benchmarks/ahead.py --ahead 1,2,4

A rollout in a process of its own writes groups as fast as it may; the trainer takes a step, and holds it until no group
has come for a while. A rollout hears in a notice what was taken, so that the number depends on how slow the machine is.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from transport import Rollout, Schema, Trainer
from transport.runtime.signals import until_stopped

SCHEMA = Schema.of(x="int64")
GROUPS, MOST, QUIET_S = 3, 100, 3.0


def write(rings: str, ahead: int) -> None:
    """Write groups of one sample, a line for each."""
    with until_stopped(), Rollout(SCHEMA, rings, slots=MOST, ahead=ahead, drain_s=0) as rollout:
        for number in range(MOST):
            rollout.write({"x": number}, group=f"g{number}", of=1)
            print(number, flush=True)


def measured(rings: str, ahead: int, said: Path) -> float:
    """Return how many steps of groups were written while the first one was learned."""
    with Trainer(SCHEMA, rings) as trainer, said.open("w") as lines:
        rollout = subprocess.Popen([sys.executable, __file__, "--write", rings, "--ahead", str(ahead)], stdout=lines)
        try:
            next(iter(trainer.steps(groups=GROUPS)))
            written, since = 0, time.monotonic()
            while time.monotonic() < since + QUIET_S:
                if (now := len(said.read_text().splitlines())) != written:
                    written, since = now, time.monotonic()
                time.sleep(0.1)
            return written / GROUPS
        finally:
            rollout.terminate()
            rollout.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ahead", default="1,2", help="numbers, separated by commas")
    parser.add_argument("--write", metavar="RINGS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    numbers = [int(each) for each in options.ahead.split(",")]
    if options.write:
        write(options.write, numbers[0])
        return 0
    for ahead in numbers:
        for where in ("one host", "directory"):
            with tempfile.TemporaryDirectory() as folder:
                rings = f"rings:ahead-{Path(folder).name}-" if where == "one host" else f"rings+sqlite:///{folder}/run"
                steps = measured(rings, ahead, Path(folder) / "said")
                print(f"ahead={ahead}, {where}: {steps:.1f} steps wait, the one being learned included", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
