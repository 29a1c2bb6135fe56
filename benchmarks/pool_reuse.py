"""How often a read finds an open connection when a trainer reads from many rollout servers.

    python benchmarks/pool_reuse.py --servers 10000 --reads-per-s 100

The real pool on a made-up clock: reads go to servers chosen at random, one listener each, one after the other; the pool
opens, keeps and closes as it does in a client (`transport/client/connections/pool.py`). docs/CLUSTER.md quotes it, as
``--quoted`` checks (make lint).
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from transport.client.connections.pool import EndpointPool
from transport.settings import Settings

WARM_UP_S = 120.0  # longer than an idle connection lives
KIB_OF_A_LINK = 56  # at the client, the middle of what was measured
PAGE = Path(__file__).resolve().parents[1] / "docs" / "CLUSTER.md"


class Reuse(NamedTuple):
    """Share of reads that found a connection, and how many were open on average."""

    share: float
    open_links: float


def simulate(servers: int, reads_per_s: float, idle: int, *, seconds: float = 60.0, seed: int = 0) -> Reuse:
    """Reads for ``seconds`` after the warm-up, with at most ``idle`` idle connections."""
    settings = replace(Settings(), pool_endpoints_idle=idle).validate()
    pool: EndpointPool[int] = EndpointPool(settings)
    rng = random.Random(seed)
    found = reads = opened = 0
    links = 0.0
    now = 0.0
    while now < WARM_UP_S + seconds:
        now += rng.expovariate(reads_per_s)
        pool.expired(now)
        port = ("server", rng.randrange(servers))
        link = pool.checkout(port, now)
        hit = link is not None
        if link is None:
            pool.begin_open(port)
            opened += 1
            link = opened
            pool.opened(port, link)
        pool.checkin(link, now)
        if now >= WARM_UP_S:
            reads += 1
            found += hit
            links += len(pool.idle()) if reads % 100 == 0 else 0
    return Reuse(found / reads, links * 100 / reads)


def row(idle: int, reuse: Reuse) -> str:
    """A row of the page's table."""
    megabytes = round(reuse.open_links * KIB_OF_A_LINK * 1024 / 1e6)
    return f"| {idle} | {100 * reuse.share:.1f} % | {reuse.open_links:.0f} | {megabytes} MB |"


def main() -> int:
    """Print a table over bounds of the pool; the exit status is 1 if the page has other rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=10_000)
    parser.add_argument("--reads-per-s", type=float, default=100.0)
    parser.add_argument("--idle", default="256,1024,4096,16384")
    parser.add_argument("--quoted", action="store_true", help="print only what docs/CLUSTER.md has otherwise")
    arguments = parser.parse_args()
    quoted = re.findall(r"^(\| (\d+) \| .* % \| .*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    if arguments.quoted:
        arguments.idle = ",".join(idle for _, idle in quoted)
    sizes = map(int, arguments.idle.split(","))
    rows = [row(idle, simulate(arguments.servers, arguments.reads_per_s, idle)) for idle in sizes]
    if arguments.quoted:
        rows = [each for each in rows if each not in dict(quoted)]
    print(*rows, sep="\n", end="\n" if rows else "")
    return int(arguments.quoted and bool(rows))


if __name__ == "__main__":
    sys.exit(main())
