"""cosmos-rl's own registry, packer, context and worker over our rings, by `register` and by `replace_ucxx`."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import eventually, free

if importlib.util.find_spec("cosmos_rl") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("cosmos-rl is not installed: pip install cosmos-rl", allow_module_level=True)

with warnings.catch_warnings():  # of what cosmos-rl imports
    warnings.simplefilter("ignore")
    import torch
    from cosmos_rl.utils.trajectory import TensorSpec, build_trajectory_schema
    from cosmos_rl_parts import (
        ROLLOUT,
        SHAPE,
        Packer,
        PayloadContext,
        PayloadTransportRegistry,
        Worker,
        closed_while_it_publishes,
        created,
        fetched,
        put_back,
        ring,
        rollout,
        trajectory,
    )

from transport.adapters import cosmos_rl
from transport.errors import RingFullError, UsageError
from transport.ticket import Ticket

pytestmark = pytest.mark.ucx

SPECS = [*build_trajectory_schema(SHAPE), TensorSpec((3,), np.float32, "goal")]


@pytest.fixture(params=["mapped", "tcp", "replaced"])
def transport(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Ours, registered under its own name with that wire, or in the place of cosmos-rl's."""
    with put_back():
        if request.param == "replaced":
            transport = cosmos_rl.replace_ucxx(rollout=ROLLOUT, timeout_s=0.0)
        else:
            transport = cosmos_rl.register(SPECS, wire={request.param})
        yield transport
        transport.discarding.close()
        PayloadTransportRegistry._registry.pop(transport.name)


def context_of(transport: Any, slots: int, timeout_s: float | None = 0.0) -> PayloadContext:
    if transport.name == cosmos_rl.NAME:
        return cosmos_rl.payload_context(SPECS, slots=slots, mode="thread", timeout_s=timeout_s)
    return created(slots, schema=SPECS)


@pytest.fixture
def context(transport: Any) -> Iterator[PayloadContext]:
    context = context_of(transport, 8)
    yield context
    context.close(timeout=0.0)


@pytest.fixture
def worker(transport: Any) -> Iterator[Worker]:
    worker = Worker(transport.name)
    worker._attach_payload_transport()
    yield worker
    worker.close_payload_transports()


@pytest.fixture
def packer(worker: Worker) -> Packer:
    return worker.data_packer


def test_what_a_rollout_publishes_its_policy_trains_on(context: PayloadContext, packer: Packer) -> None:
    rollouts = [rollout(context, length) for length in (5, 1, 32)]
    for length, found in zip((5, 1, 32), fetched(packer, rollouts), strict=True):
        assert torch.equal(found["observations"], torch.full((length, 4), float(length)))
        assert torch.equal(found["rewards"], torch.arange(length, dtype=torch.float32))
        assert found["terminated"].shape == (length,)  # not given: zeros
        assert found["goal"].shape == (3,)
        assert int(found["episode_length"]) == length
    packer.release_prefetch()


def test_only_used_rows_are_written(context: PayloadContext) -> None:
    ticket = Ticket.parse(rollout(context, 5).completion["completion"].removeprefix(cosmos_rl.PREFIX))
    assert ticket.size < ring(context).slot_capacity / 2


def test_the_controller_sees_rewards_and_a_known_prefix(context: PayloadContext, transport: Any) -> None:
    completion = rollout(context, 3).completion
    assert completion["rewards"] == [0.0, 1.0, 2.0]
    assert completion["episode_length"] == 3
    assert PayloadTransportRegistry.active_for_completion(completion) is transport


def test_a_payload_is_consumed_when_its_batch_is_released(context: PayloadContext, packer: Packer) -> None:
    rollouts = [rollout(context, length) for length in (2, 3)]
    found = fetched(packer, rollouts)
    assert ring(context).statistics().consumes == 0
    found.clear()
    packer.release_prefetch()
    eventually(lambda: free(ring(context)), "the slots are free again")
    assert ring(context).statistics().consumes == 2


def test_a_batch_that_nobody_took_stays_in_the_ring(context: PayloadContext, worker: Worker) -> None:
    rollouts = [rollout(context, length) for length in (2, 3)]
    worker.data_packer.start_prefetch(rollouts)
    eventually(lambda: worker.data_packer._prefetch_result_queue.qsize() == 1, "the batch is there")
    worker.close_payload_transports()
    eventually(lambda: ring(context).get_ready_count() == 2, "both payloads can be read by another worker")
    assert ring(context).statistics().consumes == 0


def test_a_payload_that_was_not_prefetched_is_fetched_at_once(context: PayloadContext, packer: Packer) -> None:
    found = packer.get_policy_input(rollout_output=rollout(context, 4).completion)
    assert torch.equal(found["actions"], trajectory(4)["actions"])
    eventually(lambda: free(ring(context)), "the slot is free again")


def test_an_episode_whose_payload_is_gone_is_skipped(context: PayloadContext, packer: Packer) -> None:
    gone, there = rollout(context, 2), rollout(context, 3)
    ring(context).discard(Ticket.parse(gone.completion["completion"].removeprefix(cosmos_rl.PREFIX)))
    first, second = fetched(packer, [gone, there])
    assert first is None
    assert second["observations"].shape == (3, 4)
    packer.release_prefetch()


