"""What tests of cosmos-rl's transport share: its packer, as much of a worker as attaches a transport, trajectories."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

with warnings.catch_warnings():  # of what cosmos-rl imports
    warnings.simplefilter("ignore")
    import torch
    from cosmos_rl.comm.base import CommMixin
    from cosmos_rl.dispatcher.data.packer.tensor_data_packer import TensorDataPacker
    from cosmos_rl.utils.payload_transport import PayloadContext, PayloadTransportRegistry, PrefetchDataPackerMixin
    from cosmos_rl.utils.payload_transport.ucxx import UCXXBufferConfig
    from cosmos_rl.utils.payload_transport.ucxx import producer as upstream_producer
    from cosmos_rl.utils.payload_transport.ucxx import strategy as upstream_strategy

import pytest
from helpers import eventually

from transport.errors import TransportError

SHAPE = {"max_steps": 32, "obs_dim": 4, "action_dim": 2}
ROLLOUT = {"mode": "thread"}  # of the server: no process for each test


class Packer(PrefetchDataPackerMixin, TensorDataPacker):
    """As a user of cosmos-rl writes it: it gets its transport from the worker."""


class Worker(CommMixin):
    """The part of a policy worker that attaches transports; the rest wants a controller."""

    role = "policy"

    def __init__(self, name: str, packer: Any = None, tp_size: int = 1, pp_size: int = 1, **custom: Any) -> None:
        self.config = SimpleNamespace(
            custom={"payload_transfer": name, **custom},
            policy=SimpleNamespace(parallelism=SimpleNamespace(tp_size=tp_size, cp_size=1, pp_size=pp_size)),
            redis="",
        )
        self.data_packer = packer or Packer()
        self.device = torch.device("cpu")

    def _build_redis_endpoint(self) -> None:
        return None


@contextlib.contextmanager
def put_back() -> Iterator[None]:
    """Undo at the end what `replace_ucxx` changes."""
    own = PayloadTransportRegistry.get("ucxx")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upstream_producer, "UCXXPayloadProducer", upstream_producer.UCXXPayloadProducer)
        patch.setattr(upstream_strategy, "UCXXTransportStrategy", upstream_strategy.UCXXTransportStrategy)
        yield
    PayloadTransportRegistry.register(own)


def created(slots: int = 8, **more: Any) -> PayloadContext:
    """As a job's rollout engine makes its context of "ucxx"."""
    given = {"replica_id": "rollout-0", **SHAPE, "config": UCXXBufferConfig(max_entries=slots), **more}
    return PayloadContext.create("ucxx", **given)


def trajectory(length: int) -> dict[str, Any]:
    return {
        "observations": torch.full((length, 4), float(length)),
        "actions": torch.arange(length * 2, dtype=torch.float32).reshape(length, 2),
        "rewards": torch.arange(length, dtype=torch.float64),  # is narrowed, as cosmos-rl does
    }


def rollout(context: PayloadContext, length: int) -> Any:
    reference = context.publish_tensors(trajectory(length))
    assert reference is not None
    return SimpleNamespace(completion=reference.to_dict())


def fetched(packer: Any, rollouts: list[Any]) -> list[Any]:
    packer.start_prefetch(rollouts)
    packer.wait_prefetch()
    return [packer.get_policy_input(rollout_output=each.completion) for each in rollouts]


def ring(context: PayloadContext) -> Any:
    return context._producer.ring


def closed_while_it_publishes(transport: Any, context: PayloadContext) -> None:
    """Close the engine of a context that a thread publishes into without end, when its ring is full."""
    ended: list[BaseException] = []

    def generate() -> None:
        try:
            while True:
                rollout(context, 1)
        except (TransportError, RuntimeError) as error:
            ended.append(error)

    def publishing_waits() -> bool:
        """It has the context's lock, while no slot is free."""
        if context._lock.acquire(blocking=False):
            context._lock.release()
            return False
        return bool(ring(context).native.state_counts()[0] == 0)

    thread = threading.Thread(target=generate)
    thread.start()
    eventually(publishing_waits, "the ring is full")
    transport.close_producer(SimpleNamespace(payload_context=context), timeout=0.0)
    thread.join()
    assert ended
