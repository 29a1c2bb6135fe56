"""Runs of simulated hosts and trainers, by seed, with the real decisions of client, directory and queue.

python benchmarks/simulation --seed 17               # one, again and again the same
python benchmarks/simulation --seeds 10000           # many small ones; a failing seed is printed
python benchmarks/simulation --scale --seed 1        # 1 000 trainers and 10 000 hosts, in shards of 10 and 100
python benchmarks/simulation --plant fencing         # a planted fault, which must be found
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from typing import Any

if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of a seed
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})

import planted
from accounts import Violation
from world import Plan, Result, World

SHARD = Plan(hosts=100, trainers=10, slots=30, minutes=60.0, writes_per_s=0.1, faults_per_minute=2.0)


def one(seed: int, plan: Plan) -> Result | str:
    """The result of a seed, or what it violated."""
    logging.disable(logging.CRITICAL)
    try:
        return World(seed, plan).run()
    except Violation as error:
        return f"seed {seed}: {error}"
    finally:
        gc.collect()


def _one(arguments: tuple[int, Plan]) -> tuple[int, Result | str]:
    return arguments[0], one(*arguments)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the first simulation")
    parser.add_argument("--seeds", type=int, default=1, help="how many, one after the other")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--scale", action="store_true", help="a hundred shards of 10 trainers and 100 hosts")
    parser.add_argument("--plant", choices=sorted(planted.PLANTS), help="a fault that must be found")
    parser.add_argument("--hosts", type=int)
    parser.add_argument("--trainers", type=int)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--writes-per-s", type=float)
    parser.add_argument("--faults-per-minute", type=float)
    chosen = parser.parse_args()
    plan = SHARD if chosen.scale else Plan(faults_per_minute=12.0) if chosen.plant else Plan()
    given = {name: getattr(chosen, name) for name in Plan._fields if hasattr(chosen, name)}
    plan = plan._replace(**{name: value for name, value in given.items() if value is not None})
    count = 100 if chosen.scale and chosen.seeds == 1 else chosen.seeds
    if chosen.plant:
        planted.PLANTS[chosen.plant].plant()
    begun, failed, virtual = time.monotonic(), [], 0.0
    counts: Counter[str] = Counter()
    figures: dict[str, Any] = {"most_links": 0, "most_ledger": 0}
    work = [(seed, plan) for seed in range(chosen.seed, chosen.seed + count)]
    pool = multiprocessing.get_context("fork").Pool(chosen.jobs) if chosen.jobs > 1 else None
    for seed, found in pool.imap(_one, work) if pool else map(_one, work):
        if isinstance(found, str):
            failed.append(found)
            print(found, flush=True)
            if chosen.plant:
                break
            continue
        counts += found.counts
        virtual += found.virtual_s
        figures = {name: max(value, getattr(found, name)) for name, value in figures.items()}
        if count == 1:
            print(f"seed {seed}: digest {found.digest}")
    if pool:
        pool.terminate()
    wall = time.monotonic() - begun
    print(
        f"{count} simulations of {plan.trainers} trainers and {plan.hosts} hosts: {virtual / 3600:.1f} virtual hours "
        f"in {wall:.0f} s, {len(failed)} failed; at most {figures['most_links']} connections of a host, "
        f"{figures['most_ledger']} acknowledgements in hand of a trainer"
    )
    print(", ".join(f"{name} {number}" for name, number in sorted(counts.items())))
    if chosen.plant:
        print(f"planted {chosen.plant}: {'found' if failed else 'NOT FOUND'}")
        return 0 if failed else 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
