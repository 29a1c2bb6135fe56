"""cosmos-rl's own functions for its transport "ucxx", after `replace_ucxx`. Skips where cosmos-rl is not installed."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from full_ring import closed_while_it_publishes
from helpers import eventually, free

if importlib.util.find_spec("cosmos_rl") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("cosmos-rl is not installed: pip install cosmos-rl", allow_module_level=True)

with warnings.catch_warnings():  # of what cosmos-rl imports
    warnings.simplefilter("ignore")
    import torch
    from cosmos_rl.comm.base import CommMixin
    from cosmos_rl.dispatcher.data.packer.tensor_data_packer import TensorDataPacker
    from cosmos_rl.utils.payload_transport import PayloadContext, PayloadTransportRegistry, PrefetchDataPackerMixin
    from cosmos_rl.utils.payload_transport.registry import make_transport_strategy
    from cosmos_rl.utils.payload_transport.ucxx import UCXXBufferConfig, UCXXDataPackerMixin
    from cosmos_rl.utils.payload_transport.ucxx import producer as upstream_producer
    from cosmos_rl.utils.payload_transport.ucxx import strategy as upstream_strategy
    from cosmos_rl.utils.trajectory import TensorSpec, build_trajectory_schema
    from cosmos_rl.utils.transport_failure import TransportUnusableError

from transport.adapters import cosmos_rl
from transport.adapters.cosmos_rl.policy import PREFIX
from transport.errors import ConfigurationError, RingFullError, SchemaError, UsageError
from transport.ticket import Ticket

pytestmark = [pytest.mark.ucx, pytest.mark.adapters("cosmos_rl")]

UPSTREAM_STRATEGY = upstream_strategy.UCXXTransportStrategy
SHAPE = {"max_steps": 32, "obs_dim": 4, "action_dim": 2}
ROLLOUT = {"mode": "thread"}  # of the server: no process for each test


class Composed(PrefetchDataPackerMixin, TensorDataPacker):
    """A packer that gets its transport from the worker."""


class Derived(UCXXDataPackerMixin, TensorDataPacker):
    """A packer of cosmos-rl's older way: derived from its transport's own mixin."""


class Worker(CommMixin):
    """The part of a policy worker that attaches transports."""

    role = "policy"

    def __init__(self, packer: Any, **custom: Any) -> None:
        parallelism = SimpleNamespace(tp_size=1, cp_size=1, pp_size=1)
        self.config = SimpleNamespace(
            custom={"payload_transfer": "ucxx", **custom}, policy=SimpleNamespace(parallelism=parallelism), redis=""
        )
        self.data_packer = packer
        self.device = torch.device("cpu")

    def _build_redis_endpoint(self) -> None:
        return None


@pytest.fixture(autouse=True)
def upstream(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What `replace_ucxx` changes is put back."""
    monkeypatch.setattr(upstream_producer, "UCXXPayloadProducer", upstream_producer.UCXXPayloadProducer)
    monkeypatch.setattr(upstream_strategy, "UCXXTransportStrategy", upstream_strategy.UCXXTransportStrategy)
    own = PayloadTransportRegistry.get("ucxx")
    yield
    PayloadTransportRegistry.register(own)


@pytest.fixture
def replaced() -> Iterator[Any]:
    transport = cosmos_rl.replace_ucxx(rollout=ROLLOUT, timeout_s=0.0)
    yield transport
    transport.discarding.close()


def created(**more: Any) -> PayloadContext:
    """As a job's rollout engine makes it."""
    return PayloadContext.create(
        "ucxx", **{"replica_id": "rollout-0", **SHAPE, "config": UCXXBufferConfig(max_entries=8), **more}
    )


@pytest.fixture
def context(replaced: Any) -> Iterator[PayloadContext]:
    with created() as context:
        yield context


