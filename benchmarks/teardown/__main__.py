"""Start and stop a server and a client, over and over, with reads in flight. `make teardown` runs it.

    python benchmarks/teardown [--cycles 450] [--warm-up 50] [--mode process] [--json PATH]     in one process
    python benchmarks/teardown --jobs 100 [--json PATH]                                         whole jobs

Each wire has a process of its own, so that one that crashes is a figure here: its seed is named, and the cycles after
it go on in a new process. Memory is per cycle after the warm-up; the control is bare UCX, started and ended as often.
With ``--mode process`` the server has a supervisor and a listener process. Exit status: 0 without a crash, a wrong
payload, a buffer written afterwards or a descriptor or thread that stayed. `job.py` says what it is of whole jobs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "harness"))

from command import finish, isolated, new_folder, parser, write_json

_CYCLE_S = 600.0  # a watchdog, not a measure


def work(mode: Literal["thread", "process"], wire: str, first: int, warm_up: int, count: int) -> None:
    """In a process of its own: the number of each cycle before it begins, the figures last."""
    import cycles

    from transport.testing import run

    reuse = cycles.Reuse()

    def one(number: int) -> None:
        print(first + number, flush=True)
        reuse.add(run(cycles.cycle(first + number, wire, mode), _CYCLE_S))

    grown = cycles.growth(one, warm_up, count)
    control = cycles.growth(lambda _: cycles.bare_connection(wire), 10, 50)
    print(json.dumps({"growth": grown._asdict(), "control": control._asdict(), **vars(reuse)}), flush=True)


def measure(mode: str, wire: str, warm_up: int, count: int) -> dict[str, Any]:
    """All cycles of a wire, whatever becomes of its processes."""
    crashes: list[str] = []
    begun, last, figures = 0, warm_up + count, {}
    while begun < last:
        warm = min(warm_up, last - begun)
        arguments = [mode, wire, str(begun), str(warm), str(last - begun - warm)]
        ran = subprocess.run(
            [sys.executable, str(Path(__file__).parent), "--work", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={"UCX_LOG_LEVEL": "FATAL", **os.environ},
        )
        lines = ran.stdout.split("\n")[:-1]
        if ran.returncode == 0:
            figures = json.loads(lines[-1])
            break
        seed = int(lines[-1]) if lines else begun
        crashes.append(f"seed {seed}: status {ran.returncode}")
        begun = seed + 1
    return {"wire": wire, "mode": mode, "cycles": last, "crashes": crashes, **figures}


def is_bad(row: dict[str, Any]) -> bool:
    """Whether anything happened that must not."""
    grown = row.get("growth")
    stayed = sum(grown[name] for name in ("descriptors", "threads", "mappings")) if grown else 1
    return bool(row["crashes"] or row.get("wrong") or row.get("written_afterwards") or stayed > 0)


def main() -> int:
    """Measure, print a line for each figure, write what was found."""
    options = parser(__doc__, "build/teardown")
    options.add_argument("--cycles", type=int, default=450, help="of each wire, after the warm-up")
    options.add_argument("--warm-up", type=int, default=50)
    options.add_argument("--mode", choices=("thread", "process"), default="thread", help="of the server")
    options.add_argument(
        "--jobs", type=int, default=0, metavar="N", help="cycles of whole jobs instead, from --seed on"
    )
    options.add_argument("--work", nargs=5, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.work:
        mode, wire, *numbers = chosen.work
        work(mode, wire, *map(int, numbers))
        return 0
    if chosen.jobs:
        alone = isolated()
        import job  # not before the fork

        figures = job.measure(chosen.seed, chosen.jobs, new_folder(chosen.folder), alone)
        finish(figures.as_json(), chosen.json)
        return int(figures.bad)
    rows = [measure(chosen.mode, wire, chosen.warm_up, chosen.cycles) for wire in ("shm", "tcp")]
    for row in rows:
        finish(row, None)
    write_json(rows, chosen.json)
    return int(any(map(is_bad, rows)))


if __name__ == "__main__":
    sys.exit(main())