def test_a_batch_may_be_fetched_beside_the_one_in_use(context: PayloadContext, packer: Packer) -> None:
    first, second = [rollout(context, 2)], [rollout(context, 3)]
    packer.consume_payload_batch(packer.prefetch_payload_batch(first))  # as cosmos-rl's own prefetch does
    following = packer.prefetch_payload_batch(second)
    with packer.payload_batch_scope(first):
        assert fetched(packer, first)[0]["observations"].shape == (2, 4)
    following.result(timeout=20)
    assert ring(context).statistics().consumes == 0
    packer.finish_payload_batch()
    eventually(lambda: ring(context).statistics().consumes == 1, "the first batch is consumed")
    packer.consume_payload_batch(following)
    packer.finish_payload_batch()
    eventually(lambda: free(ring(context)), "so is the second")


@pytest.mark.parametrize("transport", ["mapped"], indirect=True)
def test_a_payload_of_an_unknown_schema_is_skipped_and_stays(context: PayloadContext) -> None:
    cosmos_rl.register()
    worker = Worker(cosmos_rl.NAME)
    worker._attach_payload_transport()
    assert fetched(worker.data_packer, [rollout(context, 2)]) == [None]
    worker.close_payload_transports()
    eventually(lambda: ring(context).get_ready_count() == 1, "another worker can read it")
    assert ring(context).statistics().consumes == 0


def test_a_plain_trajectory_passes_through(packer: Packer) -> None:
    plain = trajectory(2)
    assert packer.get_policy_input(rollout_output=plain) is plain
    assert packer.get_policy_input(rollout_output="nccl:17") == "nccl:17"


def test_discarded_rollouts_free_their_slots(context: PayloadContext, transport: Any) -> None:
    rollouts = [rollout(context, length) for length in (2, 3, 4)]
    freed = PayloadTransportRegistry.handle_discarded(rollouts, rollouts[1:2], config=None, redis_client=None)
    assert freed == 2
    assert ring(context).get_ready_count() == 1


def test_the_connection_for_discarded_rollouts_is_kept(context: PayloadContext, transport: Any) -> None:
    rollouts = [rollout(context, length) for length in (2, 3)]
    clients = set()
    for each in rollouts:
        assert PayloadTransportRegistry.handle_discarded([each], [], config=None, redis_client=None) == 1
        clients.add(transport.discarding._client)
    assert len(clients) == 1
    transport.discarding.close()
    assert PayloadTransportRegistry.handle_discarded(rollouts, [], config=None, redis_client=None) == 0


def test_a_full_ring_is_an_error_and_overwrites_nothing(context: PayloadContext) -> None:
    for _ in range(8):
        rollout(context, 1)
    with pytest.raises(RingFullError):
        rollout(context, 1)
    assert ring(context).statistics().overwrites == 0


def test_a_slot_is_filled_in_place(context: PayloadContext, packer: Packer) -> None:
    with context.acquire() as payload:
        payload.tensors["observations"][:6] = 6.0
        payload.tensors["rewards"][:6] = 1.0
        payload.tensors["episode_length"][0] = 6
        payload.mark_all_written()
        reference = context.publish(payload)
    assert reference["rewards"] == [1.0] * 6
    (found,) = fetched(packer, [SimpleNamespace(completion=reference.to_dict())])
    assert torch.equal(found["observations"], torch.full((6, 4), 6.0))
    packer.release_prefetch()


def test_a_slot_that_is_not_published_is_given_back(context: PayloadContext) -> None:
    with context.acquire():
        assert ring(context).statistics().writing == 1
    assert free(ring(context))


def test_each_rank_of_a_model_parallel_group_reads_the_payload() -> None:
    ranks = iter((0, 1))
    cosmos_rl.register(SPECS, rank=lambda: next(ranks))
    with cosmos_rl.payload_context(SPECS, slots=4, readers=2, mode="thread") as context:
        workers = [Worker(cosmos_rl.NAME, tp_size=2), Worker(cosmos_rl.NAME, tp_size=2)]
        try:
            published = rollout(context, 3)
            for worker in workers:
                worker._attach_payload_transport()
                (found,) = fetched(worker.data_packer, [published])
                assert found["observations"].shape == (3, 4)
                del found
                worker.data_packer.release_prefetch()
            eventually(lambda: free(ring(context)), "the slot is free once both have it")
        finally:
            for worker in workers:
                worker.close_payload_transports()
            PayloadTransportRegistry._registry.pop(cosmos_rl.NAME)


@pytest.mark.parametrize("transport", ["mapped"], indirect=True)
def test_a_model_parallel_policy_without_ranks_is_refused(transport: Any) -> None:
    worker = Worker(transport.name, tp_size=2, pp_size=2)
    with pytest.raises(UsageError, match="4 ranks of a model-parallel group"):
        worker._attach_payload_transport()


def test_a_rollout_engine_is_closed_while_it_publishes_into_a_full_ring(transport: Any) -> None:
    if transport.name != cosmos_rl.NAME:
        transport = cosmos_rl.replace_ucxx(rollout=ROLLOUT, timeout_s=None)
    closed_while_it_publishes(transport, context_of(transport, 2, None))
