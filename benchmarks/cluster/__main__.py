"""Cluster: a job on many hosts of one machine, while hosts, links, clocks and Redis fail.

    python -P benchmarks/cluster --hosts 8 --minutes 3 --faults cut,half-open --seed 1 --json build/cluster.json

Hosts are namespaces on one bridge. Every payload is accounted for: consumed once and right, or lost with its host, or
reported with a reason. Exit status 1 if one is not, if the job does not get on, or if something is left behind.
docs/developers/TESTING.md has the rest.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "harness"), str(HERE.parent.parent)]

import isolation  # noqa: E402
from command import new_folder, parser, write_json  # noqa: E402
from faults import FAULTS  # noqa: E402

if TYPE_CHECKING:
    from run import Finding

FINDINGS: tuple[Finding, ...] = ("addresses", "directory")


def options() -> argparse.Namespace:
    """The command line."""
    faults = "\n".join(f"  {name:15} {fault.about}" for name, fault in FAULTS.items())
    given = parser(f"{__doc__}\nfaults:\n{faults}", "build/cluster")
    given.add_argument("--hosts", type=int, default=8, help="5 to 64, two of them for Redis; 4 with --find addresses")
    given.add_argument("--minutes", type=float, default=0.0, help="faults are repeated until then; one round at least")
    given.add_argument("--faults", default=",".join(FAULTS), help="of those below, with commas (default all)")
    given.add_argument("--find", default="all", choices=("all", *FINDINGS), help="how trainers find payloads")
    given.add_argument("--per-s", type=float, default=300.0, help="payloads written in a second, by all rollouts")
    chosen = given.parse_args()
    chosen.faults = [name for name in chosen.faults.split(",") if name]
    if unknown := set(chosen.faults) - set(FAULTS):
        given.error(f"unknown faults: {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    least = 4 if chosen.find == "addresses" else 5  # so that a link can be cut, and another one is there
    if not least <= chosen.hosts <= 64:
        given.error(f"--hosts {chosen.hosts}: give {least} to 64")
    return chosen


def main() -> int:
    """The exit status."""
    chosen = options()
    try:
        isolation.enter()
        import hosts

        if reason := hosts.why_not():
            raise isolation.Refused(reason)
    except isolation.Refused as error:
        print(f"there can be no cluster here: {error}", file=sys.stderr)
        return isolation.SKIPPED
    logging.basicConfig(level="ERROR")
    from run import Options, Run, show

    began = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {what}", flush=True)

    reports = []
    for finding in FINDINGS if chosen.find == "all" else (chosen.find,):
        say(f"{finding}: {chosen.hosts} hosts, seed {chosen.seed}")
        run = Run(
            Options(
                hosts=chosen.hosts,
                minutes=chosen.minutes / (len(FINDINGS) if chosen.find == "all" else 1),
                faults=chosen.faults,
                seed=chosen.seed,
                finding=finding,
                folder=new_folder(chosen.folder / finding),
                per_s=chosen.per_s,
            ),
            say,
        )
        reports.append(run.run())
        show(reports[-1])
        write_json(reports, chosen.json)
    return 0 if all(each["passed"] for each in reports) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
