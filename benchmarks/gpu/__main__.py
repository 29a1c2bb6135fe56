"""With a CUDA device: install and build what is missing, check, time; a short table last. `make gpu` runs it.

    python benchmarks/gpu [--json PATH] [--skip-tests] [--sizes 65536,1048576,16777216]

Nothing is fetched: what this interpreter lacks comes out of build/wheels, where `make gpu-wheels` puts it.

The checks are the tests marked ``gpu``. The rows: each size over each way, GB/s of the median; the floor of anything
that copies is cudaMemcpyAsync from and to pinned memory, measured in the same run. Bytes are compared once per row.
A payload's checksum is made while it is written (always) and compared on arrival over tcp and shm (staged).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from cases import Bench
from environment import check, environment
from sizes import SIZES, WEIGHTS
from table import further, table, versions
from writer import write


def measure(sizes: list[int]) -> tuple[Bench, dict[str, Any]]:
    """All rows."""
    bench = Bench()
    memory = bench.context_memory()
    bench.trajectories()
    bench.plain(WEIGHTS)
    bench.weights(WEIGHTS)
    bench.write_many()
    bench.values()
    for size in sizes:
        bench.plain(size)
        bench.torch_copies(size)
        for registered in (True, False):
            bench.write(size, registered=registered)
        bench.read(size, "mapped", "staged")
        bench.read(size, "mapped", "staged", registered=False)
        for wire in ("tcp", "shm"):
            for receive in ("staged", "direct"):
                bench.read(size, wire, receive)
        for wire in ("mapped", "tcp"):
            bench.stream_of_payloads(size, wire)
        for wire, receive in (("mapped", "staged"), ("tcp", "staged"), ("tcp", "direct")):
            bench.two_streams(size, wire, receive)
        for place in ("host", "pinned", "cupy"):
            bench.batches(size, place)
    bench.nixl(sizes)
    return bench, memory


def main() -> int:
    """Build, check, time, print."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", metavar="PATH", help="write versions and rows here")
    options.add_argument("--sizes", default=",".join(map(str, SIZES)))
    options.add_argument("--skip-tests", action="store_true", help="time only")
    options.add_argument("--write", help=argparse.SUPPRESS)
    options.add_argument("--trajectories", help=argparse.SUPPRESS)
    options.add_argument("--measure", help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.write:
        write(*map(int, chosen.write.split(",")))
        return 0
    if chosen.trajectories:
        import trajectories

        trajectories.write(int(chosen.trajectories))
        return 0
    if chosen.measure is not None:
        bench, memory = measure([int(size) for size in chosen.sizes.split(",")])
        print()
        print(" · ".join(f"{name} {value}" for name, value in versions().items()))
        print(f"a connection's transports: {', '.join(memory['ucx'])}")
        print(f"device memory that a listener takes: {memory['listener_device_bytes'] / 1e6:.1f} MB")
        print(chosen.measure)
        print()
        print(table(bench.rows))
        print(further(bench.rows))
        for way, why in bench.left_out.items():
            print(f"left out: {way}: {why}")
        if chosen.json:
            found = {
                "versions": versions(),
                "memory": memory,
                "tests": chosen.measure,
                "rows": bench.rows,
                "left_out": bench.left_out,
            }
            Path(chosen.json).write_text(json.dumps(found, indent=2))
        return 0
    inherited = environment()
    probe = "import cupy; cupy.cuda.runtime.getDeviceCount() or exit('no CUDA device')"
    if (
        probed := subprocess.run([sys.executable, "-P", "-c", probe], env=inherited, capture_output=True, text=True)
    ).returncode:
        print(f"nothing to do here: {(probed.stderr.strip() or 'no CUDA device').splitlines()[-1]}", file=sys.stderr)
        return 2
    outcome, failed = ("left out", 0) if chosen.skip_tests else check(inherited)
    again = [sys.executable, str(Path(__file__).parent), "--sizes", chosen.sizes, "--measure", f"checks: {outcome}"]
    done = subprocess.run([*again, *(["--json", chosen.json] if chosen.json else [])], env=inherited)
    return failed or done.returncode


if __name__ == "__main__":
    sys.exit(main())
