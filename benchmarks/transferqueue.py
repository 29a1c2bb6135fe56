"""TransferQueue's own throughput test over its SimpleStorage and over our backend, one after the other.

    git clone --depth 1 --branch v0.1.9 https://github.com/Ascend/TransferQueue build/TransferQueue
    build/adapters/bin/python benchmarks/transferqueue.py --sources build/TransferQueue

Its script, scripts/performance_test/perftest.py, is run as it is, with shorter pauses between its steps: a writer and a
reader, both Ray actors, put and get a batch of tensors. The first iteration, in which our rings are made and served,
has columns of its own; the others are medians. `--complex` has nested tensors and texts among the fields.
"""

from __future__ import annotations

import argparse
import csv
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BACKENDS = ("SimpleStorage", "PayloadTransport")
SCRIPT = Path("scripts") / "performance_test" / "perftest.py"
CPUS = 8  # SimpleStorage asks Ray for one for each of its actors
LONGEST_PAUSE_S = 0.5
CONFIG = """\
metrics: {enabled: false, port: 0}
controller: {sampler: SequentialSampler, polling_mode: false, zmq_info: null}
backend:
  storage_backend: SimpleStorage
  SimpleStorage: {total_storage_size: 100000, num_data_storage_units: 2, zmq_info: null}
  PayloadTransport: {}
"""
IN_EVERY_PROCESS = "import transport.adapters.transferqueue_plugin\n"


def measured(script: Path, backend: str, size: tuple[int, int, int], iterations: int, mixed: bool) -> list[list[float]]:
    """For each iteration: GiB/s of the put, and of the get."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        home.joinpath("config.yaml").write_text(CONFIG, encoding="utf-8")
        home.joinpath("sitecustomize.py").write_text(IN_EVERY_PROCESS, encoding="utf-8")
        batch, fields, length = size
        options = {
            "backend_config": home / "config.yaml",
            "backend": backend,
            "device": "cpu",
            "global_batch_size": batch,
            "field_num": fields,
            "seq_len": length,
            "num_test_iterations": iterations,
            "output_csv": home / "out.csv",
        }
        command = [sys.executable, __file__, "--script", str(script)]
        command += [f"--{name}={value}" for name, value in options.items()] + ["--use_complex_case"] * mixed
        environment = {**os.environ, "PYTHONPATH": folder, "RAY_USAGE_STATS_ENABLED": "0", "TQ_LOGGING_LEVEL": "ERROR"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580)
        if done.returncode:
            raise SystemExit(f"{backend}: perftest.py failed with exit code {done.returncode}\n{done.stderr[-4000:]}")
        with home.joinpath("out.csv").open(encoding="utf-8", newline="") as file:
            return [
                [float(row["put_gbit_per_sec"]) / 8, float(row["get_gbit_per_sec"]) / 8] for row in csv.DictReader(file)
            ]


def child(script: str) -> None:
    """Run upstream's script in this process, in a Ray of enough (nominal) CPUs."""
    import ray

    pause = time.sleep
    time.sleep = lambda seconds, /: pause(min(float(seconds), LONGEST_PAUSE_S))
    ray.init("local", num_cpus=CPUS, include_dashboard=False, object_store_memory=100 << 20, logging_level="ERROR")
    try:
        sys.argv = [script, *sys.argv[3:], f"--head_node_ip={ray.util.get_node_ip_address()}"]
        runpy.run_path(script, run_name="__main__")
    finally:
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, required=True, help="a checkout of TransferQueue")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--complex", action="store_true")
    parser.add_argument("--sizes", default="64x4x32768,512x10x8192", help="samples x fields x float32 values, several")
    chosen = parser.parse_args()
    script = chosen.sources.resolve() / SCRIPT
    if not script.is_file():
        raise SystemExit(f"{script} does not exist: --sources has to be a checkout of TransferQueue")
    print("| batch | backend | put GiB/s | get GiB/s | first put | first get |\n|---|---|---|---|---|---|", flush=True)
    for text in chosen.sizes.split(","):
        batch, fields, length = (int(part) for part in text.split("x"))
        found = []
        for backend in BACKENDS:
            first, *others = measured(script, backend, (batch, fields, length), chosen.iterations, chosen.complex)
            put, get = (statistics.median(column) for column in zip(*(others or [first]), strict=True))
            found.append((put, get, *first))
            row = " | ".join(f"{value:.3f}" for value in found[-1])
            print(f"| {text} | {backend} | {row} |", flush=True)
        ratios = " | ".join(f"× {ours / theirs:.1f}" for theirs, ours in zip(*found, strict=True))
        print(f"| {text} | ratio | {ratios} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--script"]:
        child(sys.argv[2])
    else:
        main()
