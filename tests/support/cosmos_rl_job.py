"""A job for cosmos-rl with payload_transfer = "ucxx": the script that each of its processes runs.

    COSMOS_ROLE=Controller|Rollout|Policy python cosmos_rl_job.py OPTIONS

Everything that moves payloads is cosmos-rl's: PayloadContext, its registry, the attachment of a worker (CommMixin), its
packer with prefetch, its Rollout message and its Redis streams. `--replace` adds the one call of `replace_ucxx`.

cosmos-rl's RLPolicyWorker and its rollout worker need CUDA and NCCL; what they do around the payloads is done
here by the loops below, with the same calls. The one stand-in: cosmos-rl's own producer and reader pin memory, which
torch refuses without CUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from types import SimpleNamespace
from typing import Any

import msgpack
import torch

CONTROLLER, POLICY, CREDIT, FINISH = "controller", "policy-0", "credit", "finish"
BATCH = 8
OUTDATED = 10  # the controller drops every tenth rollout


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis", required=True, help="HOST:PORT")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--credit", type=int, default=0, help="rollouts that may be under way; 0: no limit")
    parser.add_argument("--train-s", type=float, default=0.0, help="of the policy, for each batch")
    parser.add_argument("--replace", action="store_true")
    options = parser.parse_args()
    without_pinned_memory()
    if options.replace:
        from transport.adapters.cosmos_rl import replace_ucxx

        replace_ucxx()
    role = os.environ["COSMOS_ROLE"]
    result = {"Controller": controller, "Rollout": rollout, "Policy": policy}[role](options, streams(options.redis))
    print(json.dumps(result), flush=True)


def rollout(options: Any, redis: Any) -> dict[str, Any]:
    """Publish `count` trajectories, as a rollout engine does, and keep serving them until the policy has finished."""
    from cosmos_rl.dispatcher.data.schema import Rollout
    from cosmos_rl.utils.payload_transport import PayloadContext
    from cosmos_rl.utils.payload_transport.ucxx import UCXXBufferConfig

    context = PayloadContext.create(
        "ucxx", replica_id="rollout-0", **shape(options), config=UCXXBufferConfig(max_entries=options.slots)
    )
    rewards = torch.ones(options.steps)
    observations = torch.empty(options.steps, 256)
    actions = torch.zeros(options.steps, 2)
    client = redis.redis_clients[0]
    spent, refused = 0.0, 0
    for number in range(options.count):
        if options.credit and number >= options.credit:
            client.blpop([CREDIT], timeout=30)
        observations.fill_(number)
        began = time.perf_counter()
        reference = context.publish_tensors(
            {"observations": observations, "actions": actions, "rewards": rewards, "episode_length": options.steps}
        )
        spent += time.perf_counter() - began
        refused += reference is None
        completion = None if reference is None else reference.to_dict()
        message = Rollout(prompt_idx=number, completion=completion)
        redis.publish_rollout(msgpack.packb(message.model_dump()), CONTROLLER)
    while client.blpop([FINISH], timeout=30) is None:
        pass
    metrics = dict(context.metrics())
    context.close(timeout=60.0)
    return {"publish_ms": 1e3 * spent / options.count, "refused": refused, "overwritten": metrics["drops_total"]}


def controller(options: Any, redis: Any) -> dict[str, Any]:
    """Drop every tenth rollout as outdated, as the controller's filter does, and pass on the rest."""
    from cosmos_rl.dispatcher.data.schema import Rollout
    from cosmos_rl.utils.payload_transport import PayloadTransportRegistry
    from cosmos_rl.utils.payload_transport.registry import _maybe_autoload_backend

    _maybe_autoload_backend("ucxx")
    seen = freed = dropped = 0
    spent = 0.0
    while seen < options.count:
        for data in redis.subscribe_rollout(CONTROLLER):
            seen += 1
            message = Rollout(**msgpack.unpackb(data))
            if message.prompt_idx % OUTDATED == OUTDATED - 1:
                dropped += 1
                began = time.perf_counter()
                freed += PayloadTransportRegistry.handle_discarded([message], [], config=None, redis_client=None)
                spent += time.perf_counter() - began
                redis.redis_clients[0].rpush(CREDIT, 1)
            else:
                redis.publish_rollout(data, POLICY)
    return {"dropped": dropped, "freed": freed, "free_ms": 1e3 * spent / max(1, dropped)}


