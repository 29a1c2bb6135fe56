"""The first trainer of tests/adapters/test_sglang.py as a process of its own. It needs no SGLang.

Arguments as JSON: fields of `UpdateBarrier`, options of `WeightsEngine`. Each line of its input is a version, which it
makes and sends. The calls of SGLang's engine are the parent's: "call stage" and "call commit" ask for one, and any line
of input answers. "sent" ends a version.
"""

from __future__ import annotations

import json
import sys

from in_modules import Whole
from sharded_models import of_torch

from transport.weights.barrier import UpdateBarrier
from transport.weights.barrier_rank import BarrierRank


def call(phase: str) -> None:
    print("call", phase, flush=True)
    assert sys.stdin.readline()


def main() -> None:
    barrier, options = json.loads(sys.argv[1])
    group, model = UpdateBarrier(**barrier), Whole()
    with BarrierRank(of_torch(model), sends=True, **options) as member:
        while line := sys.stdin.readline():
            version = int(line)
            model.step(version)
            group.stage(member, version, lambda: call("stage"))
            group.commit(member, version, lambda: call("commit"))
            print("sent", flush=True)


if __name__ == "__main__":
    main()
