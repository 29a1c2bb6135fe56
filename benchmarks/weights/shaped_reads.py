"""How much of a link payloads over tcp use, beside one plain TCP stream: a job on two hosts, or reads.

    python benchmarks/weights/shaped_reads.py --gbits 1,10,25 --sizes 64KiB,1MiB,16MiB
    python benchmarks/weights/shaped_reads.py --way reads --concurrency 8

job: a rollout writes, a trainer takes batches and consumes them (shaped_process.py); reads: `bench serve` and
`bench fetch`. The hosts are network namespaces whose links the kernel shapes (links.py), so it needs root. Each
repetition measures the stream, then the payloads; a row is the median of the ratios, and of the rates in GB/s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from links import Links, why_not

from transport.bench.units import parse_sizes

_BENCH = [sys.executable, "-P", "-m", "transport", "bench"]
_PROCESS = [sys.executable, "-P", str(Path(__file__).with_name("shaped_process.py"))]


def consumed(links: Links, sizes: str, seconds: float) -> dict[int, float]:
    """GB/s that a trainer on host 1 consumed from a rollout on host 0, by size."""
    rates = {}
    for size in parse_sizes(sizes):
        command = [*links.within(0), *_PROCESS, "rollout", str(size), links.address(0)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rollout:
            assert rollout.stdin is not None
            assert rollout.stdout is not None
            place = f"rings://{links.address(0)}:{rollout.stdout.readline().strip()}"
            command = [*links.within(1), *_PROCESS, "trainer", str(size), place, str(seconds)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            rollout.stdin.close()
        rates[size] = float(done.stdout)
    return rates


def fetched(links: Links, sizes: str, concurrency: int, seconds: float) -> dict[int, float]:
    """GB/s of one fetch from host 0 to host 1, by size."""
    serve = [*links.within(0), *_BENCH, "serve", "--bind", links.address(0)]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as serving:
        try:
            assert serving.stdout is not None
            port = serving.stdout.readline().split()[-1]
            options = ["--sizes", sizes, "--concurrency", str(concurrency), "--seconds", str(seconds)]
            command = [*_BENCH, "fetch", f"{links.address(0)}:{port}", *options, "--repetitions", "1", "--json", "-"]
            done = subprocess.run([*links.within(1), *command], check=True, stdout=subprocess.PIPE, text=True)
        finally:
            serving.terminate()
    rows: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return {int(row["size_bytes"]): float(row["gb_per_s"]) for row in rows}


def main() -> int:
    """Print a row for each rate and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=["job", "reads"], default="job", help="how payloads are moved")
    parser.add_argument("--gbits", default="1,10,25", help="rates of the links in Gbit/s")
    parser.add_argument("--sizes", default="64KiB,1MiB,16MiB", help="of the payloads")
    parser.add_argument("--concurrency", type=int, default=8, help="reads at a time, with --way reads")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--repetitions", type=int, default=10, help="of stream and payloads, alternately")
    given = parser.parse_args()
    if reason := why_not():
        print(f"links are not shaped here: {reason}", file=sys.stderr)
        return 2
    print(f"{'Gbit/s':>7} {'bytes':>9} {'stream':>7} {'moved':>7} {'share':>6} {'least':>6}")
    for gbits in map(float, given.gbits.split(",")):
        streams: list[float] = []
        rates: dict[int, list[float]] = {}
        with Links.made(2, gbits * 1e9 / 8) as links:
            for _ in range(given.repetitions):
                streams.append(links.stream() / 1e9)
                if given.way == "job":
                    moved = consumed(links, given.sizes, given.seconds)
                else:
                    moved = fetched(links, given.sizes, given.concurrency, given.seconds)
                for size, rate in moved.items():
                    rates.setdefault(size, []).append(rate)
        for size, measured in rates.items():
            shares = [each / stream for each, stream in zip(measured, streams, strict=True)]
            medians = f"{statistics.median(streams):7.3f} {statistics.median(measured):7.3f}"
            print(f"{gbits:7g} {size:9d} {medians} {statistics.median(shares):6.2f} {min(shares):6.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
