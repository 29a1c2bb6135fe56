"""Start and stop a server and a client, over and over, with reads in flight. `make teardown` runs it.

    python benchmarks/teardown [--cycles 450] [--warm-up 50] [--mode process] [--json PATH]     in one process
    python benchmarks/teardown --jobs 100 [--nice -10] [--json PATH]                            whole jobs

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

sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "soak"))  # `process_tree`
import cycles
import job
import memory
from command import finish, write_json

from transport.testing import run

_CYCLE_S = 600.0  # a watchdog, not a measure


def work(mode: Literal["thread", "process"], wire: str, first: int, warm_up: int, count: int) -> None:
    """In a process of its own: the number of each cycle before it begins, the figures last."""
    reuse = cycles.Reuse()

    def one(number: int) -> None:
        print(first + number, flush=True)
        reuse.add(run(cycles.cycle(first + number, wire, mode), _CYCLE_S))

    grown = memory.growth(one, warm_up, count, lambda _: None)
    control = memory.growth(lambda _: memory.bare_connection(wire), 10, 50, lambda _: None)
    found = {"growth": grown._asdict(), "control": control._asdict(), "reads": reuse.reads, "ended": reuse.ended}
    print(json.dumps(found | {"wrong": reuse.wrong, "written": reuse.written_afterwards}), flush=True)


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


def main() -> int:
    """Measure, print a table, write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=450, help="of each wire, after the warm-up")
    parser.add_argument("--warm-up", type=int, default=50)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--mode", choices=("thread", "process"), default="thread", help="of the server")
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="cycles of whole jobs instead")
    parser.add_argument(
        "--nice",
        type=int,
        metavar="N",
        help="of a job's processes from SIGTERM on; below 0 (as root) the time says little of the machine's load",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the first of these cycles")
    parser.add_argument("--folder", type=Path, default=Path("build/teardown"), help="logs of whole jobs")
    parser.add_argument(
        "--work", nargs=5, metavar=("MODE", "WIRE", "FIRST", "WARM_UP", "COUNT"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.work:
        mode, wire, *numbers = options.work
        work(mode, wire, *map(int, numbers))
        return 0
    if options.jobs:
        figures = job.measure(options.seed, options.jobs, options.folder.resolve(), options.nice)
        finish(figures.as_json(), options.json)
        return int(figures.bad)
    found = [measure(options.mode, wire, options.warm_up, options.cycles) for wire in cycles.WIRES]
    print(
        f"{'wire':<6}{'cycles':>8}{'crashes':>9}{'wrong':>7}{'written':>9}{'KiB/cycle':>11}{'bare UCX':>10}{'fds':>5}"
    )
    bad = False
    for row in found:
        grown, control = row.get("growth", {}), row.get("control", {})
        wrong, written = len(row.get("wrong", ())), len(row.get("written", ()))
        left = grown.get("descriptors", 0) + grown.get("threads", 0) + grown.get("mappings", 0)
        bad |= bool(row["crashes"] or wrong or written or left > 0 or not grown)
        per_cycle = [each.get("resident_per_cycle", float("nan")) / 1024 for each in (grown, control)]
        print(
            f"{row['wire']:<6}{row['cycles']:>8}{len(row['crashes']):>9}{wrong:>7}{written:>9}"
            f"{per_cycle[0]:>11.1f}{per_cycle[1]:>10.1f}{grown.get('descriptors', 0):>5}"
        )
        print(*row["crashes"], sep="\n") if row["crashes"] else None
    write_json(found, options.json)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
