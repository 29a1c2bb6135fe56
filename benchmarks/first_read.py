"""The first batch of a data packer over tcp, against ten later ones: does the first wait for connections?

    python benchmarks/first_read.py redis://127.0.0.1:6379/0 [--cold] [--batch 32] [--size 65536] [--repetitions 5]

A process writes into a ring with two ports and publishes to a queue on the Redis server. In a fresh process for each
repetition a packer is set up; two seconds later, as a trainer that loads its model, it fetches eleven batches.
``--cold``: without the warm-up of the setup. Prints milliseconds: of the first batch, of the median and of the slowest
of the later ones.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import subprocess
import sys
import time

import numpy as np

from transport import Schema, UCXXDataPackerMixin, UCXXRolloutMixin
from transport.packer import session
from transport.packer.options import ServerOptions
from transport.queue import RedisQueue
from transport.storage.urls import RedisURL

LATER = 10


class Rollout(UCXXRolloutMixin):
    """The mixin alone."""


class Trainer(UCXXDataPackerMixin):
    """The mixin alone."""


def fetch(url: RedisURL, batch: int, cold: bool) -> list[float]:
    """Milliseconds of each batch."""
    if cold:
        session.PackerSession.warm_up = lambda *_: None  # type: ignore[method-assign]
    times = []
    with RedisQueue(url) as queue:
        trainer = Trainer()
        trainer.setup_ucxx_packer(queue=queue, wire={"tcp"})
        time.sleep(2.0)  # stands for the loading of a model: the time in which connections are warmed up
        for _ in range(1 + LATER):
            claims = trainer.claim_tickets(batch, 10.0)
            assert len(claims) == batch
            begun = time.perf_counter()
            trainer.start_prefetch(claims)
            fetched = trainer.collect_prefetch()
            times.append((time.perf_counter() - begun) * 1e3)
            assert fetched is not None
            assert len(trainer.consume(fetched)) == batch
        trainer.cleanup_ucxx_packer()
    return times


def main() -> None:
    """One repetition in each child; medians of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", help="URL of a Redis server")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int, default=64 << 10)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--fetch", metavar="RUN", help="what a child does")
    given = parser.parse_args()
    if given.fetch:
        print(json.dumps(fetch(RedisURL(given.server, given.fetch, may_forget=True), given.batch, given.cold)))
        return
    schema = Schema.of(data=("uint8", given.size))
    rows = []
    for _ in range(given.repetitions):
        run = f"first-read-{secrets.token_hex(4)}"
        with RedisQueue(RedisURL(given.server, run, may_forget=True)) as queue:
            rollout = Rollout()
            count = given.batch * (1 + LATER)
            rollout.setup_ucxx(schema, slots=count, queue=queue, server=ServerOptions(ports=(0, 0)))
            for _ in range(count):
                rollout.write_to_buffer({"data": np.zeros(given.size, np.uint8)})
            again = ["--cold"] if given.cold else []
            child = [sys.executable, __file__, given.server, "--fetch", run, "--batch", str(given.batch), *again]
            rows.append(json.loads(subprocess.run(child, stdout=subprocess.PIPE, check=True).stdout))
            rollout.cleanup_ucxx()
            queue.remove()
    print(*(" ".join(f"{value:.1f}" for value in row) for row in rows), sep="\n", file=sys.stderr)
    print(
        f"first {statistics.median(row[0] for row in rows):.1f} ms, later: median "
        f"{statistics.median(value for row in rows for value in row[1:]):.1f} ms, slowest of ten "
        f"{statistics.median(max(row[1:]) for row in rows):.1f} ms; first batches: "
        + ", ".join(f"{row[0]:.1f}" for row in rows)
    )


if __name__ == "__main__":
    main()