def policy(options: Any, redis: Any) -> dict[str, Any]:
    """Fetch batches by cosmos-rl's managed prefetch, and check each payload against the rollout it was fetched for."""
    from cosmos_rl.comm.base import CommMixin
    from cosmos_rl.dispatcher.data.packer.tensor_data_packer import TensorDataPacker
    from cosmos_rl.dispatcher.data.schema import Rollout
    from cosmos_rl.utils.payload_transport import PrefetchDataPackerMixin
    from cosmos_rl.utils.payload_transport.registry import _maybe_autoload_backend

    class Packer(PrefetchDataPackerMixin, TensorDataPacker):
        pass

    class Worker(CommMixin):
        role = "policy"

        def __init__(self) -> None:
            parallelism = SimpleNamespace(tp_size=1, cp_size=1, pp_size=1)
            custom = {"payload_transfer": "ucxx", "ucxx_prefetch_timeout": 60.0}
            self.config = SimpleNamespace(custom=custom, policy=SimpleNamespace(parallelism=parallelism), redis="")
            self.data_packer = Packer()
            self.device = torch.device("cpu")

        def _build_redis_endpoint(self) -> None:
            return None

    _maybe_autoload_backend("ucxx")
    worker = Worker()
    worker._attach_payload_transport()
    packer = worker.data_packer
    expected = sum(number % OUTDATED != OUTDATED - 1 for number in range(options.count))
    waiting: list[Any] = []
    trained = lost = stale = asked = 0
    fetching = 0.0
    first = 0.0
    while asked < expected:
        while len(waiting) < min(BATCH, expected - asked):
            waiting += [Rollout(**msgpack.unpackb(each)) for each in redis.subscribe_rollout(POLICY)]
        batch, waiting = waiting[:BATCH], waiting[BATCH:]
        asked += len(batch)
        first = first or time.perf_counter()
        began = time.perf_counter()
        sent = [each for each in batch if each.completion is not None]
        packer.consume_payload_batch(packer.prefetch_payload_batch(sent))
        with packer.payload_batch_scope(sent):
            found = [(each, packer.get_policy_input(rollout_output=each.completion)) for each in sent]
            fetching += time.perf_counter() - began
            lost += len(batch) - len(sent)
            for message, payload in found:
                if payload is None:
                    lost += 1
                elif not bool((payload["observations"] == float(message.prompt_idx)).all()):
                    stale += 1
                else:
                    trained += 1
            time.sleep(options.train_s)  # stands for a training step, of which only the duration matters
            found.clear()
            payload = None
        packer.finish_payload_batch()
        redis.redis_clients[0].rpush(CREDIT, *[1] * len(batch))
    took = time.perf_counter() - first
    worker.close_payload_transports(timeout=60.0)
    redis.redis_clients[0].rpush(FINISH, 1)
    return {"trained": trained, "lost": lost, "stale": stale, "fetch_ms": 1e3 * fetching / asked, "took_s": took}


def shape(options: Any) -> dict[str, int]:
    return {"max_steps": options.steps, "obs_dim": 256, "action_dim": 2}


def streams(place: str) -> Any:
    from cosmos_rl.utils.redis_stream import RedisStreamHandler

    host, port = place.split(":")
    return RedisStreamHandler([host], int(port))


def without_pinned_memory() -> None:
    if torch.cuda.is_available():
        return
    empty = torch.empty

    def unpinned(*size: Any, pin_memory: bool = False, **more: Any) -> Any:
        return empty(*size, **more)

    torch.empty = unpinned


if __name__ == "__main__":
    main()