def trajectory(length: int) -> dict[str, Any]:
    return {
        "observations": torch.full((length, 4), float(length)),
        "actions": torch.arange(length * 2, dtype=torch.float32).reshape(length, 2),
        "rewards": torch.arange(length, dtype=torch.float32),
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


@pytest.mark.parametrize("packer", [Composed, Derived])
def test_a_job_that_says_ucxx_runs_over_our_rings(context: PayloadContext, packer: Any) -> None:
    worker = Worker(packer())
    worker._attach_payload_transport()
    rollouts = [rollout(context, length) for length in (5, 1, 32)]
    for length, found in zip((5, 1, 32), fetched(worker.data_packer, rollouts), strict=True):
        assert torch.equal(found["observations"], torch.full((length, 4), float(length)))
        assert int(found["episode_length"]) == length
    found.clear()
    worker.data_packer.release_prefetch()
    eventually(lambda: free(ring(context)), "the batch is consumed when it is released")
    worker.close_payload_transports()


def test_a_process_without_the_call_refuses_our_references(context: PayloadContext) -> None:
    reference = rollout(context, 2).completion
    assert UPSTREAM_STRATEGY().should_intercept(reference)
    with pytest.raises(TransportUnusableError, match="UCXX payload reference"):
        UPSTREAM_STRATEGY().cache_key(reference)


def test_a_strategy_that_is_made_from_the_configuration_reads_our_payloads(context: PayloadContext) -> None:
    strategy = make_transport_strategy(Worker(None).config)
    strategy.setup(device=torch.device("cpu"), max_attempts=1, read_timeout=7.0)
    try:
        assert strategy.read_timeout == 7.0
        assert strategy.sync_fetch(rollout(context, 4).completion)["observations"].shape == (4, 4)
    finally:
        strategy.shutdown()


def test_the_times_of_the_configuration_are_used(replaced: Any) -> None:
    packer = Derived()
    worker = Worker(packer, ucxx_prefetch_timeout=77, ucxx_read_max_attempts=5, ucxx_read_timeout=12.5)
    worker._attach_payload_transport()
    settings = packer._transport_strategy._packer.settings
    assert (settings.read_timeout_s, settings.calls_per_ticket) == (12.5, 5)
    assert packer._prefetch_timeout_s == 77.0
    assert packer._ucxx_dp_read_timeout == 12.5
    assert packer._ucxx_dp_client is not None
    worker.close_payload_transports()


def test_a_read_timeout_that_is_no_time_is_named(replaced: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"ucxx_read_timeout = -1.0: give a number of seconds above 0"):
        Worker(Composed(), ucxx_read_timeout=-1)._attach_payload_transport()


def test_the_slots_are_the_jobs_max_entries(context: PayloadContext) -> None:
    assert ring(context).slot_count == 8
    assert context.metrics()["max_slots"] == 8


def test_there_are_as_many_listeners_as_the_job_asks_for_threads(replaced: Any) -> None:
    with created(config=UCXXBufferConfig(max_entries=8, n_server_threads=3)) as context:
        reference = rollout(context, 2).completion["completion"]
        assert len(set(Ticket.parse(reference.removeprefix(PREFIX)).ports)) == 3


def test_the_second_setup_of_a_producer_is_refused(replaced: Any) -> None:
    producer = upstream_producer.UCXXPayloadProducer()
    producer.setup("rollout-0", 32, 4, 2, config=UCXXBufferConfig(max_entries=2))
    try:
        with pytest.raises(UsageError, match="set up already; close it first"):
            producer.setup("rollout-0", 32, 4, 2)
    finally:
        producer.close(timeout=0.0)


def test_discarded_rollouts_free_their_slots(context: PayloadContext) -> None:
    rollouts = [rollout(context, length) for length in (2, 3, 4)]
    assert PayloadTransportRegistry.handle_discarded(rollouts, rollouts[1:2], config=None, redis_client=None) == 2
    assert ring(context).get_ready_count() == 1


def test_a_full_ring_is_an_error_that_names_both_remedies(context: PayloadContext) -> None:
    for _ in range(8):
        rollout(context, 1)
    with pytest.raises(RingFullError) as caught:
        rollout(context, 1)
    assert str(caught.value) == (
        "all 8 slots of the ring have been full for 0 s: raise max_entries, or, to lose unread payloads as cosmos-rl's "
        'own transport does, call replace_ucxx(overflow="overwrite")'
    )
    with pytest.raises(RingFullError, match="raise max_entries"):
        context.acquire()
    assert ring(context).statistics().overwrites == 0


def test_unread_payloads_are_overwritten_only_where_the_job_asks_for_it() -> None:
    cosmos_rl.replace_ucxx(rollout=ROLLOUT, overflow="overwrite")
    with created() as context:
        for _ in range(9):
            rollout(context, 1)
        assert context.metrics()["drops_total"] == 1


def test_a_schema_too_large_for_a_ticket_is_given_to_the_call() -> None:
    many = [TensorSpec((3,), np.float32, f"a_tensor_with_a_long_name_{number}") for number in range(40)]
    specs = [*build_trajectory_schema(SHAPE), *many]
    cosmos_rl.replace_ucxx(rollout=ROLLOUT)
    with pytest.raises(SchemaError, match=r"46 tensors does not fit into tickets .* give it to replace_ucxx\(schema\)"):
        created(schema=specs)
    cosmos_rl.replace_ucxx(specs, rollout=ROLLOUT)
    worker = Worker(Composed())
    worker._attach_payload_transport()
    with created(schema=specs) as context:
        (found,) = fetched(worker.data_packer, [rollout(context, 3)])
        assert found["observations"].shape == (3, 4)
        found.clear()
        worker.close_payload_transports()


def test_a_rollout_engine_is_closed_while_it_publishes_into_a_full_ring() -> None:
    transport = cosmos_rl.replace_ucxx(rollout=ROLLOUT, timeout_s=None)
    context = created(config=UCXXBufferConfig(max_entries=2))
    closed_while_it_publishes(transport, context, lambda: rollout(context, 1))


def test_a_trajectory_of_another_schema_is_one_line(context: PayloadContext) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]*observations[^\n]*$"):
        context.publish_tensors({**trajectory(2), "observations": torch.zeros(2, 5)})
    assert free(ring(context))


def test_after_the_rollout_has_ended_its_episode_is_skipped(replaced: Any, caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(Composed(), ucxx_read_max_attempts=1, ucxx_read_timeout=1)
    worker._attach_payload_transport()
    context = created()
    gone = rollout(context, 2)
    context.close(timeout=0.0)
    with pytest.raises(RuntimeError, match="closing or closed"):
        rollout(context, 2)
    with caplog.at_level(logging.WARNING):
        assert fetched(worker.data_packer, [gone]) == [None]
    worker.close_payload_transports()
    own = [each for each in caplog.records if each.name.startswith("transport.")]
    assert own
    assert not any("\n" in each.getMessage() for each in own)


def test_a_wrong_choice_is_named() -> None:
    with pytest.raises(UsageError, match="overflow='drop': choose 'block', 'error' or 'overwrite'"):
        cosmos_rl.replace_ucxx(overflow="drop")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="timeout_s"):
        cosmos_rl.replace_ucxx(timeout_s=float("nan"))
