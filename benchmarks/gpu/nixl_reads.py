"""NIXL beside ours: an agent in each of two processes, memory registered once, and READs into this process's device.

    python nixl_reads.py SIZE,… SOURCE      SOURCE: VRAM or DRAM, what the other process offers; one JSON line a size

UCX chooses the transport; UCX_TLS=tcp makes it TCP. Handles are made once, as a pool would keep them. The bytes of each
size are compared once. Needs nixl (nixl_cu13 or nixl_cu12) and CuPy; not this package.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

_MODULES = ("nixl_cu13._api", "nixl_cu12._api")


def memory(kind: str, size: int, seed: int | None) -> tuple[Any, int]:
    """An array of random bytes (zeros without a seed) on the device or the host, and its address."""
    values = np.zeros(size, np.uint8) if seed is None else np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    if kind == "DRAM":
        return values, values.ctypes.data
    import cupy

    array = cupy.asarray(values)
    cupy.cuda.Device().synchronize()
    return array, int(array.data.ptr)


def agent(name: str, kind: str, address: int, size: int) -> Any:
    """An agent with that memory registered."""
    for module in _MODULES:
        try:
            api = importlib.import_module(module)
            break
        except ImportError as error:
            missing = error
    else:
        raise SystemExit(f"nixl cannot be imported: {missing}")
    made = api.nixl_agent(f"{name}-{os.getpid()}", api.nixl_agent_config(backends=["UCX"]))
    made.register_memory([(address, size, 0, "")], kind)
    return made


def serve(kind: str, size: int) -> None:
    """Offer memory until the input ends."""
    kept, address = memory(kind, size, size)
    mine = agent("server", kind, address, size)
    print(json.dumps({"agent": mine.get_agent_metadata().hex(), "address": address}), flush=True)
    sys.stdin.read()
    del kept


def read(source: str, size: int) -> dict[str, Any]:
    """GB/s of the median of READs of this size."""
    command = [sys.executable, "-P", __file__, "--serve", source, str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        try:
            line = next((line for line in server.stdout if line.startswith("{")), None)  # NIXL logs there, too
            if line is None:
                raise SystemExit("nixl: the serving process ended")
            offered = json.loads(line)
            out, address = memory("VRAM", size, None)
            mine = agent("client", "VRAM", address, size)
            peer = mine.add_remote_agent(bytes.fromhex(offered["agent"]))
            local = mine.prep_xfer_dlist("", [(address, size, 0)], "VRAM")
            remote = mine.prep_xfer_dlist(peer, [(offered["address"], size, 0)], source)
            handle = mine.make_prepped_xfer("READ", local, [0], remote, [0])
            times = []
            for _ in range(max(20, min(300, (1 << 30) // size))):
                begun = time.perf_counter()
                state = mine.transfer(handle)
                while state == "PROC":
                    state = mine.check_xfer_state(handle)
                if state != "DONE":
                    raise SystemExit(f"nixl: transfer failed: {state}")
                times.append(time.perf_counter() - begun)
            if not np.array_equal(out.get(), np.random.default_rng(size).integers(0, 256, size, np.uint8)):
                raise SystemExit(f"nixl: content mismatch: {size} bytes read differ from those offered")
            mine.release_xfer_handle(handle)
        finally:
            server.stdin.close()
    median = statistics.median(times[3:])
    return {"size_bytes": size, "gb_per_s": round(size / median / 1e9, 2)}


def main() -> int:
    """Serve, or measure each size."""
    if sys.argv[1] == "--serve":
        serve(sys.argv[2], int(sys.argv[3]))
        return 0
    sizes, source = sys.argv[1], sys.argv[2]
    for size in map(int, sizes.split(",")):
        print(json.dumps(read(source, size)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
