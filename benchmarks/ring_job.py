"""The whole job over one mapped ring: processes write in batches, others claim, verify and consume.

    .venv/bin/python benchmarks/ring_job.py [--sizes 4096,65536] [--payloads 100000] [--repeats 3] [--batch 32]
                                            [--writers 1] [--readers 1]

Every payload is verified by its checksum, which the reader computes. Prints a JSON line per size: payloads a second,
GB/s, microseconds of processor time of writers and readers per payload, milliseconds from the call that writes one
payload to its consumption by a reader that waits, and what each step takes by itself.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection

import numpy as np

from transport import Schema, SharedRingBuffer, TensorSpec

SLOTS = 256


def schema_of(size: int) -> Schema:
    return Schema((TensorSpec("data", "uint8", (size,)),))


def payloads_of(size: int, count: int) -> list[dict[str, np.ndarray]]:
    return [{"data": np.random.default_rng(n).integers(0, 255, size, np.uint8)} for n in range(count)]


def read(name: str, batch: int, total: int, told: Connection) -> None:
    """Claim, verify and consume until ``total`` payloads were consumed by all; tells its end and processor time."""
    with SharedRingBuffer.attach(name, role="reader") as ring:
        told.send("ready")
        cpu = time.process_time()
        last = time.perf_counter()
        while ring.native.depth(0)["done"] < total:
            claims = ring.claim(batch, 0.05)
            for claim in claims:
                claim.verify()
            if ring.consume(claims):
                last = time.perf_counter()
        told.send((last, time.process_time() - cpu))


def write(name: str, size: int, batch: int, total: int, told: Connection) -> None:
    """Write ``total`` payloads when told to; tells its begin and processor time."""
    payloads = payloads_of(size, batch)
    with SharedRingBuffer.attach(name, schema_of(size), role="writer") as ring:
        told.send("ready")
        told.recv()
        begun, cpu = time.perf_counter(), time.process_time()
        for _ in range(total // batch):
            ring.write_many(payloads)
        told.send((begun, time.process_time() - cpu))


def answer(name: str, total: int, told: Connection) -> None:
    """Consume payloads one by one as they come; tells the time from each one's publication to its consumption."""
    with SharedRingBuffer.attach(name, role="reader") as ring:
        told.send("ready")
        for _ in range(total):
            [claim] = ring.claim(1, 30.0)
            claim.verify()
            claim.consume()
            told.send(time.perf_counter())


def run(size: int, batch: int, total: int, writers: int, readers: int) -> dict[str, float]:
    spawn = multiprocessing.get_context("spawn")
    with SharedRingBuffer.create(schema_of(size), slots=SLOTS) as ring:
        ends: list[Connection] = []
        children = []
        for number in range(writers + readers):
            ours, theirs = multiprocessing.Pipe()
            ends.append(ours)
            share = total // writers
            target, arguments = (
                (write, (ring.name, size, batch, share, theirs))
                if number < writers
                else (read, (ring.name, batch, share * writers, theirs))
            )
            children.append(spawn.Process(target=target, args=arguments))
            children[-1].start()
        for end in ends:
            end.recv()
        for end in ends[:writers]:
            end.send("go")
        begun, cpu_writers = zip(*(end.recv() for end in ends[:writers]), strict=True)
        ended, cpu_readers = zip(*(end.recv() for end in ends[writers:]), strict=True)
        for child in children:
            child.join()
        done = ring.native.depth(0)["done"]
        assert done == total // writers * writers
    return {
        "payloads_per_s": done / (max(ended) - min(begun)),
        "writer_us": sum(cpu_writers) / done * 1e6,
        "reader_us": sum(cpu_readers) / done * 1e6,
    }


def latency(size: int, total: int = 1000) -> dict[str, float]:
    """Milliseconds from the call of `write_many` to the consumption, the reader waiting."""
    payloads = payloads_of(size, 1)
    spawn = multiprocessing.get_context("spawn")
    with SharedRingBuffer.create(schema_of(size), slots=8) as ring:
        ours, theirs = multiprocessing.Pipe()
        child = spawn.Process(target=answer, args=(ring.name, total, theirs))
        child.start()
        ours.recv()
        took = []
        for _ in range(total):
            time.sleep(0.0005)  # the reader is asleep by then
            begun = time.perf_counter()
            ring.write_many(payloads)
            took.append((ours.recv() - begun) * 1e3)
        child.join()
    cuts = statistics.quantiles(took, n=100)
    return {"ms_p50": round(cuts[49], 3), "ms_p99": round(cuts[98], 3)}


def alone(size: int, batch: int) -> dict[str, float]:
    """Each step by itself, in one process, microseconds per payload."""
    payloads = payloads_of(size, batch)
    steps: dict[str, list[float]] = {"write_many": [], "claim": [], "verify": [], "consume": [], "write": []}
    with SharedRingBuffer.create(schema_of(size), slots=batch) as ring:
        for _ in range(200):
            times = [time.perf_counter()]
            ring.write_many(payloads)
            times.append(time.perf_counter())
            claims = ring.claim(batch)
            times.append(time.perf_counter())
            for claim in claims:
                claim.verify()
            times.append(time.perf_counter())
            ring.consume(claims)
            times.append(time.perf_counter())
            for step, begun, ended in zip(steps, times, times[1:], strict=False):
                steps[step].append((ended - begun) / batch * 1e6)
            begun = time.perf_counter()
            for payload in payloads:
                ring.write(payload)
            steps["write"].append((time.perf_counter() - begun) / batch * 1e6)
            ring.consume(ring.claim(batch))
    return {f"{step}_us": round(statistics.median(each), 2) for step, each in steps.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="4096,65536")
    parser.add_argument("--payloads", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--writers", type=int, default=1)
    parser.add_argument("--readers", type=int, default=1)
    options = parser.parse_args()
    for size in map(int, options.sizes.split(",")):
        each = options.batch * options.writers
        total = max(each, options.payloads * 4096 // max(size, 4096) // each * each)
        runs = [run(size, options.batch, total, options.writers, options.readers) for _ in range(options.repeats)]
        row = {key: round(statistics.median(one[key] for one in runs), 2) for key in runs[0]}
        row |= {"gb_per_s": round(row["payloads_per_s"] * size / 1e9, 2)}
        row |= latency(size) | alone(size, options.batch)
        settings = {"size_bytes": size, "batch": options.batch, "writers": options.writers, "readers": options.readers}
        print(json.dumps(settings | row), flush=True)


if __name__ == "__main__":
    main()
