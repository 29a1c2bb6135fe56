"""One member of a whole job: ``python member.py rollout|trainer PLAN``, PLAN as JSON. It ends at SIGTERM.

A rollout writes without an end, found through Redis. A trainer takes and consumes. Both say "ready" on
standard output when they have carried something. At the end they do what programs do: they leave the `with`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import signal
import sys
import time

import msgspec
import numpy as np

from transport import Rollout, Schema, ServerOptions, Trainer, UpTo
from transport.decoders import json_decoder
from transport.errors import TransportError
from transport.runtime.signals import Stopped, until_stopped

SCHEMA = Schema.of(values=("float32", UpTo(16384)), number=("int64",))
BATCH = 4
DRAIN_S = 0.5  # for the trainers that are still there
_PAUSE_S = 0.02


class JobPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Of one job."""

    queue: str
    prefix: str  # of the rings' names
    number: int


def rollout(plan: JobPlan, stopped: Stopped) -> None:
    """Write until told to end."""
    server = ServerOptions(addresses=("127.0.0.1",))
    name = f"{plan.prefix}-{plan.number}"
    with Rollout(SCHEMA, plan.queue, slots=32, name=name, server=server, drain_s=DRAIN_S) as worker:
        for number in range(1 << 40):
            if stopped.wait(_PAUSE_S):
                return
            values = {"values": np.full(1 + number % 16384, number, np.float32), "number": np.int64(number)}
            with contextlib.suppress(TransportError):  # the ring is full
                worker.write_to_buffer(values, timeout_s=0.0)
            if number == BATCH:
                print("ready", flush=True)


def trainer(plan: JobPlan, stopped: Stopped) -> None:
    """Consume until told to end."""
    ready = False
    with Trainer(SCHEMA, plan.queue, wire={"tcp"}) as worker:
        while not stopped.is_set():
            try:
                batch = worker.take(BATCH, 0.1)
            except TransportError:
                time.sleep(_PAUSE_S)
                continue
            if batch is None:
                continue
            with contextlib.suppress(TransportError):
                for payload in batch:
                    assert (payload["values"] == payload["number"]).all()
                batch.consume()
                if not ready and batch.accepted.any():
                    ready = True
                    print("ready", flush=True)


def main() -> None:
    """As the command line says."""
    faulthandler.register(signal.SIGUSR1)  # job.py asks whoever is late where it is
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(process)d %(name)s %(message)s")
    role, plan = sys.argv[1], json_decoder(JobPlan)(sys.argv[2])
    with until_stopped() as stopped:
        (rollout if role == "rollout" else trainer)(plan, stopped)


if __name__ == "__main__":
    main()
