"""One rank of a broadcast of weights by torch.distributed over gloo, as users without this package do it.

python gloo.py RANK WORLD ADDRESS UPDATES SHAPES      # rank 0 has the weights

Prints seconds, one line for each update: of rank 0 until every replica has said that it has the version, of a replica
from the order to stop until it has the version.
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

_PORT = "29541"


def main() -> None:
    rank, world, address, updates, shapes = sys.argv[1:]
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": _PORT}
    if address.startswith("127."):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    elif "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = "cable0"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=int(rank), world_size=int(world))
    tensors = [
        torch.ones([int(each) for each in shape.split(",")], dtype=torch.bfloat16) for shape in shapes.split(";")
    ]
    for _ in range(int(updates)):
        dist.barrier()
        begun = time.perf_counter()
        for tensor in tensors:
            dist.broadcast(tensor, 0)
        if rank == "0":
            dist.barrier()
            print(time.perf_counter() - begun, flush=True)
        else:
            print(time.perf_counter() - begun, flush=True)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
