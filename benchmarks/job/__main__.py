"""Measure the whole job, from write to consumed, also with other carriers.

    python benchmarks/job --wire mapped --peers all --plot job.png

plan     what is measured, and what is refused
work     what every writer and trainer does, whatever carries the payloads; runs without this package, too
ours     our writers and trainers, and their processes
driver   one repetition in fresh processes
rows     figures of all repetitions, the table with its ratios
trajectories, trajectory_rows    the same of trajectories, in one process
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transport.__main__ import exit_with


def main() -> int:
    """Run the program of the command line; its imports take long enough to be interrupted."""
    from benchmarks.job.command import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    exit_with(main)
