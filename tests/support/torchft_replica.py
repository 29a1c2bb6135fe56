"""One replica group of torchft, of one rank: ``python -m torchft_replica LIGHTHOUSE NAME STEPS``.

It trains a model with another replica, over gloo. After each step that counted it prints STEP HEALED CHECKSUM, and goes
on when it is told a line; HEALED is how often it has taken its state from the other one.
"""

from __future__ import annotations

import sys
import warnings
import zlib
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore
from torchft.ddp import DistributedDataParallel
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo

from transport.adapters.torchft import PayloadTransport

TIMEOUT = timedelta(seconds=20)


class Counted(PayloadTransport):
    healed = 0

    def recv_checkpoint(self, *arguments: Any, **options: Any) -> Any:
        state = super().recv_checkpoint(*arguments, **options)
        self.healed += 1
        return state


def checksum(model: nn.Module, optimizer: Any) -> int:
    moments = [each["exp_avg"] for each in optimizer.state_dict()["state"].values()]
    value = 0
    for tensor in (*model.parameters(), *moments):
        value = zlib.crc32(tensor.detach().contiguous().numpy().tobytes(), value)
    return value


def main() -> None:
    lighthouse, name, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    warnings.simplefilter("ignore")
    torch.manual_seed(sum(name.encode()))  # replicas begin with other weights
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    transport = Counted(TIMEOUT, address="127.0.0.1")
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        min_replica_size=2,
        use_async_quorum=False,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=name,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        timeout=TIMEOUT,
        checkpoint_transport=transport,
    )
    parallel = DistributedDataParallel(manager, model)
    wrapped = OptimizerWrapper(manager, optimizer)
    try:
        while manager.current_step() < steps:
            wrapped.zero_grad()
            nn.functional.mse_loss(parallel(torch.rand(16, 4)), torch.rand(16, 2)).backward()
            before = manager.current_step()
            wrapped.step()
            if manager.current_step() > before:
                print(manager.current_step(), transport.healed, checksum(model, optimizer), flush=True)
                sys.stdin.readline()
    finally:
        manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
