"""Runs of simulated hosts and trainers, by seed, with the real decisions of client, directory and queue.

python benchmarks/simulation --seed 17               # one, again and again the same
python benchmarks/simulation --seeds 10000           # many small ones; a failing seed is printed
python benchmarks/simulation --members --seeds 100   # rendezvous, election and the ends of epochs
python benchmarks/simulation --hosts 10000 --trainers 1000 --faults-per-minute 200 --minutes 10
python benchmarks/simulation --plant fencing         # a planted fault, which must be found
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import resource
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, get_type_hints

if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of a seed
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "tests" / "support"))  # store_proxy

import planted
from accounts import Violation
from members import Members, MembersPlan
from members import drawn as drawn_members
from plans import Plan, Result, drawn
from world import World

from transport.errors import TransportError


class Unexpected(logging.Handler):
    """Errors that the product logs and goes on after, such as a name that nothing here has: as tracebacks."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, Exception) and not isinstance(error, TransportError | OSError):
            self.found.append("".join(traceback.format_exception(error)))


def one(seed: int, plan: Plan | MembersPlan) -> Result | str:
    """The result of a seed, or what it violated."""
    unexpected = Unexpected()
    logging.basicConfig(level=logging.ERROR, handlers=[unexpected], force=True)
    try:
        found = (Members(seed, plan) if isinstance(plan, MembersPlan) else World(seed, plan)).run()
        return f"seed {seed}: {unexpected.found[0]}" if unexpected.found else found
    except Violation as error:
        return "\n".join([f"seed {seed}: {error}", *unexpected.found[:1]])
    except Exception as error:
        return f"seed {seed}: {type(error).__name__}: {error}\n{traceback.format_exc()}"
    finally:
        gc.collect()


def _one(arguments: tuple[int, Plan | MembersPlan]) -> tuple[int, Result | str]:
    return arguments[0], one(*arguments)


class Totals:
    """What many seeds came to."""

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.failed: list[str] = []
        self.seeds = 0
        self.virtual_s = 0.0
        self.counts: Counter[str] = Counter()
        self.most = dict.fromkeys(("most_links", "most_ledger", "most_remembered"), 0)

    def add(self, found: Result | str) -> None:
        self.seeds += 1
        if isinstance(found, str):
            self.failed.append(found)
            print(found, flush=True)
            return
        self.counts += found.counts
        self.virtual_s += found.virtual_s
        self.most = {name: max(value, getattr(found, name)) for name, value in self.most.items()}

    def __str__(self) -> str:
        return (
            f"{self.seeds} simulations, {self.virtual_s / 3600:.1f} virtual hours in "
            f"{time.monotonic() - self.begun:.0f} s, {len(self.failed)} failed; {os.times().user:.0f} s of CPU and "
            f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB; at most {self.most['most_links']} "
            f"connections of a host, {self.most['most_ledger']} acknowledgements in hand of a trainer, "
            f"{self.most['most_remembered']} records of the queue\n"
            + ", ".join(f"{name} {number}" for name, number in sorted(self.counts.items()))
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the first simulation")
    parser.add_argument("--seeds", type=int, default=1, help="how many, one after the other")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--members", action="store_true", help="rendezvous, election and epochs, without payloads")
    parser.add_argument("--plant", choices=sorted(planted.PLANTS), help="a fault that must be found")
    parser.add_argument("--list-plants", action="version", version=" ".join(planted.PLANTS), help="print their names")
    for name, kind in get_type_hints(Plan).items():
        option: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
        parser.add_argument(f"--{name.replace('_', '-')}", **option)
    return parser.parse_args()


def main() -> int:
    chosen = arguments()
    gc.freeze()  # the modules: a collection after each seed looks at what the seed left only
    given = {name: getattr(chosen, name) for name in Plan._fields if getattr(chosen, name) is not None}
    seeds = range(chosen.seed, chosen.seed + chosen.seeds)
    plant = planted.PLANTS[chosen.plant] if chosen.plant else None
    if plant is not None:
        plant.plant()

    def plan(seed: int) -> Plan | MembersPlan:
        if chosen.members or (plant is not None and plant.members):
            return drawn_members(seed)
        return (drawn(seed) if plant is None else plant.plan)._replace(**given)

    work = ((seed, plan(seed)) for seed in seeds)
    totals = Totals()
    pool = multiprocessing.get_context("fork").Pool(chosen.jobs) if chosen.jobs > 1 else None
    try:
        for seed, found in pool.imap(_one, work) if pool else map(_one, work):
            totals.add(found)
            if chosen.seeds == 1 and not isinstance(found, str):
                print(f"seed {seed}: digest {found.digest}")
            if chosen.plant and totals.failed:
                break
    except KeyboardInterrupt:
        print(f"interrupted before seed {chosen.seed + totals.seeds}")
    if pool:
        pool.terminate()
    print(totals)
    if chosen.plant:
        broken = any("Traceback" in each for each in totals.failed)  # no violation: the code has changed since
        print(f"planted {chosen.plant}: {'BROKEN' if broken else 'found' if totals.failed else 'NOT FOUND'}")
        return 0 if totals.failed and not broken else 1
    return 1 if totals.failed else 0


if __name__ == "__main__":
    sys.exit(main())
