"""How long one update of the weights takes on 10 to 10 000 hosts: the planner's own plan, and seconds from link rates.

    python benchmarks/weights/hosts.py --size 16GB --rate 12.5GB --bucket 64MiB

Measured here: the processor time of the plan. Computed: everything else. The plan says who sends to whom; a link that
carries k copies of the model takes k times its bytes over its rate, and the last host is behind the first by a bucket's
time for each hop, k times where a relay has k children. README.md has what real links took of it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from transport.bench.units import parse_size
from transport.weights.plan.topology import FANOUT, Shape, depth, hops

HOSTS = (10, 100, 1000, 10_000)
REPLICAS = 8  # of each host; one lands what comes, the others map it


def row(hosts: int, shape: Shape, size: int, rate: float, bucket: int) -> tuple[float, float, int, int]:
    """(seconds of the update, milliseconds of the plan, hops, copies that the busiest link carries)."""
    members = [f"host-{host}" for host in range(hosts) for _ in range(REPLICAS)]
    begun = time.process_time()
    found = hops(members, shape)
    planned = time.process_time() - begun
    children = Counter(each.parent for each in found if not each.mapped)
    copies, behind = max(children.values()), depth(found)
    assert sum(children.values()) == hosts
    return copies * (size + (behind - 1) * bucket) / rate, planned * 1e3, behind, copies


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="16GB", help="of the model")
    parser.add_argument("--rate", default="12.5GB", help="of every link, bytes a second in each direction")
    parser.add_argument("--bucket", default="64MiB")
    options = parser.parse_args()
    size, rate, bucket = map(parse_size, (options.size, options.rate, options.bucket))
    print(f"{options.size} to hosts of {REPLICAS} replicas, links of {options.rate}/s, limit {size / rate:.2f} s")
    for hosts in HOSTS:
        for shape in ("chain", "tree"):
            seconds, planned_ms, behind, copies = row(hosts, shape, size, rate, bucket)
            print(
                f"{hosts:6} hosts, {shape:5}: {seconds:7.2f} s, {behind} hops, the busiest link carries {copies}; "
                f"the plan takes {planned_ms:.1f} ms of processor time"
            )
    assert FANOUT == 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
