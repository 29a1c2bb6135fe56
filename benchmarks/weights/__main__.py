"""Updates of the weights: how long they take, how long replicas stand still, and what crosses the links.

python benchmarks/weights --replicas 1,2,4,8 --hosts 1 --sizes 1GiB --rates 100MB --workers mapped,delta --updates 1
python benchmarks/weights --senders 4 --replicas 16 --sizes 256MiB --rates 5MB --workers "shards,rank 0" --updates 1
python benchmarks/weights --sizes 64MiB --rates 0,400MB --torch build/adapters/bin/python      # pauses of all workers

With a rate each process is a host of its own whose links the kernel shapes, or the sender keeps it where that is not
allowed (links.py). measure.py says what the workers are. A row for which the host has too little memory says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import msgspec
from measure import KINDS, Case, Row, measured, memory_short

from transport.bench.machine import machine
from transport.bench.units import parse_size, parse_sizes
from transport.errors import TransportError, UsageError
from transport.weights.plan.topology import SHAPES

_HEADINGS = (
    "worker", "N → M", "model MB", "link MB/s", "changed", "transfer s", "limit s", "update s", "pause ms: least",
    "p50", "p99", "memcpy ms", "sent MB", "wire ×", "copies ×", "memory MB",
)  # fmt: skip


def cells(row: Row) -> list[str]:
    """One for each heading."""
    return [
        row.worker,
        f"{row.senders} → {row.replicas}" + (f", tp {row.tp}" if row.tp > 1 else ""),
        f"{row.model_bytes / 1e6:.0f}",
        f"{row.rate / 1e6:.0f}" if row.rate else "not limited",
        f"{row.changed:.1%}",
        f"{row.transfer_s:.2f}",
        f"{row.limit_s:.2f}" if row.limit_s else "",
        f"{row.update_s:.2f}",
        *(f"{each:.1f}" for each in row.pause_ms),
        f"{row.memcpy_ms:.1f}" if row.memcpy_ms else "",
        f"{row.sent_bytes / 1e6:.1f}",
        f"{row.received:.2f}",
        f"{row.trainer_copies:.2f}, {row.replica_copies:.2f}",
        f"{row.sender_bytes / 1e6:.0f}, {row.receiver_bytes / 1e6:.0f}",
    ]


def main() -> int:
    """Rows as they come; status 1 when one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="64MiB", help="of the model")
    parser.add_argument("--rates", default="0", help="bytes per second of every link; 0: no limit")
    parser.add_argument("--replicas", default="2", help="numbers of them; of shards: of ranks")
    parser.add_argument("--senders", type=int, default=2, help="trainer ranks, of shards")
    parser.add_argument("--hosts", type=int, default=0, help="that the replicas are spread over; 0: one for each")
    parser.add_argument("--workers", default="", help=f"default: all of {', '.join(KINDS)}")
    parser.add_argument("--updates", type=int, default=20, help="that are counted")
    parser.add_argument("--changed", type=float, default=0.01, help="share of the elements, for the rows of deltas")
    parser.add_argument("--bucket", default="8MiB", help="bytes that are sent at a time")
    parser.add_argument("--shape", choices=SHAPES, default="tree", help="order of the relays; star: no relays")
    parser.add_argument("--torch", default="", help="an interpreter that has torch, for the rows of gloo")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if not 0 < chosen.changed <= 1:
        parser.error(f"--changed {chosen.changed}: give a share above 0, at most 1")
    workers = (
        chosen.workers.split(",") if chosen.workers else [each for each in KINDS if each != "gloo" or chosen.torch]
    )
    if unknown := set(workers) - KINDS.keys():
        parser.error(f"--workers {', '.join(sorted(unknown))}: choose some of {', '.join(KINDS)}")
    try:
        sizes, bucket = parse_sizes(chosen.sizes), parse_size(chosen.bucket)
        rates = [0.0 if text == "0" else float(parse_size(text)) for text in chosen.rates.split(",")]
    except UsageError as error:
        parser.error(str(error))
    rows, failed = [], False
    print(" | ".join(_HEADINGS))
    for rate in rates:
        for size in sizes:
            for replicas in map(int, chosen.replicas.split(",")):
                for worker in workers:
                    case = Case(
                        worker=worker,
                        size=size,
                        replicas=replicas,
                        rate=rate,
                        senders=chosen.senders,
                        hosts=chosen.hosts,
                        updates=chosen.updates,
                        every=max(1, round(1 / chosen.changed)),
                        bucket=bucket,
                        shape=chosen.shape,
                    )
                    if why := memory_short(case):
                        print(f"{worker} | {why}", flush=True)
                        continue
                    try:
                        rows.append(measured(case, chosen.torch))
                        print(" | ".join(cells(rows[-1])), flush=True)
                    except TransportError as error:
                        failed = True
                        print(f"{worker} | {error}", flush=True)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps({"machine": machine(), "rows": msgspec.to_builtins(rows)}, indent=2) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
